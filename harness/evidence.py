"""What happened in a launch, read from what its ranks left behind: status, one line of reason, the traceback.

The first failure is the one to report. Ranks fail in a chain: one is killed, and milliseconds later its peers raise
"connection closed". So a rank that a signal ended comes first, then one that left without an exception, then the
earliest exception that does not complain about a peer, and a complaint about a peer only when nothing else is there,
be it an exception or the last words of an abort (NCCL's watchdog aborts the rank that was left alone).
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "error", "timeout", "oom"]

_PEER = re.compile(
    r"connection (was )?(closed|reset)|connectFullMesh|broken pipe|remote peer|socket timeout|TCPStore"
    r"|timed? ?out waiting|ncclRemoteError|ncclSystemError|watchdog|collective operation timeout",
    re.IGNORECASE,
)
#: A rank's own device: NCCL's watchdog names itself when it passes that on.
_OWN = re.compile(r"CUDA error|cuda failure|unhandled cuda error|ncclUnhandledCudaError", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|std::bad_alloc|not enough memory", re.IGNORECASE
)
#: What native code says before it aborts: C++, assert, glibc, LLVM, glog, Python.
_LAST_WORDS = re.compile(
    r"^(?:.*\bwhat\(\):.*|terminate called .*|pure virtual .*|.*\bAssertion\b.* failed.*|LLVM ERROR:.*"
    r"|(?:free|malloc|realloc|munmap_chunk)\(\): .*|double free .*|corrupted .*|\*\*\* .*|FATAL: .*"
    r"|(?:\[rank\d+\]:)?\[?F\d{4} .*|Fatal Python error: .*)$",
    re.MULTILINE,
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(frozen=True)
class Failure:
    """One failed rank, or the whole launch when ``rank`` is None."""

    status: Status
    reason: str
    traceback: str
    rank: int | None = None
    about_peer: bool = False


def describe_exit(code: int) -> str:
    """``exit code -9 (SIGKILL)``, ``exit code 3``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"exit code {code}"


def is_about_peer(kind: str, message: str) -> bool:
    """Whether an exception only says that another rank went away or did not answer."""
    return kind in ("DistNetworkError", "DistStoreError") or bool(_PEER.search(message) and not _OWN.search(message))


def failure(folder: Path, exit_codes: Mapping[int, int], oom_killed: bool) -> Failure:
    """The failure to report, from the exit codes of the ranks known to have failed and the files in ``folder``.

    exit_codes: rank → exit code, negative for a signal; may be empty when the supervisor itself failed.
    oom_killed: whether the kernel's counter of out-of-memory kills rose meanwhile.
    """
    errors = {int(e["rank"]): e for e in _errors(folder)}
    silent = {rank: code for rank, code in exit_codes.items() if rank not in errors and code != 0}
    ended = {rank for rank, code in silent.items() if code == -signal.SIGTERM}
    if len(ended) < len(silent) or errors:  # the launcher's own work, once another rank had failed
        silent = {rank: code for rank, code in silent.items() if rank not in ended}
    order = sorted(silent.items(), key=lambda item: (item[1] >= 0, item[0]))
    found = [_died(folder, rank, code, oom_killed) for rank, code in order]
    found += [_raised(e) for _, e in sorted(errors.items(), key=lambda item: float(item[1]["time"]))]
    if found:
        return next((f for f in found if not f.about_peer), found[0])
    tail = _tail(folder / "supervisor.log")
    last = tail.strip().splitlines()[-1] if tail.strip() else "nothing in its log"
    return Failure("error", f"the launcher failed: {last[:300]}", tail)


def _errors(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("rank*.error.json")]


def _raised(error: Mapping[str, Any]) -> Failure:
    kind, message, trace = str(error["type"]), str(error["message"]), str(error["traceback"])
    first = message.strip().splitlines()[0] if message.strip() else ""
    memory = kind in ("OutOfMemoryError", "MemoryError") or (
        kind in ("RuntimeError", "AcceleratorError", "OSError") and _OUT_OF_MEMORY.search(message) is not None
    )
    reason = f"rank {error['rank']}: {kind}: {first[:300]}".rstrip(": ")
    return Failure("oom" if memory else "error", reason, trace, int(error["rank"]), is_about_peer(kind, message))


def _died(folder: Path, rank: int, code: int, oom_killed: bool) -> Failure:
    reason = f"rank {rank} died: {describe_exit(code)}"
    stack = folder / f"rank{rank}.stack"
    log = _tail(folder / f"rank{rank}.log")
    trace = "\n".join(text for text in (log, stack.read_text() if stack.exists() else "") if text)
    words = last_words(log) if code == -signal.SIGABRT else ""
    if code == -signal.SIGKILL and oom_killed:
        return Failure("oom", f"{reason}: killed by the kernel for memory", trace, rank)
    if _OUT_OF_MEMORY.search(log):
        return Failure("oom", f"{reason}: out of memory", trace, rank)
    reason = f"{reason}: {words[:300]}" if words else reason
    return Failure("error", reason, trace, rank, is_about_peer("", words))


def last_words(log: str) -> str:
    """The line in which native code said why it aborts, the last such line of the log; empty when there is none."""
    said = _LAST_WORDS.findall(log)
    return str(said[-1]).strip() if said else ""


def hang(folder: Path, reason: str) -> Failure:
    """The failure of a launch that did not end in time, from the stacks that its ranks wrote when asked.

    The hung rank is the one that is not waiting in a collective; the others wait for it.
    """
    stacks = {int(p.stem.removeprefix("rank")): p.read_text() for p in folder.glob("rank*.stack")}
    places = {rank: place(text) for rank, text in sorted(stacks.items()) if text}
    if not places:
        return Failure("timeout", f"{reason}; no rank answered", _tail(folder / "supervisor.log"))
    astray = [rank for rank, where in places.items() if not where[1]]
    rank = astray[0] if astray else min(places)
    verb = "was at" if astray else "waited at"
    return Failure("timeout", f"{reason}; rank {rank} {verb} {places[rank][0]}", stacks[rank], rank)


def place(stack: str) -> tuple[str, bool]:
    """Where the main thread of a faulthandler dump stood, and whether that is a wait for other ranks.

    faulthandler writes the newest frame first and the main thread last.
    """
    thread = stack.rstrip().split("\n\n")[-1]
    frames = [m.groupdict() for m in _FRAME.finditer(thread)]
    if not frames:
        return "an unknown place", False
    waits = any("torch/distributed" in f["file"].replace("\\", "/") for f in frames)
    own = [f for f in frames if "site-packages" not in f["file"] and "/lib/python" not in f["file"]]
    frame = own[0] if own else frames[0]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}", waits


def _tail(path: Path, size: int = 8000) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-size:].decode(errors="replace")
