"""The first frame of every worker: ``python -m harness.guard MODULE ARGS…`` runs MODULE as ``__main__``.

Around the program it does what no program should have to do for itself:

* sends stdout and stderr of this rank to ``rank<N>.log`` in the launch's folder, so that ranks never mix;
* leaves an uncaught exception in ``rank<N>.error.json`` (type, message, traceback, time), so that the launcher need not
  guess from exit codes which rank failed first;
* answers SIGUSR1 by writing every thread's stack to ``rank<N>.stack``: a hung rank, even one inside a collective's C++
  code, still says where it is;
* dies with its parent;
* ends without taking the interpreter apart, which threads of native code do not survive (:func:`leave`).

Imports no torch, so that a program without torch starts at once.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from harness.processes import die_with_parent

#: The folder of a launch; set by :mod:`harness.launch`.
LOGS = "PAIRBENCH_LOGS"


def rank_of(environment: dict[str, str] | os._Environ[str]) -> int:
    """This process's rank; 0 when it is alone."""
    return int(environment.get("RANK", "0"))


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Leave the exception in ``rank<N>.error.json``; written whole or not at all."""
    body = {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    path = folder / f"rank{rank}.error.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(body))
    partial.replace(path)


def _redirect(folder: Path, rank: int) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def exit_code(said: object) -> int:
    """The exit code of ``sys.exit(said)``; words are printed, as the interpreter does."""
    if said is None:
        return 0
    if isinstance(said, int):
        return said & 0xFF
    print(said, file=sys.stderr)
    return 1


def leave(code: int) -> NoReturn:
    """End the process as the interpreter ends, but for its last step: it is not taken apart.

    A collective is done for the program a moment before gloo's own thread lets go of its tensors, and for that the
    thread takes the interpreter's lock. If the interpreter has begun to take itself apart meanwhile, the thread is
    ended in the middle of a C++ destructor: "terminate called without an active exception", SIGABRT, and a rank whose
    results were all there counts as dead. No call waits for those threads: a group's own end does, but a mesh may still
    refer to the group, or the graph of the very tensor that the thread holds. Those of autograd and NCCL are no better
    off.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads that are no daemons
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def main(arguments: list[str]) -> NoReturn:
    """Run the module named first with the rest as its arguments."""
    folder = Path(os.environ[LOGS])
    rank = rank_of(os.environ)
    die_with_parent()
    _redirect(folder, rank)
    stacks = open(folder / f"rank{rank}.stack", "w")  # noqa: SIM115 - faulthandler needs it open for ever
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    module, sys.argv = arguments[0], arguments
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as said:
        code = exit_code(said.code)
    except BaseException as error:
        write_error(folder, rank, error)
        traceback.print_exc()
        _flush()
        # Not leave: threads of a broken process group may block it for minutes.
        os._exit(1)
    leave(code)


if __name__ == "__main__":
    main(sys.argv[1:])
