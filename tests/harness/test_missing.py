"""A run of what is missing measures what no history has an outcome of, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.discover import Technique, VariantInfo
from harness.history.store import Store
from harness.missing import known_cases, lacking
from harness.plan import Item
from harness.record import to_line
from harness.workload import parse_workload

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = (VariantInfo("baseline"), VariantInfo("optimized"))
TECHNIQUE = Technique("fake", "test", "impls.test.fake", Path("fake.py"), variants=VARIANTS, layer="kernel")
RAW = {"tier": "quick", "dtype": "float32"}
WORKLOADS = tuple(parse_workload("fake", {**RAW, "name": name, "n": n}, "t") for n, name in enumerate("abc"))
ITEM = Item(TECHNIQUE, WORKLOADS, ("baseline", "optimized"), 1)


def line(workload: int, variant: str, status: str = "passed", **more: Any) -> dict[str, Any]:
    chosen = WORKLOADS[workload]
    record = {"type": "measurement", "technique": "fake", "workload_id": chosen.workload_id, "ranks": 1, "gpu": "x",
              "variant": variant, "status": status, "id": f"{workload}{variant}{status}", "run": "r",
              "time": "2026-01-01T00:00:00Z", "commit": None, "branch": None, "dirty": None, "machine": "m",
              "schema": 1, "method": 1, "family": "test", "kind": "op", "layer": "kernel", "peer": None,
              "workload": chosen.name, "dtype": "float32", "tier": "quick", "reason": "", "dims": {}, "digests": {},
              "metrics": {}}  # fmt: skip
    return {**record, **more}


def kept(folder: Path, *records: dict[str, Any]) -> Store:
    (folder / "x").mkdir(parents=True)
    (folder / "x" / "20260101T000000Z-00000000.jsonl").write_text("".join(to_line(r) for r in records) + "{torn")
    return Store(folder)


def names(items: list[Item]) -> list[str]:
    return [workload.name for item in items for workload in item.workloads]


def test_a_workload_is_missing_until_every_chosen_variant_has_an_outcome(tmp_path: Path) -> None:
    full = kept(tmp_path / "one", line(0, "baseline", "oom"), line(0, "optimized"), line(1, "baseline"))
    more = kept(tmp_path / "two", line(2, "optimized", "skipped"), line(2, "baseline", "unsettled"))
    known = known_cases([full, more, Store(tmp_path / "none")], "x")
    assert names(lacking([ITEM], known)) == ["b", "c"]
    assert names(lacking([replace(ITEM, variants=("baseline",))], known)) == ["c"]
    assert lacking([ITEM], known)[0].variants == ITEM.variants
    assert names(lacking([replace(ITEM, ranks=2)], known)) == ["a", "b", "c"]
    assert names(lacking([ITEM], known_cases([full, more], "another GPU"))) == ["a", "b", "c"]
    whole = kept(tmp_path / "three", *(line(n, v) for n in range(3) for v in ITEM.variants))
    assert lacking([ITEM], known_cases([whole], "x")) == []


def pairbench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PAIRBENCH_DATA": str(folder / "data"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness", "run", "swiglu", "--device", "cpu", "--samples", "3", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_what_time_did_not_suffice_for_is_measured_the_next_time(tmp_path: Path) -> None:
    store = tmp_path / "store"
    # A shape of its own: what the checkout's history has of the listed ones is not missing.
    only = ("--workload", "smoke_fwd", "--workload", "smoke_bwd", "--set", "rows=19", "--store", str(store))
    both = ["smoke_fwd[rows=19]", "smoke_bwd[rows=19]"]
    left = [f"swiglu {name}" for name in both]
    short = pairbench(tmp_path, *only, "--within", "0.01")
    assert short.returncode in (0, 3), short.stderr
    assert f"not begun within 0.01 s: {', '.join(left)}; `--missing` measures what is left" in short.stderr
    ends = [json.loads(text.splitlines()[-1]) for text in (p.read_text() for p in store.rglob("*.jsonl"))]
    assert [end["left"] for end in ends] == [left]
    assert known_cases([Store(store)], ends[0]["gpu"]) == set()
    rest = pairbench(tmp_path, *only, "--missing", "--json")
    assert "2 of 2 workloads are missing for" in rest.stderr
    records = json.loads(rest.stdout)
    assert {r["workload"] for r in records} == set(both)
    again = pairbench(tmp_path, *only, "--missing", "--json")
    unsettled = {r["workload"] for r in records if r["status"] not in ("passed", "skipped")}
    assert f"{len(unsettled)} of 2 workloads are missing for" in again.stderr
    assert {r["workload"] for r in json.loads(again.stdout)} == unsettled
