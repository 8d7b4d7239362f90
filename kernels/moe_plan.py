"""Who computes the products of routed experts, and in which tiles: the one place to tune.

A product is computed by one of

    pointers      our kernel (:mod:`kernels.moe_products`), which finds tokens through the order and has the gate at its
                  end: no pass over the pairs beside the products
    hopper        our kernel with specialised warps (:mod:`kernels.moe_hopper`), between passes of ours that lay out
                  tokens by expert and compute the gate (:mod:`kernels.moe_gate`)
    grouped_mm    torch's product over groups, between the same passes
    mm            torch's product, expert after expert, likewise; the host waits until it knows how many rows each has

and each product of a layer may be another's. The last two are no plan's: the bar that :mod:`benchmarks.moe_plans` sets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

By = Literal["pointers", "hopper", "grouped_mm", "mm"]
#: Rows an expert has on average from which products that need passes beside them are taken: those of one of their
#: tiles, which fewer would leave empty in part. `python3 -m benchmarks.moe_plans` found whole steps faster so on an
#: H200 at 1,024 rows (Mixtral 8×7B's layer) and at 256 (Qwen3-30B-A3B's). At 16 rows and at 4 (decode of 64 tokens) our
#: first kernel is ahead of torch's products with passes. Where between 16 and 256 the line is, is a guess.
MANY_ROWS = 128


class Tile(NamedTuple):
    """The shape of one product, and who computes it; a library chooses its own shape."""

    rows: int
    columns: int
    block: int  # of the sum
    warps: int
    stages: int
    group: int  # tiles of rows that share a block of columns
    turned: bool = False
    by: By = "pointers"


class Shapes(NamedTuple):
    """Tiles of the products of a layer; ours but `weights` have as many rows, those of the order's tiles."""

    gated: Tile
    down: Tile
    gate_backward: Tile
    back: Tile
    weights: Tile

    @property
    def rows(self) -> int:
        """Rows of the order's tiles; any number where no product of ours takes them.

        Raises:
            ValueError: two products of rows want different ones.
        """
        wanted = {tile.rows for tile in self[:4]} - {0}
        if len(wanted) > 1:
            raise ValueError(f"plan: tiles of {sorted(wanted)} rows; the order has one number of rows a tile")
        return wanted.pop() if wanted else 16


HOPPER = Tile(128, 256, 64, 4, 4, 8, by="hopper")
GROUPED_MM = Tile(0, 0, 0, 0, 0, 0, by="grouped_mm")
MM = Tile(0, 0, 0, 0, 0, 0, by="mm")


#: Where experts have many rows, large and small ones alike.
LAID_OUT = Shapes(*[HOPPER] * 5)


def have_many_rows(pairs: int, experts: int) -> bool:
    """Whether an expert has so many on average that passes beside the products pay for faster ones."""
    return pairs >= MANY_ROWS * experts


def launch_shapes(pairs: int, experts: int, itemsize: int, whole: bool = True, library: bool = False) -> Shapes:
    """By the rows that an expert has on average, which is all that the host knows.

    From MANY_ROWS on and where `library` allows it LAID_OUT. Else our first kernel's tiles:

    Up to 64 the products bind to memory: turned, tiles of rows that hold an expert's rows in one as a rule (half as
    many again as the average), 32 to 48 KiB a stage, two programs a multiprocessor. Beyond that 128 rows and 256
    columns, the largest whose float32 sums (128 registers a thread) leave room; the gated product has them as 128 of
    the gate and 128 of up. The product of weights finds its rows through the order, whose loads take every other of its
    stages. Float32 goes without tensor cores and takes what fits.

    whole: rows are of whole 16 numbers. Others are loaded number by number through registers, which must have room.
    library: what :func:`library_takes` says of these tensors.
    """
    if library and have_many_rows(pairs, experts):
        return LAID_OUT
    average = -(-pairs // experts)
    rows = max(16, min(128, 1 << (average + average // 2 - 1).bit_length()))
    if itemsize == 4:
        rows = min(rows, 32)
        small = Tile(rows, 32, 32, 4, 2, 8)
        return Shapes(small, small, small, small, Tile(32, 32, 32, 4, 2, 8))
    if not whole:
        small = Tile(min(rows, 64), 64, 32, 4, 2, 8)
        return Shapes(small, small, small, small, Tile(64, 64, 32, 4, 2, 8))
    weights = Tile(128, 256, 64, 8, 7, 8)
    if rows <= 64:
        few = Tile(rows, 128, 64, 4, 4, 64)
        return Shapes(
            Tile(rows, 64, 64, 4, 4, 64, turned=True), few._replace(turned=True), few._replace(columns=64), few, weights
        )
    many = Tile(128, 256, 64, 8, 4, 8)
    return Shapes(many._replace(columns=128), many, many, many, weights)


def library_takes(x_TD: torch.Tensor, gate_up_EHD: torch.Tensor, down_EDF: torch.Tensor) -> bool:
    """Whether the products that need rows laid out compute this layer: ours for Hopper and torch's over groups.

    That is bfloat16 on Hopper, rows of whole 16 bytes. Elsewhere torch falls back to a loop or refuses, and ours has no
    copy engine.
    """
    if not x_TD.is_cuda or x_TD.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    if any(t.data_ptr() % 16 for t in (gate_up_EHD, down_EDF)) or down_EDF.shape[1] % 8 or down_EDF.shape[2] % 8:
        return False
    return torch.cuda.get_device_capability(x_TD.device) == (9, 0)


def choose(pairs: int, x_TD: torch.Tensor, gate_up_EHD: torch.Tensor, down_EDF: torch.Tensor) -> Shapes:
    """The plan for that many pairs of a token and an expert of this layer."""
    experts, double, width = gate_up_EHD.shape
    return launch_shapes(
        pairs,
        experts,
        x_TD.element_size(),
        whole=(double // 2) % 16 == width % 16 == 0,
        library=have_many_rows(pairs, experts) and library_takes(x_TD, gate_up_EHD, down_EDF),
    )
