"""The machine as one run sees it: its ceilings, and the sentinel before and after. Imports no torch.

What needs torch runs in a process of its own (``python -m harness.machine``), so that the runner never holds a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import MachineUnfit
from harness.machine_store import Ceilings
from harness.report import Reporter
from harness.sentinel import Reading, moved

PROBE_LIMIT_S = 300.0


class Machine:
    """Readings around one run."""

    def __init__(self, device: str, where: Mapping[str, Any], reporter: Reporter) -> None:
        self.device, self.where, self.reporter = device, where, reporter
        self.ceilings: Ceilings | None = None
        self._start: Reading | None = None

    def begin(self) -> dict[str, Any] | None:
        """Reads the sentinel, and the ceilings (measured when they are not known yet); None says nothing new."""
        self.reporter.note("machine: sentinel and ceilings")
        said = probe(self.device, self.where, want_ceilings=True)
        self._start = Reading.from_record(said["sentinel"])
        self.ceilings = Ceilings(**said["ceilings"])
        for problem in said["problems"]:
            self.reporter.warn(problem)
        return {"reading": self._start.as_record(), "ceilings": self.ceilings.as_dict(), "moved": False}

    def end(self) -> dict[str, Any] | None:
        """Reads the sentinel again, and says whether the machine moved in between; None says nothing new."""
        self.reporter.note("machine: sentinel")
        reading = Reading.from_record(probe(self.device, self.where, want_ceilings=False)["sentinel"])
        if self._start is None:
            return {"reading": reading.as_record(), "moved": False, "reason": "no reading at the start"}
        verdict = moved(self._start, reading)
        return {"reading": reading.as_record(), **verdict.as_record()}


def ceilings_of(device: str, where: Mapping[str, Any], recalibrate: bool) -> Ceilings:
    """The kept ceilings of this machine, or new ones."""
    return Ceilings(**probe(device, where, want_ceilings=True, recalibrate=recalibrate)["ceilings"])


def probe(device: str, where: Mapping[str, Any], want_ceilings: bool, recalibrate: bool = False) -> dict[str, Any]:
    """Asks a process of its own.

    Raises:
        MachineUnfit: it failed or did not end; the message holds its last words.
    """
    with tempfile.TemporaryDirectory(prefix="pairbench-") as folder:
        ask, out = Path(folder) / "ask.json", Path(folder) / "out.json"
        asked = {"device": device, "where": dict(where), "ceilings": want_ceilings, "recalibrate": recalibrate}
        ask.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "harness.machine", str(ask), str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False, cwd=_ROOT
            )
        except subprocess.TimeoutExpired as err:
            raise MachineUnfit(f"the sentinel did not end within {PROBE_LIMIT_S:.0f} s on {device}") from err
        if done.returncode != 0 or not out.exists():
            words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise MachineUnfit(f"the sentinel failed on {device}: {words[-1][:500]}")
        said: dict[str, Any] = json.loads(out.read_text())
        return said


_ROOT = Path(__file__).resolve().parent.parent


def _answer(ask: Path, out: Path) -> None:
    from harness.ceilings import ensure_ceilings
    from harness.sentinel import read_sentinel

    asked = json.loads(ask.read_text())
    answer: dict[str, Any] = {"problems": []}
    if asked["ceilings"]:
        found, problems = ensure_ceilings(asked["device"], asked["where"], recalibrate=asked["recalibrate"])
        answer["ceilings"], answer["problems"] = found.as_dict(), problems
    answer["sentinel"] = read_sentinel(asked["device"]).as_record()
    out.write_text(json.dumps(answer, allow_nan=False))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), Path(sys.argv[2]))
