"""Plain CSV, in and out: one row a record, one column a metric (``latency [s]``), the rest named columns."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from harness.errors import UsageError
from harness.history.exchange import Defaults, Foreign, Imported, make_record
from harness.history.moments import utc
from harness.metric_names import METRICS
from harness.record import STATUSES

PLAIN: Final = ("time", "technique", "family", "workload", "workload_id", "variant", "dtype", "ranks", "gpu", "machine",
                "commit", "branch", "dirty", "run", "status", "reason")  # fmt: skip
#: What a unit is worth in the metric's own.
UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "B": {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    "1": {"1": 1.0, "x": 1.0, "×": 1.0, "%": 1e-2},
}
FALSE: Final = ("", "0", "false", "no")


def read_csv(path: Path, defaults: Defaults) -> Imported:
    """The rows of a table with a column ``technique`` (or ``benchmark`` or ``name``) and at least one metric.

    Columns that are neither known nor metrics become dimensions of the workload.

    Raises:
        UsageError: it cannot be read, or lacks such columns, or a metric's unit is unknown.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise UsageError(f"{path} cannot be read as CSV: {err}") from err
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UsageError(f"{path}: several columns are called {', '.join(map(repr, twice))}")
    title = next((name for name in ("technique", "benchmark", "name") if name in header), None)
    metrics = {name: found for name in header if (found := _metric_column(name, path)) is not None}
    if title is None or not metrics:
        seen = ", ".join(header) or "nothing"
        raise UsageError(f"{path}: expected a column 'technique' and a metric such as 'latency [s]'; found {seen}")
    done = Imported()
    for number, cells in rows:
        if len(cells) != len(header):
            done.skip(f"{path.name}:{number}", f"{len(cells)} cells under {len(header)} column names")
            continue
        row = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
        _read_row(row, number, title, metrics, path, defaults, done)
    return done


def _metric_column(name: str, path: Path) -> tuple[str, float] | None:
    """The metric of a column, and what its values are multiplied by."""
    found = re.fullmatch(r"(\w+)\s*(?:[\[(]\s*([^\])]+?)\s*[\])])?", name)
    if found is None or found[1] not in METRICS:
        return None
    unit, own = found[2], METRICS[found[1]].unit
    if unit is None or unit == own or own.startswith("items/"):
        return found[1], 1.0
    if unit not in UNITS.get(own, {}):
        raise UsageError(f"{path}: column {name!r}: unit {unit!r} is none of {', '.join(UNITS.get(own, {own: 1}))}")
    return found[1], UNITS[own][unit]


def _read_row(
    row: Mapping[str, str], number: int, title: str, metrics: Mapping[str, tuple[str, float]], path: Path,
    defaults: Defaults, done: Imported,
) -> None:  # fmt: skip
    where = f"{path.name}:{number}"
    if not row.get(title):
        done.skip(where, f"no {title}")
        return
    values: dict[str, float] = {}
    for column, (name, scale) in metrics.items():
        text = row.get(column, "")
        if not text:
            continue
        try:
            value = float(text) * scale
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            done.skip(where, f"{column} is {text!r}, not a finite number")
            return
        values[name] = value
    status = row.get("status") or ("passed" if values else "skipped")
    if status not in STATUSES:
        done.skip(where, f"status {status!r} is none of {', '.join(STATUSES)}")
        return
    ranks = _number(row.get("ranks") or "1")
    if isinstance(ranks, str) or ranks < 1 or ranks != int(ranks):
        done.skip(where, f"ranks is {row['ranks']!r}, not a number of processes")
        return
    # Without a time, rows stand in the order of the file, from the epoch on, so that no date is pretended.
    time = utc(row["time"]) if row.get("time") else utc(datetime.fromtimestamp(number, UTC))
    if time is None:
        done.skip(where, f"time is {row['time']!r}, not ISO 8601")
        return
    taken = {*PLAIN, title, *metrics}
    dims = {
        key: _number(text)
        for key, text in row.items()
        if text and key not in taken and not re.fullmatch(r"\w+ (low|high) .*", key)
    }
    named = ",".join(f"{key}={value}" for key, value in dims.items())
    foreign = Foreign(
        technique=row[title],
        variant=row.get("variant") or "imported",
        workload=row.get("workload") or named or "default",
        metrics=values if status in ("passed", "unsettled") else {},
        dims=dims,
        dtype=row.get("dtype") or "unknown",
        status=status,
        reason=row.get("reason") or None,
        family=row.get("family") or "imported",
        ranks=int(ranks),
    )
    context = {
        "commit": row.get("commit") or defaults.commit,
        "branch": row.get("branch") or defaults.branch,
        "dirty": row.get("dirty", "").lower() not in FALSE,
        "time": time,
        "gpu": row.get("gpu") or defaults.gpu or "unknown",
        "machine": row.get("machine") or defaults.machine or "unknown",
    }
    source = {"file": path.name, "line": number} | ({"run": row["run"]} if row.get("run") else {})
    done.records.append(make_record(foreign, "csv", source, context))


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def write_csv(records: Iterable[Mapping[str, Any]], out: IO[str]) -> int:
    """Write measurements as a table, with a column for each end of each interval; gives the number of rows."""
    found = [record for record in records if record["type"] == "measurement"]
    names = [name for name in METRICS if any(name in (record.get("metrics") or {}) for record in found)]
    columns = [(name, part) for name in names for part in ("value", "low", "high")
               if any(part in (r.get("metrics") or {}).get(name, {}) for r in found)]  # fmt: skip
    titles = [f"{n} [{METRICS[n].unit}]" if p == "value" else f"{n} {p} [{METRICS[n].unit}]" for n, p in columns]
    writer = csv.writer(out)
    writer.writerow([*PLAIN, *titles])
    for record in found:
        cells = [(record.get("metrics") or {}).get(name, {}).get(part) for name, part in columns]
        plain = ["" if record.get(key) is None else record[key] for key in PLAIN]
        writer.writerow([*plain, *("" if cell is None else repr(float(cell)) for cell in cells)])
    return len(found)
