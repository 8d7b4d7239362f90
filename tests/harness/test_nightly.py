"""A night: its order, its exit code, what it commits, and what stops it before anything is measured."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness import nightly
from harness.errors import UsageError
from harness.nightly import Night, Result, Step, run_night, run_step

ROOT = Path(__file__).resolve().parents[2]
Fake = Callable[[Sequence[str], Path, float], int]


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with a remote of its own."""
    root, remote = tmp_path / "here", tmp_path / "remote.git"
    subprocess.run(("git", "init", "-q", "--bare", "-b", "main", str(remote)), check=True)
    subprocess.run(("git", "clone", "-q", str(remote), str(root)), check=True, capture_output=True)
    for name, value in (("user.name", "somebody"), ("user.email", "s@example.org")):
        git(root, "config", name, value)
    (root / "code.py").write_text("x = 1\n")
    git(root, "add", "code.py")
    git(root, "commit", "-q", "-m", "code")
    git(root, "push", "-q", "origin", "HEAD:main")
    return root


def fake(codes: dict[str, int], seen: list[str], root: Path | None = None) -> Fake:
    """Steps that end as told; ``run`` writes a record where there is a repository."""

    def go(command: Sequence[str], log: Path, limit_s: float) -> int:
        name = command[3]
        seen.append(name)
        log.write_text(f"{name} said so\n")
        if name == "run" and root is not None:
            store = root / "results" / "history" / "gpu"
            store.mkdir(parents=True, exist_ok=True)
            (store / f"run-{len(list(store.iterdir()))}.jsonl").write_text("{}\n")
        return codes.get(name, 0)

    return go


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [
        ({}, 0),
        ({"run": 3}, 3),
        ({"run": 1}, 1),
        ({"regressions": 1}, 1),
        ({"run": 3, "regressions": 1}, 1),
        ({"run": 124}, 1),
        ({"run": 2}, 2),
        ({"run": -9}, 1),
    ],
    ids=str,
)
def test_the_exit_code_is_the_worst_and_every_step_has_its_say(
    codes: dict[str, int], exit_code: int, tmp_path: Path
) -> None:
    seen: list[str] = []
    result = run_night(Night("store", tmp_path / "out"), tmp_path, fake(codes, seen), note=lambda _: None)
    assert seen == ["doctor", "run", "regressions", "report"]
    assert result.exit_code == exit_code
    assert (tmp_path / "out" / "run.log").read_text() == "run said so\n"


def test_a_box_that_lacks_something_measures_nothing_and_is_not_fit(tmp_path: Path) -> None:
    seen: list[str] = []
    result = run_night(Night("store", tmp_path), tmp_path, fake({"doctor": 1}, seen), note=lambda _: None)
    assert seen == ["doctor"]
    assert result.exit_code == 3


def test_without_the_packages_of_the_history_the_night_measures_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nightly.NEEDS, "regressions", ("a_package_that_nobody_has",))
    seen: list[str] = []
    said: list[str] = []
    result = run_night(Night("store", tmp_path), tmp_path, fake({}, seen), note=said.append)
    assert "regressions" not in seen
    assert result.exit_code == 0
    assert any("left out: needs a_package_that_nobody_has" in line for line in said)


def test_records_are_committed_and_pushed_over_what_others_pushed(repository: Path, tmp_path: Path) -> None:
    night = Night("results/history", tmp_path / "out", commit=True, push="origin/main")
    other = tmp_path / "other"
    subprocess.run(("git", "clone", "-q", str(tmp_path / "remote.git"), str(other)), check=True)
    for name, value in (("user.name", "other"), ("user.email", "o@example.org")):
        git(other, "config", name, value)
    (other / "more.py").write_text("y = 2\n")
    git(other, "add", "more.py")
    git(other, "commit", "-q", "-m", "meanwhile")
    git(other, "push", "-q", "origin", "HEAD:main")
    (repository / "unfinished.py").write_text("z = 3\n")
    result = run_night(night, repository, fake({"run": 3}, [], repository), note=lambda _: None)
    assert result.steps[-1].name == "commit"
    assert result.steps[-1].code == 0, result.steps[-1].said
    assert git(repository, "show", "--name-only", "--format=%s", "HEAD").split("\n") == [
        "Nightly records: 1 run",
        "",
        "results/history/gpu/run-0.jsonl",
    ]
    git(other, "pull", "-q", "origin", "main")
    assert (other / "results" / "history" / "gpu" / "run-0.jsonl").exists()
    assert (repository / "unfinished.py").exists(), "what was not asked for stays out of the commit"
    assert result.exit_code == 3

    again = run_night(night, repository, fake({}, []), note=lambda _: None)
    assert again.steps[-1].said.startswith("nothing new to commit")


