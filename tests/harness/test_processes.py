"""Processes are found by their mark wherever they went, and the kernel's count of memory kills is read."""

import os
import signal
import subprocess
import sys

import pytest

from harness.processes import MARK, Sentry, end_all, marked, nested_mark, oom_kills

SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
DEAF = [
    *[sys.executable, "-S", "-c"],
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)",
]


def start(command, mark):
    process = subprocess.Popen(
        command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_marked_processes_are_ended_and_others_are_not():
    mine, inner, other = start(SLEEP, "aaa"), start(SLEEP, "aaa/bbb"), start(SLEEP, "ccc")
    try:
        assert set(marked("aaa")) == {mine.pid, inner.pid}
        assert end_all("bbb") == []
        assert inner.wait() == -signal.SIGTERM
        assert end_all("aaa") == []
        assert mine.wait() == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (mine, inner, other):
            process.kill()
            process.wait()


def test_a_mark_is_compared_whole():
    other = start(SLEEP, "aaabbb")
    try:
        assert marked("aaa") == []
    finally:
        other.kill()
        other.wait()


def test_who_ignores_sigterm_is_killed():
    deaf = start(DEAF, "deaf")
    assert end_all("deaf", grace_s=0.2) == []
    assert deaf.wait() == -signal.SIGKILL


def test_the_sentry_ends_what_is_left_when_it_is_dismissed():
    left = start(SLEEP, "left")
    Sentry("left").dismiss()
    assert left.wait() == -signal.SIGKILL


def test_a_nested_launch_keeps_the_outer_mark(monkeypatch):
    monkeypatch.delenv(MARK, raising=False)
    assert nested_mark("b") == "b"
    monkeypatch.setenv(MARK, "a")
    assert nested_mark("b") == "a/b"


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job", "job/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("0::/elsewhere", "memory.events", "oom_kill 2\n"),
        ("4:cpu,memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_the_kernels_count_of_memory_kills(tmp_path, line, file, text):
    (tmp_path / "cgroup").write_text(f"9:pids:/\n{line}\n")
    (tmp_path / "fs" / file).parent.mkdir(parents=True)
    (tmp_path / "fs" / file).write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path / "fs") == 2


def test_no_count_where_there_is_none(tmp_path):
    assert oom_kills(tmp_path / "missing", tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/job\n")
    assert oom_kills(tmp_path / "cgroup", tmp_path) is None
