"""Draws one token a row from logits: temperature, top-k, top-p, without sorting and without waiting for the host.

    keep the k largest logits; of these the fewest most likely that reach p together; draw from what is left at 1/T

Both limits are a threshold on the logit, and a threshold needs no order, only sums: "how much lies at or above t" is
one pass over the row (pivot search: FlashInfer, "Sorting-Free GPU Kernels for LLM Sampling", 2025). Floats compared as
integers of the same order make every threshold exact. The draw is an exponential race (the Gumbel-max trick): over the
tokens left, the smallest E_i / p_i, with E_i a hash of the row's key and the token id.

Plain: a full sort, with token ids, of every row. Here a row is cut into chunks, one program each, in four launches:

    extremes    the largest logit of a chunk and its token; one program more a row puts 256 of its logits in order
    sums        for 16 pivots at ranks of those, dense at the top: tokens (top-k), mass (top-p) at or above each
    threshold   two pivots enclose the threshold: the chunk's logits between them go to a list. The last program of a
                row to finish searches the list, eight pivots a step: at most 6 steps in 16-bit logits, 11 in float32
    draw        the race in the chunk; the last program of a row compares the chunks' best, the first of equals wins

The tokens between neighbouring pivots are about 1 in 250 of the row at the top, 1 in 11 lower down. They may be any
number: what the list (a quarter of a row) cannot hold is searched in the row itself, slowly. In the two launches in the
middle, rows without limits return at once, and greedy rows in the last one too. Nothing waits for the host and no grid
depends on data: a CUDA graph may hold it.

Always the same tokens: a row is cut in the same places in any batch. Masses are float32 in a chunk, summed over chunks
in float64 in their order. The list's order is not fixed, so its masses are summed as integers of 2^-40, where order
does not matter. A token belongs to the nucleus when the mass above it is below p by these sums, 1e-7 or so from
exact; the plain way's float32 running sum is no nearer. Ties with a threshold stay in, and -0 ties with 0.

Work, in instructions an element: extremes 10; sums 3 a pivot (compare, select, add), 20 for load, key and exponential,
8 for the sum across threads; threshold 40, most of them for the prefix sum that places the list's entries; draw 90
(two rounds of hash, two logarithms). 64 rows of 128,256 are 8.2 M elements, 0.28 us an instruction on 132
multiprocessors of 128 lanes at 1.755 GHz: 215 instructions are 60 us, 90 at two thirds of that rate, with the search of
the list below 10. From memory the row is read once (16 MB, 4 us), then from the L2. One row is 32 programs a launch,
each a few microseconds long: about 25 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels._rows import check_float, on_device_of
from kernels._sample import (
    PIVOTS,
    SAMPLE,
    bracket,
    exponential,
    inverse_of,
    largest_of_row,
    ordered,
    parameters,
    pivots_of_row,
    sort_sample,
    sums_of_chunk,
    threshold,
    winner,
)

#: Tokens a program. A row is cut in the same places whatever the batch, so that its sums and its draw are too.
_CHUNK = 4096
#: A row's counters: candidates written, programs done with them, programs done with the draw; then its threshold.
_COUNTERS = tl.constexpr(4)
_UNLIMITED = tl.constexpr(-2147483648)


class Launch(NamedTuple):
    """The shape of a launch: tokens a turn of a program's loop, and warps."""

    tile: int
    warps: int


#: A tile of the sums is held once a pivot, one of the candidates once a pivot of a step, in registers.
LAUNCHES = {
    "extremes_kernel": Launch(_CHUNK, 8),
    "sums_kernel": Launch(256, 4),
    "threshold_kernel": Launch(1024, 8),
    "draw_kernel": Launch(1024, 4),
}


class Shape(NamedTuple):
    """How a row is cut up, and where its parts lie in its workspace; the same arithmetic as in the kernels."""

    chunk: int
    chunks: int
    slots: int  # chunks, up to the next power of two
    shift: int

    @property
    def ints(self) -> int:
        """Counters, the sample in order, the token of each chunk, counts by chunk and pivot."""
        return _COUNTERS.value + SAMPLE.value + self.slots * (1 + PIVOTS.value)

    @property
    def floats(self) -> int:
        """The largest logit of each chunk, its best in the race, masses by chunk and pivot."""
        return self.slots * (2 + PIVOTS.value)


