"""The floor of a workload: its work over each ceiling. The largest term is the floor and names the limit.

A term is divided by what this machine reached (:mod:`harness.machine_store`) where that was measured, else by the
datasheet. A link has no single rate: where messages of many sizes were measured, their curve gives the time of the
work's messages (:mod:`harness.link_curve`). The floor is a bound, not a model: real kernels overlap terms at best, they
never beat the largest.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.devices import Device, Found, canonical_dtype, peak_flops
from harness.link_curve import LinkCurve
from harness.machine_store import Ceilings


class WorkLike(Protocol):
    """The part of :class:`harness.pair.Work` that a floor needs: FLOPs, bytes, bytes and two counts."""

    @property
    def flops(self) -> float: ...

    @property
    def bytes(self) -> float: ...

    @property
    def link_bytes(self) -> float: ...

    @property
    def messages(self) -> int: ...

    @property
    def launches(self) -> int: ...


@dataclass(frozen=True)
class Floor:
    """The least time a workload can take here.

    seconds: the largest known term; None where no term is known.
    limit: the term that is largest: ``compute``, ``memory``, ``link`` or ``launch``; None where a term that the work
        has is unknown, since that one might be larger (launch excepted: it is only known by measuring).
    terms: seconds by term. source: ``measured``, ``measured curve`` or ``datasheet`` by term. missing: why a term is
        not known.
    """

    seconds: float | None
    limit: str | None
    terms: Mapping[str, float]
    source: Mapping[str, str]
    missing: Mapping[str, str] = field(default_factory=dict)

    def share(self, seconds: float) -> float | None:
        """The floor over a measured time; above 1 where a measured ceiling was beaten. None without a floor."""
        if self.seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return None
        return self.seconds / seconds

    def as_record(self, seconds: float | None = None) -> dict[str, Any]:
        """The record's ``floor``: ``seconds``, ``limit``, ``terms``, ``source``, ``missing`` and, for a time,
        ``share``."""
        out: dict[str, Any] = {
            "seconds": self.seconds,
            "limit": self.limit,
            "terms": dict(self.terms),
            "source": dict(self.source),
            "missing": dict(self.missing),
        }
        if seconds is not None:
            out["share"] = self.share(seconds)
        return out


def floor(
    work: WorkLike,
    dtype: str,
    measured: Ceilings | None = None,
    device: Device | Found | None = None,
    curve: LinkCurve | None = None,
) -> Floor:
    """The floor of ``work`` on one device.

    Args:
        work: counted for one rank where there are several (``link_bytes`` is what the busiest rank sends).
        dtype: of the arithmetic; it chooses the compute ceiling. ``tf32`` where float32 products may run in it.
        measured: this machine's ceilings; used before the datasheet, term by term.
        device: the row of the device table, if known.
        curve: of the work's collective on the work's number of ranks, where it was measured; used before any rate.

    Raises:
        ValueError: work that is negative or not finite, or link bytes in less than one message.
    """
    amounts = {"flops": work.flops, "bytes": work.bytes, "link_bytes": work.link_bytes, "launches": work.launches}
    for name, amount in amounts.items():
        if not math.isfinite(amount) or amount < 0:
            raise ValueError(f"work.{name} must be a finite number of at least 0, got {amount!r}")
    if work.messages < 1:
        raise ValueError(f"work.messages must be at least 1, got {work.messages!r}")
    row = device.device if isinstance(device, Found) else device
    terms: dict[str, float] = {}
    source: dict[str, str] = {}
    missing: dict[str, str] = {}

    def put(term: str, amount: float, rate: float | None, where: str, why: str) -> None:
        if amount == 0:
            return
        if rate is None:
            missing[term] = why
        else:
            terms[term], source[term] = amount / rate, where

    rate, where, why = _compute_rate(dtype, measured, device)
    put("compute", work.flops, rate, where, why)
    rate, where = _first(measured.copy if measured else None, row.memory_bandwidth if row else None)
    put("memory", work.bytes, rate, where, "no copy was measured and no datasheet is known")
    if curve is not None and work.link_bytes:
        terms["link"], source["link"] = curve.carrying(work.link_bytes, work.messages), "measured curve"
    else:
        rate, where = _first(measured.link if measured else None, row.link_each_way if row else None)
        put("link", work.link_bytes, rate, where, "no link was measured and no datasheet is known")
    launch = (measured.launch_graph or measured.launch_eager) if measured else None
    rate = 1 / launch if launch else None
    put("launch", float(work.launches), rate, "measured", "launch cost is known by measuring only")

    if not terms:
        return Floor(None, None, terms, source, missing)
    largest = max(terms, key=lambda term: terms[term])
    unknown = set(missing) - {"launch"}
    return Floor(terms[largest], None if unknown else largest, terms, source, missing)


def _first(measured: float | None, datasheet: float | None) -> tuple[float | None, str]:
    return (measured, "measured") if measured else (datasheet, "datasheet")


def _compute_rate(
    dtype: str, measured: Ceilings | None, device: Device | Found | None
) -> tuple[float | None, str, str]:
    key = canonical_dtype(dtype)
    if key is None:
        return None, "", f"no compute ceiling is known for dtype {dtype!r}"
    if measured is not None and measured.matmul.get(key):
        return measured.matmul[key], "measured", ""
    peak = peak_flops(device, key)
    return peak.value, "datasheet", f"no {key} product was measured, and {peak.reason}"
