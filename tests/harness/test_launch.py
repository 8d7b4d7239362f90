"""A launch ends as its program does, says which rank failed first and why, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.launch import Job, Outcome, launch, threads_per_rank

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parent.parent.parent


def run(logs: Path, *args: str, ranks: int = 1, timeout_s: float = 60.0) -> Outcome:
    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    return launch(Job("fake_worker", args, ranks, timeout_s, logs / "logs", {"PYTHONPATH": path}))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_one_rank_passes_with_its_log_apart(tmp_path):
    found = run(tmp_path, "pass")
    assert (found.status, found.reason, found.traceback) == ("passed", "", "")
    assert "rank 0 does pass" in (found.logs / "rank0.log").read_text()
    assert "passive" in (found.logs / "rank0.log").read_text()


def test_two_ranks_meet_and_their_logs_are_apart(tmp_path):
    found = run(tmp_path, "collective", "pass", "0", ranks=2)
    assert (found.status, found.reason) == ("passed", "")
    for rank in (0, 1):
        log = (found.logs / f"rank{rank}.log").read_text()
        assert log.splitlines()[0] == f"rank {rank} does collective"
        assert "sum 2.0" in log
        assert f"rank {1 - rank}" not in log


@pytest.mark.parametrize(
    ("how", "status", "reason", "trace"),
    [
        (("raise", "0"), "error", "rank 0: RuntimeError: planted on rank 0", 'raise RuntimeError(f"planted'),
        (("exit", "0"), "error", "rank 0 died: exit code 7", "rank 0 does exit"),
        (("die", "0"), "error", "rank 0 died: exit code -9 (SIGKILL)", "rank 0 does die"),
        (("crash",), "error", "rank 0 died: exit code -11 (SIGSEGV)", "in main"),
        (
            ("abort",),
            "error",
            "rank 0 died: exit code -6 (SIGABRT): terminate called without an active exception",
            "rank 0 does abort",
        ),
        (("memory",), "oom", "rank 0: MemoryError: planted", "MemoryError: planted"),
    ],
)
def test_a_failed_rank_says_why(tmp_path, how, status, reason, trace):
    found = run(tmp_path, *how)
    assert (found.status, found.reason, found.rank) == (status, reason, 0)
    assert trace in found.traceback


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ((), ""),
        (("0",), ""),
        (("3",), "rank 0 died: exit code 3"),
        (("some words",), "rank 0 died: exit code 1"),
    ],
)
def test_a_program_ends_whole_and_the_interpreter_is_not_taken_apart(tmp_path, said, reason):
    found = run(tmp_path, "end", *said)
    assert found.reason == reason
    log = (found.logs / "rank0.log").read_text().splitlines()
    words = [said[0]] if said and not said[0].isdigit() else []
    assert log == ["rank 0 does end", "native print", *words, "thread ended", "at exit"]


def test_a_collective_s_tensor_may_be_let_go_of_when_the_program_has_ended(tmp_path):
    found = run(tmp_path, "collective", "late", "0", ranks=2)
    assert (found.status, found.reason) == ("passed", "")


def test_a_module_that_does_not_exist_is_named(tmp_path):
    found = launch(Job("no_such_worker", logs=tmp_path / "logs"))
    assert found.status == "error"
    assert "no_such_worker" in found.reason


@pytest.mark.parametrize(
    ("how", "reason", "trace"),
    [
        ("die", "rank 1 died: exit code -9 (SIGKILL)", "rank 1 does collective"),
        ("raise", "rank 1: ValueError: planted in the middle", "ValueError: planted in the middle"),
    ],
)
def test_a_rank_that_dies_in_the_middle_ends_the_launch_in_seconds(tmp_path, how, reason, trace):
    found = run(tmp_path, "collective", how, "1", ranks=2)
    assert (found.status, found.reason, found.rank) == ("error", reason, 1)
    assert trace in found.traceback
    assert found.seconds < 30


def test_a_hung_launch_ends_at_its_limit_with_its_stack(tmp_path):
    found = run(tmp_path, "hang", timeout_s=1.0)
    assert (found.status, found.rank) == ("timeout", 0)
    assert found.reason.startswith("no end within 1 s; rank 0 was at fake_worker.py:")
    assert "in stuck" in found.traceback
    assert 1 <= found.seconds < 10


def test_of_two_ranks_the_one_that_hangs_is_told_from_the_one_that_waits(tmp_path):
    since: list[float] = []

    def ended() -> str | None:
        logs = [tmp_path / "logs" / f"rank{rank}.log" for rank in (0, 1)]
        if all(log.exists() and "sum" in log.read_text() for log in logs):
            since.append(time.monotonic())
        return "stuck" if since and time.monotonic() - since[0] > 0.5 else None

    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    job = Job("fake_worker", ("collective", "hang", "1"), 2, 60, tmp_path / "logs", {"PYTHONPATH": path})
    found = launch(job, poll=ended)
    assert (found.status, found.rank) == ("timeout", 1)
    assert found.reason.startswith("stuck; rank 1 was at fake_worker.py:")
    assert "in stuck" in found.traceback


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    found = run(tmp_path, "stubborn", timeout_s=0.7)
    assert found.status == "timeout"
    assert not runs(int((found.logs / "rank0.pid").read_text()))


@pytest.mark.parametrize("then", ["pass", "hang"])
def test_no_grandchild_stays_even_in_a_session_of_its_own(tmp_path, then):
    pid_file = tmp_path / "pid"
    found = run(tmp_path, "grandchild", str(pid_file), then, timeout_s=1.5)
    assert found.status == ("passed" if then == "pass" else "timeout")
    assert not runs(int(pid_file.read_text()))


@pytest.mark.parametrize(("ranks", "sig"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGTERM)])
def test_killing_the_runner_leaves_nothing_running(tmp_path, ranks, sig):
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(WORKERS)]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "fake_runner", str(pid_file), str(ranks)]
    runner = subprocess.Popen(command, env=environment)
    try:
        said = []  # every rank writes the file anew, and a reader can come between
        assert wait_until(lambda: pid_file.exists() and said.append(pid_file.read_text()) is None and said[-1])
        grandchild = int(said[-1])
        workers = [int(path.read_text()) for path in tmp_path.glob("pairbench-launch-*/rank*.pid")]
        assert runs(grandchild)
        assert workers
    finally:
        runner.send_signal(sig)
        runner.wait()
    assert wait_until(lambda: not any(map(runs, [grandchild, *workers])))


def test_ctrl_c_ends_the_launch_and_is_passed_on(tmp_path):
    pid_file = tmp_path / "pid"

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "grandchild", str(pid_file), "hang")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert not runs(int(pid_file.read_text()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_looks_like_ours_does_no_harm(tmp_path, monkeypatch, ranks):
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("raise RuntimeError('the wrong harness')")
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "pass", ranks=ranks).reason == ""


def test_a_supervisor_of_ranks_that_is_killed_takes_them_along(tmp_path):
    pid_file, rank_file = tmp_path / "pid", tmp_path / "logs" / "rank0.pid"

    def kill_agent() -> str | None:
        # The first file may be the other rank's, who is there before rank 0.
        if all(file.exists() and file.read_text() for file in (pid_file, rank_file)):
            worker = Path(f"/proc/{rank_file.read_text()}/stat").read_text()
            os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGKILL)
            pid_file.unlink()
        return None

    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    job = Job("fake_worker", ("grandchild", str(pid_file), "hang"), 2, 60, tmp_path / "logs", {"PYTHONPATH": path})
    found = launch(job, poll=kill_agent)
    assert found.status == "error"
    assert found.reason.startswith("the launcher failed")
    assert not any(runs(int(p.read_text())) for p in found.logs.glob("rank*.pid"))


def test_bad_jobs_are_refused(tmp_path):
    with pytest.raises(UsageError, match="at least 1 rank"):
        Job("x", ranks=0)
    with pytest.raises(UsageError, match="time limit"):
        Job("x", timeout_s=0)
    run(tmp_path, "pass")
    with pytest.raises(UsageError, match="already holds a launch"):
        run(tmp_path, "pass")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        launch(Job("x", logs=tmp_path / "file" / "logs"))


def test_threads_are_cores_over_ranks():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1, {}) == cores
    assert threads_per_rank(cores, {}) == 1
    assert threads_per_rank(4 * cores, {}) == 1
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "1"}) == 1
    assert threads_per_rank(1, {"OMP_NUM_THREADS": str(8 * cores)}) == cores
