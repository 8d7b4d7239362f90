"""What a serve record says beyond its timeline: what was served, what it cost, and whether it can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.assemble import Facts, records_of
from harness.discover import Technique, VariantInfo
from harness.errors import UsageError
from harness.plan import Item, Request
from harness.report import Reporter
from harness.session import Options, Session
from harness.workload import parse_workload

#: Two tokens in an hour.
TIMELINE = {
    "requests": {
        "a": {"arrival": 0.0, "token_times": [1.0, 3600.0], "finish": 3600.0, "status": "finished", "prompt_tokens": 3}
    },
    "start": 0.0,
    "end": 3600.0,
}


def recorded(device: str, ranks: int, **more: Any) -> dict[str, Any]:
    """The record of a served timeline on a host of eight GPUs."""
    host = {"device": device, "gpu_count": 8}
    where = {"gpu": "x", "machine": "m", "stack": {}, "host": host, "env": {}, "ci": {}}
    raw = {"name": "w", "tier": "smoke", "dtype": "float32", "ranks": ranks}
    workload = parse_workload("fake", raw, "test")
    variants = (VariantInfo("v"),)
    technique = Technique("fake", "serving", "impls.serving.fake", Path("fake.py"), kind="serve", variants=variants)
    samples = {"values": [3600.0] * 3, "clock": "wall", "cache": "warm"}
    event = {"variant": "v", "status": "passed", "reason": "", "samples": samples, "timeline": TIMELINE, **more}
    facts = Facts(run="r", provenance=where, gpu_hour_price=2.0)
    (record,) = records_of(facts, Item(technique, (workload,), ("v",), ranks), workload, [event])
    return record


@pytest.mark.parametrize(
    ("device", "ranks", "more", "gpus"),
    [("cuda", 1, {}, 1), ("cuda", 2, {}, 2), ("cpu", 1, {"gpus": 1}, 1)],
    ids=["one of eight", "two of eight", "somebody else's server"],
)
def test_the_gpus_that_a_run_held_are_paid_and_no_others(
    device: str, ranks: int, more: dict[str, Any], gpus: int
) -> None:
    cost = recorded(device, ranks, **more)["metrics"]["cost_per_mtok"]
    assert cost["value"] == pytest.approx(2.0 * gpus / 2 * 1e6)


def test_a_run_on_a_cpu_has_no_gpu_to_pay() -> None:
    record = recorded("cpu", 1)
    assert "cost_per_mtok" not in record["metrics"]
    assert record["missing"]["cost_per_mtok"] == "the run held no GPU"


@pytest.mark.parametrize(("unit", "served"), [("requests", 1), ("tokens", 2)])
def test_throughput_is_of_what_was_served_and_not_of_what_was_asked_for(unit: str, served: int) -> None:
    # The workload asks for 24; the trace had one request, of two tokens.
    record = recorded("cuda", 1, work={"items": 24.0, "unit": unit, "launches": 0})
    assert record["work"]["items"] == served
    assert record["metrics"]["throughput"]["value"] == pytest.approx(served / 3600.0)
    assert record["metrics"]["throughput"]["unit"] == f"{unit}/s"
    assert record["missing"]["floor_share"] == "nothing was counted that takes time"


def test_a_timeline_that_cannot_be_costs_its_record_and_no_other() -> None:
    record = recorded("cuda", 1, timeline={**TIMELINE, "slots": {"reserved": 1, "held": 2}})
    assert (record["status"], record["metrics"]) == ("implausible", {})
    assert record["reason"] == "timeline: of 1 cache slots reserved 2 held a token"


@pytest.mark.parametrize("bad", [{"gpu_hour_price": 0.0}, {"slo": (0.0, None)}, {"slo": (None, 0.0)}], ids=str)
def test_a_price_or_a_bound_of_nothing_is_told_before_anything_is_measured(bad: dict[str, Any]) -> None:
    chosen = Request(names=("paged_kv",), tier="smoke")
    with pytest.raises(UsageError, match=r"price above zero|positive number of seconds"):
        Session(chosen, Options(device="cpu", keep=False, **bad), Reporter(quiet_table=True)).run()
