"""The types of what readers compute with, so that a line which is JSON and yet no record is named once, where it is
read, and trips nobody after that. Values that are of the right type and cannot be true are verify's business."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TEXT: Final = ("id", "run", "time", "gpu")
OF_MEASUREMENT: Final = ("technique", "variant", "workload", "workload_id", "dtype", "family", "kind")
PERHAPS: Final = ("commit", "branch", "machine", "commit_date")


def misshapen(record: Mapping[str, Any]) -> list[str]:
    """What is of a type that no record has; empty when it is sound. Keys that are absent are not judged here."""
    measured = record.get("type") == "measurement"
    found = [
        f"{name} is no text"
        for name in (*TEXT, *(OF_MEASUREMENT if measured else ()))
        if name in record and (type(record[name]) is not str or (name in TEXT and not record[name]))
    ]
    found += [f"{name} is no text" for name in PERHAPS if not isinstance(record.get(name), (str, type(None)))]
    if not isinstance(record.get("dirty"), (bool, type(None))):
        found.append("dirty is neither true nor false")
    if not measured:
        return found
    if "ranks" in record and (type(record["ranks"]) is not int or record["ranks"] < 1):
        found.append("ranks is no count")
    samples = record.get("samples")
    if samples is not None and not (isinstance(samples, Mapping) and isinstance(samples.get("values") or [], list)):
        found.append("samples is no object with a list of values")
    metrics = record.get("metrics")
    for name, entry in metrics.items() if isinstance(metrics, Mapping) else ():
        if not isinstance(entry, Mapping):
            continue
        ends = [entry.get("low"), entry.get("high")]
        if type(entry.get("value")) is bool or not all(_number(end) for end in ends if end is not None):
            found.append(f"metrics.{name} holds something that is no number")
        elif (ends[0] is None) != (ends[1] is None):
            found.append(f"metrics.{name} has an interval with one end")
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
