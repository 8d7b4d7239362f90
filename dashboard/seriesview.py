"""Which series a view shows and what is known of their changes; shared by the history page and the snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboard.charts.lines import Line
from dashboard.queries import points
from dashboard.source import Judged
from harness.history.engine import History, Row
from harness.history.query import SeriesKey
from harness.metric_names import METRICS
from harness.regress.attribution import reproduce
from harness.regress.detect import detect
from harness.regress.points import as_detector_points

#: Points that changes are looked for at once before a page is drawn; with more, marks come when all is judged.
MOST_DETECTED = 1500


def name_of(key: SeriesKey, row: Row | None, several: Sequence[SeriesKey]) -> str:
    """A series in a few words: what tells it from the others that are shown beside it."""
    parts = [key.variant]
    for attribute in ("technique", "gpu", "dtype", "ranks", "method", "clock", "cache"):
        if len({getattr(other, attribute) for other in several}) > 1:
            value = getattr(key, attribute)
            parts.append(f"{value} ranks" if attribute == "ranks" else str(value))
    if row is not None and len({other.workload_id for other in several}) > 1:
        parts.append(str(row["workload"]))
    return ", ".join(parts)


def events_of(judged: Judged, key: SeriesKey, points: Sequence[Row], here: bool = True) -> list[dict[str, Any]]:
    """The changes of a series: as judged where that is done, else (``here``) found now, without whose doing."""
    verdict = judged.of(key)
    if verdict is not None:
        return list(verdict.body.get("events") or [])
    own = [point for point in points if point["judged"]]
    if not own or not here:
        return []
    report = detect(as_detector_points(own), METRICS[key.metric].better)
    return [
        {
            "kind": event.kind,
            "verdict": event.verdict,
            "ratio": event.ratio,
            "low": event.low,
            "high": event.high,
            "commit": own[event.index]["commit"],
            "subject": own[event.index]["subject"],
            "recovered": None if event.recovered_at is None else own[event.recovered_at]["commit"],
            "side": None,
            "acknowledged": None,
            "reproduce": reproduce(own[event.index]),
        }
        for event in report.events
    ]


def lines_of(
    history: History, judged: Judged, chosen: Sequence[tuple[SeriesKey, Row]], all_points: bool = True
) -> list[Line]:
    """Series of one metric, ready to be drawn; without ``all_points`` only the points that are judged."""
    keys = [key for key, _ in chosen]
    found = points(history, keys)
    small = sum(map(len, found.values())) <= MOST_DETECTED
    names = [name_of(key, row, keys) for key, row in chosen]
    lines = []
    for key, name in zip(keys, names, strict=True):
        kept = found[key] if all_points else [point for point in found[key] if point["judged"]]
        # A workload that was defined anew has the same name for another series.
        name = name if names.count(name) == 1 else f"{name} {key.workload_id}"
        lines.append(Line(name, kept, events_of(judged, key, found[key], small), key.metric))
    return lines
