"""The coverage of techniques on GPU types: speedup with its interval by colour and number, other states by sign.

Plain values for :mod:`dashboard.grid`, which draws a table: the first page need not wait for Plotly, whose 4.7 MB of
script a browser loads, compiles and runs before it draws a first cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dashboard.text import ago, cut, short
from dashboard.theme import LOOKS, Look, look, on_colour, speed_colour


def coverage(rows: Sequence[Mapping[str, Any]], metric: str, ages: Mapping[str, float | None]) -> dict[str, Any]:
    """The heat map as ``columns``, the names of GPU types, and ``rows``, each a technique with a cell a column.

    Nothing is escaped: the table sets text as text. A cell without a record is None; see :func:`_cell` for the others.

    Args:
        rows: :func:`dashboard.queries.coverage`.
        metric: ``speedup`` or ``speedup_peer``.
        ages: seconds since a record's time, by that time.
    """
    names = list(dict.fromkeys(row["technique"] for row in rows))
    gpus = list(dict.fromkeys(sorted(row["gpu"] for row in rows)))
    cells = {(row["technique"], row["gpu"]): _cell(row, metric, ages.get(row["time"])) for row in rows}
    return {
        "columns": [cut(gpu, 24) for gpu in gpus],
        "rows": [{"name": cut(name, 26), "cells": [cells.get((name, gpu)) for gpu in gpus]} for name in names],
    }


def _cell(row: Mapping[str, Any], metric: str, age: float | None) -> dict[str, Any]:
    """``at`` technique and GPU type, for a click; ``words`` for hover; with a speedup, ``colour``, ``ink``, ``value``
    and ``interval``; signs with their colours, which on a coloured cell is the ink: ``sign`` for a state that is not
    simply passed, or for one without a number, and ``stale``."""
    shown = look(row["status"])
    entry = row[metric] if shown not in (LOOKS["wrong"], LOOKS["failed"]) else None
    cell: dict[str, Any] = {"at": [row["technique"], row["gpu"]], "words": words(row, age)}
    if entry:
        colour = speed_colour(entry["value"])
        cell |= {"colour": colour, "ink": on_colour(colour), "value": f"{entry['value']:.2f}×",
                 "interval": f"{entry['low']:.2f}–{entry['high']:.2f}"}  # fmt: skip
    if not entry or shown is not LOOKS["passed"]:
        cell["sign"] = _sign(shown, cell)
    if row["stale"]:
        cell["stale"] = _sign(LOOKS["stale"], cell)
    return cell


def _sign(shown: Look, cell: Mapping[str, Any]) -> list[str]:
    return [shown.sign, cell.get("ink", shown.colour)]


def words(row: Mapping[str, Any], age: float | None) -> list[str]:
    """Everything about a cell, for its hover box, line by line."""
    lines = [f"{row['technique']} on {row['gpu']}: {row['status']}"]
    for name, title in (("speedup", "over baseline"), ("speedup_peer", "over best one-liner")):
        if row[name]:
            entry = row[name]
            count = entry["workloads"]
            lines.append(
                f"{entry['value']:.2f}× [{entry['low']:.2f}, {entry['high']:.2f}] {title}, {count} workload(s)"
            )
    if row.get("reason"):
        lines.append(row["reason"])
    if row["status"] != "not run":
        lines.append(", ".join(f"{count} {status}" for status, count in row["statuses"].items()))
        lines.append(f"commit {short(row['commit'])}" + (f", {ago(age)} ago" if age is not None else ""))
        if row["stale"]:
            lines.append(f"stale: {row['behind']} newer measured commit(s) on this GPU type")
    lines.append(f"pairbench run {row['technique']}")
    return [cut(line) for line in lines if line]