@triton.jit
def extremes_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, ints_ptr, floats_ptr, stride, vocab, chunks,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """The largest logit of a chunk, with NaN as inf, and its first token; one program more a row orders a sample."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    ints_ptr += row * INTS
    floats_ptr += row * FLOATS
    if chunk == chunks:
        _inverse, _k, _p, by_count, by_mass = parameters(temperatures_ptr, top_ks_ptr, top_ps_ptr, row, vocab)
        tl.store(ints_ptr + tl.arange(0, _COUNTERS), tl.where(tl.arange(0, _COUNTERS) == 3, _UNLIMITED, 0))
        if by_count | by_mass:
            sort_sample(row_ptr, vocab, ints_ptr + _COUNTERS, SHIFT)
    else:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        value, first = winner(tl.where(x == x, x, float("inf")), token)
        tl.store(floats_ptr + chunk, value)
        tl.store(ints_ptr + _COUNTERS + SAMPLE + chunk, first)


@triton.jit
def sums_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, ints_ptr, floats_ptr, stride, vocab, chunks,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Counts, masses or both of a chunk at or above each pivot, as far as the row's limits ask for them."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    ints_ptr += row * INTS
    floats_ptr += row * FLOATS
    place = tl.arange(0, PIVOTS)
    inverse, _k, _p, by_count, by_mass = parameters(temperatures_ptr, top_ks_ptr, top_ps_ptr, row, vocab)
    if by_count | by_mass:
        best, sane = largest_of_row(floats_ptr, chunks, CHUNKS)
        pivots = pivots_of_row(ints_ptr + _COUNTERS, SHIFT)
        if sane & by_count:
            counts = sums_of_chunk(row_ptr, chunk * CHUNK, vocab, pivots, best, inverse, True, SHIFT, CHUNK, TILE)
            tl.store(ints_ptr + _COUNTERS + SAMPLE + CHUNKS + chunk * PIVOTS + place, counts)
        if sane & by_mass:
            masses = sums_of_chunk(row_ptr, chunk * CHUNK, vocab, pivots, best, inverse, False, SHIFT, CHUNK, TILE)
            tl.store(floats_ptr + 2 * CHUNKS + chunk * PIVOTS + place, masses)


@triton.jit
def threshold_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, ints_ptr, floats_ptr, list_ptr, stride, vocab, chunks, room,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Lists the logits of a chunk that lie in the bracket; the last program of a row finds the threshold among them.

    When the list has no ``room``, the threshold is searched in the row itself.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    ints_ptr += row * INTS
    floats_ptr += row * FLOATS
    list_ptr += row * room
    place = tl.arange(0, PIVOTS)
    inverse, top_k, top_p, by_count, by_mass = parameters(temperatures_ptr, top_ks_ptr, top_ps_ptr, row, vocab)
    if by_count | by_mass:
        best, sane = largest_of_row(floats_ptr, chunks, CHUNKS)
        if sane:
            pivots = pivots_of_row(ints_ptr + _COUNTERS, SHIFT)
            one = tl.arange(0, CHUNKS)
            table = one[:, None] * PIVOTS + place[None, :]
            counts_ptr = ints_ptr + _COUNTERS + SAMPLE + CHUNKS
            counts = tl.sum(
                tl.load(counts_ptr + table, mask=(one < tl.where(by_count, chunks, 0))[:, None], other=0), 0
            )
            masses = tl.load(
                floats_ptr + 2 * CHUNKS + table, mask=(one < tl.where(by_mass, chunks, 0))[:, None], other=0.0
            )
            masses = tl.sum(masses.to(tl.float64), 0)
            low, high, _high_by_count = bracket(pivots, counts, masses, best, top_k, top_p, by_count, by_mass, SHIFT)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
            order = ordered(x.to(tl.float32), SHIFT)
            # A bracket of one key is the threshold.
            inside = ((token < vocab) & (order >= low) & (order < high) & (high > low + 1)).to(tl.int32)
            found = tl.sum(inside, 0)
            if found > 0:
                slot = tl.atomic_add(ints_ptr, found, sem="relaxed") + tl.cumsum(inside, 0) - 1
                tl.store(list_ptr + slot, x, mask=(inside > 0) & (slot < room))
            tl.debug_barrier()
            if tl.atomic_add(ints_ptr + 1, 1, sem="acq_rel") == chunks - 1:
                tl.debug_barrier()
                from_ptr = list_ptr
                many = tl.load(ints_ptr, cache_modifier=".cg")
                if many > room:
                    from_ptr = row_ptr
                    many = vocab
                floor = threshold(
                    from_ptr, many, pivots, counts, masses, best, inverse, top_k, top_p, by_count, by_mass,
                    SHIFT, TILE,
                )  # fmt: skip
                tl.store(ints_ptr + 3, floor)


@triton.jit
def draw_kernel(
    logits_ptr, temperatures_ptr, keys_ptr, ints_ptr, floats_ptr, out_ptr, stride, vocab, chunks,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The race in a chunk, and in the last program of a row that among chunks; a greedy row has its token already."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    ints_ptr += row * INTS
    floats_ptr += row * FLOATS
    tokens_ptr = ints_ptr + _COUNTERS + SAMPLE
    one = tl.arange(0, CHUNKS)
    temperature = tl.load(temperatures_ptr + row)
    best, sane = largest_of_row(floats_ptr, chunks, CHUNKS)
    if sane & (temperature > 0.0):
        inverse = inverse_of(temperature)
        key = tl.load(keys_ptr + row).to(tl.uint32)
        floor = tl.load(ints_ptr + 3)
        value = tl.full([TILE], float("-inf"), tl.float32)
        index = tl.full([TILE], 2147483647, tl.int32)
        lane = chunk * CHUNK + tl.arange(0, TILE)
        for start in tl.range(0, CHUNK, TILE):
            token = start + lane
            x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            raced = (x - best) * inverse - tl.log(exponential(key, token))
            better = (ordered(x, SHIFT) >= floor) & (token < vocab) & (raced > value)
            value = tl.where(better, raced, value)
            index = tl.where(better, token, index)
        raced, token = winner(value, index)
        # The counts are used up: their place takes the token of each chunk.
        tl.store(floats_ptr + CHUNKS + chunk, raced)
        tl.store(tokens_ptr + CHUNKS + chunk, token)
        tl.debug_barrier()
        if tl.atomic_add(ints_ptr + 2, 1, sem="acq_rel") == chunks - 1:
            tl.debug_barrier()
            values = tl.load(floats_ptr + CHUNKS + one, mask=one < chunks, other=float("-inf"), cache_modifier=".cg")
            tokens = tl.load(tokens_ptr + CHUNKS + one, mask=one < chunks, other=0, cache_modifier=".cg")
            raced, token = winner(values, tokens)
            tl.store(out_ptr + row, token.to(tl.int64))
    elif chunk == 0:
        values = tl.load(floats_ptr + one, mask=one < chunks, other=float("-inf"))
        tokens = tl.load(tokens_ptr + one, mask=one < chunks, other=0)
        value, token = winner(values, tokens)
        tl.store(out_ptr + row, tl.where(sane, token, -1).to(tl.int64))


def sample_rows(
    logits_BV: torch.Tensor,
    temperatures_B: torch.Tensor,
    top_ks_B: torch.Tensor,
    top_ps_B: torch.Tensor,
    keys_B: torch.Tensor,
) -> torch.Tensor:
    """One token a row, int64 (B,); -1 for a row with NaN, or whose largest logit is not finite.

    Args:
        logits_BV: float32, float16 or bfloat16; rows contiguous.
        temperatures_B: float32; 0 takes the largest logit (the first of equals). top_ks_B: int64; 0 keeps all.
        top_ps_B: float32, above 0; 1 keeps all. keys_B: int64, 32 bits of hash that the noise of the row comes from.

    Raises:
        ValueError: a shape, stride or dtype outside what is said here; the argument is named.
    """
    check_float("logits", logits_BV)
    if logits_BV.ndim != 2 or not logits_BV.shape[1] or logits_BV.stride(1) != 1:
        raise ValueError(
            f"logits: shape {tuple(logits_BV.shape)}, strides {logits_BV.stride()}; contiguous rows are needed"
        )
    rows, vocab = logits_BV.shape
    for name, tensor, dtype in (
        ("temperatures", temperatures_B, torch.float32),
        ("top_ks", top_ks_B, torch.int64),
        ("top_ps", top_ps_B, torch.float32),
        ("keys", keys_B, torch.int64),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != (rows,) or tensor.device != logits_BV.device:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}; {dtype} ({rows},) beside the logits is needed"
            )
    out = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    if not rows:
        return out
    shape = row_shape(vocab, logits_BV.dtype)
    room = triton.cdiv(vocab, 4)
    ints = torch.empty(rows, shape.ints, dtype=torch.int32, device=logits_BV.device)
    floats = torch.empty(rows, shape.floats, dtype=torch.float32, device=logits_BV.device)
    candidates = torch.empty(rows, room, dtype=logits_BV.dtype, device=logits_BV.device)
    limits = (temperatures_B, top_ks_B, top_ps_B)
    cut = {
        "SHIFT": shape.shift, "CHUNK": shape.chunk, "CHUNKS": shape.slots, "INTS": shape.ints, "FLOATS": shape.floats
    }  # fmt: skip
    stride, chunks = logits_BV.stride(0), shape.chunks
    tile = {name: min(launch.tile, shape.chunk) for name, launch in LAUNCHES.items()}
    with on_device_of(logits_BV):
        extremes_kernel[(rows, chunks + 1)](
            logits_BV, *limits, ints, floats, stride, vocab, chunks,
            **cut, num_warps=LAUNCHES["extremes_kernel"].warps,
        )  # fmt: skip
        sums_kernel[(rows, chunks)](
            logits_BV, *limits, ints, floats, stride, vocab, chunks,
            **cut, TILE=tile["sums_kernel"], num_warps=LAUNCHES["sums_kernel"].warps,
        )  # fmt: skip
        threshold_kernel[(rows, chunks)](
            logits_BV, *limits, ints, floats, candidates, stride, vocab, chunks, room,
            **cut, TILE=tile["threshold_kernel"], num_warps=LAUNCHES["threshold_kernel"].warps,
        )  # fmt: skip
        draw_kernel[(rows, chunks)](
            logits_BV, temperatures_B, keys_B, ints, floats, out, stride, vocab, chunks,
            **cut, TILE=tile["draw_kernel"], num_warps=LAUNCHES["draw_kernel"].warps,
        )  # fmt: skip
    return out


def row_shape(vocab: int, dtype: torch.dtype) -> Shape:
    """A short row is one chunk, no longer than it must be."""
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, chunk)
    shift = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[dtype]
    return Shape(chunk, chunks, triton.next_power_of_2(chunks), shift)