def test_a_push_that_fails_says_so_and_keeps_the_commit(repository: Path, tmp_path: Path) -> None:
    git(repository, "remote", "set-url", "origin", str(tmp_path / "gone.git"))
    night = Night("results/history", tmp_path / "out", push="origin/main")
    result = run_night(night, repository, fake({}, [], repository), note=lambda _: None)
    assert result.exit_code == 1
    assert "not pushed to origin/main" in result.steps[-1].said
    assert git(repository, "log", "-1", "--format=%s") == "Nightly records: 1 run"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store": "s3://bucket/history"}, "is a URL"),
        ({"store": "/elsewhere/history"}, "lies outside"),
        ({"push": "origin"}, "give remote/branch"),
        ({"store": "ignored/history"}, "git ignores"),
    ],
    ids=str,
)
def test_what_could_not_be_kept_is_refused_before_anything_is_measured(
    change: dict[str, str], message: str, repository: Path, tmp_path: Path
) -> None:
    (repository / ".gitignore").write_text("ignored/\n")
    seen: list[str] = []
    arguments = {"store": "results/history", "push": ""} | change
    with pytest.raises(UsageError, match=message):
        run_night(Night(out=tmp_path / "out", commit=True, **arguments), repository, fake({}, seen))
    with pytest.raises(UsageError, match="no git repository"):
        run_night(Night("store", tmp_path / "out", commit=True), tmp_path, fake({}, seen))
    assert seen == []


def test_two_nights_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    inside, finish = threading.Event(), threading.Event()

    def slow(command: Sequence[str], log: Path, limit_s: float) -> int:
        inside.set()
        assert finish.wait(30)
        return 0

    night = Night("store", tmp_path)
    first = threading.Thread(target=run_night, args=(night, tmp_path, slow, lambda _: None))
    first.start()
    try:
        assert inside.wait(30)
        with pytest.raises(UsageError, match="another night is under way"):
            run_night(night, tmp_path, fake({}, []))
    finally:
        finish.set()
        first.join()
    assert run_night(night, tmp_path, fake({}, []), note=lambda _: None).exit_code == 0


def test_a_step_that_does_not_end_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sleeper = (sys.executable, "-c", "print('on', flush=True)\nimport time\ntime.sleep(60)")
    assert run_step(sleeper, log, 2.0) == 124
    assert log.read_text() == "on\n"
    assert run_step((sys.executable, "-c", "raise SystemExit(3)"), log, 30.0) == 3


def test_the_summary_goes_where_the_job_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    run_night(Night("store", tmp_path / "out"), tmp_path, fake({}, []), note=lambda _: None)
    assert target.read_text() == "regressions said so\n\nreport said so\n\n"


def test_an_empty_night_is_no_failure() -> None:
    assert Result().exit_code == 0
    assert Result([Step("report", None, said="left out")]).exit_code == 0


@pytest.mark.slow
def test_a_real_night_on_two_cores(tmp_path: Path) -> None:
    """The commands that it runs exist, take these options, and leave a store, logs and a page."""
    command = (sys.executable, "-m", "harness", "nightly", "add_rms_norm", "--budget", "1")
    command += ("--store", str(tmp_path / "store"), "--out", str(tmp_path / "out"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: a busy machine
    assert "<html" in (tmp_path / "out" / "report.html").read_text()[:2000]
    assert list((tmp_path / "store").rglob("*.jsonl"))
    assert "Traceback" not in "".join(p.read_text() for p in (tmp_path / "out").glob("*.log"))
