"""All series of a technique on a GPU type at once, as points in commit order, and the sentinel's readings there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.history.engine import History, Row
from harness.history.flat import metric_column
from harness.history.query import KEY_COLUMNS, SeriesKey, points_of, where
from harness.metric_names import METRICS
from harness.regress.series import Point

#: Throughput is the latency's inverse wherever there is one, and would say everything twice.
INVERSE = {"throughput": "latency"}


def judged_metrics() -> list[str]:
    """Metrics that are watched, in the order of the table."""
    return [name for name, row in METRICS.items() if row.judged]


def collect(
    history: History, technique: str, gpu: str, metrics: Sequence[str] | None = None, last: int | None = None
) -> dict[SeriesKey, list[Row]]:
    """The points of every series of a technique on a GPU type, all metrics that it has among ``metrics``.

    Only the ``last`` so many commits of each series are looked at; None: all of them.

    Points are those of :func:`harness.history.query.series`, with ``workload``, ``family`` and ``reproduce`` beside.
    """
    names = list(metrics or judged_metrics())
    keys = ", ".join(f'"{name}"' for name in KEY_COLUMNS)
    parts = []
    for name in names:
        column = metric_column(name)
        there = f"FILTER ({column} IS NOT NULL)"
        parts.append(f'list({column} ORDER BY "time", id) {there} AS v_{name}')
        parts.append(f'list({column}_low ORDER BY "time", id) {there} AS l_{name}')
        parts.append(f'list({column}_high ORDER BY "time", id) {there} AS h_{name}')
    condition, values = where({"technique": technique, "gpu": gpu})
    rows = history.rows(
        f'SELECT {keys}, "commit", dirty, any_value(workload) AS workload, any_value(family) AS family, '
        "any_value(unit) AS unit, max(reproduce) AS reproduce, max(torch) AS torch, max(triton) AS triton, "
        "max(cuda) AS cuda, max(driver) AS driver, max(machine) AS machine, max(power_limit_w) AS power_limit_w, "
        "max(gpu_name) AS gpu_name, max(stack) AS stack, max(env) AS env, "
        'list(run ORDER BY "time", id) AS runs, list(id ORDER BY "time", id) AS ids, '
        f'min("time") AS first, max("time") AS last, {", ".join(parts)} '
        f"FROM records WHERE type = 'measurement' AND status = 'passed' AND {condition} "
        f'GROUP BY {keys}, "commit", dirty',
        values,
    )
    found: dict[SeriesKey, list[Row]] = {}
    for row in rows:
        for name in names:
            if row[f"v_{name}"] and not (name in INVERSE and row.get(f"v_{INVERSE[name]}")):
                found.setdefault(SeriesKey.of(row, name), []).append(_one_metric(row, name, names))
    if last is not None:
        for key, series in found.items():
            series.sort(key=lambda row: history.order.place(row["commit"] or "").rank)
            found[key] = series[-last:]
    return {key: points_of(history, found[key], key.metric) for key in sorted(found, key=lambda key: key.text)}


def fingerprints(history: History) -> dict[tuple[str, str], str]:
    """(technique, GPU type) → what changes whenever one of its records or their places in the order do."""
    rows = history.rows(
        "SELECT technique, gpu, count(*) AS n, bit_xor(hash(id, dirty, p.rank, p.standing, p.side)) AS mix "
        'FROM records AS r LEFT JOIN places AS p ON p."commit" = r."commit" '
        "WHERE type = 'measurement' GROUP BY technique, gpu"
    )
    return {(row["technique"], row["gpu"]): f"{row['n']}-{row['mix']}" for row in rows}


def _one_metric(row: Row, name: str, names: Sequence[str]) -> Row:
    dropped = {f"{part}_{other}" for other in names for part in "vlh"} | set(KEY_COLUMNS)
    lows, highs = row[f"l_{name}"], row[f"h_{name}"]
    return {
        **{key: value for key, value in row.items() if key not in dropped},
        "values": row[f"v_{name}"],
        "lows": lows,
        "highs": highs,
        "low": min((v for v in lows or [] if v is not None), default=None),
        "high": max((v for v in highs or [] if v is not None), default=None),
    }


def as_detector_points(points: Sequence[Row]) -> list[Point]:
    """The points as the detector takes them; intervals only where every run of a point has one."""
    out = []
    for point in points:
        values = tuple(float(value) for value in point["values"])
        lows, highs = point["lows"] or [], point["highs"] or []
        whole = len(lows) == len(highs) == len(values) and None not in lows and None not in highs
        out.append(Point(values, tuple(lows), tuple(highs)) if whole else Point(values))
    return out


def sentinel(history: History, gpu: str) -> dict[str, dict[str, list[float]]]:
    """Commit → what the sentinel's product and copy took in the runs there (seconds), clean trees only."""

    def read(asked: History) -> list[Row]:
        return asked.rows(
            'SELECT gpu, "commit", list(matmul_s) FILTER (matmul_s IS NOT NULL) AS product, '
            "list(copy_s) FILTER (copy_s IS NOT NULL) AS copy FROM records "
            "WHERE type = 'sentinel' AND dirty = false GROUP BY gpu, \"commit\""
        )

    rows: list[dict[str, Any]] = history.once("sentinel", read)
    return {
        row["commit"]: {"product": row["product"] or [], "copy": row["copy"] or []} for row in rows if row["gpu"] == gpu
    }
