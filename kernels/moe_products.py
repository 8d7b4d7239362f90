"""Products of ragged rows with the weights of their experts: one grid for all experts, whatever the host does not know.

Rows lie expert after expert (:mod:`kernels.moe_order`), R_e of them for expert e. Three forms of product:

    gated     act[r, f]  = silu(x[t(r)] · gate_e[f]) · (x[t(r)] · up_e[f])     two sums in registers, one pass over x
    rows      out[r, n]  = Σ_k a[r, k] · weight_e[n, k]   (or weight_e[k, n])
    weights   out_e[m, n] = Σ_{r of e} a[r, m] · b[r, n]    the sum is ragged instead; an expert without rows gets zeros

and the backward of the gate, which is a product of rows with an end of its own. Where a row's values are those of its
token, the kernel loads the token's row: no sorted copy of them is written and read.

Design. A tile's expert and rows come from the order's table; a program without a tile returns. Loads carry no mask over
rows or columns (those outside are loaded from the last row inside, and not stored), none over the sum where blocks
divide it, so that they are plain 16-byte copies into shared memory, `num_stages` tiles ahead. Consecutive programs take
GROUP tiles of rows for one block of columns, which share it in the L2.

With few rows an expert the product binds to memory: every weight is read for a handful of rows. Then the product is
turned, weights as its rows and tokens as its 16 or more columns, so that no multiply of the tensor cores is spent on
rows that are not there, and small tiles keep several programs of a multiprocessor loading.

Accumulation is float32, in one order: the same from run to run.

Sources: Gale et al., "MegaBlocks", 2023, section 5.1 (products over ragged groups); Kwon et al., vLLM's fused_moe and
Guo et al., "SonicMoE", 2025 (tokens gathered by the product; the router's gradient from the gate's backward).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(tiles_ptr, max_tiles, blocks, GROUP: tl.constexpr):
    """This program's expert (-1: none), first row, row after the last, and block of columns."""
    program = tl.program_id(0)
    width = GROUP * blocks
    first = program // width * GROUP
    size = tl.minimum(max_tiles - first, GROUP)
    tile = first + program % width % size
    expert = tl.load(tiles_ptr + tile)
    row = tl.load(tiles_ptr + max_tiles + tile)
    end = tl.load(tiles_ptr + 2 * max_tiles + tile)
    return expert, row, end, program % width // size


