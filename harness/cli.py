"""The command line: ``pairbench``, also ``python -m harness``. Each group of commands has a module of its own.

Only typer is imported here; a command imports what it needs when it runs, so that ``pairbench list`` stays quick.
Exit codes: 0 all well, 1 something measured is wrong or broke, 2 bad use, 3 the machine is not fit, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from harness.commands import dashboard, figures, inspect, measure, nightly, setup
from harness.errors import Interrupted, PairbenchError, UsageError
from harness.extras import brings
from harness.history import cli as history
from harness.regress import cli as detect
from harness.regress import cli_history as regress

GROUPS = (inspect, measure, setup, history, detect, regress, figures, dashboard, nightly)


class Commands(TyperGroup):
    """All commands. An interrupt becomes an error of ours here, before typer ends the process without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as err:
            raise Interrupted(str(err) or "interrupted") from None


def make_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="pairbench",
        cls=Commands,
        help="Does this optimization pay on this machine, is it right, and did last night's commit make it worse?",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for module in GROUPS:
        module.register(app)
    return app


def main() -> None:
    """Runs the command line; a :class:`PairbenchError` becomes its message and its exit code, and a package that is
    not installed the command that brings it."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        make_app()(standalone_mode=True)
    except PairbenchError as err:
        print(f"pairbench: {err}", file=sys.stderr)
        raise SystemExit(err.exit_code) from None
    except ModuleNotFoundError as err:
        command = brings(err.name or "")
        if command is None:
            raise
        print(f"pairbench: this needs {err.name}, which is not installed: {command}", file=sys.stderr)
        raise SystemExit(UsageError.exit_code) from None


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """A polite kill ends a run as Ctrl-C does: children are ended, records kept."""
    raise KeyboardInterrupt
