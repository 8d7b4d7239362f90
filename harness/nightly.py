"""One night: is the machine fit, is everything right, how fast is it, is anything worse; and what was measured is kept.

Every step is a command of its own under a time limit, with its output in a file of its own. A step that fails stops
none that can still say something: what a run measured before it broke is judged, reported and committed all the same.
Imports no torch; what reads the history runs only where its packages are, and says so elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UsageError

#: What a step's packages are called, by step: the box that measures needs none of them.
NEEDS = {"regressions": ("duckdb", "ruptures"), "report": ("duckdb", "plotly")}
SEVERITY = (0, 3, 1, 2)  # of exit codes: all well, machine not fit, wrong or worse, bad use
END_S = 30.0  # for a step that was asked to end
PUSHES = 3


@dataclass(frozen=True)
class Night:
    """What is asked for.

    store: folder or URL of the history. out: folder for logs and pages, new or of an earlier night. run: what ``run``
    gets besides the store. commit: whether new records are committed. push: where to, as ``remote/branch``, or empty.
    limit_s: seconds the measurement may take.
    """

    store: str
    out: Path
    run: tuple[str, ...] = ()
    commit: bool = False
    push: str = ""
    limit_s: float = 6 * 3600.0


@dataclass
class Step:
    """What became of a step: its exit code, or None where it was left out, with the reason."""

    name: str
    code: int | None
    seconds: float = 0.0
    said: str = ""
    log: Path | None = None


@dataclass
class Result:
    """All steps in order; the exit code is the worst of theirs."""

    steps: list[Step] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 all well, 1 wrong or worse, 2 bad use, 3 the machine is not fit."""
        codes = [step.code if step.code in SEVERITY else 1 for step in self.steps if step.code is not None]
        return max(codes, key=SEVERITY.index, default=0)


Runner = Callable[[Sequence[str], Path, float], int]


def run_night(night: Night, root: Path, runner: Runner | None = None, note: Callable[[str], None] = print) -> Result:
    """The steps of a night in the checkout ``root``.

    Raises UsageError where records could not be committed afterwards, before anything is measured, and where another
    night is under way in the same folder.
    """
    go = runner or run_step
    if night.commit or night.push:
        _check_committable(night, root)
    night.out.mkdir(parents=True, exist_ok=True)
    result = Result()
    with _alone(night.out / "lock"):
        python = (sys.executable, "-m", "harness")
        store = ("--store", night.store)
        fit = _step(result, go, night.out, note, "doctor", (*python, "doctor"), 300.0)
        if fit.code != 0:
            fit.code = 3  # what is missing here is no fault of the code under test
            return result
        _step(result, go, night.out, note, "run", (*python, "run", *store, *night.run), night.limit_s)
        judge = (*python, "regressions", *store, "--fail-on", "regressed", "--markdown")
        _step(result, go, night.out, note, "regressions", judge, 1800.0)
        page = night.out / "report.html"
        _step(
            result, go, night.out, note, "report",
            (*python, "report", *store, "--html", str(page), "--force", "--markdown"), 1800.0,
        )  # fmt: skip
        if night.commit or night.push:
            _keep(result, night, root, note)
        _summarize(result, os.environ)
    return result


def run_step(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Runs a command with its output in ``log``; 124 when it outlasted its limit. An interrupt ends it politely."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _step(
    result: Result,
    go: Runner,
    out: Path,
    note: Callable[[str], None],
    name: str,
    command: Sequence[str],
    limit_s: float,
) -> Step:
    missing = [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    log = out / f"{name}.log"
    if missing:
        step = Step(name, None, said=f"left out: needs {', '.join(missing)} (pip install 'pairbench[dashboard]')")
    else:
        started = time.perf_counter()
        code = go(command, log, limit_s)
        said = f"no end after {limit_s:.0f} s" if code == 124 else ""
        step = Step(name, code, time.perf_counter() - started, said, log)
    result.steps.append(step)
    note(f"{name}: {step.said or f'exit code {step.code}'}, {step.seconds:.0f} s" + (f", {log}" if step.log else ""))
    return step


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One night at a time in a folder: two would measure each other."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{lock.parent}: another night is under way here; wait for it, or name another --out"
            ) from None
        yield


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, text=True, timeout=300)


def _check_committable(night: Night, root: Path) -> None:
    if night.push and "/" not in night.push:
        raise UsageError(f"--push {night.push}: give remote/branch, as in origin/main")
    if "://" in night.store:
        raise UsageError(f"--commit: {night.store} is a URL, which no commit holds; leave --commit out")
    inside = _git(root, "rev-parse", "--show-toplevel")
    if inside.returncode:
        raise UsageError(f"--commit: {root} is in no git repository ({inside.stderr.strip()})")
    store = Path(night.store)
    store = store if store.is_absolute() else root / store
    if not store.resolve().is_relative_to(Path(inside.stdout.strip()).resolve()):
        raise UsageError(f"--commit: {night.store} lies outside of {inside.stdout.strip()}; commit it there yourself")
    if _git(root, "check-ignore", "-q", str(store)).returncode == 0:
        raise UsageError(f"--commit: git ignores {night.store}; take it out of .gitignore")


def _keep(result: Result, night: Night, root: Path, note: Callable[[str], None]) -> None:
    """Commits what is new under the store, and pushes it, over what others pushed meanwhile."""
    started = time.perf_counter()
    step = Step("commit", 0)
    result.steps.append(step)
    _git(root, "add", "--", night.store)
    names = _git(root, "diff", "--cached", "--name-only", "--", night.store).stdout.split()
    if names:
        message = f"Nightly records: {len(names)} run{'s' * (len(names) > 1)}"
        done = _git(root, "commit", "-q", "-m", message, "--", night.store)
        step.code, step.said = (1, done.stderr.strip()) if done.returncode else (0, f"{message}, committed")
    else:
        step.said = "nothing new to commit"
    if night.push and step.code == 0:
        remote, branch = night.push.split("/", 1)
        for _ in range(PUSHES):
            pushed = _git(root, "push", "-q", remote, f"HEAD:{branch}")
            if pushed.returncode == 0:
                step.said += f"; pushed to {night.push}"
                break
            _git(root, "pull", "-q", "--rebase", remote, branch)
        else:
            step.code, step.said = 1, f"{step.said}; not pushed to {night.push}: {pushed.stderr.strip()}"
    step.seconds = time.perf_counter() - started
    note(f"commit: {step.said}")


def _summarize(result: Result, env: Mapping[str, str]) -> None:
    """What a CI job shows of itself, where it says in which file: the summaries that the steps printed as Markdown."""
    target = env.get("GITHUB_STEP_SUMMARY")
    if not target:
        return
    with open(target, "a") as file:
        for step in result.steps:
            if step.name in NEEDS and step.log is not None:
                file.write(step.log.read_text(errors="replace") + "\n")
