"""Judging in a process of its own: beside a page that is being drawn, a thread would take the interpreter from it.

The process keeps what it judges in the user's cache, where the dashboard finds it, and gives way to everybody else.

python -m dashboard.judging BRANCH [STORE]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from harness.errors import PairbenchError
from harness.history.engine import History
from harness.history.order import find_order_repository
from harness.history.store import stores_to_read
from harness.regress.verdicts import judge

ROOT: Final = Path(__file__).resolve().parents[1]
#: How far behind others it stands in the queue for a core, and what its queries may take.
NICE: Final = 15
MEMORY: Final = "512MB"


class Helper:
    """The process; it ends by itself when it is done, or when this process is gone."""

    def __init__(self, store: str | None, branch: str) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dashboard.judging", branch, *([store] if store else [])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, waited for so long at most."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def main(branch: str, store: str | None = None) -> int:
    """Judge every series, and keep the verdicts; 1 if the history cannot be judged (the dashboard says why)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _give_way()
    try:
        with History(stores_to_read(store), find_order_repository(), branch, threads=1, memory=MEMORY) as history:
            history.refresh()
            judge(history)
    except PairbenchError:
        return 1
    return 0


def _give_way() -> None:
    os.nice(NICE)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone knows it, and may refuse it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with_parent() -> None:
    """Standard input ends with the process that holds its other end.

    Read without Python's buffer, whose lock this thread would hold when the interpreter ends: that is an abort.
    """
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
