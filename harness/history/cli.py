"""``pairbench history compact | verify | generate | restore``, ``pairbench import`` and ``pairbench export``."""

from __future__ import annotations

import io
import json as json_module
import os
import sys
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

EXPORTS = ("asv", "pytest-benchmark", "github-action-benchmark", "csv", "parquet", "junit")

history_app = typer.Typer(
    no_args_is_help=True, help="Look after the store: compact it, look it over, fill it for tests."
)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(history_app, name="history")
    app.command("import")(import_)
    app.command()(export)


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
        findings = [finding.as_json() for finding in done.findings]
        print_json({"records": done.records, "findings": findings, "judged_implausible": done.judged})
    else:
        for finding in done.findings:
            where = f"{finding.file}:{finding.line}" if finding.line else finding.file
            typer.echo(f"{where}: {finding.kind}: {finding.reason}")
        judged = f"; {done.judged} judged implausible when written, which count for nothing" if done.judged else ""
        typer.echo(f"{done.records} record(s) looked at, {len(done.findings)} finding(s){judged}")
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
    workers = min(gpus, os.cpu_count() or 1) if records > 100_000 else 1
    done = generate(Store(store), shape, parquet=not jsonl, workers=workers)
    if json:
        print_json(done.as_json())
    else:
        typer.echo(f"{done.records} record(s) in {done.files} file(s), {len(done.commits)} commit(s)")
        for step in done.steps:
            typer.echo(f"planted: {step.technique} {step.variant} on {step.gpu} × {step.ratio} from {step.commit[:12]}")


def import_(
    path: Annotated[
        Path, typer.Argument(help="asv's results folder, a JSON file of pytest-benchmark, or a CSV table.")
    ],
    format_: Annotated[str, typer.Option("--format", help="auto, asv, pytest-benchmark or csv.")] = "auto",
    gpu: Annotated[str | None, typer.Option(help="GPU type of the records, where the file does not say.")] = None,
    machine: Annotated[str | None, typer.Option(help="Label of the machine, where the file does not say.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the records, where the file does not say.")] = None,
    branch: Annotated[str | None, typer.Option(help="Branch of the records, where the file does not say.")] = None,
    store: StoreOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")] = False,
    json: Json = False,
) -> None:
    """Take another tool's results into the history. Doing it twice adds nothing; where each came from is kept.

    Exits 1 when part of the file could not be taken; docs/exchange.md says what each format loses.
    """
    from harness.history.exchange import Defaults, keep, read_foreign
    from harness.history.store import Store, default_store

    found = read_foreign(path, format_, Defaults(gpu, machine, commit, branch))
    if not dry_run:
        keep(Store(store or default_store()), found)
    if json:
        print_json(
            {
                "records": len(found.records),
                "written": found.written,
                "already": found.already,
                "runs": found.runs,
                "skipped": [{"what": what, "why": why} for what, why in found.skipped],
            }
        )
    else:
        typer.echo(f"{len(found.records)} record(s) found, {found.written} written, {found.already} there already")
        for what, why in found.skipped:
            typer.echo(f"left out: {what}: {why}")
    if found.skipped:
        raise typer.Exit(1)


def export(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help=", ".join(EXPORTS))],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File, or folder for asv; standard output if none.")
    ] = None,
    technique: Annotated[str | None, typer.Option(help="Only this technique.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only this GPU type.")] = None,
    run: Annotated[str | None, typer.Option(help="Only this run, or those that begin so.")] = None,
    commit: Annotated[str | None, typer.Option(help="Only this commit.")] = None,
    better: Annotated[
        str, typer.Option(help="github-action-benchmark: metrics of which lower or higher is better.")
    ] = "lower",
    store: ReadStore = None,
) -> None:
    """Give records to another tool. Formats of a single run take the newest one unless --run names another.

    Nothing is overwritten. Exits 1 when part of the store could not be read; docs/exchange.md says what is lost.
    """
    from harness.errors import DamagedStore, UsageError, unknown
    from harness.history import exchange_asv, exchange_csv, exchange_out, exchange_pytest
    from harness.history.store import describe, stores_to_read

    if format_ not in EXPORTS:
        raise unknown("format", format_, EXPORTS)
    if output is None and format_ in ("asv", "parquet"):
        raise UsageError(f"export {format_} needs --output: a {'folder' if format_ == 'asv' else 'file'}")
    damage: list[Any] = []
    records = list(exchange_out.chosen(stores_to_read(store), damage, technique, gpu, run, commit))
    if not records:
        lost = f"\n{describe(damage)}" if damage else ""
        raise UsageError(f"no record to export: the history is empty, or nothing matches the options{lost}")
    if format_ == "asv":
        assert output is not None
        written = exchange_asv.write_asv(records, output)
        typer.echo(f"{len(written)} file(s) written into {output}")
    elif format_ == "parquet":
        assert output is not None
        typer.echo(f"{exchange_out.write_parquet(records, output)} record(s) written to {output}")
    else:
        single = exchange_out.newest_run(records)
        if format_ == "csv":
            text = io.StringIO()
            exchange_csv.write_csv(records, text)
            content = text.getvalue()
        elif format_ == "junit":
            content = exchange_out.junit(single)
        elif format_ == "pytest-benchmark":
            content = json_module.dumps(exchange_pytest.pytest_benchmark_json(single), indent=1) + "\n"
        else:
            content = json_module.dumps(exchange_out.action_benchmark(single, better), indent=1) + "\n"
        _write(content, output)
    if damage:
        raise DamagedStore(describe(damage))


def _write(content: str, output: Path | None) -> None:
    from harness.errors import UsageError

    if output is None:
        sys.stdout.write(content)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "x", encoding="utf-8", newline="") as file:
            file.write(content)
    except FileExistsError as err:
        raise UsageError(f"{output} exists already; name a new file") from err
    except OSError as err:
        raise UsageError(f"{output} cannot be written: {err.strerror}") from err
