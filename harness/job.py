"""The protocol between the runner and its workers: what is asked, and what is said. Imports no torch.

The runner writes one job as JSON; rank 0 of the worker appends one JSON object a line to the job's ``out`` file,
flushed as each is known, so that a worker that dies has told everything up to then:

``begin``    workload, variant, phase: what is in hand now (a death there belongs to it)
``result``   workload, variant, status, and the parts of the record that were measured
``done``     the worker reached its end

Beside ``out`` lies ``out.now``: the variant whose sample is being taken, overwritten in place before each sample.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from harness.workload import Workload

NOW_BYTES = 128


@dataclass(frozen=True)
class MeasureJob:
    """One technique, some of its workloads, in one process group.

    budget_s: seconds of sampling for each workload. samples: a fixed number of samples instead. timing: False for
    correctness only. skip: variants not to touch, with the reason (they crashed a worker of this run before), by
    ``workload/variant``. interpret: Triton kernels run through the interpreter, and are not timed. until: the time
    (seconds since 1970) after which no further workload begins.
    """

    technique: str
    workloads: tuple[Workload, ...]
    variants: tuple[str, ...]
    device: str
    out: str
    timing: bool = True
    budget_s: float = 5.0
    samples: int | None = None
    seed: int = 0
    model_path: str | None = None
    trace_path: str | None = None
    skip: Mapping[str, str] = field(default_factory=dict)
    interpret: bool = False
    share_gpus: bool = False
    until: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """The job as a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> MeasureJob:
        """The job of a file that :meth:`write` made."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["workloads"] = tuple(Workload(**w) for w in raw["workloads"])
        raw["variants"] = tuple(raw["variants"])
        return MeasureJob(**raw)


class Events:
    """Rank 0's pen: appends events to the job's file; other ranks write nothing."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file: TextIO | None = None
        self._now: int | None = None
        if rank == 0:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the worker
            self._now = os.open(f"{path}.now", os.O_CREAT | os.O_WRONLY, 0o644)

    def begin(self, workload: str, variant: str, phase: str) -> None:
        """Says what is in hand now."""
        self._write({"event": "begin", "workload": workload, "variant": variant, "phase": phase})

    def result(self, workload: str, variant: str, status: str, reason: str = "", **parts: Any) -> None:
        """Says what was found."""
        line = {"event": "result", "workload": workload, "variant": variant, "status": status, "reason": reason}
        self._write({**line, **parts})

    def now(self, variant: str) -> None:
        """Says whose sample comes next; the file also tells, by its time, that the worker is not stuck."""
        if self._now is not None:
            os.pwrite(self._now, variant.encode()[:NOW_BYTES].ljust(NOW_BYTES), 0)

    def done(self) -> None:
        """Says that nothing is left to do."""
        self._write({"event": "done"})

    def close(self) -> None:
        """Lets the files go."""
        if self._file is not None and self._now is not None:
            self._file.close()
            os.close(self._now)
            self._file = self._now = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class EventReader:
    """Follows a worker's file while it grows; a line that is not whole yet is left for the next look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        """The events since the last look."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._at += whole
        return [json.loads(line) for line in data[:whole].splitlines()]

    def now(self) -> str:
        """The variant whose sample was begun last, or nothing."""
        path = Path(f"{self.path}.now")
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def last_sign(self) -> float:
        """When the worker last wrote, as a time of :func:`time.time`; 0 when it never did."""
        paths = [self.path, Path(f"{self.path}.now")]
        return max((p.stat().st_mtime for p in paths if p.exists()), default=0.0)
