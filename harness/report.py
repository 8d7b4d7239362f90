"""Tells the user how a run goes: a line that moves on a terminal, plain lines in a log, tables as they are known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from harness.tables import console, long_reasons, print_served, result_table


class Reporter:
    """Writes progress to standard error and results to standard output.

    quiet_table: print no tables (the caller prints JSON).
    """

    def __init__(self, quiet_table: bool = False) -> None:
        self.quiet_table = quiet_table
        self._err, self._out = console(stderr=True), console()
        self._progress: Progress | None = None
        self._task: Any = None
        self._named = False
        self._shown: list[Mapping[str, Any]] = []
        self._started = time.monotonic()

    def silence(self) -> None:
        """Says nothing from now on: another process speaks for this one."""
        self.quiet_table = True
        self._err.quiet = self._out.quiet = True

    def begin(self, workloads: int) -> None:
        """A run of so many workloads starts."""
        self._started = time.monotonic()
        if self._err.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._err, transient=True)
            self._progress.start()
            self._task = self._progress.add_task("starting", total=workloads)

    def note(self, text: str) -> None:
        """What happens now."""
        if self._progress is not None:
            self._progress.update(self._task, description=text.strip()[:70])
        else:
            self._err.print(f"[{time.monotonic() - self._started:7.1f} s] {text}", markup=False)

    def done(self, workloads: int) -> None:
        """So many more workloads are through."""
        if self._progress is not None:
            self._progress.advance(self._task, workloads)

    def warn(self, text: str) -> None:
        """What the user should know though the run goes on."""
        self._err.print(f"warning: {text}", style="yellow", markup=False)

    def show(self, records: Sequence[Mapping[str, Any]]) -> None:
        """The records of one workload; the columns are named once."""
        if records and not self.quiet_table:
            self._out.print(result_table(records, header=not self._named))
            self._named = True
            self._shown += records
            for reason in long_reasons(records):
                self._out.print(reason, markup=False, soft_wrap=True)

    def end(self) -> None:
        """The run is over. What requests saw is told together for all its serve runs: rates stand side by side."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        print_served(self._out, self._shown)
        self._shown = []
