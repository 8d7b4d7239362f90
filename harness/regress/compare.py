"""Two selections of the history side by side: every series with its ratio, interval and verdict; what is missing apart.

A selection is a commit, a branch, a tag, a run id, ``gpu:NAME`` or ``torch:VERSION`` (also ``triton:``, ``driver:``,
``machine:``). Ratios are B over A. Verdicts need magnitude and separation: with a single run a side, the noise
between runs is taken from the series' own history, or assumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from harness import stats
from harness.errors import UsageError, unknown
from harness.history.engine import History, Row
from harness.history.order import resolve_selection
from harness.history.query import KEY_COLUMNS, aggregate, latest, worst
from harness.metric_names import METRICS
from harness.regress.points import INVERSE, judged_metrics

PREFIXES: Final = ("gpu", "torch", "triton", "driver", "machine", "variant")
#: Relative noise between runs that is assumed where the history does not tell.
ASSUMED_NOISE: Final = 0.015
#: Standard errors that a change must span, and below which there is none.
APART, TOGETHER = 4.0, 2.5
#: Changes smaller than this are never a verdict, and a comparison too blunt to show twice this settles nothing.
SMALLEST: Final = 0.005
BLUNT: Final = 0.10
#: Runs of a series' history that its noise is taken from, at least.
NOISE_RUNS: Final = 6


@dataclass(frozen=True)
class Selection:
    """What one side of a comparison holds."""

    text: str
    filters: Mapping[str, Any]
    describes: str


@dataclass
class Compared:
    """The outcome. ``series`` are rows of the intersection, the largest change first."""

    a: Selection
    b: Selection
    series: list[Row] = field(default_factory=list)
    only_a: list[Row] = field(default_factory=list)
    only_b: list[Row] = field(default_factory=list)
    means: dict[str, Row] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "a": {"asked": self.a.text, "is": self.a.describes},
            "b": {"asked": self.b.text, "is": self.b.describes},
            "series": self.series,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "geometric_mean": self.means,
        }


def select(history: History, text: str) -> Selection:
    """What a user's word selects.

    Raises:
        UsageError: it selects nothing that was recorded.
    """
    prefix, colon, value = text.partition(":")
    if colon and prefix in PREFIXES:
        known = [
            row["v"] for row in history.rows(f"SELECT DISTINCT {prefix} AS v FROM records") if row["v"] is not None
        ]
        if value not in known:
            raise unknown(prefix, value, known)
        return Selection(text, {prefix: value}, f"{prefix} {value}")
    runs: list[str] = history.once("run ids", _run_ids)
    if text in runs:
        return Selection(text, {"run": text}, f"run {text}")
    commits = list(history.order.places)
    named = [run for run in runs if run.startswith(text)] if len(text) >= 8 else []
    if len(named) == 1 and not any(commit.startswith(text) for commit in commits):
        return Selection(text, {"run": named[0]}, f"run {named[0]}")
    commit = resolve_selection(text, history.repository, commits)
    clean: set[str] = history.once("clean commits", _clean_commits)
    if (name := _recorded_as(commit, clean)) is not None:
        return Selection(text, {"commit": name}, f"commit {name[:12]}")
    near, recorded = _newest_before(history, commit, clean), commit in history.order.places
    if near is not None:
        what = "of a clean tree" if recorded else "recorded"
        return Selection(text, {"commit": near}, f"commit {near[:12]}, the newest {what} on {text}")
    if recorded:  # what the other side has is shown as missing here
        return Selection(text, {"commit": commit}, f"commit {commit[:12]}, measured in dirty trees only")
    raise UsageError(f"{text!r} is commit {commit[:12]}, of which nothing was recorded; nor of what it builds on")


def _run_ids(history: History) -> list[str]:
    return [row["run"] for row in history.rows("SELECT DISTINCT run FROM records")]


def _clean_commits(history: History) -> set[str]:
    """Commits of which something was measured in a clean tree."""
    rows = history.rows(
        'SELECT DISTINCT "commit" AS c FROM records WHERE type = \'measurement\' AND NOT dirty AND "commit" IS NOT NULL'
    )
    return {row["c"] for row in rows}


def _newest_before(history: History, commit: str, among: set[str]) -> str | None:
    """The newest of these commits that another one builds on: its own line first, then what was merged into it."""
    if history.repository is None or history.repository.resolve(commit) is None:
        return None
    own = history.repository.first_parents(commit)
    line = reversed(history.repository.line(commit))
    before = [(ancestor, name) for ancestor, _, _ in line if (name := _recorded_as(ancestor, among)) is not None]
    return next((name for ancestor, name in before if ancestor in own), before[0][1] if before else None)


def _recorded_as(commit: str, among: set[str]) -> str | None:
    """The name by which records know a commit: all of it, or, when they were imported, perhaps its beginning."""
    return next((commit[:length] for length in range(len(commit), 6, -1) if commit[:length] in among), None)


def compare(history: History, a: str, b: str, metrics: Sequence[str] | None = None, **filters: Any) -> Compared:
    """Compare two selections, series by series.

    Args:
        metrics: which, by default all that are judged.
        filters: technique, gpu and the like, for both sides.

    Raises:
        UsageError: a selection names nothing, or a metric is unknown.
    """
    for name in metrics or ():
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    names = list(metrics or judged_metrics())
    done = Compared(select(history, a), select(history, b))
    across = tuple(sorted({key for side in (done.a, done.b) for key in side.filters if key in KEY_COLUMNS}))
    sides = [_side(history, names, {**filters, **side.filters}, across) for side in (done.a, done.b)]
    single = any(len(row["values"]) < 3 for side in sides for row in side.values())
    noises = _noises(history, across) if single else {}
    for key in sorted(sides[0].keys() & sides[1].keys(), key=str):
        done.series.append(_row(key, sides[0][key], sides[1][key], noises.get(key)))
    done.series.sort(key=lambda row: -abs(math.log(row["ratio"])) if row["ratio"] else 0.0)
    done.only_a = _missing(history, sides[0], sides[1], {**filters, **done.b.filters}, across)
    done.only_b = _missing(history, sides[1], sides[0], {**filters, **done.a.filters}, across)
    for name in names:
        ratios = [row["ratio"] for row in done.series if row["metric"] == name and row["ratio"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            done.means[name] = {"ratio": mean, "n": len(ratios), "better": METRICS[name].better}
    return done


Key = tuple[Any, ...]


def _key(row: Row, name: str, across: Sequence[str]) -> Key:
    """A series without the columns that the comparison goes across."""
    return (*(None if column in across else row[column] for column in KEY_COLUMNS), name)


def _side(history: History, names: Sequence[str], filters: Mapping[str, Any], across: Sequence[str]) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for row in aggregate(history, names, clean=True, **filters):
        for name in names:
            if not row[f"v_{name}"] or (name in INVERSE and row.get(f"v_{INVERSE[name]}")):
                continue
            found[_key(row, name, across)] = {
                **{column: row[column] for column in KEY_COLUMNS},
                "metric": name,
                "workload": row["workload"],
                "unit": METRICS[name].unit.replace("items", row["unit"] or "items"),
                "values": row[f"v_{name}"],
                "width": row[f"w_{name}"],
            }
    return found


def _noises(history: History, across: Sequence[str]) -> dict[Key, float]:
    """Relative noise between runs of each series, from how neighbouring runs of its whole history differ."""
    found: dict[Key, float] = {}
    for row in history.once("noise of all series", _noise_rows):
        key = _key(row, row["metric"], across)
        found[key] = max(found.get(key, 0.0), row["noise"])
    return found


def _noise_rows(history: History) -> list[Row]:
    rows = []
    names = judged_metrics()
    for row in aggregate(history, names, clean=True, last=40):
        for name in names:
            values = row[f"v_{name}"] or []
            if len(values) >= NOISE_RUNS and min(values) > 0:
                # Differences of neighbours know no level: steps in the history do not count as noise.
                steps = np.abs(np.diff(np.log(np.asarray(values, dtype=np.float64))))
                noise = float(np.median(steps)) * 1.4826 / math.sqrt(2)
                rows.append({**{column: row[column] for column in KEY_COLUMNS}, "metric": name, "noise": noise})
    return rows


def _row(key: Key, a: Row, b: Row, noise: float | None) -> Row:
    name = str(key[-1])
    out = {
        **{column: b[column] for column in KEY_COLUMNS},
        "metric": name,
        "better": METRICS[name].better,
        "workload": b["workload"],
        "unit": b["unit"],
        "a": _level(a),
        "b": _level(b),
    }
    return {**out, **verdict_of(a, b, METRICS[name].better, noise)}


def _level(side: Row) -> Row:
    values = side["values"]
    if len(values) > 1:
        estimate = stats.median(values)
        return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n}
    half = math.sqrt(side["width"]) if side["width"] else None
    value = values[0]
    return {"value": value, "low": value / half if half else None, "high": value * half if half else None, "n": 1}


def verdict_of(a: Row, b: Row, better: str, noise: float | None = None) -> Row:
    """Ratio of B over A with its 95 % interval, and the verdict. Rows have ``values`` and
    ``width``, the ratio of the ends of a run's own interval, or None.

    Args:
        noise: relative noise between runs of the series, if its history tells.
    """
    old, new = (statistics.median(side["values"]) for side in (a, b))
    if old <= 0 or new <= 0:
        same = old == new
        reason = "both are zero" if same else "no ratio: a level is not above zero"
        return {"ratio": 1.0 if same else None, "ratio_low": None, "ratio_high": None,
                "verdict": "unchanged" if same else "inconclusive", "reason": reason}  # fmt: skip
    shift = math.log(new / old)
    assumed = noise is None and min(len(a["values"]), len(b["values"])) < 3
    sigma = max(noise or 0.0, *(_spread(side["values"]) for side in (a, b)), ASSUMED_NOISE if assumed else 0.0, 1e-4)
    error = math.sqrt(sum(_variance(side, sigma) for side in (a, b)))
    low, high = (math.exp(shift + side * 1.96 * error) for side in (-1, 1))
    out = {"ratio": math.exp(shift), "ratio_low": low, "ratio_high": high}
    apart = abs(shift) / error
    few = f"; noise between runs assumed {ASSUMED_NOISE:.1%}, there are too few runs to know it" if assumed else ""
    if apart >= APART and abs(shift) >= SMALLEST:
        worse = (shift > 0) == (better == "lower")
        return {
            **out,
            "verdict": "regressed" if worse else "improved",
            "reason": f"{apart:.1f} standard errors apart{few}",
        }
    if apart <= TOGETHER and APART * error <= BLUNT:
        return {
            **out,
            "verdict": "unchanged",
            "reason": f"within the noise; {math.expm1(APART * error):.1%} would show{few}",
        }
    if assumed:
        return {**out, "verdict": "too few runs", "reason": f"{apart:.1f} standard errors apart{few}"}
    return {**out, "verdict": "inconclusive", "reason": f"{apart:.1f} standard errors apart: run both again"}


def _spread(values: Sequence[float]) -> float:
    """Relative noise of one run, from at least three."""
    if len(values) < 3 or min(values) <= 0:
        return 0.0
    return statistics.stdev(map(math.log, values))


def _variance(side: Row, sigma: float) -> float:
    """Squared standard error of a side's median on the logarithmic scale: between runs, and within one."""
    n = len(side["values"])
    between = (1.2533 if n > 2 else 1.0) ** 2 * sigma**2 / n
    within = math.log(side["width"]) / (2 * 1.96) if side["width"] and side["width"] > 1 else 0.0
    return between + within**2 / n


