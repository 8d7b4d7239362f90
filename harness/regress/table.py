"""The detector over any table of numbers: a CSV file in, a list of plain objects out."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from harness.errors import UsageError, unknown
from harness.regress.detect import check_direction, detect
from harness.regress.report import Direction, Event, Report

MISSING = frozenset({"", "-", "na", "n/a", "nan", "none", "null", "inf", "+inf", "-inf", "infinity", "-infinity"})


@dataclass
class Group:
    """The rows of one series in their order in the file; a missing value is NaN. Lines count from 1, the header's."""

    name: str | None
    better: Direction
    values: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def detect_table(
    path: str | Path,
    value: str,
    group: str | None = None,
    better: str | None = None,
    better_col: str | None = None,
    every: bool = False,
) -> list[dict[str, Any]]:
    """Finds the changes in each group of a CSV file's rows.

    Args:
        path: a CSV file with a header, UTF-8.
        value: the column of numbers. Empty cells, ``nan``, ``inf`` and the like are missing runs.
        group: the column that tells series apart; rows of several may be mixed. Without it the file is one series.
        better: ``lower`` (the default) or ``higher``, for all; or
        better_col: the column that says so, the same in all rows of a group.
        every: also give each group's end state, as an object whose ``kind`` is ``state``.

    Returns:
        One object a change, groups in order of their first row: ``group``, ``index`` (first row at the new level,
        counted from 0 within the group), ``ratio`` (new median over old; None with a ``reason`` where none exists),
        ``verdict``, and the other fields of ``Event``; ``line`` is the row's line in the file. All of it is JSON.

    Raises:
        UsageError: the file, a column or a cell is not as said; the message names it.
    """
    out: list[dict[str, Any]] = []
    for one in read_groups(Path(path), value, group, better, better_col):
        report = detect(one.values, one.better)
        out.extend(_event(one, event) for event in report.events)
        if every:
            out.append(_state(one, report))
    return out


def read_groups(
    path: Path, value: str, group: str | None, better: str | None = None, better_col: str | None = None
) -> list[Group]:
    """The table's series, in order of their first row; arguments and errors as in ``detect_table``."""
    if better is not None and better_col is not None:
        raise UsageError("give --better or --better-col, not both")
    check_direction(better or "lower")
    groups: dict[str | None, Group] = {}
    for line, row in _rows(path, [c for c in (value, group, better_col) if c is not None]):
        name = None if group is None else row[group]
        direction = better or "lower"
        if better_col is not None:
            direction = row[better_col].strip().lower()
            if direction not in ("lower", "higher"):
                raise UsageError(
                    f"{path}, line {line}, column {better_col!r}: must be 'lower' or 'higher', not {row[better_col]!r}"
                )
        one = groups.setdefault(name, Group(name, cast(Direction, direction)))
        if one.better != direction:
            raise UsageError(
                f"{path}, line {line}, column {better_col!r}: {direction!r}, but earlier rows of "
                f"{'the file' if name is None else f'group {name!r}'} say {one.better!r}"
            )
        one.values.append(_number(row[value], path, line, value))
        one.lines.append(line)
    if not groups:
        raise UsageError(f"{path} has a header and no rows")
    return list(groups.values())


def _rows(path: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row's line number and its cells in the named columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if not header:
                raise UsageError(f"{path} is empty: a CSV file with a header line is needed")
            at: dict[str, int] = {}
            for column in columns:
                if column not in header:
                    raise UsageError(f"{path}: {unknown('column', column, header)}")
                if header.count(column) > 1:
                    raise UsageError(f"{path}: {header.count(column)} columns are called {column!r}")
                at[column] = header.index(column)
            for cells in reader:
                if not cells:
                    continue  # a blank line is no row
                if len(cells) != len(header):
                    raise UsageError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells under {len(header)} column names"
                    )
                yield reader.line_num, {column: cells[i] for column, i in at.items()}
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _number(text: str, path: Path, line: int, column: str) -> float:
    text = text.strip()
    if text.lower() in MISSING:
        return math.nan
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{path}, line {line}, column {column!r}: {text!r} is not a number") from None


def _event(group: Group, event: Event) -> dict[str, Any]:
    return {
        "group": group.name,
        "index": event.index,
        "ratio": event.ratio,
        "verdict": event.verdict,
        "kind": event.kind,
        "ratio_low": event.low,
        "ratio_high": event.high,
        "old": event.old,
        "new": event.new,
        "p_value": event.p_value,
        "end": event.end,
        "line": group.lines[event.index],
        "recovered_at": event.recovered_at,
        "recovers": event.recovers,
        "reason": event.reason,
    }


def _state(group: Group, report: Report) -> dict[str, Any]:
    return {
        "group": group.name,
        "index": report.suspect,
        "ratio": None,
        "verdict": report.state,
        "kind": "state",
        "reason": report.reason,
        "runs": report.runs,
        "missing": report.missing,
        "noise": report.noise,
        "autocorrelation": report.autocorrelation,
        "smallest_change": report.smallest_change,
        "smallest_lasting_change": report.smallest_lasting_change,
    }
