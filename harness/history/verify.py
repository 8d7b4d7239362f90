"""Looks a whole store over: what cannot be read, what is there twice, and what cannot be true.

A record of status ``implausible`` has been judged when it was written: its figures are kept to be looked at and count
for nothing, so that they are counted here and are no finding. A record that passed with such figures is one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from harness.history.generate import is_results
from harness.history.store import Damage, Store, gpu_folder
from harness.metric_names import METRICS

#: Shares that no method of counting lets pass 1.
AT_MOST_ONE: Final = ("mfu", "mbu", "cache_hit_rate", "failed_requests", "cache_waste")
#: Only these statuses may carry figures: those that were judged implausible are kept with what made them so.
WITH_METRICS: Final = ("passed", "unsettled", "implausible")
#: How far a speedup may lie outside the interval that its own latencies give: rounding, and medians of blocks.
SPEEDUP_SLACK: Final = 0.02
#: How far the latency may lie from the median of its own samples.
MEDIAN_SLACK: Final = 0.05


@dataclass(frozen=True)
class Finding:
    """Something amiss: its kind (``torn``, ``foreign``, ``newer``, ``unfit``, ``duplicate``, ``implausible``,
    ``misplaced`` or ``synthetic``), the file, the line (0 for a whole file), and why."""

    kind: str
    file: str
    line: int
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass
class Verified:
    """What was looked at and found. judged: records that the harness itself marked implausible."""

    records: int
    findings: list[Finding]
    judged: int = 0


def verify(stores: Iterable[Store]) -> Verified:
    """Look at every record of the stores.

    Raises:
        StoreError: a store cannot be listed.
    """
    findings: list[Finding] = []
    records = judged = 0
    first_place: dict[str, str] = {}
    for store in stores:
        damage: list[Damage] = []
        results = is_results(store)
        synthetic: dict[str, int] = {}
        for file, lines in _by_file(store, damage):
            label = store.label(file)
            for number, record in lines:
                records += 1
                judged += record["type"] == "measurement" and record["status"] == "implausible"
                place = f"{label}:{number}"
                earlier = first_place.setdefault(str(record["id"]), place)
                if earlier != place:
                    findings.append(Finding("duplicate", label, number, f"id {record['id']} is at {earlier} already"))
                findings.extend(Finding("misplaced", label, number, reason) for reason in _misplaced(file, record))
                findings.extend(Finding("implausible", label, number, reason) for reason in implausible(record))
                if results and record.get("synthetic"):
                    synthetic[label] = synthetic.get(label, 0) + 1
            findings.extend(
                Finding("implausible", label, number, reason)
                for number, reason in inconsistent_speedups([(n, r) for n, r in lines if r["type"] == "measurement"])
            )
        findings.extend(
            Finding("synthetic", label, 0, f"{count} made-up record(s) among results")
            for label, count in synthetic.items()
        )
        findings.extend(Finding(_kind(item), item.file, item.line, item.reason) for item in damage)
    return Verified(records, sorted(findings, key=lambda f: (f.file, f.line, f.kind)), judged)


def _by_file(store: Store, damage: list[Damage]) -> Iterator[tuple[str, list[tuple[int, dict[str, Any]]]]]:
    current, lines = "", list[tuple[int, dict[str, Any]]]()
    for file, number, record in store.scan(damage):
        if file != current:
            if lines:
                yield current, lines
            current, lines = file, []
        lines.append((number, record))
    if lines:
        yield current, lines


def _kind(item: Damage) -> str:
    if item.reason == "empty":
        return "unfit"
    for word, kind in (("schema", "newer"), ("unfit", "unfit"), ("torn", "torn")):
        if item.reason.startswith(word):
            return kind
    return "foreign"


def _misplaced(file: str, record: Mapping[str, Any]) -> Iterator[str]:
    folder, _, name = file.rpartition("/")
    if gpu_folder(str(record["gpu"])) != folder:
        yield f"a record of GPU type {record['gpu']!r} in folder {folder!r}"
    if not name.startswith(str(record["run"])):
        yield f"a record of run {record['run']!r} in {name!r}"


def implausible(record: Mapping[str, Any]) -> Iterator[str]:
    """What about a sound record cannot be true, one reason at a time; of a judged one only its form."""
    yield from _time_problems(record)
    if record["type"] != "measurement":
        return
    metrics: Mapping[str, Any] = record.get("metrics") or {}
    if metrics and record["status"] not in WITH_METRICS:
        yield f"status {record['status']} with metrics {', '.join(sorted(metrics))}"
    if record["status"] == "passed" and not metrics and record.get("samples"):
        yield "passed, with samples but no metrics"
    for name, entry in metrics.items():
        yield from _metric_form(name, entry)
    if record["status"] == "implausible":
        return
    for name, entry in metrics.items():
        yield from _metric_problems(name, entry)
    values = [v for v in (record.get("samples") or {}).get("values") or [] if isinstance(v, (int, float))]
    if any(value <= 0 for value in values):
        yield "samples hold a time that is not above zero"
    elif values and "latency" in metrics and record["kind"] == "op":
        middle = statistics.median(values)
        if abs(metrics["latency"]["value"] / middle - 1) > MEDIAN_SLACK:
            yield f"latency {metrics['latency']['value']:.6g} s is not the median of its samples, {middle:.6g} s"
    peak, absolute = (metrics.get(name, {}).get("value") for name in ("peak_memory", "absolute_memory"))
    if peak is not None and absolute is not None and absolute < peak:
        yield f"absolute peak memory {absolute:.0f} B is below the peak above the start, {peak:.0f} B"


def _time_problems(record: Mapping[str, Any]) -> Iterator[str]:
    try:
        when = datetime.fromisoformat(str(record["time"]))
    except ValueError:
        yield f"time {record['time']!r} is not ISO 8601"
        return
    if when.tzinfo is None:
        yield f"time {record['time']!r} has no zone"
    elif when > datetime.now(UTC) + timedelta(days=1):
        yield f"time {record['time']!r} lies ahead"


def _metric_form(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    row = METRICS.get(name)
    if row is None:
        yield f"metric {name!r} is unknown"
    elif entry["better"] != row.better:
        yield f"{name} says {entry['better']} is better, the table says {row.better}"


def _metric_problems(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    value = float(entry["value"])
    if name not in METRICS:
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and name in ("latency", "speedup", "throughput")):
        yield f"{name} is {value}"
    if name in AT_MOST_ONE and value > 1:
        yield f"{name} is {value:.4g}, above 1"
    low, high = entry.get("low"), entry.get("high")
    if low is not None and high is not None and not low <= value <= high:
        yield f"{name} {value:.6g} lies outside its interval [{low:.6g}, {high:.6g}]"


def inconsistent_speedups(lines: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[int, str]]:
    """Speedups that the latencies of the same run contradict, as (line, reason)."""

    def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return record["run"], record["technique"], record["workload_id"], record["dtype"], record["ranks"]

    found = list(lines)
    baselines = {
        key(record): record["metrics"]["latency"]
        for _, record in found
        if record["variant"] == "baseline" and "latency" in (record.get("metrics") or {})
    }
    for number, record in found:
        metrics = record.get("metrics") or {}
        base = baselines.get(key(record))
        if record["status"] == "implausible":
            continue
        if base is None or "speedup" not in metrics or "latency" not in metrics or metrics["latency"]["value"] <= 0:
            continue
        expected = base["value"] / metrics["latency"]["value"]
        entry = metrics["speedup"]
        low, high = entry.get("low", entry["value"]), entry.get("high", entry["value"])
        if not low * (1 - SPEEDUP_SLACK) <= expected <= high * (1 + SPEEDUP_SLACK):
            yield number, f"speedup {entry['value']:.4g} contradicts the latencies, whose ratio is {expected:.4g}"
