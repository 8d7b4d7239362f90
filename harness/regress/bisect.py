"""Finds the commit that moved a series, by ``git bisect run`` in a worktree of its own: nothing that is checked out
here is touched, and records of the search go nowhere but into its log."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.errors import PairbenchError, UsageError, unknown
from harness.history.engine import History
from harness.history.order import Repository
from harness.history.query import SeriesKey, resolve_series, series
from harness.metric_names import METRICS
from harness.regress import bisect_step
from harness.regress.detect import detect
from harness.regress.points import as_detector_points
from harness.regress.rerun import device_of, run_command, variants_for

#: Isolated, so that neither this folder nor the worktree shadows the standard library: a step that dies on import
#: would count as the new level.
STEP: Final = (sys.executable, "-I", bisect_step.__file__)


#: Candidates that a message lists.
SHOWN: Final = 10


class BisectFailed(PairbenchError):
    """The search ended without a commit; the message says why."""


@dataclass(frozen=True)
class Task:
    """What is looked for: the series, the last commit at the old level, the first at the new one, and the levels."""

    key: SeriesKey
    workload: str
    good: str
    bad: str
    old: float
    new: float
    runs: int = 1
    device: str | None = None

    def measuring(self) -> list[str]:
        """The command that measures the series' workload with the code of the working directory."""
        variants = variants_for([(self.key.variant, self.key.metric)])
        return run_command(self.key.technique, self.workload, variants, self.device, "{store}")

    def spec(self, log: Path) -> dict[str, Any]:
        """The step's specification (:mod:`harness.regress.bisect_step`)."""
        match = {"type": "measurement", "technique": self.key.technique, "variant": self.key.variant,
                 "workload_id": self.key.workload_id, "dtype": self.key.dtype, "gpu": self.key.gpu,
                 "ranks": self.key.ranks}  # fmt: skip
        return {
            "command": self.measuring(),
            "match": match,
            "metric": self.key.metric,
            "old": self.old,
            "new": self.new,
            "runs": self.runs,
            "log": str(log),
        }


@dataclass
class Found:
    """The commit, its subject, and every step on the way."""

    commit: str
    subject: str
    steps: list[dict[str, Any]] = field(default_factory=list)


def plan(
    history: History,
    text: str,
    good: str | None = None,
    bad: str | None = None,
    runs: int = 1,
    commit: str | None = None,
) -> Task:
    """What to search for a series: its last regression (else its last change), or between two commits given.

    Args:
        text: the series, or as much of its beginning as names one.
        good, bad: commits, branches or tags, instead of the change's own ends.
        commit: a change's first commit at the new level, to choose one of several.

    Raises:
        UsageError: no such series, no change in it, or no repository.
    """
    if history.repository is None:
        raise UsageError("bisect needs the repository: run it in a checkout")
    if runs < 1:
        raise UsageError(f"--runs {runs}: at least one run a commit")
    key = resolve_series(history, text)
    points = [point for point in series(history, key) if point["judged"] and point["standing"] == "graph"]
    if not points:
        raise UsageError(f"no commit of series {key.text} is on {history.branch} of {history.repository.top}")
    workload = history.rows(
        "SELECT workload FROM records WHERE technique = ? AND workload_id = ? LIMIT 1", [key.technique, key.workload_id]
    )[0]["workload"]
    device = device_of(history, key.technique, key.gpu)
    if good is not None and bad is not None:
        old, new = (_level_at(history, points, name) for name in (good, bad))
        return Task(key, workload, old[0], new[0], old[1], new[1], runs, device)
    events = detect(as_detector_points(points), METRICS[key.metric].better).events
    if commit is not None:
        events = tuple(e for e in events if str(points[e.index]["commit"]).startswith(commit))
    if not events:
        raise UsageError(f"no change in series {key.text}; name the two ends with --good and --bad")
    event = next((e for e in reversed(events) if e.verdict == "regressed"), events[-1])
    before, after = points[event.index - 1], points[event.end]
    ends = [_resolve(history.repository, name) if name else end for name, end in
            ((good, before["commit"]), (bad, after["commit"]))]  # fmt: skip
    return Task(key, workload, ends[0], ends[1], event.old, event.new, runs, device)


def _resolve(repository: Repository, name: str) -> str:
    commit = repository.resolve(name)
    if commit is None:
        raise unknown("commit", name, repository.branches())
    return commit


def _level_at(history: History, points: Sequence[dict[str, Any]], name: str) -> tuple[str, float]:
    assert history.repository is not None
    commit = _resolve(history.repository, name)
    for point in points:
        if point["commit"] == commit:
            return commit, float(point["value"])
    raise UsageError(f"the series has no point at {name} ({commit[:12]}), so its level there is unknown")


def shown(task: Task) -> list[str]:
    """The commands that :func:`bisect` runs, as one would type them."""
    return [
        f"git worktree add --detach WORKTREE {task.bad[:12]} && cd WORKTREE",
        f"git bisect start {task.bad[:12]} {task.good[:12]}",
        f"git bisect run {shlex.join([*STEP, 'SPEC.json'])}",
        f"# each step: {shlex.join(task.measuring())}",
    ]


def bisect(repository: Repository, task: Task, say: Callable[[str], None] = lambda line: None) -> Found:
    """Run the search.

    Args:
        say: called with each line that git and the steps print.

    Raises:
        BisectFailed: the ends do not stand in line, every step was skipped, or git refused.
    """
    if not repository.between(task.good, task.bad):
        raise BisectFailed(f"{task.bad[:12]} does not come after {task.good[:12]}")
    folder = Path(tempfile.mkdtemp(prefix="pairbench-bisect-"))
    tree, spec, log = folder / "tree", folder / "spec.json", folder / "log.jsonl"
    spec.write_text(json.dumps(task.spec(log)), encoding="utf-8")
    try:
        repository.git("worktree", "add", "--detach", "--quiet", str(tree), task.bad)
        return _run(tree, task, spec, log, say)
    finally:
        with suppress(PairbenchError):
            repository.git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(folder, ignore_errors=True)


def _run(tree: Path, task: Task, spec: Path, log: Path, say: Callable[[str], None]) -> Found:
    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=tree, capture_output=True, text=True, check=False)

    started = git("bisect", "start", task.bad, task.good)
    if started.returncode:
        raise BisectFailed(f"git bisect start: {started.stderr.strip()}")
    step = [*STEP, str(spec)]
    with subprocess.Popen(
        ["git", "bisect", "run", *step], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            say(line.rstrip("\n"))
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    culprit = git("rev-parse", "--verify", "--quiet", "refs/bisect/bad").stdout.strip()
    if running.returncode != 0 or not culprit:
        skipped = sum(step["level"] == "skipped" for step in steps)
        last = next((step["reason"] for step in reversed(steps) if step["level"] == "skipped"), "git said no more")
        good = git("for-each-ref", "--format=%(objectname)", "refs/bisect/good-*").stdout.split()
        left = git("log", "--format=%h %s", culprit or task.bad, "--not", *good).stdout.splitlines() if good else []
        among = f"; it is one of: {', '.join(left[:SHOWN])}" if 1 < len(left) <= SHOWN else ""
        raise BisectFailed(f"no single commit was found{among}; {skipped} of {len(steps)} steps could not tell: {last}")
    seen = {step["commit"] for step in steps if step["level"] == "new"}
    if culprit != task.bad and culprit not in seen:
        raise BisectFailed(f"git names {culprit[:12]}, which was never measured at the new level: a step broke")
    subject = git("log", "-1", "--format=%s", culprit).stdout.strip()
    return Found(culprit, subject, steps)
