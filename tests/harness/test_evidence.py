"""Which rank failed first, and why, from what the ranks left behind."""

import json
import signal

import pytest

from harness import evidence


def leave(folder, rank, kind, message, when):
    body = {"rank": rank, "type": kind, "message": message, "traceback": f"trace of {rank}", "time": when}
    (folder / f"rank{rank}.error.json").write_text(json.dumps(body))


def test_a_killed_rank_comes_before_its_peers_complaints(tmp_path):
    leave(tmp_path, 0, "RuntimeError", "Connection closed by peer [127.0.0.1]:1", 1.0)
    found = evidence.failure(tmp_path, {0: 1, 1: -9}, oom_killed=False)
    assert (found.status, found.rank, found.reason) == ("error", 1, "rank 1 died: exit code -9 (SIGKILL)")


def test_the_first_exception_that_is_not_about_a_peer(tmp_path):
    leave(tmp_path, 0, "DistBackendError", "ncclRemoteError: remote process exited", 1.0)
    leave(tmp_path, 2, "ValueError", "late", 3.0)
    leave(tmp_path, 1, "ValueError", "first\nsecond line", 2.0)
    found = evidence.failure(tmp_path, {0: 1, 1: 1, 2: 1}, oom_killed=False)
    assert (found.rank, found.reason, found.traceback) == (1, "rank 1: ValueError: first", "trace of 1")
    assert not found.about_peer


def test_a_complaint_about_a_peer_when_nothing_else_is_known(tmp_path):
    leave(tmp_path, 0, "DistNetworkError", "socket timeout", 1.0)
    found = evidence.failure(tmp_path, {0: 1}, oom_killed=False)
    assert found.about_peer


def test_ranks_that_the_launcher_ended_are_not_the_cause(tmp_path):
    found = evidence.failure(tmp_path, {0: -signal.SIGTERM, 1: 7}, oom_killed=False)
    assert found.reason == "rank 1 died: exit code 7"
    alone = evidence.failure(tmp_path, {0: -signal.SIGTERM}, oom_killed=False)
    assert alone.reason == "rank 0 died: exit code -15 (SIGTERM)"


@pytest.mark.parametrize(
    ("kind", "message", "status"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
        ("MemoryError", "", "oom"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", "oom"),
        ("ValueError", "a cache that would run out of memory", "error"),
        ("RuntimeError", "shapes do not match", "error"),
    ],
)
def test_out_of_memory_is_told_from_other_errors(tmp_path, kind, message, status):
    leave(tmp_path, 0, kind, message, 1.0)
    assert evidence.failure(tmp_path, {0: 1}, oom_killed=False).status == status


def test_a_kill_counts_as_out_of_memory_only_when_the_kernel_counted_one(tmp_path):
    assert evidence.failure(tmp_path, {0: -9}, oom_killed=False).status == "error"
    assert evidence.failure(tmp_path, {0: -9}, oom_killed=True).status == "oom"
    assert evidence.failure(tmp_path, {0: -11}, oom_killed=True).status == "error"


def test_a_launcher_that_failed_itself_shows_its_last_line(tmp_path):
    assert evidence.failure(tmp_path, {}, oom_killed=False).reason == "the launcher failed: nothing in its log"
    (tmp_path / "supervisor.log").write_text("something\nNo module named x\n")
    assert evidence.failure(tmp_path, {}, oom_killed=False).reason == "the launcher failed: No module named x"


ABORTED = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  <no Python frame>
"""
THROWN = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 0] {}\nframe #0: f\n"
TIMEOUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 60000 ms"
DEVICE = "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access"


def abort(folder, rank, log):
    (folder / f"rank{rank}.log").write_text(log)
    (folder / f"rank{rank}.stack").write_text(ABORTED)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("step 3\nterminate called without an active exception\n", "terminate called without an active exception"),
        (THROWN.format(DEVICE), f"what():  [Rank 0] {DEVICE}"),
        ("FATAL: exception not rethrown\n", "FATAL: exception not rethrown"),
        ("double free or corruption (out)\n", "double free or corruption (out)"),
        ("a.cc:9: int f(): Assertion `x > 0' failed.\n", "a.cc:9: int f(): Assertion `x > 0' failed."),
        ("[rank0]:[F1130 12:00:00.1 x.cpp:9] watched\n", "[rank0]:[F1130 12:00:00.1 x.cpp:9] watched"),
    ],
)
def test_a_rank_that_aborts_has_its_last_words(tmp_path, log, words):
    abort(tmp_path, 0, f"before\n{log}")
    found = evidence.failure(tmp_path, {0: -signal.SIGABRT}, oom_killed=False)
    assert found.reason == f"rank 0 died: exit code -6 (SIGABRT): {words}"
    assert f"before\n{log}" in found.traceback, "the log is lost"
    assert ABORTED in found.traceback, "the stack is lost"
    assert not found.about_peer


def test_a_rank_that_aborts_without_a_word_has_its_log(tmp_path):
    abort(tmp_path, 0, "step 3\n")
    found = evidence.failure(tmp_path, {0: -signal.SIGABRT}, oom_killed=False)
    assert (found.reason, found.traceback) == ("rank 0 died: exit code -6 (SIGABRT)", f"step 3\n\n{ABORTED}")


def test_an_abort_about_a_peer_comes_after_the_peer(tmp_path):
    abort(tmp_path, 0, THROWN.format(TIMEOUT))
    alone = evidence.failure(tmp_path, {0: -6}, oom_killed=False)
    assert alone.about_peer
    assert alone.reason.endswith(TIMEOUT)
    assert evidence.failure(tmp_path, {0: -6, 1: -9}, oom_killed=False).rank == 1
    leave(tmp_path, 2, "ValueError", "first", 1.0)
    assert evidence.failure(tmp_path, {0: -6, 2: 1}, oom_killed=False).reason == "rank 2: ValueError: first"


STACK = """Thread 0x1 (most recent call first):
  File "/env/lib/python3.11/threading.py", line 331 in wait

Current thread 0x2 (most recent call first):
{frames}
  File "/home/me/impls/parallel/link.py", line 90 in all_reduce
  File "<frozen runpy>", line 88 in _run_code
"""
WAITING = '  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce'
ASTRAY = '  File "/env/lib/python3.11/json/decoder.py", line 9 in decode'


def test_the_hung_rank_is_the_one_that_waits_for_nobody(tmp_path):
    (tmp_path / "rank0.stack").write_text(STACK.format(frames=WAITING))
    (tmp_path / "rank1.stack").write_text(STACK.format(frames=ASTRAY))
    found = evidence.hang(tmp_path, "no end within 5 s")
    assert (found.status, found.rank) == ("timeout", 1)
    assert found.reason == "no end within 5 s; rank 1 was at link.py:90 in all_reduce"


def test_when_all_wait_that_is_said(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.stack").write_text(STACK.format(frames=WAITING))
    assert "rank 0 waited at link.py:90" in evidence.hang(tmp_path, "no end").reason


def test_no_stack_is_said(tmp_path):
    assert evidence.hang(tmp_path, "no end").reason == "no end; no rank answered"
    assert evidence.place("nothing here") == ("an unknown place", False)
