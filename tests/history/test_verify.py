"""``history verify`` names what is torn, foreign, there twice, or cannot be true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import DamagedStore
from harness.history import cli
from harness.history.compact import compact
from harness.history.generate import Shape, generate
from harness.history.store import Store
from harness.history.verify import verify
from harness.record import metric

Make = Callable[..., dict[str, Any]]
Write = Callable[[Path, str, list[dict[str, Any]]], Path]


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    cli.register(made)
    return made


def kinds(root: Path) -> list[str]:
    return [finding.kind for finding in verify([Store(root)]).findings]


def test_a_sound_store_has_no_findings(tmp_path: Path, make_record: Make, write_run: Write, app: typer.Typer) -> None:
    write_run(tmp_path, "r1", [make_record(n) for n in range(3)])
    assert verify([Store(tmp_path)]).records == 3
    done = CliRunner().invoke(app, ["history", "verify", "--store", str(tmp_path)])
    assert done.exit_code == 0
    assert "0 finding(s)" in done.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": {"latency": {"value": -1e-3, "unit": "s", "better": "lower"}}}, "latency is -0.001"),
        ({"metrics": {"latency": {"value": 1e-3, "unit": "s", "better": "higher"}}}, "better"),
        ({"metrics": {"mfu": metric("mfu", 1.52)}}, "above 1"),
        ({"metrics": {"latency": metric("latency", 1e-3, 2e-3, 3e-3)}}, "outside its interval"),
        ({"metrics": {"latency": metric("latency", 5e-3)}}, "not the median"),
        ({"metrics": {"speed": {"value": 1.0, "unit": "1", "better": "higher"}}}, "unknown"),
        ({"samples": {"values": [0.0, 1e-3]}}, "not above zero"),
        ({"status": "wrong"}, "status wrong with metrics"),
        ({"time": "yesterday"}, "ISO"),
        ({"time": "2999-01-01T00:00:00Z"}, "ahead"),
        ({"metrics": {"peak_memory": metric("peak_memory", 2.0), "absolute_memory": metric("absolute_memory", 1.0)}},
         "below the peak"),
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_named(
    tmp_path: Path, make_record: Make, write_run: Write, change: dict[str, Any], words: str
) -> None:
    write_run(tmp_path, "r1", [make_record(0, **change)])
    findings = verify([Store(tmp_path)]).findings
    assert findings
    assert all((f.kind, f.line) == ("implausible", 1) for f in findings)
    assert any(words in f.reason for f in findings)


def test_a_speedup_that_its_latencies_contradict(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    def fast(number: int, speedup: float) -> dict[str, Any]:
        record = make_record(number, latency=1e-3)
        record["metrics"]["speedup"] = metric("speedup", speedup, speedup * 0.99, speedup * 1.01)
        return record

    write_run(tmp_path, "r1", [make_record(0, variant="baseline", latency=2e-3), fast(1, 2.0), fast(2, 3.0)])
    findings = verify([Store(tmp_path)]).findings
    assert [(f.line, f.kind) for f in findings] == [(3, "implausible")]
    assert "contradicts" in findings[0].reason


def test_what_was_judged_implausible_is_counted_and_what_passed_so_is_a_finding(
    tmp_path: Path, make_record: Make, write_run: Write, app: typer.Typer
) -> None:
    beyond = {"metrics": {"mbu": metric("mbu", 2.3)}, "samples": {"values": [1e-3] * 3}}
    judged = make_record(0, status="implausible", reason="bandwidth above the datasheet's", **beyond)
    write_run(tmp_path, "r1", [judged])
    done = CliRunner().invoke(app, ["history", "verify", "--store", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "0 finding(s); 1 judged implausible" in done.output
    renamed = {**judged, "id": "r2-0", "run": "r2", "metrics": {"speed": metric("mbu", 2.3)}}
    write_run(tmp_path, "r2", [renamed, make_record(1, run="r2", **beyond)])
    found = verify([Store(tmp_path)])
    assert found.judged == 2
    assert [(f.line, f.reason) for f in found.findings] == [
        (1, "metric 'speed' is unknown"),
        (2, "mbu is 2.3, above 1"),
    ]
    done = CliRunner().invoke(app, ["history", "verify", "--store", str(tmp_path), "--json"])
    assert (done.exit_code, json.loads(done.output)["judged_implausible"]) == (1, 2)


def test_damage_duplicates_and_misplaced_files(
    tmp_path: Path, make_record: Make, write_run: Write, app: typer.Typer
) -> None:
    path = write_run(tmp_path, "r1", [make_record(0)])
    with path.open("a") as file:
        file.write('{"torn\n{"foreign": 1}\n' + json.dumps({**make_record(7), "schema": 9}) + "\n")
    write_run(tmp_path, "r1-copy", [make_record(0)])
    write_run(tmp_path, "other", [make_record(5)])
    (tmp_path / "l40s").mkdir()
    (tmp_path / "l40s" / "r1.jsonl").write_text(json.dumps(make_record(6)) + "\n")
    (tmp_path / "note.txt").write_text("")
    assert sorted(kinds(tmp_path)) == sorted(
        ["torn", "foreign", "newer", "duplicate", "misplaced", "misplaced", "foreign"]
    )
    done = CliRunner().invoke(app, ["history", "verify", "--store", str(tmp_path), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.output)["findings"]
    assert [item["line"] for item in found if item["kind"] == "torn"] == [2]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"id": None}, "id is no text"),
        ({"id": {"a": 1}}, "id is no text"),
        ({"gpu": None}, "gpu is no text"),
        ({"technique": 5, "commit": 7}, "technique is no text; commit is no text"),
        ({"ranks": "x"}, "ranks is no count"),
        ({"dirty": "no"}, "dirty is neither"),
        ({"samples": [1]}, "samples is no object"),
        ({"metrics": {"latency": {"value": True, "better": "lower"}}}, "holds something that is no number"),
        ({"metrics": {"latency": {"value": 1.0, "low": "x", "high": 2.0, "better": "lower"}}}, "that is no number"),
        ({"metrics": {"latency": {"value": 1.0, "low": 1.0, "better": "lower"}}}, "interval with one end"),
    ],
)
def test_a_line_of_the_wrong_shape_is_named_and_trips_no_reader(
    tmp_path: Path, make_record: Make, write_run: Write, app: typer.Typer, changed: dict[str, Any], words: str
) -> None:
    write_run(tmp_path, "r1", [make_record(0)])
    file = tmp_path / "h200" / "r1.jsonl"
    file.write_text(file.read_text() + json.dumps({**make_record(1), **changed}) + "\n")
    done = verify([Store(tmp_path)])
    assert done.records == 1
    assert [(finding.kind, finding.line) for finding in done.findings] == [("unfit", 2)]
    assert words in done.findings[0].reason
    for form in ("csv", "junit", "pytest-benchmark", "github-action-benchmark"):
        made = CliRunner().invoke(app, ["export", form, "--store", str(tmp_path)])
        assert isinstance(made.exception, DamagedStore)
        assert made.stdout


def test_synthetic_records_are_kept_out_of_results(tmp_path: Path, app: typer.Typer) -> None:
    results = tmp_path / "results" / "history"
    (tmp_path / "harness").mkdir()
    done = CliRunner().invoke(app, ["history", "generate", str(results)])
    assert done.exit_code != 0
    assert "results" in str(done.exception)
    generate(Store(tmp_path / "elsewhere"), Shape(records=20, techniques=1, gpus=1, steps=0), parquet=False)
    results.parent.mkdir(exist_ok=True)
    (tmp_path / "elsewhere").rename(results)
    assert kinds(results) == ["synthetic", "synthetic"]


def test_the_generator_makes_sound_records_with_steps_in_them(tmp_path: Path, app: typer.Typer) -> None:
    done = CliRunner().invoke(
        app, ["history", "generate", str(tmp_path), "--records", "1000", "--techniques", "3", "--gpus", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["records"] == 1000
    assert said["steps"]
    checked = verify([Store(tmp_path)])
    assert (checked.records, checked.findings) == (1000, [])
    assert all(record["synthetic"] for record in Store(tmp_path).read())
    again = generate(Store(tmp_path / "again"), Shape(records=1000, techniques=3, gpus=2))
    assert [step.commit for step in again.steps] == [step["commit"] for step in said["steps"]]


def test_the_commands_of_compaction(tmp_path: Path, make_record: Make, write_run: Write, app: typer.Typer) -> None:
    root = tmp_path / "store"
    path = write_run(root, "r1", [make_record(n) for n in range(2)])
    content = path.read_bytes()
    done = CliRunner().invoke(app, ["history", "compact", "--store", str(root), "--json"])
    assert json.loads(done.output)["records"] == 2
    assert verify([Store(root)]).records == 2
    done = CliRunner().invoke(app, ["history", "restore", str(tmp_path / "back"), "--store", str(root)])
    assert done.exit_code == 0
    assert (tmp_path / "back" / "h200" / "r1.jsonl").read_bytes() == content
    with write_run(root, "r2", [make_record(0, run="r2")]).open("a") as file:
        file.write("torn")
    assert CliRunner().invoke(app, ["history", "compact", "--store", str(root)]).exit_code == 1
    assert compact(Store(root)).files == []
