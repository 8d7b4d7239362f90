"""Whose doing was it? Which side of a pair moved, whether the machine moved with it, and what else changed there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from harness.errors import StoreError
from harness.history.engine import Row, as_object
from harness.history.order import Repository
from harness.history.query import SeriesKey
from harness.regress.report import Event

#: A side has moved when it did at least this share of the change (on the logarithmic scale), in the same direction
#: of time, and by more than twice its own standard error.
SHARE: Final = 0.4
#: Runs on either side of the change that are looked at.
WINDOW: Final = 15
#: Commits listed by name.
LISTED: Final = 50
#: Metrics that are made of the times of two sides, or of one: the time is what moved.
BY_TIME: Final = ("speedup", "speedup_peer", "throughput")


@dataclass(frozen=True)
class Side:
    """Which side moved: ``optimized`` (or the variant's name), ``baseline``, ``both``, ``machine`` or ``unknown``."""

    name: str
    reason: str
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Changed:
    """What differs between the last point at the old level and the first at the new one."""

    commits: tuple[tuple[str, str | None], ...] = ()
    more_commits: int = 0
    stack: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    machine: tuple[Any, Any] | None = None
    power_limit_w: tuple[Any, Any] | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "commits": [{"commit": commit, "subject": subject} for commit, subject in self.commits],
            "more_commits": self.more_commits,
            "stack": {name: list(pair) for name, pair in self.stack.items()},
            "machine": list(self.machine) if self.machine else None,
            "power_limit_w": list(self.power_limit_w) if self.power_limit_w else None,
            "note": self.note,
        }


@dataclass(frozen=True)
class Shift:
    """The logarithm of new over old of a quantity across a change, and its standard error."""

    log_ratio: float
    error: float

    def moved(self, whole: float) -> bool:
        """Whether this quantity did a good part of a change of ``whole``, beyond its own noise."""
        size = abs(self.log_ratio)
        return size >= SHARE * abs(whole) and size > 2 * self.error

    @property
    def ratio(self) -> float:
        """New over old."""
        return math.exp(self.log_ratio)


def shift_across(old: Sequence[float], new: Sequence[float]) -> Shift | None:
    """The shift of medians between two groups of runs; None without runs on both sides, or below zero."""
    if not old or not new or min(*old, *new) <= 0:
        return None
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in (old, new)]
    spread = [float(np.median(np.abs(x - np.median(x)))) * 1.4826 for x in logs]
    # One run has no spread of its own: it takes the other side's.
    widths = [s if len(x) > 2 else max(spread) for s, x in zip(spread, logs, strict=True)]
    error = 1.2533 * math.sqrt(sum(w * w / len(x) for w, x in zip(widths, logs, strict=True)))
    return Shift(float(np.median(logs[1]) - np.median(logs[0])), error)


def around(points: Sequence[Row], before: set[str], after: set[str]) -> tuple[list[float], list[float]]:
    """The runs of a series at the commits on either side of a change."""
    old = [v for p in points if p["judged"] and p["commit"] in before for v in p["values"]]
    new = [v for p in points if p["judged"] and p["commit"] in after for v in p["values"]]
    return old, new


def sides_of_time(points: Sequence[Row], event: Event, events: Sequence[Event] = ()) -> tuple[set[str], set[str]]:
    """The commits just before a change and just after it, no further than its neighbours among ``events``."""
    begin = max((e.end for e in events if e.end < event.index), default=0)
    stop = min((e.index for e in events if e.index > event.end), default=len(points))
    before = {p["commit"] for p in points[max(begin, event.index - WINDOW) : event.index]}
    after = {p["commit"] for p in points[event.end : min(event.end + WINDOW, stop)]}
    return before, after


