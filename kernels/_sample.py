"""What the sampling kernels are made of: floats ordered as integers, the noise of the race, sums at or above pivots.

A row's parameters say what it needs: a threshold by count (top-k), by mass (top-p), both, or none.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Pivots of the pass over the whole row; the last lies at or below everything.
PIVOTS = tl.constexpr(16)
#: Tokens of a row, evenly spaced, whose order gives the pivots.
SAMPLE = tl.constexpr(256)
#: Pivots of a step over the candidates.
STEPS = tl.constexpr(8)
#: A mass of one, in the integers that the candidates' masses are summed in: their sum has no order.
ONE = tl.constexpr(2.0**40)

_BELOW_ALL = tl.constexpr(-2147483648)
_NO_TOKEN = tl.constexpr(2147483647)
#: -inf ordered, all 32 bits of it.
_LOWEST = tl.constexpr(-2139095041)


@triton.jit
def ordered(x, SHIFT: tl.constexpr):
    """int32 that are ordered as the floats are, -0 as 0; without the SHIFT low bits that a narrower dtype has not."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _mix(x):
    """A permutation of 32 bits without visible pattern ("lowbias32", C. Wellons, 2018)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def exponential(key, token):
    """A standard exponential number; small ones, which decide the race, keep all 32 bits."""
    token = token.to(tl.uint32)
    bits = _mix(_mix(key ^ (token * 0x9E3779B9)) + token)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    return tl.where(u < 0.001, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))


@triton.jit
def inverse_of(temperature):
    """1 / T, finite for any T, so that the largest logit's distance of 0 stays 0."""
    return 1.0 / tl.maximum(temperature, 2e-38)


@triton.jit
def parameters(temperatures_ptr, top_ks_ptr, top_ps_ptr, row, vocab):
    """1 / temperature, k, p, and whether each of the two limits anything in this row."""
    temperature = tl.load(temperatures_ptr + row)
    noisy = temperature > 0.0
    inverse = inverse_of(temperature)
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    return inverse, top_k, top_p, noisy & (top_k > 0) & (top_k < vocab), noisy & (top_p < 1.0)


@triton.jit
def largest_of_row(bests_ptr, chunks, CHUNKS: tl.constexpr):
    """The largest logit from those of the chunks, and whether it is finite: a chunk with NaN has told inf."""
    chunk = tl.arange(0, CHUNKS)
    bests = tl.load(bests_ptr + chunk, mask=chunk < chunks, other=float("-inf"))
    best = tl.max(bests, 0)
    return best, (best > float("-inf")) & (best < float("inf"))


@triton.jit
def winner(values, tokens):
    """The largest value and, among equals, the first token."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, tokens, _NO_TOKEN), 0)


@triton.jit
def _sampled(row_ptr, vocab, spot, SHIFT: tl.constexpr):
    token = (2 * spot.to(tl.int64) + 1) * vocab // (2 * SAMPLE)
    return ordered(tl.load(row_ptr + token).to(tl.float32), SHIFT)


@triton.jit
def sort_sample(row_ptr, vocab, sorted_ptr, SHIFT: tl.constexpr):
    """Writes SAMPLE evenly spaced keys of the row, largest first: each goes to the place that its rank counts out.

    Whatever the sample, what follows is right; only its speed varies.
    """
    spot = tl.arange(0, SAMPLE)
    order = _sampled(row_ptr, vocab, spot, SHIFT)
    rank = tl.zeros([SAMPLE], tl.int32)
    for start in tl.range(0, SAMPLE, 32):
        beside = start + tl.arange(0, 32)
        other = _sampled(row_ptr, vocab, beside, SHIFT)
        before = (other[None, :] == order[:, None]) & (beside[None, :] < spot[:, None])
        rank += tl.sum(((other[None, :] > order[:, None]) | before).to(tl.int32), 1)
    tl.store(sorted_ptr + rank, order)


@triton.jit
def pivots_of_row(sorted_ptr, SHIFT: tl.constexpr):
    """Keys of ranks 0, 1, 3, 7, 15, 31 in the sample, where thresholds mostly lie, then every 24; the last is -inf."""
    place = tl.arange(0, PIVOTS)
    rank = tl.where(place < 6, (1 << tl.minimum(place, 6)) - 1, 31 + 24 * (place - 5))
    pivots = tl.load(sorted_ptr + rank, mask=place < PIVOTS - 1, other=0)
    return tl.where(place < PIVOTS - 1, pivots, _LOWEST >> SHIFT)


@triton.jit
def sums_of_chunk(
    row_ptr, first, vocab, pivots, best, inverse,
    COUNT: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For each pivot, how many of the chunk's tokens, or how much exp((x - best) / T), lie at or above it."""
    acc = tl.zeros([PIVOTS, TILE], tl.int32 if COUNT else tl.float32)
    lane = first + tl.arange(0, TILE)
    following = tl.load(row_ptr + lane, mask=lane < vocab, other=float("-inf"))
    for start in tl.range(0, CHUNK, TILE):
        token = start + lane
        x = following.to(tl.float32)
        following = tl.load(row_ptr + token + TILE, mask=token + TILE < vocab, other=float("-inf"))
        order = tl.where(token < vocab, ordered(x, SHIFT), _BELOW_ALL)
        above = order[None, :] >= pivots[:, None]
        if COUNT:
            acc += above.to(tl.int32)
        else:
            acc += tl.where(above, tl.exp((x - best) * inverse)[None, :], 0.0)
    return tl.sum(acc, 1)


