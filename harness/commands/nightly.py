"""``pairbench nightly``: what a scheduled job on a GPU box runs."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.commands import options


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(nightly)


def nightly(
    techniques: Annotated[list[str] | None, typer.Argument(help="Techniques; all when none is named.")] = None,
    store: Annotated[str, typer.Option(help="Folder or object-store URL of the history.")] = "results/history",
    out: Annotated[Path, typer.Option(help="Folder for logs and the report.")] = Path("nightly"),
    tier: Annotated[str | None, typer.Option(help="As for run: quick on a GPU, smoke on a CPU.")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds of sampling for each technique.")] = None,
    commit: Annotated[bool, typer.Option("--commit", help="Commit the new records.")] = False,
    push: Annotated[str, typer.Option(help="Push them to this remote/branch, too.")] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds the measurement may take.")] = 6 * 3600.0,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """One night: is the machine fit, is all right, how fast is it, is anything worse; the records are kept.

    Exits 0 when all is well, 1 when something is wrong, broke or got worse, 3 when the machine is not fit.
    """
    from harness.gitfacts import package_root
    from harness.nightly import Night, run_night

    asked = [*(techniques or ())]
    asked += ["--tier", tier] if tier else []
    asked += ["--budget", str(budget)] if budget is not None else []
    night = Night(store, out, tuple(asked), commit or bool(push), push, limit)
    try:
        result = run_night(night, package_root(), note=partial(typer.echo, err=json))
    except KeyboardInterrupt:
        kept = f"what was measured until then is kept in {store}, the logs in {out}"
        raise KeyboardInterrupt(f"interrupted; {kept}") from None
    if json:
        options.print_json({"exit_code": result.exit_code, "steps": [asdict(step) for step in result.steps]})
    raise typer.Exit(result.exit_code)