def side_of(
    key: SeriesKey,
    points: Sequence[Row],
    event: Event,
    group: Mapping[SeriesKey, Sequence[Row]],
    sentinel: Mapping[str, Mapping[str, list[float]]],
    events: Sequence[Event] = (),
) -> Side:
    """Which side of the pair moved at a change of a series.

    Args:
        points: the judged points of the series, as the event counts them.
        group: every series of the technique on this GPU type (:func:`harness.regress.points.collect`).
        sentinel: readings by commit (:func:`harness.regress.points.sentinel`).
        events: every change of the series, so that neighbours do not mix in.
    """
    if not event.ratio or event.ratio <= 0:
        return Side("unknown", event.reason or "the change has no ratio")
    before, after = sides_of_time(points, event, events)
    whole = math.log(event.ratio)
    metric = "latency" if key.metric in BY_TIME else key.metric
    shifts: dict[str, Shift] = {}
    for variant in dict.fromkeys(("baseline", key.variant)):
        series = group.get(replace(key, variant=variant, metric=metric))
        found = shift_across(*around(series, before, after)) if series else None
        if found is not None:
            shifts[variant] = found
    ratios = {name: shift.ratio for name, shift in shifts.items()}
    machine = _machine(sentinel, before, after)
    ratios |= {f"sentinel {name}": shift.ratio for name, shift in machine.items()}
    moved = {name for name, shift in shifts.items() if shift.moved(whole)}
    by_machine = {name: shift for name, shift in machine.items() if shift.moved(whole)}
    timed = metric not in ("peak_memory",)
    if timed and by_machine and len(moved) == len(shifts):
        words = ", ".join(f"{name} × {shift.ratio:.3f}" for name, shift in by_machine.items())
        return Side("machine", f"the sentinel moved with it ({words})", ratios)
    tail = _sentinel_words(machine, by_machine) if timed else ""
    if len(moved) == 2:
        return Side("both", f"baseline and {key.variant} moved together{tail}", ratios)
    if moved:
        name = moved.pop()
        still = [other for other in shifts if other != name]
        words = f"{name} moved" + (f", {still[0]} did not" if still else "")
        return Side(name, words + tail, ratios)
    if key.metric == "speedup_peer" and shifts:
        return Side("peer", f"neither baseline nor {key.variant} moved: the peer did{tail}", ratios)
    return Side("unknown", "no side of the pair shows the change on its own" + tail, ratios)


def _machine(sentinel: Mapping[str, Mapping[str, list[float]]], before: set[str], after: set[str]) -> dict[str, Shift]:
    found = {}
    for name in ("product", "copy"):
        old, new = ([v for c in commits for v in sentinel.get(c, {}).get(name, [])] for commits in (before, after))
        shift = shift_across(old, new)
        if shift is not None:
            found[name] = shift
    return found


def _sentinel_words(machine: Mapping[str, Shift], moved: Mapping[str, Shift]) -> str:
    if not machine:
        return "; no sentinel was read there"
    return "; the sentinel moved too" if moved else "; the sentinel did not move"


def changed_between(old: Row, new: Row, repository: Repository | None) -> Changed:
    """What differs between two points of a series: commits, versions, machine, power limit."""
    stack: dict[str, tuple[Any, Any]] = {}
    for column in ("stack", "env"):
        olds, news = as_object(old.get(column)), as_object(new.get(column))
        for name in sorted(olds.keys() | news.keys()):
            if olds.get(name) != news.get(name):
                stack[name] = (olds.get(name), news.get(name))
    if old.get("driver") != new.get("driver"):
        stack["driver"] = (old.get("driver"), new.get("driver"))

    def pair(name: str) -> tuple[Any, Any] | None:
        return (old.get(name), new.get(name)) if old.get(name) != new.get(name) else None

    commits: list[tuple[str, str | None]] = [(new["commit"], new.get("subject"))]
    note = ""
    if new["commit"] == old["commit"]:
        commits, note = [], "both points are of one commit"
    elif repository is None:
        note = "no repository here: only the new commit is known"
    else:
        try:
            commits = list(repository.between(old["commit"], new["commit"])) or commits
        except StoreError:
            note = "the commits are not in this repository: only the new one is known"
    return Changed(
        tuple(commits[-LISTED:]), max(0, len(commits) - LISTED), stack, pair("machine"), pair("power_limit_w"), note
    )


def reproduce(point: Row) -> str:
    """The command that measures a point again, with its commit checked out; a comment where there is none, as for what
    another tool measured."""
    command = point.get("reproduce")
    if not command:
        return "# the record names no command: measure it again with the tool that it came from"
    commit = point.get("commit")
    placed = point.get("standing") != "declared"
    return f"git checkout {commit[:12]} && {command}" if commit and placed else str(command)


def as_text(value: Any) -> str:
    """A version or a name as it is shown."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
