"""The exceptions that a user can meet, each with the exit code of the command that ends on it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PairbenchError(Exception):
    """Anything that ends a command with a message instead of a traceback."""

    exit_code = 1


class UsageError(PairbenchError):
    """What was asked for cannot be: an unknown name, a value out of range, a file of the wrong form."""

    exit_code = 2


class StoreError(PairbenchError):
    """The store cannot be read or written; the message names it."""

    exit_code = 2


class DamagedStore(PairbenchError):
    """Part of the store could not be read; the rest was. The message lists files and lines."""

    exit_code = 1


class MachineUnfit(PairbenchError):
    """The machine cannot give a trusted number now: it moved, throttled, or is shared."""

    exit_code = 3


class Interrupted(PairbenchError):
    """Ctrl-C or a polite kill; the message says what was kept and where."""

    exit_code = 130


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: it lists the nearest names, or all when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {', '.join(near)}?"
    elif names:
        hint = f"known: {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
    else:
        hint = "none exist here"
    return UsageError(f"unknown {kind} {name!r}; {hint}")
