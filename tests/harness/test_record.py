"""What is not fit to be history is refused when it is written, with the reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from harness.record import RecordError, metric, new_run_id, problems, series_key, to_line

GOOD: dict[str, Any] = {
    "schema": 1,
    "method": 1,
    "type": "measurement",
    "id": "r-1",
    "run": "r",
    "time": "2026-01-01T00:00:00Z",
    "commit": None,
    "branch": None,
    "dirty": False,
    "gpu": "cpu-x",
    "machine": "m",
    "technique": "t",
    "family": "f",
    "kind": "op",
    "layer": "kernel",
    "variant": "baseline",
    "peer": "",
    "workload": "w",
    "workload_id": "abc",
    "dtype": "float32",
    "tier": "smoke",
    "ranks": 1,
    "status": "passed",
    "reason": "",
    "samples": {"values": [1.0], "clock": "wall", "cache": "warm"},
    "metrics": {"latency": metric("latency", 1.0, 0.9, 1.1)},
}


def test_a_sound_record_is_one_line_of_json() -> None:
    line = to_line(GOOD)
    assert line.endswith("\n")
    assert "\n" not in line[:-1]
    assert json.loads(line) == GOOD


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_wherever_they_hide(bad: float) -> None:
    with pytest.raises(RecordError, match=r"conditions\.deep\[1\]"):
        to_line({**GOOD, "conditions": {"deep": [1.0, bad]}})
    with pytest.raises(RecordError, match="finite"):
        metric("latency", bad)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"status": "fine"}, "status"),
        ({"type": "note"}, "type"),
        ({"metrics": {"latency": 3.0}}, "latency"),
        ({"metrics": {"latency": {"value": "3"}}}, "latency"),
        ({"metrics": {"latency": {"value": 3.0}}}, "direction"),
        ({"metrics": []}, "metrics"),
    ],
)
def test_an_unfit_record_says_what_is_wrong(change: dict[str, Any], word: str) -> None:
    assert any(word in p for p in problems({**GOOD, **change}))


def test_every_plain_key_is_required() -> None:
    for key in GOOD:
        if key not in ("samples", "metrics"):
            assert problems({k: v for k, v in GOOD.items() if k != key}), key


def test_an_unknown_metric_is_refused_and_a_known_one_brings_unit_and_direction() -> None:
    with pytest.raises(RecordError, match="speed"):
        metric("speed", 1.0)
    assert metric("throughput", 5.0, unit="tokens/s")["better"] == "higher"
    assert metric("latency", 5.0)["better"] == "lower"


def test_a_series_ends_with_the_method_the_clock_and_the_cache_policy() -> None:
    keys = {
        series_key(GOOD),
        series_key({**GOOD, "method": 2}),
        series_key({**GOOD, "samples": {"clock": "cuda_event", "cache": "cold"}}),
        series_key({**GOOD, "samples": {"clock": "wall", "cache": "cold"}}),
    }
    assert len(keys) == 4
    assert series_key({**GOOD, "workload": "renamed"}) == series_key(GOOD)


def test_run_ids_differ_and_sort_by_time() -> None:
    ids = [new_run_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert ids[0][:8].isdigit()
