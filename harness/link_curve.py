"""What a message of a collective costs here, by its size: the measured points, joined by straight pieces.

A link has no single bandwidth: small messages cost a latency, and where a backend changes its protocol the cost jumps.
One line fitted through all sizes is wrong at both ends and hides the jumps, so that nothing is fitted: a size that was
measured costs what was measured, a size between two of them lies on the line of those two alone (latency plus bytes
over bandwidth, the alpha-beta model, holds between changes). Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.metrics import BUS_FACTORS

#: Fewer sizes than this are single figures, or one line, and no curve.
LEAST_POINTS = 3


@dataclass(frozen=True)
class LinkCurve:
    """Payload bytes and seconds of one message of one collective on so many ranks, by ascending payload.

    The payload is counted as algbw counts it: one rank's buffer, for all_gather the gathered one, for reduce_scatter
    the one before it.

    Raises:
        ValueError: an unknown collective, a world of one, too few points, or points that are no ascending sizes with
            positive finite times.
    """

    collective: str
    ranks: int
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if self.collective not in BUS_FACTORS:
            raise ValueError(f"collective {self.collective!r} is none of {', '.join(sorted(BUS_FACTORS))}")
        if self.ranks < 2:
            raise ValueError(f"a link needs 2 ranks at least, not {self.ranks}")
        if len(self.points) < LEAST_POINTS:
            raise ValueError(f"{len(self.points)} sizes are no curve, {LEAST_POINTS} at least are")
        sizes = [size for size, _ in self.points]
        if sizes[0] <= 0 or any(b <= a for a, b in itertools.pairwise(sizes)):
            raise ValueError("the sizes are not positive and ascending")
        if not all(math.isfinite(seconds) and seconds > 0 for _, seconds in self.points):
            raise ValueError("a time is not a positive number")

    def seconds(self, payload: float) -> float:
        """The time of one message.

        Below the smallest size measured its time holds, above the largest one its rate.
        """
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, payload)
        if place == 0:
            return self.points[0][1]
        (low, before) = self.points[place - 1]
        if place == len(sizes):
            return before * payload / low
        (high, after) = self.points[place]
        return before + (after - before) * (payload - low) / (high - low)

    def carrying(self, link_bytes: float, messages: int) -> float:
        """The time of ``messages`` equal messages, one after another, in which a rank sends ``link_bytes`` in all."""
        payload = link_bytes / messages / BUS_FACTORS[self.collective](self.ranks)
        return messages * self.seconds(payload)

    def rates(self) -> list[tuple[int, float, float]]:
        """Payload bytes, seconds and bus bandwidth (bytes/s) of every point."""
        factor = BUS_FACTORS[self.collective](self.ranks)
        return [(size, seconds, size / seconds * factor) for size, seconds in self.points]


#: Curves by collective and number of ranks.
Curves = Mapping[tuple[str, int], LinkCurve]


def points_of(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], tuple[tuple[int, float], ...]]:
    """The sizes that records have measured, by collective and ranks.

    A record is a point when it passed and its case counts ``payload_bytes`` that travel in one message (``messages`` of
    1) of the collective that the dimension ``op`` names. Of two records of one size the shorter time is the ceiling.
    An unsettled time is no point: what slowed it down is not the link.
    """
    found: dict[tuple[str, int], dict[int, float]] = {}
    for record in records:
        counters = record.get("counters") or {}
        op, latency = str(record["dims"].get("op", "")), record["metrics"].get("latency")
        one_message = counters.get("messages") == 1 and counters.get("payload_bytes")
        if (
            record["status"] != "passed"
            or record["ranks"] < 2
            or op not in BUS_FACTORS
            or not (one_message and latency)
        ):
            continue
        sizes = found.setdefault((op, record["ranks"]), {})
        size, seconds = int(counters["payload_bytes"]), float(latency["value"])
        sizes[size] = min(seconds, sizes.get(size, seconds))
    return {key: tuple(sorted(sizes.items())) for key, sizes in found.items()}


def curves_of(points: Mapping[tuple[str, int], Sequence[tuple[int, float]]]) -> dict[tuple[str, int], LinkCurve]:
    """The curves among them: collectives of which enough sizes were measured."""
    return {
        (op, ranks): LinkCurve(op, ranks, tuple(found))
        for (op, ranks), found in points.items()
        if len(found) >= LEAST_POINTS
    }
