"""What the harness itself costs: `make bench-harness`. Not part of the tests; nothing here touches a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.clock import WallClock
from harness.discover import techniques
from harness.history.store import Store
from harness.record import metric, to_line
from harness.sampling import Lane, Plan, sample_all

RECORD: dict[str, Any] = {
    "schema": 1,
    "method": 1,
    "type": "measurement",
    "id": "r-1",
    "run": "r",
    "time": "2026-01-01T00:00:00.000Z",
    "commit": "c" * 40,
    "branch": "main",
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
    "samples": {"values": [1.0 + i * 1e-3 for i in range(100)], "clock": "wall", "cache": "warm"},
    "metrics": {"latency": metric("latency", 1.0, 0.9, 1.1)},
}


def test_a_sample_costs_little_beside_what_it_times(benchmark: Any) -> None:
    clock = WallClock(torch.device("cpu"))
    lanes = [Lane(name, lambda: clock.time(lambda: None)) for name in ("a", "b", "c")]
    series = benchmark(sample_all, lanes, Plan(budget=0.0, least=100, exactly=100))
    assert len(series["a"].values) == 100


def test_a_record_is_appended_in_milliseconds(benchmark: Any, tmp_path: Path) -> None:
    writer = Store(tmp_path).open_run("cpu-x", "20260101T000000Z-00000000")
    numbers = iter(range(10**9))
    benchmark(lambda: writer.append({**RECORD, "id": f"r-{next(numbers)}"}))
    writer.close()
    assert benchmark.stats.stats.median < 0.005


def test_a_record_becomes_a_line(benchmark: Any) -> None:
    assert benchmark(to_line, RECORD).endswith("\n")


def test_techniques_are_found(benchmark: Any) -> None:
    assert benchmark(techniques)