@triton.jit
def _dot(a, b, acc, TURNED: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr):
    """acc + a · bᵀ for a (rows, sum) and b (columns, sum), or its transpose."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    if WIDE:  # the interpreter multiplies bfloat16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(b, a.T, acc, input_precision=precision) if TURNED else tl.dot(a, b.T, acc, input_precision=precision)


@triton.jit
def _load(pointers, start, length, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """A tile (rows, sum), contiguous in the sum: `start` and on of `length`, zeros beyond. EVEN: nothing is beyond."""
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(start + tl.arange(0, BLOCK) < length)[None, :], other=0.0)
    return tile


@triton.jit
def _load_across(pointers, start, length, known, BLOCK: tl.constexpr, EVEN: tl.constexpr, ALL: tl.constexpr):
    """A tile (sum, columns), contiguous in the columns, of which `known` are there. ALL: all are.

    Columns are masked and not clamped as rows are: clamped ones are not contiguous, and would be copied one by one.
    """
    if EVEN and ALL:
        tile = tl.load(pointers)
    elif EVEN:
        tile = tl.load(pointers, mask=known[None, :], other=0.0)
    else:
        inside = start + tl.arange(0, BLOCK) < length
        tile = tl.load(pointers, mask=inside[:, None] & known[None, :], other=0.0)
    return tile


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    return tl.zeros([COLUMNS, ROWS] if TURNED else [ROWS, COLUMNS], tl.float32)


@triton.jit(do_not_specialize=["order_ptr", "tiles_ptr", "max_tiles"])
def gated_kernel(
    x_ptr, weight_ptr, act_ptr, kept_ptr, order_ptr, tiles_ptr, max_tiles, inner, width, choices, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """act (R, F) of tokens' x (T, D) and weights (E, 2F, D), gate above up; KEEP: gate and up (R, 2F) for backward.

    `order` names a row's pair, pair // choices its token.
    """
    expert, first, end, block = _place(tiles_ptr, max_tiles, tl.cdiv(inner, COLUMNS), GROUP)
    if expert < 0:
        return
    row = first + tl.arange(0, ROWS)
    token = tl.load(order_ptr + tl.minimum(row, end - 1)) // choices
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, BLOCK)
    x = x_ptr + token.to(tl.int64)[:, None] * x_stride + lane[None, :]
    gate_row = expert.to(tl.int64) * 2 * inner + tl.minimum(column, inner - 1)
    gate = weight_ptr + gate_row[:, None] * width + lane[None, :]
    up = gate + tl.cast(inner, tl.int64) * width
    gate_acc = _zeros(ROWS, COLUMNS, TURNED)
    up_acc = _zeros(ROWS, COLUMNS, TURNED)
    for start in tl.range(0, width, BLOCK):
        tokens = _load(x, start, width, BLOCK, EVEN)
        gate_acc = _dot(tokens, _load(gate, start, width, BLOCK, EVEN), gate_acc, TURNED, EXACT, WIDE)
        up_acc = _dot(tokens, _load(up, start, width, BLOCK, EVEN), up_acc, TURNED, EXACT, WIDE)
        x += BLOCK
        gate += BLOCK
        up += BLOCK
    if TURNED:
        gate_acc, up_acc = gate_acc.T, up_acc.T
    inside = (row < end)[:, None] & (column < inner)[None, :]
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    if KEEP:
        kept = kept_ptr + row.to(tl.int64)[:, None] * (2 * inner) + column[None, :]
        tl.store(kept, gate_acc.to(dtype), mask=inside)
        tl.store(kept + inner, up_acc.to(dtype), mask=inside)
    act = gate_acc / (1.0 + tl.exp(-gate_acc)) * up_acc
    tl.store(act_ptr + row.to(tl.int64)[:, None] * inner + column[None, :], act.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tiles_ptr", "max_tiles"])
def rows_kernel(
    a_ptr, weight_ptr, out_ptr, tiles_ptr, max_tiles, columns, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ACROSS: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, ALL: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out (R, N) of a (R, K) and weights (E, N, K), or (E, K, N) with ACROSS."""
    expert, first, end, block = _place(tiles_ptr, max_tiles, tl.cdiv(columns, COLUMNS), GROUP)
    if expert < 0:
        return
    row = first + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, BLOCK)
    a = a_ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * length + lane[None, :]
    known = column < columns
    weight = weight_ptr + expert.to(tl.int64) * columns * length
    if ACROSS:
        weight += lane[:, None] * columns + column[None, :]
    else:
        weight += tl.minimum(column, columns - 1)[:, None] * length + lane[None, :]
    acc = _zeros(ROWS, COLUMNS, TURNED)
    for start in tl.range(0, length, BLOCK):
        rows = _load(a, start, length, BLOCK, EVEN)
        if ACROSS:
            tile = _load_across(weight, start, length, known, BLOCK, EVEN, ALL)
            acc = _dot(rows, tile.T, acc, TURNED, EXACT, WIDE)
            weight += BLOCK * columns
        else:
            acc = _dot(rows, _load(weight, start, length, BLOCK, EVEN), acc, TURNED, EXACT, WIDE)
            weight += BLOCK
        a += BLOCK
    if TURNED:
        acc = acc.T
    out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & known[None, :])


