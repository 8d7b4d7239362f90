"""Exact attention forward in one pass over the keys, never holding the score matrix.

For each tile of queries the kernel walks the visible keys once and keeps a running row maximum, row sum and output
(FlashAttention, Dao et al. 2022, Algorithm 1; FlashAttention-2, Dao 2023, section 3.1: rescale late, divide once at
the end). The softmax runs in base 2 with log2(e) folded into the scale, so that one fused multiply-add feeds exp2.

Three things make it fast on Hopper and are worth knowing before changing it:

* tiles come through tensor descriptors (the bulk copy engine computes addresses and fills out-of-range rows with
  zeros), elsewhere through pointers;
* the walk over keys is split into phases, so that only tiles cut by a mask edge pay for the mask;
* with a causal mask the longest tiles start first, within a group of heads whose keys and values fit in the L2.

A program's products and its softmax alternate; another program on the same multiprocessor fills the gaps, if the two
are out of step. With STAGGER they start out of step.

Shapes: B batch, S sequence, T total tokens of a variable-length batch, H heads, D head dimension. Tensors are
[B, S, H, D], or [T, H, D] with cumulative lengths; the log-sum-exp is [B, H, S] or [H, T] in float32.
"""

# The legend of the tile names: BLOCK_M queries, BLOCK_N keys, BLOCK_D the head dimension rounded up to a power of two.
import triton
import triton.language as tl


@triton.jit
def load_tile(
    src, batch, head, row, rows, stride_h, stride_s,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, USE_DESC: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + BLOCK) of one head as [BLOCK, BLOCK_D]; zeros beyond `rows` and the head dimension D.

    `src` is a rank-4 descriptor (batch, head, row, column), or a pointer to the first element of the sequence.
    """
    if USE_DESC:
        tile = src.load([batch, head, row, 0]).reshape(BLOCK, BLOCK_D)
    else:
        offs_s = row + tl.arange(0, BLOCK)
        offs_d = tl.arange(0, BLOCK_D)
        ptrs = src + tl.cast(head, tl.int64) * stride_h + offs_s.to(tl.int64)[:, None] * stride_s + offs_d[None, :]
        tile = tl.load(ptrs, mask=(offs_s[:, None] < rows) & (offs_d[None, :] < D), other=0.0)
    return tile


@triton.jit
def store_tile(
    dst, tile, batch, head, row, rows, stride_h, stride_s,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, USE_DESC: tl.constexpr,
):  # fmt: skip
    """The reverse of `load_tile`: what lies beyond `rows` and the head dimension is not written."""
    if USE_DESC:
        dst.store([batch, head, row, 0], tile.reshape(1, 1, BLOCK, BLOCK_D))
    else:
        offs_s = row + tl.arange(0, BLOCK)
        offs_d = tl.arange(0, BLOCK_D)
        ptrs = dst + tl.cast(head, tl.int64) * stride_h + offs_s.to(tl.int64)[:, None] * stride_s + offs_d[None, :]
        tl.store(ptrs, tile, mask=(offs_s[:, None] < rows) & (offs_d[None, :] < D))


@triton.jit
def sequence_descriptor(
    ptr, heads, rows, stride_h, stride_s,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A descriptor of one sequence of a packed batch, in the rank-4 form `load_tile` wants (batch 0).

    Made on the device because the rows of a sequence end where the next one begins: the copy engine must stop
    there, or a neighbour's NaN would reach this sequence through 0 · NaN. A descriptor holds no dimension of zero;
    of an empty sequence nothing is loaded.
    """
    rows = tl.maximum(rows, 1)
    return tl.make_tensor_descriptor(
        ptr, shape=[1, heads, rows, D], strides=[stride_s, stride_h, stride_s, 1], block_shape=[1, 1, BLOCK, BLOCK_D]
    )


@triton.jit
def soft_cap(scores, scale, cap):
    """cap · tanh(scores · scale / cap), through exp2: tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends."""
    e = tl.exp2(scores * (scale / cap * 2.8853900817779268))  # 2·log2(e)
    return cap * (1.0 - 2.0 / (1.0 + e))


@triton.jit
def visible(
    row_positions, cols, kv_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EVEN_N: tl.constexpr
):  # fmt: skip
    """Which keys each query sees. `row_positions` are on the keys' axis: the last query stands on the last key."""
    mask = (cols <= row_positions + right) if HAS_RIGHT else (cols < kv_len)
    if HAS_RIGHT and not EVEN_N:
        mask = mask & (cols < kv_len)
    if HAS_LEFT:
        mask = mask & (cols >= row_positions - left)
    return mask


@triton.jit
def tile_of(pid, num_tiles, num_heads, heads_per_section, HEAVY_LAST: tl.constexpr):
    """Program id to (tile, head): all tiles of one section of heads before the next section, tile-major inside it.

    A section is as many heads as share the L2. `HEAVY_LAST` says that the last tile is the longest (causal queries):
    it starts first, so that the short ones fill the end of the grid.
    """
    section = pid // (heads_per_section * num_tiles)
    within = pid % (heads_per_section * num_tiles)
    heads = tl.minimum(heads_per_section, num_heads - section * heads_per_section)
    tile = within // heads
    if HEAVY_LAST:
        tile = num_tiles - 1 - tile
    return tile, section * heads_per_section + within % heads