def _missing(
    history: History,
    here: Mapping[Key, Row],
    there: Mapping[Key, Row],
    filters: Mapping[str, Any],
    across: Sequence[str],
) -> list[Row]:
    """Series of one side that the other lacks, with what is known of them there."""
    columns = [name for name in ("technique", "variant", "workload_id", "dtype", "gpu", "ranks") if name not in across]
    states: dict[Key, list[Row]] = {}
    absent = [key for key in here if key not in there]
    if absent:
        for row in failed(history, filters):
            states.setdefault(tuple(row[name] for name in columns), []).append(row)
    out = []
    for key in sorted(absent, key=str):
        row = here[key]
        known = states.get(tuple(row[name] for name in columns), [])
        status = worst({item["status"] for item in known}) if known else "not run"
        reason = next((item["reason"] for item in known if item["status"] == status), None)
        shown = {column: row[column] for column in KEY_COLUMNS}
        out.append({**shown, "metric": row["metric"], "workload": row["workload"], "unit": row["unit"], **_level(row),
                    "there": status, "reason": reason})  # fmt: skip
    return out


def failed(history: History, filters: Mapping[str, Any]) -> list[Row]:
    """Records of a selection that did not pass."""
    from harness.history.query import where

    condition, values = where(filters)
    return history.rows(
        "SELECT technique, variant, workload_id, dtype, gpu, ranks, status, reason FROM records "
        f"WHERE type = 'measurement' AND status <> 'passed' AND {condition}",
        values,
    )


def newest_commit(history: History) -> str | None:
    """The newest recorded commit on the line."""
    ranks = [(row["rank"], row["commit"]) for row in latest(history) if row["rank"] is not None]
    return max(ranks)[1] if ranks else None
