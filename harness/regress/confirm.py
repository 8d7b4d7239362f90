"""Measures what is in doubt again: the suspect pair alone, its variants interleaved, at the commit in doubt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

from harness.errors import UsageError
from harness.history.engine import History
from harness.history.order import Repository
from harness.regress.rerun import device_of, run_command, variants_for
from harness.regress.verdicts import Verdict

Run = Callable[[Sequence[str]], int]


def suspects(verdicts: Iterable[Verdict]) -> dict[tuple[str, str, str], list[Verdict]]:
    """(technique, workload, commit) in doubt → the series that are."""
    found: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        suspect = verdict.body.get("suspect")
        if verdict.verdict == "inconclusive" and suspect:
            key = (verdict.key.technique, str(verdict.body["workload"]), str(suspect["commit"]))
            found.setdefault(key, []).append(verdict)
    return found


def confirm(history: History, verdicts: Iterable[Verdict], store: str | None, run: Run | None = None) -> list[str]:
    """Measure every pair in doubt once more and say what was done.

    Only the commit that is checked out can be measured here; for others the note holds the command.

    Raises:
        UsageError: there is something to confirm and no repository to tell what is checked out.
    """
    doubts = suspects(verdicts)
    if not doubts:
        return ["nothing is in doubt: no run was made"]
    if history.repository is None:
        raise UsageError("--confirm needs the repository, to know that the commit in doubt is the one checked out")
    head = history.repository.resolve("HEAD")
    dirty = bool(_changed(history.repository))
    notes = []
    for (technique, workload, commit), series in sorted(doubts.items()):
        gpus = ", ".join(sorted({verdict.key.gpu for verdict in series}))
        variants = variants_for([(verdict.key.variant, verdict.key.metric) for verdict in series])
        command = run_command(technique, workload, variants, device_of(history, technique, series[0].key.gpu), store)
        if commit != head or dirty:
            why = "the tree has changes" if commit == head else f"{commit[:12]} is not what is checked out"
            notes.append(f"{technique} {workload}: not run: {why}; on {gpus}: {series[0].body['suspect']['reproduce']}")
            continue
        code = (run or _run)(command)
        notes.append(f"{technique} {workload}: run again on this machine (in doubt on {gpus}), exit code {code}")
    return notes


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False, stdout=sys.stderr).returncode


def _changed(repository: Repository) -> list[str]:
    from harness.gitfacts import changed_paths

    return changed_paths(repository.top, repository.top)
