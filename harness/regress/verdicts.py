"""A verdict for every series of the history: what changed, by how much, since when, and whose doing it was."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from harness.history.engine import History, Row
from harness.history.index import cache_folder
from harness.history.moments import utc
from harness.history.query import KEY_COLUMNS, SeriesKey
from harness.metric_names import METRICS
from harness.regress.acknowledge import Acknowledged
from harness.regress.attribution import changed_between, reproduce, side_of
from harness.regress.detect import detect
from harness.regress.points import as_detector_points, collect, fingerprints, sentinel
from harness.regress.reference import reference_of, slow_drift
from harness.regress.report import Event, Report
from harness.regress.rules import RULES

VERDICTS: Final = ("regressed", "inconclusive", "improved", "unchanged", "too few runs")
#: Points at the end of a series that are judged; what lies before is history.
WINDOW: Final = 250
#: What a verdict repeats of its last change.
OF_EVENT: Final = ("ratio", "low", "high", "commit", "previous", "subject", "date", "side", "side_reason", "changed")
#: What decides how a verdict on the same records reads.
CODE: Final = (
    *("attribution.py", "detect.py", "drift.py", "noise.py", "points.py", "reference.py", "report.py", "rules.py"),
    *("segments.py", "series.py", "verdicts.py", "../metric_names.py", "../stats.py"),
    *("../history/flat.py", "../history/order.py", "../history/query.py", "../history/series_key.py"),
)


@dataclass
class Verdict:
    """One series, judged. ``body`` holds plain values only (see :meth:`as_json`)."""

    key: SeriesKey
    verdict: str
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def acknowledged(self) -> str | None:
        """The reason why its last change was accepted; None if it was not."""
        reason: str | None = self.body.get("acknowledged")
        return reason

    @property
    def last_event(self) -> dict[str, Any] | None:
        """The newest change."""
        events: list[dict[str, Any]] = self.body.get("events") or []
        return events[-1] if events else None

    @property
    def still_regressed(self) -> bool:
        """Whether an unaccepted regression stands that nothing since has made good: a small gain after a large loss
        makes the last change an improvement, and leaves the series worse than before."""
        events: list[dict[str, Any]] = self.body.get("events") or []
        lower = METRICS[self.key.metric].better == "lower"
        for at, event in enumerate(events):
            settled = event["recovered"] or event.get("acknowledged") or not event.get("in_scope", True)
            if event["verdict"] != "regressed" or settled:
                continue
            ratios = [later["ratio"] for later in events[at:]]
            net = None if None in ratios else math.prod(ratios)
            if net is None or (net > 1 if lower else net < 1):
                return True
        return False

    def as_json(self) -> dict[str, Any]:
        """Everything about the verdict: the series' parts, ``verdict``, ``reason``, size with interval (``ratio``,
        ``low``, ``high``), ``commit``, ``previous``, ``side``, ``changed``, ``smallest_change``, ``reproduce``,
        ``reference`` (the end against the pinned reference), ``events``, ``acknowledged``."""
        return {
            "series": self.key.text,
            **{name: getattr(self.key, name) for name in KEY_COLUMNS},
            "metric": self.key.metric,
            "better": METRICS[self.key.metric].better,
            "verdict": self.verdict,
            **self.body,
        }


@dataclass(frozen=True)
class Scope:
    """What is judged: filters (None: all), and two places in the line of commits.

    ``since`` is a recorded commit, or a moment as :func:`harness.history.moments.utc` gives it: older changes are left
    out of the verdict, though not out of ``events``. ``reference`` is a recorded commit that the end of each series is
    held against, instead of its own beginning.
    """

    technique: str | None = None
    gpu: str | None = None
    variant: str | None = None
    metric: str | None = None
    since: str | None = None
    reference: str | None = None
    window: int = WINDOW


def judge(
    history: History,
    scope: Scope | None = None,
    acknowledged: Sequence[Acknowledged] = (),
    progress: Callable[[int, int], None] | None = None,
    kept_in: Path | None = None,
) -> list[Verdict]:
    """A verdict for every series in scope, the worst first.

    The series of a technique on a GPU type are not judged again while their records stay the same: ``kept_in`` (by
    default a folder in the user's cache) keeps their verdicts.
    """
    return judge_within(None, history, scope, acknowledged, progress, kept_in)[0]


def judge_within(
    budget_s: float | None,
    history: History,
    scope: Scope | None = None,
    acknowledged: Sequence[Acknowledged] = (),
    progress: Callable[[int, int], None] | None = None,
    kept_in: Path | None = None,
) -> tuple[list[Verdict], int]:
    """As :func:`judge`, but nothing more is judged anew once ``budget_s`` has passed: what is kept is given all the
    same, beside the number of techniques × GPU types that still wait. Asked again, it goes on."""
    scope = scope or Scope()
    marks = fingerprints(history)
    groups = sorted(g for g in marks if scope.technique in (None, g[0]) and scope.gpu in (None, g[1]))
    kept = _Kept(kept_in or cache_folder() / "verdicts")
    verdicts: list[Verdict] = []
    waiting = 0
    start = time.monotonic()
    for number, (technique, gpu) in enumerate(groups, 1):
        where = f"{scope.window} {scope.reference} {history.order.repository}"
        mark = f"{code_digest()} {RULES!r} {where} {marks[technique, gpu]}"
        name = f"{'|'.join(store.url for store in history.stores)}|{technique}|{gpu}"
        bodies = kept.get(name, mark)
        if bodies is None and budget_s is not None and time.monotonic() - start >= budget_s:
            waiting += 1
            continue
        if bodies is None:
            bodies = _judge_group(history, technique, gpu, scope)
            kept.put(name, mark, bodies)
        for text, body in bodies.items():
            key = SeriesKey.parse(text)
            if scope.variant in (None, key.variant) and scope.metric in (None, key.metric):
                verdicts.append(Verdict(key, body.pop("verdict"), body))
        if progress is not None:
            progress(number, len(groups))
    for verdict in verdicts:
        _limit(verdict, history, scope.since)
        _acknowledge(verdict, acknowledged, history, scope.since)
    return sorted(verdicts, key=_rank), waiting


@cache
def code_digest() -> str:
    """A digest of the code that judges: verdicts kept by another version are not taken for this one's."""
    digest = hashlib.sha256()
    for name in CODE:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _rank(verdict: Verdict) -> tuple[Any, ...]:
    ratio = verdict.body.get("ratio") or 1.0
    size = max(ratio, 1 / ratio) if ratio > 0 else 1.0
    return verdict.acknowledged is not None, VERDICTS.index(verdict.verdict), -size, verdict.key.text


def _judge_group(history: History, technique: str, gpu: str, scope: Scope) -> dict[str, dict[str, Any]]:
    group = collect(history, technique, gpu, last=scope.window)
    pinned = history.order.place(scope.reference).rank if scope.reference is not None else None
    bodies: dict[str, dict[str, Any]] = {}
    for key, points in group.items():
        judged = [point for point in points if point["judged"]]
        if judged:
            reference = reference_of(judged, pinned)
            values = reference.values if reference is not None else None
            report = detect(as_detector_points(judged), METRICS[key.metric].better, values)
            drift = slow_drift(report, reference, len(judged))
            bodies[key.text] = _body(history, key, judged, report, group, drift)
            if reference is not None and report.reference is not None:
                held = {**asdict(report.reference), "commit": judged[reference.end - 1]["commit"]}
                bodies[key.text]["reference"] = held
    return bodies


def _limit(verdict: Verdict, history: History, since: str | None) -> None:
    """Leave a last change out of the verdict that is older than ``since``; each event says whether it is in scope."""
    for event in verdict.body.get("events") or []:
        event["in_scope"] = since is None or not _older(event, history, since)
    last = verdict.last_event
    if since is None or last is None or verdict.verdict not in ("regressed", "improved"):
        return
    if _older(last, history, since):
        verdict.verdict = "unchanged"
        verdict.body.update(dict.fromkeys(OF_EVENT))
        verdict.body["reason"] = f"no change since then; the last one was: {verdict.body['reason']}"


def _body(
    history: History,
    key: SeriesKey,
    points: Sequence[Row],
    report: Report,
    group: dict[SeriesKey, list[Row]],
    drift: Event | None,
) -> dict[str, Any]:
    readings = sentinel(history, key.gpu)
    found = [*report.events, drift] if drift is not None else list(report.events)
    events = [_event(history, key, points, event, report.events, group, readings) for event in found]
    verdict, reason = report.state, report.reason
    if drift is not None:
        verdict = drift.verdict
        size = "" if drift.ratio is None else f" to {drift.ratio:.4g} of the level at {events[-1]['previous'][:12]}"
        reason = f"{verdict} by a drift too slow to show from run to run{size}"
    now = points[-1]
    body: dict[str, Any] = {
        "verdict": verdict,
        "reason": reason,
        "workload": now["workload"],
        "family": now["family"],
        "unit": now["unit"],
        "points": len(points),
        "runs": report.runs,
        "value": now["value"],
        **dict.fromkeys(OF_EVENT),
        "noise": report.noise,
        "smallest_change": report.smallest_change,
        "smallest_lasting_change": report.smallest_lasting_change,
        "newest": now["commit"],
        "reproduce": reproduce(now),
        "events": events,
        "suspect": None,
        "reference": None,
    }
    if events and verdict != "unchanged":
        body.update({name: events[-1][name] for name in OF_EVENT} | {"reproduce": events[-1]["reproduce"]})
    if report.suspect is not None:
        point = points[report.suspect]
        body["suspect"] = {"commit": point["commit"], "subject": point["subject"], "runs": point["runs"],
                           "value": point["value"], "reproduce": reproduce(point)}  # fmt: skip
    return body


def _event(
    history: History,
    key: SeriesKey,
    points: Sequence[Row],
    event: Event,
    events: Sequence[Event],
    group: dict[SeriesKey, list[Row]],
    readings: dict[str, dict[str, list[float]]],
) -> dict[str, Any]:
    old, new = points[event.index - 1], points[event.index]
    end = points[event.end]
    side = side_of(key, points, event, group, readings, events)
    back = None if event.recovered_at is None else points[event.recovered_at]["commit"]
    return {
        "kind": event.kind,
        "verdict": event.verdict,
        "ratio": event.ratio,
        "low": event.low,
        "high": event.high,
        "old": event.old,
        "new": event.new,
        "p_value": event.p_value,
        "commit": new["commit"],
        "until": end["commit"],
        "until_rank": end["rank"],
        "until_date": end["date"] or end["first"],
        "subject": new["subject"],
        "date": new["date"] or new["first"],
        "previous": old["commit"],
        "recovered": back,
        "recovers": None if event.recovers is None else points[event.recovers]["commit"],
        "side": side.name,
        "side_reason": side.reason,
        "ratios": dict(side.ratios),
        "changed": changed_between(old, end if event.kind == "drift" else new, history.repository).as_json(),
        "reproduce": reproduce(new),
        "reason": event.reason,
    }


def _older(event: dict[str, Any], history: History, since: str) -> bool:
    place = history.order.places.get(since)
    if place is not None:
        return bool(event["until_rank"] < place.rank)
    return (utc(event["until_date"]) or "") < since


def _acknowledge(verdict: Verdict, entries: Sequence[Acknowledged], history: History, since: str | None) -> None:
    """Write the reason of an accepted change beside it, and beside the verdict if it is the last one."""
    series = {**{name: getattr(verdict.key, name) for name in KEY_COLUMNS}, "metric": verdict.key.metric}
    series["workload"] = verdict.body.get("workload")
    verdict.body["acknowledged"] = None
    events = verdict.body.get("events") or []
    for event in events:
        commits = [event["commit"], *(item["commit"] for item in event["changed"]["commits"])]
        event["acknowledged"] = next((e.reason for e in entries if e.covers(series, commits)), None)
    if events and verdict.verdict in ("regressed", "improved"):
        # Accepting the last of several steps accepts none of the earlier ones that still stand.
        standing = [e for e in events[:-1] if verdict.verdict == e["verdict"] == "regressed" and not e["recovered"]]
        standing = [event for event in standing if since is None or not _older(event, history, since)]
        if all(event["acknowledged"] for event in standing):
            verdict.body["acknowledged"] = events[-1]["acknowledged"]
        elif events[-1]["acknowledged"]:
            open_ = ", ".join(e["commit"][:12] for e in standing if not e["acknowledged"])
            verdict.body["reason"] += f"; that one is accepted, the change at {open_} is not"


class _Kept:
    """Verdicts of groups of series in a folder, a file a group, with a mark of what they were made from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"

    def get(self, name: str, mark: str) -> dict[str, dict[str, Any]] | None:
        """The verdicts of a group, if they were made from what the mark says."""
        try:
            found = json.loads(self._path(name).read_bytes())
            return dict(found["bodies"]) if found["mark"] == mark else None
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or another version's: judged anew
            return None

    def put(self, name: str, mark: str, bodies: dict[str, dict[str, Any]]) -> None:
        """Keep a group's verdicts; a cache that cannot be written costs time only."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"mark": mark, "bodies": bodies}))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many series of each verdict; acknowledged changes count apart."""
    found = dict.fromkeys((*VERDICTS, "acknowledged"), 0)
    for verdict in verdicts:
        found["acknowledged" if verdict.acknowledged is not None else verdict.verdict] += 1
    return found
