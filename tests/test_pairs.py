"""Every discovered pair, its variants and smoke workloads, through the measurement's own check."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness import discover
from harness.job import EventReader, Events, MeasureJob
from harness.measure import Measurement
from harness.ranked import Agreement

CASES = [
    pytest.param(technique.name, workload.name, id=f"{technique.name}-{workload.name}")
    for technique in discover.techniques().values()
    for workload in discover.workloads_of(technique)
    if workload.tier == "smoke" and workload.ranks == 1
]


@pytest.mark.parametrize(("name", "workload_name"), CASES)
def test_every_variant_is_right_or_says_why_it_did_not_run(name: str, workload_name: str, tmp_path: Path) -> None:
    technique = discover.find(name)
    workload = next(w for w in discover.workloads_of(technique) if w.name == workload_name)
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    out = tmp_path / "events.jsonl"
    variants = tuple(v.name for v in technique.variants)
    job = MeasureJob(name, (workload,), variants, device, str(out), timing=False, interpret=device == "cpu")
    events = Events(out, 0)
    Measurement(discover.load_pair(technique), workload, job, Agreement(0, 1), events).run()
    events.close()
    found = {e["variant"]: e for e in EventReader(out).new() if e["event"] == "result"}
    assert set(found) == set(variants)
    for variant, event in found.items():
        assert event["status"] in ("passed", "skipped"), f"{variant}: {event['status']}: {event['reason']}"
        assert event["status"] == "passed" or event["reason"]
    assert found["baseline"]["status"] == "passed" or "fetch" in found["baseline"]["reason"]


@pytest.mark.parametrize("name", sorted(discover.techniques()))
def test_work_is_counted_with_its_reasons(name: str) -> None:
    technique = discover.find(name)
    pair = discover.load_pair(technique)
    for workload in discover.workloads_of(technique):
        work = pair.work(workload)
        assert work.items > 0
        assert work.flops >= 0
        assert work.bytes >= 0
        assert work.flops or work.bytes or work.link_bytes or technique.kind == "serve"
        assert work.reasons or technique.kind == "serve"
        if pair.predict is not None:
            speedup = pair.predict(workload)
            assert speedup is None or speedup > 0
