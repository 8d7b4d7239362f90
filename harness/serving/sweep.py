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
#: Below this share of the offered rate a server does not keep up, and its latencies grow with the length of the run.
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


def _service(name: str) -> str:
    base, changed = split_name(name)
    others = ",".join(f"{key}={value}" for key, value in changed.items() if key != RATE)
    return f"{base}[{others}]" if others else base


def curve(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the throughput–latency curve: technique, variant, workload, rate, and the figures at that rate.

    ``workload`` is the name without what the sweep changed. ``keeps_up`` tells whether requests were finished about as
    fast as they were sent, in the middle of the run (:func:`harness.serving.metrics.middle_rate`); None where it cannot
    be told. Records without a rate or without figures are left out.
    """
    rows = []
    for record in records:
        rate = (record.get("dims") or {}).get(RATE)
        metrics = record.get("metrics") or {}
        if not rate or record.get("status") != "passed" or "output_rate" not in metrics:
            continue
        serve = record.get("serve") or {}
        sent, done = serve.get("offered_rate"), serve.get("finished_rate")
        row: dict[str, Any] = {
            "technique": record["technique"],
            "variant": record["variant"],
            "workload": _service(str(record["workload"])),
            "rate": float(rate),
            "finished_rate": done,
            "keeps_up": None if done is None or sent is None else done >= KEEPS_UP * sent,
        }
        row.update({name: metrics[name]["value"] for name in COLUMNS if name in metrics})
        rows.append(row)
    return sorted(rows, key=lambda r: (r["technique"], r["workload"], r["variant"], r["rate"]))
