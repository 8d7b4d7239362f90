"""Draws one token a row from logits: temperature, top-k, top-p, without sorting and without waiting for the host.

    keep the k largest logits; of these the fewest most likely that reach p together; draw from what is left at 1/T

Both limits are a threshold on the logit, and a threshold needs no order, only sums: "how much lies at or above t" is
one pass over the row. Floats compared as integers of the same order give 32 bits to find; each pass tries seven
pivots and so settles three of them, eleven passes at most (the idea of pivot search is FlashInfer's, "Sorting-Free GPU
Kernels for LLM Sampling", 2025; here every bit is settled, so that the nucleus is exact). A row is 0.25 to 0.5 MB: it
is read from device memory once and then from the L2. A full sort of the same row moves it a dozen times with indices.

The draw is an exponential race (the Gumbel-max trick): over the tokens left, the smallest E_i / p_i. E_i comes from a
hash of the row's key and the token id, so that a row's draw depends on its key and its logits alone, not on the batch
and not on the device. Ties with the threshold stay in.

One program a row: the rows of a decode batch are fewer than the multiprocessors, and the arithmetic of a pass (a
comparison and a sum for each pivot) is what takes the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._rows import check_float, on_device_of

_TILE = 2048
_WARPS = 16
_LOWEST = tl.constexpr(-2147483648)


@triton.jit
def _ordered(x):
    """int32 that are ordered as the floats are."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mix(x):
    """A permutation of 32 bits without visible pattern ("lowbias32", C. Wellons, 2018)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _exponential(key, token):
    """A standard exponential number; small ones, which decide the race, keep all 32 bits."""
    token = token.to(tl.uint32)
    bits = _mix(_mix(key ^ (token * 0x9E3779B9)) + token)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    return tl.where(u < 0.001, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))


@triton.jit
def _mass_above(row_ptr, vocab, floor, pivots, best, inverse, COUNT: tl.constexpr, TILE: tl.constexpr):
    """For each pivot, how many tokens, or how much exp((x - best) / T), lies at or above it and the floor."""
    acc = tl.zeros([8, TILE], tl.float32)
    for start in tl.range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        order = _ordered(x)
        weight = tl.where((token < vocab) & (order >= floor), 1.0, 0.0)
        if not COUNT:
            weight *= tl.exp((x - best) * inverse)
        acc += tl.where(order[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(acc, 1)


@triton.jit
def _threshold(row_ptr, vocab, floor, best, inverse, target, share, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest threshold, at least ``floor``, at or above which ``target`` (or ``share`` of all) still lies."""
    step_of = tl.arange(0, 8).to(tl.int64)
    low = floor.to(tl.int64)
    end = _ordered(best).to(tl.int64) + 1
    if not COUNT:
        everything = _mass_above(row_ptr, vocab, floor, (low + step_of * 0).to(tl.int32), best, inverse, COUNT, TILE)
        target = share * tl.max(everything, 0)
    while end - low > 1:
        step = (end - low + 7) // 8
        pivots = tl.minimum(low + step * step_of, end - 1)
        mass = _mass_above(row_ptr, vocab, floor, pivots.to(tl.int32), best, inverse, COUNT, TILE)
        # The first pivot is the old bound, at or above which enough lies already.
        found = tl.max(tl.where((mass >= target) | (step_of == 0), pivots, low), 0)
        end = tl.minimum(end, tl.min(tl.where(pivots > found, pivots, end), 0))
        low = found
    return low.to(tl.int32)


@triton.jit
def sample_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, keys_ptr, out_ptr, stride, vocab, TILE: tl.constexpr
):  # fmt: skip
    """One row; temperature 0 takes the largest logit; -1 when the largest is not a finite number."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    lane = tl.arange(0, TILE)

    value = tl.full([TILE], float("-inf"), tl.float32)
    index = tl.zeros([TILE], tl.int32)
    broken = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE):
        token = start + lane
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        broken |= (x != x).to(tl.int32)
        better = x > value
        value = tl.where(better, x, value)
        index = tl.where(better, token, index)
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, index, 2147483647), 0)
    sane = (tl.max(broken, 0) == 0) & (best > float("-inf")) & (best < float("inf"))

    temperature = tl.load(temperatures_ptr + row)
    if sane & (temperature > 0.0):
        inverse = 1.0 / temperature
        top_k = tl.load(top_ks_ptr + row).to(tl.int32)
        top_p = tl.load(top_ps_ptr + row)
        key = tl.load(keys_ptr + row).to(tl.uint32)
        floor = tl.full([], _LOWEST, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            floor = _threshold(row_ptr, vocab, floor, best, inverse, top_k.to(tl.float32), 0.0, True, TILE)
        if top_p < 1.0:
            floor = _threshold(row_ptr, vocab, floor, best, inverse, 0.0, top_p, False, TILE)
        value = tl.full([TILE], float("-inf"), tl.float32)
        for start in tl.range(0, vocab, TILE):
            other = start + lane
            x = tl.load(row_ptr + other, mask=other < vocab, other=float("-inf")).to(tl.float32)
            raced = (x - best) * inverse - tl.log(_exponential(key, other))
            better = (_ordered(x) >= floor) & (other < vocab) & (raced > value)
            value = tl.where(better, raced, value)
            index = tl.where(better, other, index)
        winner = tl.max(value, 0)
        token = tl.min(tl.where(value == winner, index, 2147483647), 0)
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
    if rows:
        with on_device_of(logits_BV):
            sample_kernel[(rows,)](
                logits_BV, temperatures_B, top_ks_B, top_ps_B, keys_B, out, logits_BV.stride(0), vocab,
                TILE=min(_TILE, max(16, triton.next_power_of_2(vocab))), num_warps=_WARPS,
            )  # fmt: skip
    return out
