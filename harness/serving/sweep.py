"""Rate sweeps: one workload at several request rates, and the throughput–latency curve read from their records.

A point of the curve is a record like any other (its dimension ``request_rate`` says which), so it is stored, checked
and judged for regressions as such. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from harness.errors import UsageError
from harness.workload import Workload, split_name

RATE: Final = "request_rate"
COLUMNS: Final = ("output_rate", "goodput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "e2e_p99", "failed_requests")
#: Below this share of what is sent a server does not keep up, and its latencies grow with the length of the run.
KEEPS_UP: Final = 0.9


def parse_rates(text: str) -> list[float]:
    """Rates from ``1,2,4`` (requests a second), ascending, each once.

    Raises:
        UsageError: something that is not a positive number.
    """
    rates = set()
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            raise UsageError(f"--request-rate {text}: {part.strip()!r} is not a number") from None
        if not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"--request-rate {text}: a rate is above zero, got {part.strip()}")
        rates.add(rate)
    return sorted(rates)


def sweep(workload: Workload, rates: Sequence[float]) -> list[Workload]:
    """The workload at each rate.

    Raises:
        UsageError: the workload has no request rate.
    """
    if RATE not in workload.dims:
        raise UsageError(f"{workload.technique}: workload {workload.name!r} sends no requests, so it has no rate")
    return [workload.replace(**{RATE: rate}) for rate in rates]


def _keeps_up(serve: Mapping[str, Any]) -> bool | None:
    growth, counts = serve.get("lag_growth"), serve.get("requests") or {}
    if growth is None:
        return None
    return bool(1 / (1 + max(growth, 0.0)) >= KEEPS_UP and counts["finished"] >= KEEPS_UP * counts["total"])


def _service(name: str) -> str:
    base, changed = split_name(name)
    others = ",".join(f"{key}={value}" for key, value in changed.items() if key != RATE)
    return f"{base}[{others}]" if others else base


def curve(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the throughput–latency curve: technique, variant, workload, rate, and the figures at that rate.

    ``workload`` is the name without what the sweep changed. ``keeps_up`` tells whether requests were answered about as
    fast as they were sent: nearly all of them, and the last ones hardly later than the first
    (:func:`harness.serving.metrics.lag_growth`); None where it cannot be told. ``finished_rate`` is that of the middle
    of the run. Records without a rate or without figures are left out.
    """
    rows = []
    for record in records:
        rate = (record.get("dims") or {}).get(RATE)
        metrics = record.get("metrics") or {}
        if not rate or record.get("status") != "passed" or "output_rate" not in metrics:
            continue
        serve = record.get("serve") or {}
        row: dict[str, Any] = {
            "technique": record["technique"],
            "variant": record["variant"],
            "workload": _service(str(record["workload"])),
            "rate": float(rate),
            "finished_rate": serve.get("finished_rate"),
            "keeps_up": _keeps_up(serve),
        }
        row.update({name: metrics[name]["value"] for name in COLUMNS if name in metrics})
        rows.append(row)
    return sorted(rows, key=lambda r: (r["technique"], r["workload"], r["variant"], r["rate"]))
