"""What several ranks agree on while they measure: who goes on, in which order, and what a sample took.

Rank 0 decides and tells the others, so that no rank waits for ever. A sample starts aligned, after a barrier outside
the timed span; the slowest rank is the latency, and the distance to the fastest is the skew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.clock import Clock, Tick


class Agreement:
    """The control channel of a worker's ranks. In a world of one every answer is one's own."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.group: Any = None
        if world > 1:
            import torch.distributed as dist

            self.group = dist.new_group(backend="gloo")

    def decide(self, wish: bool) -> bool:
        """Rank 0's wish."""
        return bool(self.tell(wish))

    def tell(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: float) -> list[float]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        mine = torch.tensor([value], dtype=torch.float64)
        all_values = [torch.zeros(1, dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(all_values, mine, group=self.group)
        return [float(v) for v in all_values]

    def most(self, value: int | None) -> int | None:
        """The largest over the ranks; None where no rank has a figure."""
        found = max(self.gather(-1.0 if value is None else float(value)))
        return None if found < 0 else int(found)

    def least(self, value: int | None) -> int | None:
        """The smallest over the ranks that have a figure; None where no rank has one."""
        found = [v for v in self.gather(-1.0 if value is None else float(value)) if v >= 0]
        return int(min(found)) if found else None

    def align(self) -> None:
        """All ranks go on together."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier(group=self.group)


class RankedClock:
    """A clock whose sample is the slowest rank's, and says how far the fastest was from it."""

    def __init__(self, clock: Clock, agreement: Agreement) -> None:
        self.clock = clock
        self.agreement = agreement
        self.name, self.cache = clock.name, clock.cache

    def time(self, call: Callable[[], None]) -> Tick:
        """One sample of all ranks."""
        if self.agreement.world == 1:
            return self.clock.time(call)
        self.agreement.align()
        mine = self.clock.time(call)
        every = self.agreement.gather(mine.seconds)
        return Tick(max(every), mine.host_bound, max(every) - min(every))

    def verify(self, call: Callable[[], None], worst: Callable[[float], float] = float) -> None:
        """As the clock below, on every rank equally often."""
        self.clock.verify(call, lambda late: max(self.agreement.gather(worst(late))))
