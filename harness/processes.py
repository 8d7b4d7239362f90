"""Process trees: find every process that a launch has made, end them all, and do so even when the launcher is killed.

A launch marks its children with an environment variable that every descendant inherits, whatever session, group or
parent it moves to. Killing by mark therefore also reaches a grandchild that called ``setsid`` and was orphaned, which
killing a process group does not.

Linux only (it reads ``/proc``). Imports the standard library only and nothing of this project: the sentry runs this
very file by its path, so that watching costs a bare interpreter and not an import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

#: The environment variable that marks a launch; nested launches are joined by ``/``.
MARK = "PAIRBENCH_LAUNCH"
_PR_SET_PDEATHSIG = 1


def nested_mark(mark: str) -> str:
    """The value of :data:`MARK` for children: this process's own mark, if it has one, and the new one."""
    outer = os.environ.get(MARK)
    return f"{outer}/{mark}" if outer else mark


def marked(mark: str) -> list[int]:
    """Pids of all living processes that carry the mark, zombies and this process excluded."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if _carries(environment, mark) and not _is_zombie(entry):
            found.append(int(entry))
    return found


def _carries(environment: bytes, mark: str) -> bool:
    prefix = MARK.encode() + b"="
    for item in environment.split(b"\0"):
        if item.startswith(prefix):
            return mark.encode() in item[len(prefix) :].split(b"/")
    return False


def _is_zombie(pid: str) -> bool:
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def send(pids: Iterable[int], sig: int) -> None:
    """Send a signal to each pid; one that is gone is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)


def end_all(mark: str, grace_s: float = 2.0, patience_s: float = 10.0) -> list[int]:
    """End every process that carries the mark: SIGTERM, ``grace_s`` later SIGKILL, until none is left.

    Returns the pids that are still there after ``patience_s`` more seconds (a process stuck in the kernel); normally
    the list is empty.
    """
    alive = marked(mark)
    if alive and grace_s > 0:
        send(alive, signal.SIGTERM)
        alive = _wait_gone(mark, grace_s)
    deadline = time.monotonic() + patience_s
    while alive and time.monotonic() < deadline:
        send(alive, signal.SIGKILL)
        alive = _wait_gone(mark, 0.2)
    return alive


def _wait_gone(mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while True:
        alive = marked(mark)
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.02)


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies (Linux, prctl PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


class Sentry:
    """A small process that ends everything marked once this process is gone, however it went (kill -9 included).

    It waits on a pipe that only this process holds open, in a session of its own, so that neither Ctrl-C nor a kill of
    the process group takes it along.
    """

    def __init__(self, mark: str) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), mark]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def dismiss(self) -> None:
        """Let it make its last round (nothing is left after a clean end) and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of this cgroup the kernel has killed for memory, or None where no counter can be read.

    Reads ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1) of this process's own group, or of the mount's
    root when the group's path is not visible from inside a container.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            candidates = [root / relative / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            base = root / "memory"
            candidates = [base / relative / "memory.oom_control", base / "memory.oom_control"]
        else:
            continue
        for candidate in candidates:
            count = _oom_count(candidate)
            if count is not None:
                return count
    return None


def _oom_count(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def _stand_sentry() -> None:
    mark = sys.argv[1]
    sys.stdin.buffer.read()
    end_all(mark, grace_s=0.0)


if __name__ == "__main__":
    _stand_sentry()