@triton.jit
def bracket(pivots, counts, masses, best, top_k, top_p, by_count, by_mass, SHIFT: tl.constexpr):
    """Where the thresholds lie, from sums at or above the pivots: [low, high), and the count's own upper end.

    By mass alone, the total is known, and two neighbouring pivots enclose the threshold. With both limits the total is
    the mass of what top-k leaves, known to lie between two sums; then [low, high) holds both thresholds.
    """
    lowest = tl.min(pivots, 0)
    above_all = ordered(best, SHIFT) + 1
    low = lowest
    high_by_count = above_all
    most = tl.max(masses, 0)
    least = most
    if by_count:
        low = tl.max(tl.where(counts >= top_k, pivots, lowest), 0)
        high_by_count = tl.min(tl.where(pivots > low, pivots, above_all), 0)
        most = tl.max(tl.where(pivots == low, masses, 0.0), 0)
        least = tl.max(tl.where(pivots >= high_by_count, masses, 0.0), 0)
    high = high_by_count
    if by_mass:
        high = tl.min(tl.where(masses < top_p * least, pivots, above_all), 0)
        if not by_count:
            low = tl.max(tl.where(masses >= top_p * most, pivots, lowest), 0)
    return low, high, high_by_count


@triton.jit
def _sums_of_candidates(
    from_ptr, many, high, pivots, best, inverse, COUNT: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """int64: for each pivot, how many of the entries below ``high`` lie at or above it, or their mass in 1 / ONE."""
    total = tl.zeros([STEPS], tl.int64)
    for start in tl.range(0, many, TILE):
        entry = start + tl.arange(0, TILE)
        x = tl.load(from_ptr + entry, mask=entry < many, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
        order = ordered(x, SHIFT)
        order = tl.where((entry < many) & (order < high), order, _BELOW_ALL)
        weight = tl.full([TILE], 1, tl.int64) if COUNT else (tl.exp((x - best) * inverse) * ONE).to(tl.int64)
        total += tl.sum(tl.where(order[None, :] >= pivots[:, None], weight[None, :], 0), 1)
    return total


@triton.jit
def _search(
    from_ptr, many, high, low, end, best, inverse, needed, COUNT: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """The largest threshold in [low, end) at or above which, up to ``high``, ``needed`` still lies; else ``low``."""
    step_of = tl.arange(0, STEPS).to(tl.int64)
    low = low.to(tl.int64)
    end = end.to(tl.int64)
    while end - low > 1:
        step = (end - low + STEPS - 1) // STEPS
        pivots = tl.minimum(low + step * step_of, end - 1)
        sums = _sums_of_candidates(from_ptr, many, high, pivots.to(tl.int32), best, inverse, COUNT, SHIFT, TILE)
        # The first pivot is the old bound, at or above which enough lies already.
        found = tl.max(tl.where((sums.to(tl.float64) >= needed) | (step_of == 0), pivots, low), 0)
        end = tl.minimum(end, tl.min(tl.where(pivots > found, pivots, end), 0))
        low = found
    return low.to(tl.int32)


@triton.jit
def threshold(
    from_ptr, many, pivots, counts, masses, best, inverse, top_k, top_p, by_count, by_mass,
    SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The smallest key that is kept, from the entries in the bracket and the sums above it; see ``bracket``.

    ``from_ptr`` and ``many``: those entries, in any order, or the whole row, of which the rest is passed over.
    """
    low, high, high_by_count = bracket(pivots, counts, masses, best, top_k, top_p, by_count, by_mass, SHIFT)
    if by_count:
        count_above = tl.max(tl.where(pivots >= high, counts, 0), 0)
        needed = (top_k - count_above).to(tl.float64)
        low = _search(from_ptr, many, high, low, high_by_count, best, inverse, needed, True, SHIFT, TILE)
    if by_mass:
        mass_above = tl.max(tl.where(pivots >= high, masses, 0.0), 0)
        total = tl.max(masses, 0)
        if by_count:
            here = tl.zeros([STEPS], tl.int32) + low
            inside = tl.max(_sums_of_candidates(from_ptr, many, high, here, best, inverse, False, SHIFT, TILE), 0)
            total = mass_above + inside.to(tl.float64) / ONE
        needed = (top_p * total - mass_above) * ONE
        low = _search(from_ptr, many, high, low, high, best, inverse, needed, False, SHIFT, TILE)
    return low
