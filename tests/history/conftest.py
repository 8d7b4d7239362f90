"""A maker of sound records, a store full of synthetic ones, and an index cache that no test shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.record import metric

Make = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's history nor the user's cache."""
    folder = tmp_path_factory.mktemp("user")
    monkeypatch.setenv("PAIRBENCH_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PAIRBENCH_DATA", str(folder / "data"))


@pytest.fixture
def make_record() -> Make:
    """``make_record(number, run="r1", latency=1e-3, **keys)``: a measurement that passed."""

    def make(number: int, run: str = "r1", latency: float = 1e-3, **more: Any) -> dict[str, Any]:
        return {
            "schema": 1,
            "method": 1,
            "type": "measurement",
            "id": f"{run}-{number}",
            "run": run,
            "time": "2026-01-31T00:00:00.000Z",
            "commit": "a" * 40,
            "branch": "main",
            "dirty": False,
            "gpu": "h200",
            "machine": "m1",
            "technique": "t",
            "family": "fusion",
            "kind": "op",
            "layer": "kernel",
            "variant": "optimized",
            "peer": "",
            "workload": "w",
            "workload_id": "abc",
            "dtype": "float32",
            "tier": "quick",
            "ranks": 1,
            "status": "passed",
            "reason": None,
            "dims": {"rows": 4},
            "samples": {"values": [latency] * 3, "clock": "events", "cache": "cold"},
            "metrics": {"latency": metric("latency", latency, latency * 0.99, latency * 1.01)},
            **more,
        }

    return make


@pytest.fixture
def write_run() -> Callable[[Path, str, list[dict[str, Any]]], Path]:
    """Writes records as a finished run of a local store and gives the file."""

    def write(root: Path, run: str, records: list[dict[str, Any]]) -> Path:
        from harness.history.store import Store

        with Store(root).open_run(str(records[0]["gpu"]), run) as writer:
            for record in records:
                writer.append(record)
        return root / writer.name

    return write
