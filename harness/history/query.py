"""The questions that the command line and the dashboard ask of a history. Every answer is a list of plain mappings.

Metrics come as flat columns (``m_latency``, ``m_latency_low``, ``m_latency_high``; see :mod:`harness.history.flat`),
``dims`` as a mapping. All of them look at one line of commits, that of ``history.branch``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from harness.errors import UsageError, unknown
from harness.history.engine import History, Row, as_object
from harness.history.flat import OBJECT, metric_column
from harness.history.series_key import KEY_COLUMNS as KEY_COLUMNS
from harness.history.series_key import SeriesKey as SeriesKey
from harness.metric_names import METRICS
from harness.stats import Estimate, median

#: From the worst to the best: what a technique with several workloads is said to be.
SEVERITY: Final = ("wrong", "error", "implausible", "timeout", "oom", "unsettled", "skipped", "passed")
FILTERS: Final = ("technique", "family", "kind", "layer", "variant", "workload", "workload_id", "dtype", "gpu", "ranks",
                  "tier", "status", "run", "commit", "torch", "triton", "driver", "machine", "type", "id")  # fmt: skip


def where(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """A condition from column → value, or several values; empty ones do not filter.

    Raises:
        UsageError: a column that cannot be filtered by.
    """
    parts, values = ["true"], []
    for name, value in filters.items():
        if name not in FILTERS:
            raise unknown("filter", name, FILTERS)
        if value is None or value == [] or value == ():
            continue
        several = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
        parts.append(f'"{name}" IN ({", ".join("?" * len(several))})')
        values.extend(several)
    return " AND ".join(parts), values


def facets(history: History) -> dict[str, list[Any]]:
    """What there is to choose from: the values of each column that one filters by."""
    names = ("technique", "family", "kind", "layer", "variant", "workload", "dtype", "gpu", "ranks", "tier", "status")
    row = history.rows(f"SELECT {', '.join(f'list(DISTINCT {name}) AS {name}' for name in names)} FROM latest")[0]
    return {name: sorted(value for value in row[name] or [] if value is not None) for name in names}


def latest(history: History, **filters: Any) -> list[Row]:
    """The newest record of every technique × variant × workload × dtype × GPU type × ranks, with all flat columns."""
    condition, values = where(filters)
    rows = history.rows(
        f"SELECT * EXCLUDE (line, place, row_number, store, holder, number) FROM latest WHERE {condition} "
        "ORDER BY technique, gpu, workload, ranks, variant",
        values,
    )
    return [_opened(row) for row in rows]


def _opened(row: Row) -> Row:
    for name in OBJECT:
        if name in row:
            row[name] = as_object(row[name])
    return row


def overview(history: History, **filters: Any) -> list[Row]:
    """Of each technique × GPU type: status, speedups with intervals (geometric means over its workloads), staleness.

    ``status`` is the worst of the optimized variant's newest records, ``statuses`` counts them; ``speedup`` and
    ``speedup_peer`` are mappings of ``value``, ``low``, ``high`` and ``workloads``, or None. ``behind`` is how many
    measured commits of that GPU type are newer, ``stale`` whether there are any.
    """
    rows = latest(history, **filters)
    newest = {row["gpu"]: row for row in history.once("gpus", gpus)}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["technique"], row["gpu"]), []).append(row)
    out = []
    for (technique, gpu), group in sorted(groups.items()):
        own = [row for row in group if row["variant"] == "optimized"] or group
        head = max(own, key=lambda row: (row["rank"] or 0, row["time"]))
        ranks = (newest[gpu]["commit_ranks"] if gpu in newest else None) or []  # None: dirty trees only
        behind = sum(1 for rank in ranks if rank > (head["rank"] if head["rank"] is not None else -1))
        statuses: dict[str, int] = {}
        for row in own:
            statuses[row["status"]] = statuses.get(row["status"], 0) + 1
        out.append(
            {
                "technique": technique,
                "gpu": gpu,
                **{
                    name: head[name]
                    for name in ("family", "layer", "kind", "run", "commit", "time", "dirty", "standing")
                },
                "status": worst(statuses),
                "statuses": statuses,
                "reason": next((row["reason"] for row in own if row["status"] == worst(statuses)), None),
                "workloads": len(own),
                "variants": sorted({row["variant"] for row in group}),
                "speedup": mean_of(own, "speedup"),
                "speedup_peer": mean_of(own, "speedup_peer"),
                "behind": behind,
                "stale": behind > 0,
            }
        )
    return out


def worst(statuses: Iterable[str]) -> str:
    """The worst of some statuses."""
    found = set(statuses)
    return next((status for status in SEVERITY if status in found), "skipped")


def mean_of(rows: Iterable[Row], metric: str) -> Row | None:
    """Geometric mean of a metric over rows that passed, and of the ends of its intervals; None when none has it."""
    columns = [metric_column(metric, part) for part in ("value", "low", "high")]
    found = [row for row in rows if row["status"] == "passed" and (row[columns[0]] or 0) > 0]
    if not found:
        return None
    values = []
    for column in columns:
        logs = [math.log(row[column] if (row[column] or 0) > 0 else row[columns[0]]) for row in found]
        values.append(math.exp(sum(logs) / len(logs)))
    return {"value": values[0], "low": values[1], "high": values[2], "workloads": len(found)}


def gpus(history: History) -> list[Row]:
    """GPU types: when each ran last, how many runs and records, and the ranks of its measured commits."""
    return history.rows(
        'SELECT gpu, max("time") AS last, count(DISTINCT run) AS runs, sum(n)::BIGINT AS records, '
        "max(gpu_name) AS gpu_name, list(DISTINCT machine) AS machines, "
        "list_sort(list(DISTINCT rank) FILTER (rank IS NOT NULL AND NOT dirty)) AS commit_ranks "
        'FROM (SELECT gpu, run, r."commit", dirty, machine, any_value(gpu_name) AS gpu_name, max("time") AS "time", '
        "count(*) AS n, any_value(p.rank) AS rank "
        'FROM records AS r LEFT JOIN places AS p ON p."commit" = r."commit" '
        'GROUP BY gpu, run, r."commit", dirty, machine) '
        "GROUP BY gpu ORDER BY gpu"
    )


def series_list(history: History, **filters: Any) -> list[Row]:
    """Every series: its key columns, newest time, number of records, workload name, family, and the metrics it has.

    Filters are those of key columns, ``workload``, ``family`` and ``kind``.
    """
    chosen = {name: value for name, value in filters.items() if value is not None and value not in ([], ())}
    for name in chosen:
        if name not in (*KEY_COLUMNS, "workload", "family", "kind"):
            raise unknown("filter", name, (*KEY_COLUMNS, "workload", "family", "kind"))

    def fits(row: Row) -> bool:
        return all(
            row[name] in value if isinstance(value, (list, tuple, set, frozenset)) else row[name] == value
            for name, value in chosen.items()
        )

    return [row for row in history.once("series_list", _all_series) if fits(row)]


def _all_series(history: History) -> list[Row]:
    judged = [name for name, row in METRICS.items() if row.judged]
    counts = ", ".join(f"count({metric_column(name)}) AS n_{name}" for name in judged)
    keys = ", ".join(f'"{name}"' for name in KEY_COLUMNS)
    rows = history.rows(
        f"SELECT {keys}, any_value(workload) AS workload, any_value(family) AS family, any_value(kind) AS kind, "
        f'count(*) AS records, max("time") AS last, {counts} FROM records '
        f"WHERE type = 'measurement' AND status = 'passed' GROUP BY {keys} ORDER BY {keys}"
    )
    for row in rows:
        row["metrics"] = [name for name in judged if row.pop(f"n_{name}") > 0]
    return rows


def resolve_series(history: History, text: str) -> SeriesKey:
    """The series that a word names: all its parts, or as many from the front as one series has; the metric may follow
    after a colon (``add_rms_norm/optimized:speedup``; latency if none is given).

    Raises:
        UsageError: it names none, or several.
    """
    if text.count("/") == len(fields(SeriesKey)) - 1:
        key = SeriesKey.parse(text)
        condition, values = key.where()
        if history.rows(f"SELECT 1 AS n FROM records WHERE {condition} LIMIT 1", values):
            return key
    keys = [SeriesKey.of(row, "latency") for row in series_list(history)]
    head, _, metric = text.rpartition(":")
    if not head or metric not in METRICS:
        head, metric = text, ""  # imported names hold colons of their own
    near = [replace(key, metric=metric or key.metric) for key in keys if _begins(key, head)]
    if not near and ":" in text and not metric:
        raise unknown("metric", text.rpartition(":")[2], METRICS)
    if not near:
        raise unknown("series", head, {"/".join(key.text.split("/")[:2]) for key in keys})
    if len(near) > 1:
        listed = "".join(f"\n  {key.text}" for key in near[:10])
        raise UsageError(f"{text!r} names {len(near)} series; give one of them in full:{listed}")
    return near[0]


def _begins(key: SeriesKey, head: str) -> bool:
    """Whether a series is of this technique, or its name begins so, part by part."""
    return key.technique == head or f"{key.text}/".startswith(f"{head.rstrip('/')}/")


def series(history: History, key: SeriesKey, since: str | None = None) -> list[Row]:
    """The points of a series in commit order: one a commit, of all its runs; a dirty tree's are points of their own.

    A point has ``commit``, ``subject``, ``date``, ``value`` (median over runs), ``low``, ``high``, ``n``, ``values``
    (run by run) with their own intervals ``lows`` and ``highs`` (None where unknown), ``runs``, ``ids``, ``standing``,
    ``side``, ``dirty``, ``judged``, ``unit``, ``reproduce`` and the stack it ran on.
    Only what passed makes points; gaps stay gaps.
    """
    condition, values = key.where()
    column = metric_column(key.metric)
    rows = history.rows(
        f'SELECT "commit", dirty, list({column} ORDER BY "time") AS "values", list(run ORDER BY "time") AS runs, '
        f'list(id ORDER BY "time") AS ids, list({column}_low ORDER BY "time") AS lows, '
        f'list({column}_high ORDER BY "time") AS highs, min({column}_low) AS low, max({column}_high) AS high, '
        'min("time") AS first, max("time") AS last, any_value(unit) AS unit, '
        "max(torch) AS torch, max(triton) AS triton, max(cuda) AS cuda, max(driver) AS driver, "
        "max(machine) AS machine, max(power_limit_w) AS power_limit_w, max(reproduce) AS reproduce "
        f"FROM records WHERE type = 'measurement' AND status = 'passed' AND {column} IS NOT NULL AND {condition} "
        'GROUP BY "commit", dirty',
        values,
    )
    return points_of(history, rows, key.metric, since)


def points_of(history: History, rows: Iterable[Row], metric: str, since: str | None = None) -> list[Row]:
    """Points in commit order from what :func:`series` selects for each commit."""
    points = []
    for row in rows:
        place = history.order.place(row["commit"] or "")
        if since is not None and (place.date or row["first"]) < since:
            continue
        values = row["values"]
        estimate = median(values) if len(values) > 1 else Estimate(values[0], values[0], values[0], 1)
        low, high = row["low"], row["high"]
        if estimate.n > 1:
            low = estimate.low if low is None or estimate.n > 5 else min(low, estimate.low)
            high = estimate.high if high is None or estimate.n > 5 else max(high, estimate.high)
        unit = METRICS[metric].unit.replace("items", row["unit"] or "items")
        points.append(
            {
                **row,
                "value": estimate.value,
                "low": low,
                "high": high,
                "n": estimate.n,
                "unit": unit,
                "subject": place.subject,
                "date": place.date,
                "rank": place.rank,
                "standing": place.standing,
                "side": place.side,
                "judged": place.judged and row["dirty"] is False,
            }
        )
    return sorted(points, key=lambda point: (point["rank"], point["dirty"] is not False, point["first"]))


def runs(history: History, limit: int = 200, **filters: Any) -> list[Row]:
    """Runs, the newest first: where, when, on what, and how many records of each status."""
    condition, values = where(filters)
    rows = history.rows(
        'SELECT run, gpu, any_value("commit") AS "commit", any_value(branch) AS branch, any_value(dirty) AS dirty, '
        "any_value(machine) AS machine, any_value(commit_subject) AS subject, any_value(torch) AS torch, "
        "any_value(triton) AS triton, any_value(driver) AS driver, any_value(power_limit_w) AS power_limit_w, "
        'any_value(ci_url) AS ci_url, any_value(source) AS source, any_value(tier) AS tier, min("time") AS first, '
        'max("time") AS last, count(DISTINCT technique) AS techniques, '
        "count(*) FILTER (type = 'measurement') AS records, "
        "histogram(status) AS statuses "
        f"FROM records WHERE {condition} GROUP BY run, gpu ORDER BY first DESC, run LIMIT ?",
        [*values, limit],
    )
    for row in rows:
        row["statuses"] = dict(row["statuses"] or {})
        place = history.order.place(row["commit"] or "")
        row["standing"], row["subject"] = place.standing, place.subject or row["subject"]
    return rows


def run_records(history: History, run: str) -> list[dict[str, Any]]:
    """Every record of a run as it was written, raw samples and conditions included.

    Raises:
        UsageError: there is no such run.
    """
    found = history.lines("run = ?", [run])
    if not found:
        raise unknown("run", run, [row["run"] for row in runs(history)])
    return found


def record(history: History, record_id: str) -> dict[str, Any]:
    """One record as it was written.

    Raises:
        UsageError: there is no such record.
    """
    found = history.lines("id = ?", [record_id])
    if not found:
        raise UsageError(f"no record {record_id!r} in the history")
    return found[0]


def failures(history: History, **filters: Any) -> list[Row]:
    """The newest records that did not pass, the worst first, with their reasons."""
    rows = [row for row in latest(history, **filters) if row["status"] != "passed"]
    return sorted(rows, key=lambda row: SEVERITY.index(row["status"]))


def serving(history: History, **filters: Any) -> list[Row]:
    """The newest serve runs: every variant's latency and throughput figures at each load (``dims``)."""
    return latest(history, kind="serve", **filters)