@triton.jit
def _halves(x):
    """Its left and its right columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _gate_backward(g, p, kept, grad_kept, weighted, real, start, inner):
    """Writes what `gate_backward_kernel` does for g's columns, from `start` on; returns the rows' sums of g · act."""
    column = start + tl.arange(0, g.shape[1])[None, :]
    inside = real & (column < inner)
    gate = tl.load(kept + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(kept + inner + column, mask=inside, other=0.0).to(tl.float32)
    # From the exponential that does not overflow, and without 1 - sigmoid, which would cancel.
    small = tl.exp(-tl.abs(gate))
    share = 1.0 / (1.0 + small)
    sigmoid = tl.where(gate < 0.0, small * share, share)
    silu = gate * sigmoid
    act = silu * up
    dtype: tl.constexpr = grad_kept.dtype.element_ty
    tl.store(weighted + column, (p * act).to(dtype), mask=inside)
    total = tl.sum(tl.where(inside, g * act, 0.0), 1)
    g *= p
    grad_gate = g * up * (sigmoid + gate * (small * share * share))
    tl.store(grad_kept + column, grad_gate.to(dtype), mask=inside)
    tl.store(grad_kept + inner + column, (g * silu).to(dtype), mask=inside)
    return total


@triton.jit
def _gate_backward_tile(g, p, kept, grad_kept, weighted, real, start, inner):
    """A quarter of the columns after the other: all at once would not fit the registers."""
    left, right = _halves(g)
    QUARTER: tl.constexpr = g.shape[1] // 4
    first, second = _halves(left)
    total = _gate_backward(first, p, kept, grad_kept, weighted, real, start, inner)
    total += _gate_backward(second, p, kept, grad_kept, weighted, real, start + QUARTER, inner)
    third, fourth = _halves(right)
    total += _gate_backward(third, p, kept, grad_kept, weighted, real, start + 2 * QUARTER, inner)
    total += _gate_backward(fourth, p, kept, grad_kept, weighted, real, start + 3 * QUARTER, inner)
    return total


@triton.jit(do_not_specialize=["order_ptr", "tiles_ptr", "max_tiles", "pairs"])
def gate_backward_kernel(
    grad_ptr, weight_ptr, kept_ptr, router_ptr, grad_kept_ptr, weighted_ptr, parts_ptr, order_ptr, tiles_ptr,
    max_tiles, pairs, inner, width, choices, grad_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, ALL: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From the gradient of the layer's output (T, D) to those of gate and up (R, 2F), of weights (E, D, F).

    g[r, f] = Σ_d grad[t(r), d] · weight_e[d, f] is the gradient of act before the router's weight p[r]. Also written:
    p · act (R, F), which the gradient of the weights takes, and parts (blocks of F, P) of Σ_f g · act, which is the
    gradient of p: the result of the second product need not be kept for it.
    """
    expert, first, end, block = _place(tiles_ptr, max_tiles, tl.cdiv(inner, COLUMNS), GROUP)
    if expert < 0:
        return
    row = first + tl.arange(0, ROWS)
    pair = tl.load(order_ptr + tl.minimum(row, end - 1))
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, BLOCK)
    grad = grad_ptr + (pair // choices).to(tl.int64)[:, None] * grad_stride + lane[None, :]
    weight = weight_ptr + expert.to(tl.int64) * width * inner
    weight += lane[:, None] * inner + column[None, :]
    known = column < inner
    g = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, width, BLOCK):
        tile = _load_across(weight, start, width, known, BLOCK, EVEN, ALL)
        g = _dot(_load(grad, start, width, BLOCK, EVEN), tile.T, g, False, EXACT, WIDE)
        grad += BLOCK
        weight += BLOCK * inner

    p = tl.load(router_ptr + pair).to(tl.float32)[:, None]
    kept = kept_ptr + row.to(tl.int64)[:, None] * (2 * inner)
    grad_kept = grad_kept_ptr + row.to(tl.int64)[:, None] * (2 * inner)
    weighted = weighted_ptr + row.to(tl.int64)[:, None] * inner
    real = (row < end)[:, None]
    start = block * COLUMNS
    if COLUMNS > 128:
        left, right = _halves(g)
        part = _gate_backward_tile(left, p, kept, grad_kept, weighted, real, start, inner)
        part += _gate_backward_tile(right, p, kept, grad_kept, weighted, real, start + COLUMNS // 2, inner)
    else:
        part = _gate_backward_tile(g, p, kept, grad_kept, weighted, real, start, inner)
    tl.store(parts_ptr + block.to(tl.int64) * pairs + row, part, mask=row < end)


@triton.jit(do_not_specialize=["order_ptr", "ends_ptr"])
def weights_kernel(
    a_ptr, b_ptr, out_ptr, order_ptr, ends_ptr, m_size, n_size, choices, a_stride, b_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GATHER_A: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out (E, M, N): the sum over an expert's rows of a (R, M) times b (R, N), of which one holds tokens' rows.

    GATHER_A: a does, (T, M); else b, (T, N).
    """
    m_blocks = tl.cdiv(m_size, ROWS)
    n_blocks = tl.cdiv(n_size, COLUMNS)
    expert = tl.program_id(0) // (m_blocks * n_blocks)
    within = tl.program_id(0) % (m_blocks * n_blocks)
    m_first = within // (GROUP * n_blocks) * GROUP
    m_count = tl.minimum(m_blocks - m_first, GROUP)
    m_block = m_first + within % (GROUP * n_blocks) % m_count
    n_block = within % (GROUP * n_blocks) // m_count
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    m = m_block * ROWS + tl.arange(0, ROWS)
    n = n_block * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, BLOCK)
    m_known = m < m_size
    n_known = n < n_size
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        row = start + lane
        inside = row < end
        token = tl.load(order_ptr + row, mask=inside, other=0) // choices
        a = a_ptr + (token if GATHER_A else row).to(tl.int64)[:, None] * a_stride + m[None, :]
        b = b_ptr + (row if GATHER_A else token).to(tl.int64)[:, None] * b_stride + n[None, :]
        a_tile = tl.load(a, mask=inside[:, None] & m_known[None, :], other=0.0)
        b_tile = tl.load(b, mask=inside[:, None] & n_known[None, :], other=0.0)
        acc = _dot(a_tile.T, b_tile.T, acc, False, EXACT, WIDE)
    out = out_ptr + (expert.to(tl.int64) * m_size + m)[:, None] * n_size + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=m_known[:, None] & n_known[None, :])
