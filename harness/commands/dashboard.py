"""``pairbench dashboard`` and ``pairbench report``: look at the history, or take it along as one page."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import DamagedStore, UsageError

Store = Annotated[
    str | None,
    typer.Option("--store", help="Folder or URL to read; your own history and the checkout's if not given."),
]
Branch = Annotated[str, typer.Option(help="The branch whose line of commits is looked at.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(dashboard)
    app.command()(report)


def dashboard(
    store: Store = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to serve it.")] = 8501,
    host: Annotated[str, typer.Option(help="Who can reach it: this machine alone, or 0.0.0.0 for all.")] = "127.0.0.1",
    branch: Branch = "HEAD",
    browser: Annotated[bool, typer.Option("--browser", help="Open it in a browser.")] = False,
) -> None:
    """Serve the dashboard: overview, techniques, history, regressions, comparisons, serving, scaling, runs."""
    _room("serve").serve(store, port, host, branch, browser)


def report(
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page to this file.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a summary as Markdown, fit for a pull request.")
    ] = False,
    store: Store = None,
    branch: Branch = "HEAD",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a page that opens from disk without Python, or print a summary. Exits 1 if part of the store is damaged."""
    if html is None and not markdown:
        raise UsageError("report: give --html FILE, --markdown, or both")
    if html is not None and html.exists() and not force:  # before the work is done in vain
        raise UsageError(f"{html} exists: give --force to write over it, or name another file")
    snapshots, sources = _room("snapshot"), _room("source")
    source = sources.open_source(store, branch)
    taken = snapshots.take(source)
    if html is not None:
        snapshots.write(html, snapshots.html_page(taken), force)
        typer.echo(f"wrote {html}", err=True)
    if markdown:
        typer.echo(snapshots.markdown_summary(taken))
    if source.history.damage:
        from harness.history.store import describe

        raise DamagedStore(describe(source.history.damage))


def _room(name: str) -> Any:
    """A module of the dashboard, which the harness does not know until it is asked for.

    Raises:
        UsageError: what it needs is not installed.
    """
    try:
        return importlib.import_module(f"dashboard.{name}")
    except ModuleNotFoundError as err:
        raise UsageError(f"this needs {err.name}: pip install 'pairbench[dashboard]'") from err