# Waits for $1 clocks times the number of programs in lower warp slots of this multiprocessor.
_WAIT = tl.constexpr(
    "{ .reg .u32 slot, n, from, now; .reg .pred early; mov.u32 slot, %warpid; mov.u32 n, %ntid.x; shr.u32 n, n, 5; "
    "div.u32 slot, slot, n; mul.lo.u32 n, slot, $1; mov.u32 from, %clock; "
    "again: mov.u32 now, %clock; sub.u32 now, now, from; setp.lt.u32 early, now, n; @early bra again; "
    "mov.u32 $0, now; }"
)


@triton.jit
def start_out_of_step(CLOCKS: tl.constexpr, FIRST: tl.constexpr):
    """Hold each but the first program of a multiprocessor back by CLOCKS after the one before it.

    Only the FIRST programs of the grid, those that start together: a later one starts when an earlier one ends.
    """
    if tl.program_id(0) < FIRST:
        tl.inline_asm_elementwise(_WAIT, "=r,r", [CLOCKS], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def flash_attention_forward_kernel(
    q_src, k_src, v_src, o_dst, lse_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section, left, right, scale_log2, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, EVEN_N: tl.constexpr,
    VARLEN: tl.constexpr, USE_DESC: tl.constexpr, PRECISION: tl.constexpr, STAGGER: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. `num_heads` counts the whole batch's heads, `heads` one batch row's."""
    if STAGGER:
        start_out_of_step(STAGGER, FIRST)
    tile, batch_head = tile_of(tl.program_id(0), num_tiles, num_heads, heads_per_section, HAS_RIGHT)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // (heads // kv_heads)
    start_m = tile * BLOCK_M

    lse_base = lse_ptr + batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
    if VARLEN:
        q_row = tl.load(cu_q_ptr + batch)
        k_row = tl.load(cu_k_ptr + batch)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_row
        kv_len = tl.load(cu_k_ptr + batch + 1) - k_row
        if start_m >= q_len:
            return
        lse_base += q_row
        q_src += q_row.to(tl.int64) * stride_qs
        k_src += k_row.to(tl.int64) * stride_ks
        v_src += k_row.to(tl.int64) * stride_vs
        o_dst += q_row.to(tl.int64) * stride_os
        batch = 0
        if USE_DESC:
            q_src = sequence_descriptor(q_src, heads, q_len, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
            k_src = sequence_descriptor(k_src, kv_heads, kv_len, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
            v_src = sequence_descriptor(v_src, kv_heads, kv_len, stride_vh, stride_vs, HEAD_DIM, BLOCK_N, BLOCK_D)
            o_dst = sequence_descriptor(o_dst, heads, q_len, stride_oh, stride_os, HEAD_DIM, BLOCK_M, BLOCK_D)
    elif not USE_DESC:
        q_src += batch.to(tl.int64) * stride_qb
        k_src += batch.to(tl.int64) * stride_kb
        v_src += batch.to(tl.int64) * stride_vb
        o_dst += batch.to(tl.int64) * stride_ob

    # Positions on the keys' axis: the last query stands on the last key (causal aligned to the end).
    offset = kv_len - q_len
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_positions = offs_m + offset
    first = start_m + offset
    last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + offset

    # Keys some row sees: [lo, hi). Keys every row sees without a mask: [full_lo, full_hi), whole tiles.
    lo = 0
    hi = kv_len
    full_lo = 0
    full_hi = kv_len
    if HAS_LEFT:
        lo = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(last - left, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        hi = tl.minimum(kv_len, last + right + 1)
        full_hi = tl.minimum(kv_len, first + right + 1)
    full_hi = tl.maximum(full_hi, 0) // BLOCK_N * BLOCK_N
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN_N

    q = load_tile(q_src, batch, head, start_m, q_len, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, USE_DESC)
    if HAS_CAP:
        scale_log2 = 1.4426950408889634  # the scale went into the cap
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

    lo = tl.multiple_of(lo, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k = load_tile(k_src, batch, kv_head, start, kv_len, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, USE_DESC)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if HAS_CAP:
            scores = soft_cap(scores, scale, cap)
        if MASKED:  # noqa: SIM102 (one is a constant)
            # Only tiles that a mask edge cuts pay for it. One loop with a branch, not three loops: the pipeline of
            # loads is filled once, and the addresses of one loop fit the registers.
            if (start < full_lo) | (start >= full_hi):
                cols = start + tl.arange(0, BLOCK_N)
                seen = visible(row_positions[:, None], cols[None, :], kv_len, left, right, HAS_LEFT, HAS_RIGHT, EVEN_N)
                scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shift = new_max
        if MASKED:
            # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_src, batch, kv_head, start, kv_len, stride_vh, stride_vs, HEAD_DIM, BLOCK_N, BLOCK_D, USE_DESC)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max

    # A row that sees no key gives zeros and log-sum-exp -inf.
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453)
    tl.store(lse_base + offs_m, lse, mask=offs_m < q_len)
    out = (acc / row_sum[:, None]).to(q.dtype)
    store_tile(o_dst, out, batch, head, start_m, q_len, stride_oh, stride_os, HEAD_DIM, BLOCK_M, BLOCK_D, USE_DESC)
