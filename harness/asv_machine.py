"""The machine's readings under asv, which starts a process a technique: one reading serves neighbours in time.

``pairbench run`` reads the sentinel twice, whatever it measures. Under asv each technique is a run of its own, and two
readings for each would cost a third of the time. So a reading is carried over, in a file that asv's plugin names in
``PAIRBENCH_ASV_STATE``, to the next technique of the same commit, and is taken anew once it is a minute old; where a
reading takes long, once it is twenty times as old as it took, or five minutes. A run that carries one has no line of
its own for it: no reading is counted twice. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.machine import Machine
from harness.machine_store import Ceilings
from harness.sentinel import Reading

STATE = "PAIRBENCH_ASV_STATE"
FRESH_S = 60.0
#: A reading stays fresh for so many times what it took, if that is more: a busy machine shall not read half the time.
FRESH_TIMES = 20.0
FRESH_AT_MOST_S = 300.0


class CarriedMachine(Machine):
    """Readings that neighbouring runs of one commit share; without a state file, those of :class:`Machine`."""

    _taken = 0.0
    _fresh = FRESH_S

    def begin(self) -> dict[str, Any] | None:
        """The reading of the technique before, or a new one."""
        kept = self._kept()
        if kept is None:
            said = self._timed(super().begin)
            self._keep()
            return said
        self._taken, self._fresh, self._start, self.ceilings = kept
        return None

    def end(self) -> dict[str, Any] | None:
        """A new reading once the last is old, or when nobody carries it on."""
        if _state() is not None and time.time() - self._taken < self._fresh:
            return None
        said = self._timed(super().end)
        if said is not None:
            self._start = Reading.from_record(said["reading"])
            self._keep()
        return said

    def _timed(self, read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        started = time.time()
        said = read()
        self._taken = time.time()
        self._fresh = min(max(FRESH_S, FRESH_TIMES * (self._taken - started)), FRESH_AT_MOST_S)
        return said

    def _identity(self) -> list[Any]:
        return [self.device, self.where["gpu"], self.where["machine"], self.where.get("commit")]

    def _kept(self) -> tuple[float, float, Reading, Ceilings] | None:
        path = _state()
        if path is None or not path.exists():
            return None
        state = json.loads(path.read_text(encoding="utf-8") or "{}")
        if state.get("of") != self._identity() or not 0 <= time.time() - state["taken"] < 2 * state["fresh"]:
            return None
        return state["taken"], state["fresh"], Reading.from_record(state["reading"]), Ceilings(**state["ceilings"])

    def _keep(self) -> None:
        path = _state()
        if path is None or self._start is None or self.ceilings is None:
            return
        state: dict[str, Any] = {"reading": self._start.as_record(), "ceilings": self.ceilings.as_dict()}
        state |= {"of": self._identity(), "taken": self._taken, "fresh": self._fresh}
        text = json.dumps(state, allow_nan=False)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


class Unwatched(Machine):
    """No readings: for a quick run, which nobody compares with anything."""

    def begin(self) -> None:
        """Reads nothing."""

    def end(self) -> None:
        """Reads nothing."""


def _state() -> Path | None:
    named = os.environ.get(STATE)
    return Path(named) if named else None
