"""The record: one measured variant on one workload, one line of history. Imports no torch.

A line is a JSON object. Its ``type`` says what it is:

``run``          first line of a run's file: what was asked, where, with what.
``measurement``  one variant on one workload.
``sentinel``     the fixed product and copy, at the start and the end of a run; the last carries ``spent``.
``end``          ``spent`` of a run that reads no sentinel at its end (a check; asv, whose neighbours share a reading).

``spent`` is where the run's seconds went: ``total_s``, ``sampling_s``, ``energy_s``, ``check_s``, ``compile_s``,
``memory_s``, and ``outside_share``, the share outside sampling, energy, checks and compilation (:mod:`harness.spent`).
Beside it stands ``left``, the workloads that a run did not begin within the time it was given, where there are any.

What one filters by is a plain key at the top of every line: ``schema``, ``method``, ``type``, ``id``, ``run``,
``time``, ``commit``, ``branch``, ``dirty``, ``gpu``, ``machine``. A measurement adds ``technique``, ``family``,
``kind``, ``layer``, ``variant``, ``peer``, ``workload``, ``workload_id``, ``dtype``, ``tier``, ``ranks``, ``status``
and ``reason``. The rest are objects:

===========  ===========================================================================================
``dims``     the workload's dimensions; ``digests`` those of model, trace and text
``check``    ``rule``, ``passed``, ``error``, ``bound``, ``tensor`` (the worst), ``tensors`` (each by name)
``samples``  ``values`` (seconds, raw), ``clock``, ``cache``, ``rounds``, ``warmup``, ``discarded``, ``settled``,
             ``host_bound`` (how many waited for the host), ``device_s`` (of a step, at most, with the host ahead)
``metrics``  name → ``{"value", "low", "high", "unit", "better"}``; low and high only where an interval is known;
             counts only when ``status`` is ``passed``
``missing``  metric name → why it could not be given (an unknown GPU has no MFU)
``work``     ``flops``, ``bytes``, ``link_bytes``, ``messages``, ``collective``, ``launches``, ``items``, ``unit``,
             ``reasons``
``floor``    ``seconds``, ``limit``, ``terms``, ``source`` (which ceilings), ``share``
``costs``    seconds outside the timed spans: ``build_s``, ``compile_s``, ``check_s``, ``memory_s``, ``warmup_s``
``predicted``  ``speedup`` by the pair's own count
``conditions`` clocks, temperatures, throttle reasons and other processes around the measurement
``serve``    for a serve run: ``ttft``, ``itl`` (quantile grids), ``cache_use`` ([seconds, share] pairs), ``requests``
``counters`` bytes over the link, hits, drops, whatever the case counts
``stack``, ``host``, ``env``, ``ci``   provenance (:mod:`harness.provenance`); ``host`` names CPU, GPU, memory, power
===========  ===========================================================================================

A **series** is the records of equal :func:`series_key` and metric, in commit order.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from harness.errors import PairbenchError
from harness.metric_names import METRICS

SCHEMA: Final = 1
#: Changes whenever the way of measuring changes what a number means; it ends every series.
METHOD: Final = 1

STATUSES: Final = ("passed", "wrong", "error", "oom", "timeout", "skipped", "implausible", "unsettled")
TYPES: Final = ("run", "measurement", "sentinel", "end")

#: status → exit code of the command that met it.
EXIT_CODES: Final[Mapping[str, int]] = {
    "passed": 0,
    "skipped": 0,
    "unsettled": 0,
    "wrong": 1,
    "error": 1,
    "oom": 1,
    "timeout": 1,
    "implausible": 1,
}

COMMON_KEYS: Final = (
    "schema",
    "method",
    "type",
    "id",
    "run",
    "time",
    "commit",
    "branch",
    "dirty",
    "gpu",
    "machine",
)
MEASUREMENT_KEYS: Final = (
    "technique",
    "family",
    "kind",
    "layer",
    "variant",
    "peer",
    "workload",
    "workload_id",
    "dtype",
    "tier",
    "ranks",
    "status",
    "reason",
)


class RecordError(PairbenchError):
    """A record that must not be written: it says which key is at fault."""


def utc_now() -> str:
    """Now, as ISO 8601 UTC to the millisecond."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def new_run_id() -> str:
    """A run id that sorts by time and that no parallel job shares: ``20260131T235959Z-1f2e3d4c``."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + "-" + secrets.token_hex(4)


def metric(
    name: str, value: float, low: float | None = None, high: float | None = None, unit: str | None = None
) -> dict[str, Any]:
    """One entry of ``metrics``; unit and direction come from the table of metrics.

    Raises:
        RecordError: an unknown metric, or a value that is not a finite number.
    """
    row = METRICS.get(name)
    if row is None:
        raise RecordError(f"metric {name!r} is not in harness.metric_names")
    for number in (value, low, high):
        if number is not None and not (isinstance(number, (int, float)) and math.isfinite(number)):
            raise RecordError(f"metric {name!r} must be a finite number, got {number!r}")
    out: dict[str, Any] = {"value": float(value), "unit": unit or row.unit, "better": row.better}
    if low is not None and high is not None:
        out["low"], out["high"] = float(low), float(high)
    return out


def series_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two measurements must share to be samples of one series (beside the metric).

    Clock and cache policy belong to it: times of different clocks or policies are never compared.
    """
    samples = record.get("samples") or {}
    return (
        record["technique"],
        record["variant"],
        record["workload_id"],
        record["dtype"],
        record["gpu"],
        record["ranks"],
        record["method"],
        samples.get("clock"),
        samples.get("cache"),
    )


