"""Rows of each chunk of :mod:`impls.parallel.overlap`, by the waves of its product beside the link's kernels.

A product of 128×256 tiles runs in waves, a tile on each of the GPU's multiprocessors. A collective's kernels hold some
of them while it travels, so that a chunk whose tiles just filled its waves needs one more, which costs a whole wave:
four even chunks of 2,048 rows by 4,096 columns take 2 + 3 + 3 + 3 waves for 8 in one product. Rows are therefore chosen
by counting waves and messages: the step that is shortest by the count is the plan.

Figures are those of two H200s (NV18). Elsewhere the plan is as right, but may not be the fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

#: Multiprocessors, dense bfloat16 FLOP/s of all of them, and the tile of the library's product.
SMS, PRODUCTS, TILE_ROWS, TILE_COLUMNS = 132, 700e12, 128, 256
#: Of an all-reduce: multiprocessors that it holds (inferred: with 24 the count agrees with four even chunks as timed),
#: bus bandwidth, and what the smallest takes.
HELD, ALL_REDUCE, MESSAGE = 24, 329e9, 34e-6
#: Chunks are cut in at most so many pieces, of a tile's rows where there are enough.
PIECES = 64


def step_seconds(sizes: Sequence[int], inner: int, width: int, link_bytes_a_row: float, held: int = HELD) -> float:
    """Seconds of products of so many rows, each followed by its message while the next one computes.

    inner: of one rank. link_bytes_a_row: what a rank sends for a row of the output.
    """
    wave = 2.0 * TILE_ROWS * TILE_COLUMNS * inner * SMS / PRODUCTS
    now = arrived = 0.0
    for rows in sizes:
        tiles = math.ceil(rows / TILE_ROWS) * math.ceil(width / TILE_COLUMNS)
        while tiles > 0:
            tiles -= SMS - (held if arrived > now else 0)
            now += wave
        arrived = max(now, arrived) + MESSAGE + rows * link_bytes_a_row / ALL_REDUCE
    return arrived


@cache
def chunk_rows(tokens: int, chunks: int, inner: int, width: int, link_bytes_a_row: float) -> tuple[int, ...]:
    """Rows of each of 2 to ``chunks`` chunks (at most 3 are tried), those with the shortest step.

    Raises:
        ValueError: fewer than one chunk, or more chunks than tokens.
    """
    if not 1 <= chunks <= tokens:
        raise ValueError(f"{tokens} tokens cannot be cut into {chunks} chunks")
    if chunks == 1:
        return (tokens,)
    piece = max(1, min(TILE_ROWS, tokens // (2 * chunks)))
    piece *= max(1, tokens // piece // PIECES)
    ends = range(piece, tokens, piece)
    best: tuple[float, tuple[int, ...]] | None = None
    for count in range(2, min(chunks, 3) + 1):
        for cuts in itertools.combinations(ends, count - 1):
            sizes = tuple(b - a for a, b in itertools.pairwise((0, *cuts, tokens)))
            seconds = step_seconds(sizes, inner, width, link_bytes_a_row)
            if best is None or (seconds, sizes) < best:
                best = seconds, sizes
    assert best is not None
    return best[1]
