"""``pairbench bisect``: the commit that moved a series, found by measuring, without touching what is checked out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import UsageError
from harness.history.order import Repository
from harness.history.store import Store
from harness.regress import bisect_step, cli_history
from harness.regress.bisect import BisectFailed, bisect, plan, shown

#: A harness in miniature: it "measures" what the checked-out tree says, and breaks where the tree says so.
MEASURE = """
import json, pathlib, sys
args = sys.argv[1:]
assert args[:2] == ["run", "norm"] and args[args.index("--workload") + 1] == "rows", args
here = pathlib.Path(__file__).parent
if (here / "broken").exists():
    sys.exit("cannot build")
value = float((here / "latency").read_text())
folder = pathlib.Path(args[args.index("--store") + 1]) / "h200"
folder.mkdir()
entry = {"value": value, "unit": "s", "better": "lower"}
record = {"type": "measurement", "technique": "norm", "variant": "optimized", "workload_id": "abc", "dtype": "float32",
          "gpu": "h200", "ranks": 1, "status": "passed", "reason": None, "metrics": {"latency": entry}}
(folder / "run.jsonl").write_text(json.dumps(record) + "\\n")
"""


def tree(world: Any, latency: float, subject: str, broken: bool = False, measured: bool = True) -> str:
    """A commit whose tree measures so much, recorded if ``measured``."""
    folder = world.root / "harness"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()
    (folder / "record.py").write_text("")
    (folder / "__main__.py").write_text(MEASURE)
    (folder / "latency").write_text(str(latency))
    (folder / "broken").unlink(missing_ok=True)
    if broken:
        (folder / "broken").touch()
    world.git("add", "-A")
    commit: str = world.commit(subject)
    if measured:
        world.run(commit, optimized=latency)
    return commit


@pytest.fixture
def moved(world: Any) -> tuple[Any, str]:
    """Eight measured commits at the old level, five in which the culprit hides, five measured at the new level."""
    for number in range(8):
        tree(world, 1e-3, f"old {number}")
    tree(world, 1e-3, "innocent 0", measured=False)
    tree(world, 1e-3, "innocent 1", measured=False)
    culprit = tree(world, 1.2e-3, "the culprit", measured=False)
    tree(world, 1.2e-3, "later 0", measured=False)
    tree(world, 1.2e-3, "later 1", measured=False)
    for number in range(5):
        tree(world, 1.2e-3, f"new {number}")
    return world, culprit


def test_the_culprit_is_found_and_nothing_here_is_touched(moved: tuple[Any, str]) -> None:
    world, culprit = moved
    before = world.git("rev-parse", "HEAD"), world.git("status", "--porcelain"), world.git("branch", "--list")
    with world.history() as history:
        task = plan(history, "norm/optimized")
    assert (task.good, task.bad) == (world.commits[7], world.commits[13])
    said: list[str] = []
    found = bisect(Repository(world.root), task, said.append)
    assert (found.commit, found.subject) == (culprit, "the culprit")
    assert 2 <= len(found.steps) <= 4
    assert {step["level"] for step in found.steps} <= {"old", "new"}
    assert (world.git("rev-parse", "HEAD"), world.git("status", "--porcelain"), world.git("branch", "--list")) == before
    assert len(world.git("worktree", "list").splitlines()) == 1
    assert any("new level" in line for line in said)


def test_commits_that_cannot_be_measured_are_skipped_or_reported(moved: tuple[Any, str]) -> None:
    world, _ = moved
    first = tree(world, 1.2e-3, "start", measured=True)
    for number in range(3):
        tree(world, 1.2e-3, f"broken {number}", broken=True, measured=False)
    last = tree(world, 1.5e-3, "end", measured=True)
    with world.history() as history:
        task = plan(history, "norm/optimized", good=first, bad=last)
    assert (task.old, task.new) == pytest.approx((1.2e-3, 1.5e-3), rel=0.02)
    with pytest.raises(BisectFailed, match="cannot build"):
        bisect(Repository(world.root), task)
    assert len(world.git("worktree", "list").splitlines()) == 1


def test_a_broken_commit_beside_the_culprit_leaves_two_candidates(world: Any) -> None:
    first = tree(world, 1e-3, "old 0")
    tree(world, 1.2e-3, "broken", broken=True, measured=False)
    last = tree(world, 1.2e-3, "slow")
    with world.history() as history:
        task = plan(history, "norm/optimized", good=first, bad=last)
    with pytest.raises(BisectFailed, match=r"it is one of: .* slow, .* broken; 1 of") as found:
        bisect(Repository(world.root), task)
    assert " old " not in str(found.value)


def test_what_cannot_be_searched_is_said_first(moved: tuple[Any, str]) -> None:
    world, _ = moved
    with world.history() as history:
        with pytest.raises(UsageError, match="no change in series"):
            plan(history, "norm/baseline")
        with pytest.raises(UsageError, match="names 2 series"):
            plan(history, "norm")
        with pytest.raises(UsageError, match="unknown series"):
            plan(history, "nrm/optimized")
        with pytest.raises(UsageError, match="no point at"):
            plan(history, "norm/optimized", good=world.commits[8], bad=world.commits[13])
        task = plan(history, "norm/optimized", good=world.commits[13], bad=world.commits[0])
    with pytest.raises(BisectFailed, match="does not come after"):
        bisect(Repository(world.root), task)


def test_a_series_of_other_commits_is_named_as_such(world: Any) -> None:
    world.commit("one")
    record = world.record("optimized", 1e-3, "r", "9" * 40, technique="tests/a.py::test")
    with Store(world.store).open_run("h200", "r") as writer:
        writer.append(record)
    with pytest.raises(UsageError, match="is on main"):
        plan(world.history(), "tests/a.py::test")


def test_the_command_shows_what_it_would_run_and_runs_it(moved: tuple[Any, str], in_world: Callable[[], None]) -> None:
    world, culprit = moved
    in_world()
    app = typer.Typer(pretty_exceptions_enable=False)
    cli_history.register(app)
    app.command("other")(lambda: None)
    base = ["bisect", "norm/optimized", "--store", str(world.store)]
    dry = CliRunner().invoke(app, [*base, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "git bisect run" in dry.stdout
    assert "run norm --workload rows" in dry.stdout
    done = CliRunner().invoke(app, [*base, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["commit"] == culprit


def test_a_users_own_shape_is_measured_again_as_such(moved: tuple[Any, str]) -> None:
    world, _ = moved
    with world.history() as history:
        task = plan(history, "norm/optimized")
    own = type(task)(task.key, "rows[width=8,dtype=float16]", task.good, task.bad, task.old, task.new)
    assert own.measuring()[1:6] == ["-m", "harness", "run", "norm", "--workload"]
    assert own.measuring()[6:] == [
        *("rows", "--set", "width=8", "--set", "dtype=float16", "--variant", "baseline", "--variant", "optimized"),
        *("--store", "{store}"),
    ]
    peer = type(task)(replace(task.key, metric="speedup_peer"), "rows", task.good, task.bad, 1.0, 2.0, device="cpu")
    assert peer.measuring()[6:] == ["rows", "--device", "cpu", "--store", "{store}"]  # the peers too: all variants
    assert any("git bisect start" in line for line in shown(own))


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (1.05, 0), (1.1, 125), (1.16, 1), (1.2, 1), (0.5, 0), (3.0, 1)])
def test_a_step_decides_by_the_nearer_level(value: float, code: int) -> None:
    assert bisect_step.nearer(value, 1.0, 1.2) == code
    assert bisect_step.nearer(1 / value, 1.0, 1 / 1.2) == code


def test_a_step_takes_the_median_of_several_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "measure.py"
    script.write_text(
        "import json, pathlib, sys\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "n = int(count.read_text()) if count.exists() else 0\n"
        "count.write_text(str(n + 1))\n"
        "value = [1.0, 9.0, 1.01][n]\n"
        "record = {'type': 'measurement', 'status': 'passed', 'metrics': {'latency': {'value': value}}}\n"
        "pathlib.Path(sys.argv[1], 'r.jsonl').write_text(json.dumps(record) + '\\n')\n"
    )
    spec = {"command": [sys.executable, str(script), "{store}"], "match": {"type": "measurement"}, "metric": "latency",
            "old": 1.0, "new": 2.0, "runs": 3, "log": str(tmp_path / "log")}  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    assert bisect_step.main(str(tmp_path / "spec.json")) == 0
    assert json.loads((tmp_path / "log").read_text())["value"] == 1.01
    assert "old level" in capfd.readouterr().err
