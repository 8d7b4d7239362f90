"""``pairbench figures``: fills the tables of README and docs from the committed history, so that none is typed by hand.

A place for figures is a pair of HTML comments; what stands between them is replaced::

    <!-- figures: technique=kv_cache tier=quick -->
    <!-- end figures -->

Each condition is ``key=value`` over the record's plain keys (``gpu``, ``technique``, ``workload``, ``tier``,
``variant``, ``dtype``); the newest passed record of each technique, workload, variant and GPU type is shown. Records of
a dirty tree count for nothing, so they are left out: what was measured there cannot be measured again. With
``show=output_rate,itl_p99,allowed_speedup`` the columns after the speedup are these metrics and counters instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import UsageError

BLOCK = re.compile(r"(<!-- figures:(?P<query>[^>]*)-->\n)(?P<body>.*?)(<!-- end figures -->)", flags=re.DOTALL)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(figures)


def figures(
    paths: Annotated[list[Path] | None, typer.Argument(help="Markdown files, or folders of them.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the files; otherwise say whether they are current.")
    ] = False,
    store: Annotated[Path, typer.Option(help="The committed history.")] = Path("results/history"),
) -> None:
    """Fills the tables of README and docs from the committed history."""
    from harness.history.store import Store, describe

    reading = Store(store).read()
    records = [r for r in reading if r["type"] == "measurement"]
    if reading.damage:  # the tables are made of what is sound
        print(f"warning: {describe(reading.damage)}", file=sys.stderr)
    stale = []
    for path in _files(paths or [Path("README.md"), Path("docs")]):
        text = path.read_text(encoding="utf-8")
        filled = fill(text, records)
        if filled == text:
            continue
        stale.append(str(path))
        if write:
            path.write_text(filled, encoding="utf-8")
            print(f"{path}: written")
    if stale and not write:
        print(f"not current: {', '.join(stale)}; 'pairbench figures --write' fills them")
        raise typer.Exit(1)


def _files(paths: Iterable[Path]) -> list[Path]:
    out: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        out += sorted(path.glob("*.md")) if path.is_dir() else [path]
    return out


def fill(text: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The text with every block of figures made from the records.

    Raises:
        UsageError: a condition that is not ``key=value``.
    """

    def table(match: re.Match[str]) -> str:
        conditions = conditions_of(match["query"])
        shown = tuple(conditions.pop("show", "").split(",")) if "show" in conditions else ()
        return match[1] + markdown(chosen(records, conditions), shown) + match[4]

    return BLOCK.sub(table, text)


def conditions_of(query: str) -> dict[str, str]:
    """The conditions of a place.

    Raises:
        UsageError: one that is not ``key=value``.
    """
    conditions = {}
    for part in shlex.split(query):
        key, sign, value = part.partition("=")
        if not sign:
            raise UsageError(f"figures: {part!r} is not key=value")
        conditions[key] = value
    return conditions


def chosen(records: Sequence[Mapping[str, Any]], conditions: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The newest record that counts (passed, clean tree) of each technique, workload, variant and GPU type."""
    newest: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for record in records:
        if record["status"] != "passed" or record["dirty"] is not False:
            continue
        if any(str(record.get(k)) != v for k, v in conditions.items()):
            continue
        key_of = tuple(str(record[k]) for k in ("gpu", "technique", "workload", "variant"))
        if key_of not in newest or record["time"] >= newest[key_of]["time"]:
            newest[key_of] = record
    return list(newest.values())


def markdown(records: Sequence[Mapping[str, Any]], shown: Sequence[str] = ()) -> str:
    """A Markdown table, and the run and commit that each row comes from; ``shown`` as in the module's docstring."""
    from harness.tables import amount, interval, latency, seconds, share, size

    if not records:
        return "No record of this that passed on a clean tree is in the committed history yet.\n"
    usual = ("over best one-liner", "throughput", "peak memory", "reached")
    heads = ["GPU type", "technique", "workload", "variant", "latency", "over baseline", *(shown or usual), "run"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for r in records:
        metrics = r["metrics"]
        rate, memory = metrics.get("throughput"), metrics.get("peak_memory")
        more = [
            interval(metrics.get("speedup_peer")) + (f" {r['best_peer']}" if r.get("best_peer") else ""),
            amount(rate["value"], rate["unit"]) if rate else "–",
            size(memory["value"]) if memory else "–",
            share(r),
        ]
        cells = [
            r["gpu"],
            r["technique"],
            f"{r['workload']} {r['dtype']}",
            r["variant"],
            latency(r) if "latency" in metrics else seconds(0),
            interval(metrics.get("speedup")),
            *([quantity(r, name) for name in shown] or more),
            f"{r['run']} at {(r['commit'] or 'no commit')[:10]}",
        ]
        lines.append("| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def quantity(record: Mapping[str, Any], name: str) -> str:
    """A metric or counter of a record in units that a person reads; a dash where the record has none."""
    from harness.tables import amount, seconds, size

    metric = record["metrics"].get(name)
    counter = (record.get("counters") or {}).get(name)
    if metric is None and counter is None:
        return "–"
    value = float(metric["value"] if metric is not None else counter or 0.0)
    unit = metric["unit"] if metric is not None else "s" if name.endswith("_s") else "1"
    if unit == "1":
        return f"{value:.3g}"
    return seconds(value) if unit == "s" else size(value) if unit == "B" else amount(value, unit)