def scaling(history: History, **filters: Any) -> list[Row]:
    """The newest records of techniques that were measured with several numbers of ranks, by ranks."""
    rows = latest(history, **filters)
    several: dict[str, set[int]] = {}
    for row in rows:
        several.setdefault(row["technique"], set()).add(row["ranks"])
    chosen = [row for row in rows if len(several[row["technique"]]) > 1]
    return sorted(chosen, key=lambda row: (row["technique"], row["gpu"], row["variant"], row["ranks"]))


def aggregate(
    history: History, metrics: Sequence[str], clean: bool = False, last: int = 15, **filters: Any
) -> list[Row]:
    """Of every series among the records chosen: each metric's newest values run by run (``v_latency``), the newest
    commit's last, and the mean ratio of the ends of their own intervals, high over low (``w_latency``).

    Args:
        clean: leave dirty trees out.
        last: so many values at most.
    """
    condition, values = where(filters)
    keys = ", ".join(f'"{name}"' for name in KEY_COLUMNS)
    parts = ", ".join(
        f"list_reverse(max_by({column}, place, {int(last)}) FILTER ({column} IS NOT NULL)) AS v_{name}, "
        f"avg({column}_high / {column}_low) FILTER ({column}_low > 0) AS w_{name}"
        for name, column in ((name, metric_column(name)) for name in metrics)
    )
    columns = ", ".join(
        f"{column}, {column}_low, {column}_high" for column in (metric_column(name) for name in metrics)
    )
    return history.rows(
        f"SELECT {keys}, any_value(workload) AS workload, any_value(unit) AS unit, {parts} FROM ("
        f"SELECT {keys}, workload, unit, {columns}, coalesce(p.rank, -1) * 4294967296 "
        '+ coalesce(epoch(TRY_CAST("time" AS TIMESTAMP))::BIGINT, 0) AS place '
        "FROM (SELECT * FROM records "
        f"WHERE type = 'measurement' AND status = 'passed' {'AND NOT dirty' if clean else ''} AND {condition}) AS r "
        f'LEFT JOIN places AS p ON p."commit" = r."commit") GROUP BY {keys} ORDER BY {keys}',
        values,
    )
