"""The runner keeps what was measured whatever becomes of a worker. Workers here are fakes that write events."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.assemble import Facts
from harness.discover import Technique, VariantInfo
from harness.job import EventReader, Events, MeasureJob
from harness.launch import Job, Outcome
from harness.plan import Item
from harness.record import EXIT_CODES, problems
from harness.runner import Runner, Settings
from harness.workload import parse_workload

TECHNIQUE = Technique(
    "fake",
    "test",
    "impls.test.fake",
    Path("fake.py"),
    variants=(VariantInfo("baseline"), VariantInfo("optimized"), VariantInfo("line", peer="torch")),
    layer="kernel",
    relieves="memory",
)
RAW = {"tier": "smoke", "dtype": "float32", "n": 4}
WORKLOADS = tuple(parse_workload("fake", {**RAW, "name": n, "n": i}, "t") for i, n in enumerate(("first", "second")))
ITEM = Item(TECHNIQUE, WORKLOADS, ("baseline", "optimized", "line"), 1)
SAMPLES = {"clock": "wall", "cache": "warm"}
WORK = {"flops": 100.0, "bytes": 1000.0, "items": 10.0, "unit": "rows"}
MEDIAN = {"baseline": 4.0, "optimized": 1.0, "line": 2.0}


def _facts() -> Facts:
    where = {
        "commit": "c" * 40,
        "branch": "main",
        "dirty": False,
        "gpu": "cpu-x",
        "machine": "m",
        "stack": {},
        "host": {"device": "cpu"},
        "env": {},
        "ci": {},
    }
    return Facts(run="r", provenance=where)


def _measured(variant: str) -> dict[str, Any]:
    noise = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.0, 1.01, 0.99)
    return {"samples": {"values": [MEDIAN[variant] * n for n in noise], **SAMPLES}, "work": WORK}


class Keeper:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def append(self, record: Any) -> None:
        assert not problems(record)
        self.records.append(record)


def _run(
    worker: Callable[[MeasureJob, Events], str | None], tmp_path: Path, **settings: Any
) -> tuple[list[dict[str, Any]], list[MeasureJob]]:
    jobs: list[MeasureJob] = []

    def start(job: Job, poll: Callable[[], str | None]) -> Outcome:
        asked = MeasureJob.read(Path(job.args[0]))
        jobs.append(asked)
        events = Events(Path(asked.out), 0)
        try:
            reason = worker(asked, events)
        finally:
            events.close()
        stuck = poll()
        reason = reason or stuck
        return Outcome("passed" if not reason else "error", reason or "", "Traceback …" * bool(reason), tmp_path)

    keeper = Keeper()
    runner = Runner(_facts(), keeper, Settings(device="cpu", start=start, **settings))
    records = runner.run([ITEM])
    assert records == keeper.records
    return records, jobs


def _status(records: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    found = {(r["workload"], r["variant"]): r["status"] for r in records}
    assert len(found) == len(records), "a variant was recorded twice"
    return found


def _good(job: MeasureJob, events: Events) -> None:
    for w in job.workloads:
        for v in job.variants:
            events.begin(w.name, v, "check")
        for v in job.variants:
            reason = job.skip.get(f"{w.name}/{v}")
            if reason:
                events.result(w.name, v, "skipped", reason)
            else:
                events.result(w.name, v, "passed", **_measured(v))
    events.done()


def test_a_good_run_gives_both_speedups_with_intervals(tmp_path: Path) -> None:
    records, jobs = _run(_good, tmp_path)
    assert set(_status(records).values()) == {"passed"}
    assert len(jobs) == 1
    by = {r["variant"]: r["metrics"] for r in records if r["workload"] == "first"}
    assert by["optimized"]["speedup"]["value"] == pytest.approx(4.0)
    assert by["optimized"]["speedup_peer"]["value"] == pytest.approx(2.0)
    assert by["optimized"]["speedup"]["low"] <= 4.0 <= by["optimized"]["speedup"]["high"]
    assert by["baseline"]["speedup_peer"]["value"] == pytest.approx(0.5)
    assert "speedup" not in by["baseline"]
    assert "speedup_peer" not in by["line"]
    assert by["optimized"]["throughput"] == pytest.approx({**by["optimized"]["throughput"], "value": 10.0})
    assert by["optimized"]["throughput"]["unit"] == "rows/s"
    assert records[0]["missing"]["mfu"]


def _two(until: float | None, tmp_path: Path, late: bool = False) -> tuple[Runner, list[MeasureJob]]:
    """Two techniques of two workloads; the worker begins one workload only when it is ``late``."""
    jobs: list[MeasureJob] = []

    def start(job: Job, poll: Callable[[], str | None]) -> Outcome:
        asked = MeasureJob.read(Path(job.args[0]))
        jobs.append(asked)
        events = Events(Path(asked.out), 0)
        _good(replace(asked, workloads=asked.workloads[:1]) if late else asked, events)
        events.close()
        poll()
        return Outcome("passed", "", "", tmp_path)

    runner = Runner(_facts(), Keeper(), Settings(device="cpu", start=start, until=until))
    runner.run([ITEM, replace(ITEM, technique=replace(TECHNIQUE, name="other"))])
    return runner, jobs


def test_no_workload_begins_after_the_time_is_over_and_the_rest_is_named(tmp_path: Path) -> None:
    runner, jobs = _two(time.time() - 1, tmp_path)
    assert (runner.records, jobs) == ([], [])
    assert runner.left == ["fake first", "fake second", "other first", "other second"]
    runner, jobs = _two(time.time() + 600, tmp_path)
    assert runner.left == []
    assert len(runner.records) == 12
    assert all(job.until is not None for job in jobs)


def test_what_a_worker_did_not_begin_is_left_and_not_begun_again(tmp_path: Path) -> None:
    runner, jobs = _two(time.time() + 600, tmp_path, late=True)
    assert len(jobs) == 2
    assert {r["workload"] for r in runner.records} == {"first"}
    assert runner.left == ["fake second", "other second"]


def test_a_crash_costs_the_variant_in_hand_and_the_rest_is_measured_again_without_it(tmp_path: Path) -> None:
    def crashes(job: MeasureJob, events: Events) -> str | None:
        for w in job.workloads:
            for v in job.variants:
                if f"{w.name}/{v}" in job.skip:
                    continue
                events.begin(w.name, v, "check")
                if v == "optimized":
                    return "rank 0 died: exit code -11 (SIGSEGV)"
        _good(job, events)
        return None

    records, jobs = _run(crashes, tmp_path)
    status = _status(records)
    assert status["first", "optimized"] == "error"
    assert status["second", "optimized"] == "skipped"
    assert {status[w, v] for w in ("first", "second") for v in ("baseline", "line")} == {"passed"}
    assert len(jobs) == 2
    reason = next(r["reason"] for r in records if r["status"] == "error")
    assert "SIGSEGV" in reason
    assert "check" in reason


def test_a_crash_between_samples_is_blamed_on_the_variant_that_ran(tmp_path: Path) -> None:
    def crashes(job: MeasureJob, events: Events) -> str | None:
        if job.skip:
            _good(job, events)
            return None
        for v in job.variants:
            events.begin("first", v, "time")
        events.now("baseline")
        return "rank 0 died"

    status = _status(_run(crashes, tmp_path)[0])
    assert status["first", "baseline"] == "error"
    assert status["first", "optimized"] == "passed"


def test_a_worker_that_cannot_even_start_fails_everything_once(tmp_path: Path) -> None:
    records, jobs = _run(lambda job, events: "ModuleNotFoundError: no torch", tmp_path)
    assert set(_status(records).values()) == {"error"}
    assert len(jobs) == 1
    assert len(records) == 6


def test_a_worker_that_ends_badly_after_a_workload_costs_no_other(tmp_path: Path) -> None:
    def ends(job: MeasureJob, events: Events) -> str | None:
        _good(replace(job, workloads=job.workloads[:1]), events)
        return "rank 0 died: exit code 1"

    said: list[str] = []
    records, jobs = _run(ends, tmp_path, note=said.append)
    assert set(_status(records).values()) == {"passed"}
    assert len(jobs) == 2
    assert "fake: the worker ended after second: rank 0 died: exit code 1" in said
    assert "fake: starting again" in said


def test_a_broken_oracle_fails_its_workload_and_no_other(tmp_path: Path) -> None:
    def oracle_dies(job: MeasureJob, events: Events) -> str | None:
        if job.workloads[0].name == "first":
            events.begin("first", "oracle", "check")
            return "rank 0 died"
        _good(job, events)
        return None

    status = _status(_run(oracle_dies, tmp_path)[0])
    assert {s for (w, _), s in status.items() if w == "first"} == {"error"}
    assert {s for (w, _), s in status.items() if w == "second"} == {"passed"}


def test_a_silent_worker_is_ended_for_its_silence(tmp_path: Path) -> None:
    def silent(job: MeasureJob, events: Events) -> str | None:
        if job.skip:
            _good(job, events)
            return None
        events.begin("first", "line", "check")
        for path in (Path(job.out), Path(job.out + ".now")):
            os.utime(path, (1, 1))
        return None

    import harness.runner as module

    stamp = module.time.time

    class Later:
        @staticmethod
        def time() -> float:
            Later.calls += 1
            return stamp() + (100.0 if Later.calls > 1 else 0.0)

        calls = 0

    patch = pytest.MonkeyPatch()
    patch.setattr(module, "time", Later)
    try:
        records, _ = _run(silent, tmp_path, stall_s=30.0)
    finally:
        patch.undo()
    reasons = [r["reason"] for r in records if r["workload"] == "first" and r["variant"] == "line"]
    assert "no sign of life" in reasons[0]


def test_records_of_a_finished_workload_are_kept_when_the_user_interrupts(tmp_path: Path) -> None:
    def interrupted(job: MeasureJob, events: Events) -> str | None:
        for v in job.variants:
            events.result("first", v, "passed", **_measured(v))
        raise KeyboardInterrupt

    keeper = Keeper()

    def start(job: Job, poll: Callable[[], str | None]) -> Outcome:
        asked = MeasureJob.read(Path(job.args[0]))
        events = Events(Path(asked.out), 0)
        try:
            interrupted(asked, events)
        finally:
            events.close()
        raise AssertionError("unreachable")

    with pytest.raises(KeyboardInterrupt):
        Runner(_facts(), keeper, Settings(device="cpu", start=start)).run([ITEM])
    assert len(keeper.records) == 3


def test_implausible_and_loose_figures_are_not_passed(tmp_path: Path) -> None:
    from harness.devices import lookup

    def too_fast(job: MeasureJob, events: Events) -> None:
        for w in job.workloads:
            for v in job.variants:
                spread = [1e-9] * 10 if v != "line" else [1.0, 3.0] * 5
                work = {**WORK, "bytes": 1e12} if v != "line" else WORK
                events.result(w.name, v, "passed", samples={"values": spread, **SAMPLES}, work=work)
        events.done()

    def start(job: Job, poll: Callable[[], str | None]) -> Outcome:
        asked = MeasureJob.read(Path(job.args[0]))
        events = Events(Path(asked.out), 0)
        too_fast(asked, events)
        events.close()
        return Outcome("passed", "", "", tmp_path)

    facts = _facts()
    facts.found = lookup("NVIDIA H200")
    keeper = Keeper()
    Runner(facts, keeper, Settings(device="cpu", start=start)).run([ITEM])
    status = _status(keeper.records)
    assert status["first", "optimized"] == "implausible"
    assert status["first", "line"] == "unsettled"
    assert "datasheet" in next(r["reason"] for r in keeper.records if r["status"] == "implausible") or "above" in next(
        r["reason"] for r in keeper.records if r["status"] == "implausible"
    )


def test_an_unsettled_baseline_measures_nobody(tmp_path: Path) -> None:
    def shaky(job: MeasureJob, events: Events) -> None:
        for w in job.workloads:
            for v in job.variants:
                parts = _measured(v)
                if v == "baseline":
                    parts["samples"] = {**parts["samples"], "values": [4.0, 12.0] * 5}
                events.result(w.name, v, "passed", **parts)
        events.done()

    records, _ = _run(shaky, tmp_path)
    by = {r["variant"]: r for r in records if r["workload"] == "first"}
    assert (by["baseline"]["status"], by["optimized"]["status"]) == ("unsettled", "passed")
    assert "speedup" not in by["optimized"]["metrics"]
    assert "no one's measure" in by["optimized"]["missing"]["speedup"]
    assert by["optimized"]["metrics"]["speedup_peer"]["value"] == pytest.approx(2.0)


def test_a_half_written_event_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    reader = EventReader(path)
    assert reader.new() == []
    whole = json.dumps({"event": "done"}) + "\n"
    path.write_text(whole + whole[:5])
    assert len(reader.new()) == 1
    path.write_text(whole + whole)
    assert len(reader.new()) == 1


def test_every_status_has_an_exit_code() -> None:
    from harness.record import STATUSES

    assert set(EXIT_CODES) == set(STATUSES)
