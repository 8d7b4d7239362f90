"""`pairbench detect`: the detector on any table of numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import UsageError


def register(app: typer.Typer) -> None:
    """Adds the ``detect`` command to ``app``."""
    app.command("detect")(detect_command)


def detect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="A CSV file with a header, rows in order.")],
    value: Annotated[str, typer.Option(help="The column of numbers.")],
    group: Annotated[str | None, typer.Option(help="The column that tells series apart.")] = None,
    better: Annotated[str | None, typer.Option(help="Whether 'lower' (default) or 'higher' is better.")] = None,
    better_col: Annotated[str | None, typer.Option(help="The column that says which is better.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of changes.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also give each series' state at its end.")] = False,
) -> None:
    """Find changes in a table's series: steps and drifts, told from noise.

    Prints one object a change: group, index (the first row at the new level, from 0 within the group), ratio (new
    median over old) and verdict. Exits 0 whether or not there are changes, and 2 if the file or a column is wrong.
    """
    try:
        from harness.regress.table import detect_table  # ruptures takes a second to import

        found = detect_table(file, value, group, better, better_col, every=every)
    except UsageError as error:
        typer.echo(f"pairbench detect: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except ModuleNotFoundError as error:
        if error.name != "ruptures":
            raise
        typer.echo("pairbench detect: ruptures is not installed; pip install 'pairbench[history]'", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
        return
    for one in found:
        typer.echo(_line(one))
    if not found:
        typer.echo("no changes")


def _line(one: dict[str, Any]) -> str:
    name = "" if one["group"] is None else f"{one['group']}: "
    if one["kind"] == "state":
        return f"{name}{one['verdict']}: {one['reason']}"
    if one["ratio"] is None:
        size = f"from {one['old']:.6g} to {one['new']:.6g} ({one['reason']})"
    else:
        size = f"ratio {one['ratio']:.4f} (95 % {one['ratio_low']:.4f} to {one['ratio_high']:.4f})"
    where = f"row {one['index']}" if one["kind"] == "step" else f"rows {one['index']} to {one['end']}, drifting"
    after = "" if one["recovered_at"] is None else f", recovered at row {one['recovered_at']}"
    return f"{name}{one['verdict']} at {where} (line {one['line']}): {size}{after}"
