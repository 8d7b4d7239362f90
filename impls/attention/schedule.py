"""How evenly the orders of a Hopper forward's tiles load a device: exact, from the lengths of the tiles.

A causal tile of queries takes as many steps as it sees tiles of keys, 1 to the sequence's; a full one all of them. A
device of P multiprocessors with one program each takes as long as its longest program:

    fixed     program p takes tiles p, p + P, p + 2P, …   (persistent programs without a counter)
    counter   whoever is free takes the next tile         (a counter, or a program a tile: the hardware deals them out)

The quotient of that and an even share is the imbalance; 1.1 costs a tenth of the rate.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kernels.flash_attention_plan import groups_per_section

TOKENS, WIDTH = 16384, 2048  # of a timed batch
MULTIPROCESSORS = 132
OVERHEAD = 1.0  # a tile's start and end, in steps: an assumption; more of it evens the tiles
SEQS = (2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Grid:
    """Heads of one length, dealt out by sections of heads."""

    num_tiles: int
    num_heads: int
    heads_per_section: int
    causal: bool

    def steps(self) -> list[int]:
        """The length of every tile, in the order in which they are dealt out; queries and keys in tiles of one size."""
        found = []
        for index in range(self.num_tiles * self.num_heads):
            section, within = divmod(index, self.heads_per_section * self.num_tiles)
            here = min(self.heads_per_section, self.num_heads - section * self.heads_per_section)
            # Under a mask the last tile is the longest and comes first.
            found.append(self.num_tiles - within // here if self.causal else self.num_tiles)
        return found


def imbalance(steps: list[int], order: str, programs: int = MULTIPROCESSORS, overhead: float = OVERHEAD) -> float:
    """The longest program's work over an even share of it all; `order` is "fixed" or "counter"."""
    loads = [0.0] * programs
    for i, length in enumerate(steps):
        if order == "fixed":
            loads[i % programs] += length + overhead
        else:
            heapq.heapreplace(loads, loads[0] + length + overhead)
    return max(loads) * programs / (sum(steps) + overhead * len(steps))


def table(l2_bytes: int = 50 * 2**20, dim: int = 128) -> list[str]:
    """The causal imbalance by length, as Markdown: sections that fill half the L2, and those that are chosen."""
    lines = [
        "| causal, D = 128 | heads, and a section's by the cache | fixed: before | now | counter: before | now "
        "| two programs a multiprocessor: before | now |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for seq in SEQS:
        heads, tiles = TOKENS // seq * WIDTH // dim, seq // 128
        most = max(1, min(heads, l2_bytes // 2 // (4 * seq * dim)))
        cells = [f"{heads}, {most}"]
        for order, programs in (("fixed", 1), ("counter", 1), ("counter", 2)):
            now = groups_per_section(heads, most, dealt_out=order != "fixed")
            for size in (most, now):
                steps = Grid(tiles, heads, size, causal=True).steps()
                cells.append(f"{imbalance(steps, order, programs * MULTIPROCESSORS):.2f}")
            cells[-1] += f" ({now})"
        lines.append(f"| S = {seq} | {' | '.join(cells)} |")
    return lines