def problems(record: Mapping[str, Any]) -> list[str]:
    """What makes this line unfit to be history; empty when it is sound. Newer schemas are not judged here."""
    found = [f"lacks {key!r}" for key in COMMON_KEYS if key not in record]
    if record.get("type") not in TYPES:
        found.append(f"type {record.get('type')!r} is none of {TYPES}")
    if record.get("type") == "measurement":
        found.extend(f"lacks {key!r}" for key in MEASUREMENT_KEYS if key not in record)
        if record.get("status") not in STATUSES:
            found.append(f"status {record.get('status')!r} is none of {STATUSES}")
        metrics = record.get("metrics", {})
        if not isinstance(metrics, Mapping):
            found.append("metrics is not an object")
        else:
            found.extend(_metric_problems(metrics))
    found.extend(_not_finite(record, ""))
    return found


def _metric_problems(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    for name, entry in metrics.items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("value"), (int, float)):
            found.append(f"metrics.{name} has no numeric value")
        elif entry.get("better") not in ("lower", "higher"):
            found.append(f"metrics.{name} has no direction")
    return found


_SCALARS: Final = (str, int, bool, type(None))


def _not_finite(value: Any, path: str) -> list[str]:
    found: list[str] = []
    _look_for_not_finite(value, path, found)
    return found


def _look_for_not_finite(value: Any, path: str, found: list[str]) -> None:
    """Walks the whole record; reading a history does so for every line, hence the types asked first."""
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            found.append(f"{path or 'value'} is {value}")
    elif kind in _SCALARS:
        return
    elif isinstance(value, (dict, Mapping)):
        for key, inner in value.items():
            if type(inner) not in _SCALARS:
                _look_for_not_finite(inner, f"{path}.{key}" if path else str(key), found)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            if type(inner) is not float or not math.isfinite(inner):
                _look_for_not_finite(inner, f"{path}[{place}]", found)
    elif isinstance(value, float) and not math.isfinite(value):
        found.append(f"{path or 'value'} is {value}")


def to_line(record: Mapping[str, Any]) -> str:
    """The record as one line of JSON, newline included.

    Raises:
        RecordError: the record is unfit (NaN, inf, a missing key, an unknown status), with every reason.
    """
    found = problems(record)
    if found:
        raise RecordError(f"record {record.get('id')!r} refused: {'; '.join(found)}")
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as err:
        raise RecordError(f"record {record.get('id')!r} refused: {err}") from err
