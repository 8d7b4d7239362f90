"""Questions that only the dashboard asks, over the same engine as :mod:`harness.history.query`. No Streamlit here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

from harness.discover import Technique, techniques
from harness.errors import PairbenchError
from harness.gitfacts import GitUnavailable, find_repository, run_git
from harness.history import query
from harness.history.engine import History, Row, as_object
from harness.history.flat import metric_column
from harness.history.query import KEY_COLUMNS, SeriesKey

#: A nightly that has not come after so many hours is late: a day, and half a day's grace for a long one.
NIGHTLY_S: Final = 36 * 3600.0
#: What a measurement ran on, as far as points say it.
STACK: Final = ("torch", "triton", "cuda", "driver", "machine", "power_limit_w")
#: Newest commits that a comparison offers.
SIDES: Final = 60


@cache
def declared() -> dict[str, Technique]:
    """The techniques that this installation declares; none when it cannot say."""
    try:
        return techniques()
    except PairbenchError:
        return {}


def now() -> datetime:
    """The present moment; tests put another in its place."""
    return datetime.now(UTC)


def age_s(time: str | None) -> float | None:
    """Seconds since a record's time."""
    try:
        return (now() - datetime.fromisoformat(str(time).replace("Z", "+00:00"))).total_seconds()
    except (TypeError, ValueError):
        return None


def any_measurement(history: History) -> bool:
    """Whether there is anything to show."""
    return bool(history.rows("SELECT 1 FROM latest LIMIT 1"))


def coverage(history: History) -> list[Row]:
    """:func:`harness.history.query.overview` and, for techniques that are declared but were never run on a GPU type
    that ran, cells with ``status`` ``not run``."""
    rows = query.overview(history)
    gpus = [row["gpu"] for row in query.gpus(history)]
    have = {(row["technique"], row["gpu"]) for row in rows}
    families = {row["technique"]: row["family"] for row in rows}
    layers = {row["technique"]: row["layer"] for row in rows}
    # A history that shares no technique with this installation (a made-up one) is not blamed for what it lacks.
    known = declared() if any(name in families for name in declared()) else {}
    for technique in known.values():
        families.setdefault(technique.name, technique.family)
        layers.setdefault(technique.name, technique.layer)
    for name in families:
        rows.extend(
            {"technique": name, "gpu": gpu, "family": families[name], "layer": layers[name], "status": "not run",
             "statuses": {}, "reason": None, "workloads": 0, "speedup": None, "speedup_peer": None, "stale": False,
             "behind": 0, "time": None, "commit": None, "run": None, "variants": []}
            for gpu in gpus if (name, gpu) not in have
        )  # fmt: skip
    return sorted(rows, key=lambda row: (str(row["family"]), row["technique"], row["gpu"]))


def last_runs(history: History) -> list[Row]:
    """Of every GPU type: its newest run, and the newest that a CI job made, each with its time."""
    rows = history.rows(
        'SELECT gpu, max("time") AS last, max_by(run, "time") AS run, count(DISTINCT run) AS runs, '
        "count(*) FILTER (type = 'measurement') AS records, "
        'max("time") FILTER (ci_url IS NOT NULL) AS nightly, max(gpu_name) AS gpu_name FROM records '
        "GROUP BY gpu ORDER BY gpu"
    )
    for row in rows:
        since = age_s(row["nightly"])
        row["nightly_late"] = None if since is None else since > NIGHTLY_S
    return rows


