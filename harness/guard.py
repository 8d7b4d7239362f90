"""The first frame of every worker: ``python -m harness.guard MODULE ARGS…`` runs MODULE as ``__main__``.

Around the program it does what no program should have to do for itself:

* sends stdout and stderr of this rank to ``rank<N>.log`` in the launch's folder, so that ranks never mix;
* leaves an uncaught exception in ``rank<N>.error.json`` (type, message, traceback, time), so that the launcher need not
  guess from exit codes which rank failed first;
* answers SIGUSR1 by writing every thread's stack to ``rank<N>.stack``: a hung rank, even one inside a collective's C++
  code, still says where it is;
* dies with its parent.

Imports no torch, so that a program without torch starts at once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

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


def main(arguments: list[str]) -> None:
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
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as error:
        write_error(folder, rank, error)
        traceback.print_exc()
        sys.stderr.flush()
        # Not sys.exit: threads of a broken process group may block the interpreter's own end for minutes.
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
