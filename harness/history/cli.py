"""``pairbench history compact | verify | generate | restore``, ``pairbench import`` and ``pairbench export``."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Folder or object-store URL (s3://bucket/prefix); your own history if not given."),
]
ReadStore = Annotated[
    str | None,
    typer.Option(
        "--store", help="Folder or object-store URL to read; your own history and the checkout's if not given."
    ),
]

history_app = typer.Typer(
    no_args_is_help=True, help="Look after the store: compact it, look it over, fill it for tests."
)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(history_app, name="history")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json_module.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str))


@history_app.command("compact")
def compact_(
    store: StoreOption = None,
    min_age: Annotated[
        float | None,
        typer.Option(
            help="Leave files alone that changed in the last so many seconds (0 in a folder, 600 elsewhere).", min=0
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Turn finished runs into Parquet, losslessly. Runs being written and damaged files are left alone."""
    from harness.history.compact import compact
    from harness.history.store import Store, default_store

    done = compact(Store(store or default_store()), min_age)
    if json:
        print_json({**asdict(done), "left": [{"file": file, "reason": reason} for file, reason in done.left]})
    else:
        typer.echo(
            f"{done.records} record(s) of {len(done.files)} run(s) are now in {len(done.written)} Parquet file(s)"
        )
        for file, reason in done.left:
            typer.echo(f"left alone: {file}: {reason}")
    if any(reason.startswith("damaged") for _, reason in done.left):
        raise typer.Exit(1)


@history_app.command("restore")
def restore_(
    folder: Annotated[Path, typer.Argument(help="An empty folder to write the runs into.")],
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """Write compacted runs out as JSONL again, byte for byte as they were."""
    from harness.history.compact import restore
    from harness.history.store import Store, default_store

    written = restore(Store(store or default_store()), folder)
    if json:
        print_json(written)
    else:
        typer.echo(f"{len(written)} run(s) written into {folder}")


@history_app.command("verify")
def verify_(store: ReadStore = None, json: Json = False) -> None:
    """List what is torn, foreign, there twice or cannot be true; exits 1 when anything is."""
    from harness.history.store import stores_to_read
    from harness.history.verify import verify

    done = verify(stores_to_read(store))
    if json:
        print_json({"records": done.records, "findings": [finding.as_json() for finding in done.findings]})
    else:
        for finding in done.findings:
            where = f"{finding.file}:{finding.line}" if finding.line else finding.file
            typer.echo(f"{where}: {finding.kind}: {finding.reason}")
        typer.echo(f"{done.records} record(s) looked at, {len(done.findings)} finding(s)")
    if done.findings:
        raise typer.Exit(1)


@history_app.command("generate")
def generate_(
    store: Annotated[str, typer.Argument(help="The folder to write into; not results/ of a checkout.")],
    records: Annotated[int, typer.Option(help="How many records.", min=1)] = 10_000,
    techniques: Annotated[int, typer.Option(help="How many techniques.", min=1)] = 40,
    gpus: Annotated[int, typer.Option(help="How many GPU types.", min=1, max=4)] = 4,
    runs: Annotated[int, typer.Option(help="Runs a commit and GPU type.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Changes to plant.", min=0)] = 40,
    noise: Annotated[float, typer.Option(help="Relative noise between runs.", min=0)] = 0.01,
    seed: Annotated[int, typer.Option(help="The same seed gives the same records.")] = 0,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSONL file a run instead of Parquet.")] = False,
    json: Json = False,
) -> None:
    """Fill a store with made-up records, marked as such, to test dashboards and queries for speed."""
    from harness.history.generate import Shape, generate
    from harness.history.store import Store

    shape = Shape(records, techniques, gpus, runs, seed, noise, steps)
    done = generate(Store(store), shape, parquet=not jsonl)
    if json:
        print_json(done.as_json())
    else:
        typer.echo(f"{done.records} record(s) in {done.files} file(s), {len(done.commits)} commit(s)")
        for step in done.steps:
            typer.echo(f"planted: {step.technique} {step.variant} on {step.gpu} × {step.ratio} from {step.commit[:12]}")