def records_of(history: History, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Whole records by id, raw samples included."""
    if not ids:
        return []
    return history.lines(f"id IN ({', '.join('?' * len(ids))})", list(ids))


def correctness(history: History, technique: str, gpu: str) -> list[Row]:
    """Error and bound of every check of a technique on a GPU type, in commit order."""
    rows = history.rows(
        'SELECT "commit", variant, workload, dtype, max(check_error) AS error, max(check_bound) AS bound, '
        "bool_and(check_passed) AS passed, any_value(check_rule) AS rule "
        "FROM records WHERE type = 'measurement' AND check_error IS NOT NULL AND technique = ? AND gpu = ? "
        'GROUP BY "commit", variant, workload, dtype',
        [technique, gpu],
    )
    for row in rows:
        place = history.order.place(row["commit"] or "")
        row["rank"], row["subject"] = place.rank, place.subject
    return sorted(rows, key=lambda row: (row["rank"], row["workload"], row["variant"]))


def newest_ceilings(history: History, gpu: str) -> dict[str, Any]:
    """The newest ceilings of a machine of this GPU type that a run carries; empty when none does."""
    rows = history.rows(
        "SELECT run FROM records WHERE type = 'sentinel' AND gpu = ? ORDER BY \"time\" DESC LIMIT 1", [gpu]
    )
    if not rows:
        return {}
    lines = history.lines("run = ? AND type = 'sentinel'", [rows[0]["run"]])
    return next((dict(line["ceilings"]) for line in lines if line.get("ceilings")), {})


def all_runs(history: History) -> list[Row]:
    """The newest runs, see :func:`harness.history.query.runs`, with whether the machine moved in each."""
    rows = query.runs(history, limit=1000)
    moved = {
        row["run"]: row["moved"]
        for row in history.rows(
            "SELECT run, bool_or(coalesce(moved, false)) AS moved FROM records WHERE type = 'sentinel' GROUP BY run"
        )
    }
    for row in rows:
        row["moved"] = moved.get(row["run"])
    return rows


def selections(history: History) -> list[str]:
    """What can be put on a side of a comparison: the newest commits, branches, GPU types, versions."""
    places = sorted(history.order.places.values(), key=lambda place: -place.rank)
    commits = [place.commit[:12] for place in places[:SIDES]]
    names = ("gpu", "torch", "triton", "driver", "machine", "branch")
    row = history.rows(f"SELECT {', '.join(f'list(DISTINCT {name}) AS {name}' for name in names)} FROM records")[0]
    words = [f"{name}:{value}" for name in names[:-1] for value in sorted(v for v in row[name] or [] if v is not None)]
    branches = []
    if history.repository is not None:
        branches = [name for name in history.repository.branches() if "/" not in name]
    return [*commits[:2], *branches, *words, *commits[2:]]


def compared(history: History) -> tuple[str, str] | None:
    """What a comparison begins with: the newest clean commit that has something in common with an older clean one, and
    the newest such; None when there are no two. The older one comes first."""
    places = sorted(history.order.places.values(), key=lambda place: (not place.judged, -place.rank))
    newest = [place.commit for place in places[:SIDES]]
    if not newest:
        return None
    rows = history.rows(
        'SELECT "commit", list(DISTINCT hash(technique, variant, workload_id, dtype, gpu, ranks)) AS has '
        "FROM records WHERE type = 'measurement' AND status = 'passed' AND dirty = false "
        f'AND "commit" IN ({", ".join("?" * len(newest))}) GROUP BY "commit"',
        newest,
    )
    has = {row["commit"]: set(row["has"]) for row in rows}
    clean = [commit for commit in newest if commit in has]
    pairs = ((old, new) for at, new in enumerate(clean) for old in clean[at + 1 :] if has[new] & has[old])
    old, new = next(pairs, (None, None))
    return None if old is None or new is None else (old[:12], new[:12])


def subject_of(history: History, commit: str | None) -> str:
    """A commit's subject as the repository or the records know it."""
    return history.order.place(commit or "").subject or ""


def several_ranks(history: History) -> list[Row]:
    """The newest records of techniques measured on several numbers of ranks, each with ``group``: what stays the same
    while the ranks change."""
    rows = query.scaling(history)
    for row in rows:
        row["counters"] = as_object(row["counters"]) if isinstance(row["counters"], str) else row["counters"]
        row["group"] = _without_ranks(row)
    return rows


def _without_ranks(row: Mapping[str, Any]) -> str:
    """The workload's name without the digits that stand for its ranks: ``long8`` on 8 ranks belongs to ``long``."""
    name, ranks = str(row["workload"]), str(row["ranks"])
    for ending in (f"_x{ranks}", f"_{ranks}", f"x{ranks}", ranks):
        if name.endswith(ending) and len(name) > len(ending):
            return name[: -len(ending)]
    return name


def keys_of(history: History, filters: Mapping[str, Any], metric: str) -> list[tuple[SeriesKey, Row]]:
    """The series that fit some filters and have a metric, with their rows of the list of series."""
    rows = history.once("series_list", query._all_series)
    return [
        (SeriesKey.of(row, metric), row)
        for row in rows
        if metric in row["metrics"]
        and all(
            value is None or value == [] or (row[name] in value if isinstance(value, list) else row[name] == value)
            for name, value in filters.items()
        )
    ]


def first_measured(history: History, names: Sequence[str]) -> str:
    """The first of some techniques that has a series to show; the first of all when none has."""
    rows = history.once("series_list", query._all_series)
    have = {row["technique"] for row in rows if "latency" in row["metrics"]}
    return next((name for name in names if name in have), names[0])


def points(history: History, keys: Sequence[SeriesKey]) -> dict[SeriesKey, list[Row]]:
    """The points of several series of one metric, as :func:`harness.history.query.series` gives them, in one query.

    They have no ``ids`` and no ``runs``: each record has its own, and to read them takes as long as all the rest. Rows
    are put together here, since nearly every point is one row.
    """
    if not keys:
        return {}
    column = metric_column(keys[0].metric)
    wanted = {
        name: sorted({str(getattr(key, name)) for key in keys}) for name in ("technique", "workload_id", "variant")
    }
    conditions = " AND ".join(f"{name} IN ({', '.join('?' * len(found))})" for name, found in wanted.items())
    selected = ", ".join(f'"{name}"' for name in (*KEY_COLUMNS, "commit", "dirty", "time", "unit", *STACK, "reproduce"))
    rows = history.rows(
        f"SELECT {selected}, {column} AS v, {column}_low AS low, {column}_high AS high FROM records "
        f"WHERE type = 'measurement' AND status = 'passed' AND {column} IS NOT NULL AND {conditions}",
        [value for found in wanted.values() for value in found],
    )
    groups: dict[SeriesKey, dict[tuple[Any, Any], list[Row]]] = {key: {} for key in keys}
    series = {tuple(getattr(key, name) for name in KEY_COLUMNS): key for key in keys}
    for row in rows:
        key = series.get(tuple(row[name] for name in KEY_COLUMNS))
        if key is not None:
            groups[key].setdefault((row["commit"], row["dirty"]), []).append(row)
    return {
        key: query.points_of(history, [_as_one(group) for group in own.values()], key.metric)
        for key, own in groups.items()
    }


def _as_one(rows: list[Row]) -> Row:
    """The rows of one commit in a series as one, in the order of their time."""
    first = rows[0]
    if len(rows) == 1:
        return {
            **first,
            "values": [first["v"]],
            "lows": [first["low"]],
            "highs": [first["high"]],
            "first": first["time"],
            "last": first["time"],
        }
    rows.sort(key=lambda row: str(row["time"]))

    def largest(name: str) -> Any:
        return max((row[name] for row in rows if row[name] is not None), default=None)

    return {
        **first,
        **{name: largest(name) for name in (*STACK, "reproduce", "high")},
        "low": min((row["low"] for row in rows if row["low"] is not None), default=None),
        "values": [row["v"] for row in rows],
        "lows": [row["low"] for row in rows],
        "highs": [row["high"] for row in rows],
        "first": rows[0]["time"],
        "last": rows[-1]["time"],
        "unit": next((row["unit"] for row in rows if row["unit"] is not None), None),
    }


def source_link(technique: Technique, commit: str | None) -> str | None:
    """The address of a technique's file at its remote, where the checkout has one that a browser can open."""
    top = find_repository(technique.path.parent)
    if top is None:
        return None
    try:
        remote = run_git(top, "remote", "get-url", "origin", top=top).strip()
    except GitUnavailable:
        return None
    if remote.startswith("git@") and ":" in remote:
        host, _, path = remote[4:].partition(":")
        remote = f"https://{host}/{path}"
    if not remote.startswith("https://"):
        return None
    address = remote.split("@")[-1] if "@" in remote else remote.removeprefix("https://")
    file = technique.path.resolve().relative_to(top)
    return f"https://{address.removesuffix('.git')}/blob/{commit or 'HEAD'}/{file}"
