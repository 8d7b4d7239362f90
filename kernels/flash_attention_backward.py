"""Exact attention backward: gradients of queries, keys and values without the score matrix.

Two ways, after FlashAttention-2 (Dao 2023, section 3.1 and Algorithm 2):

* one pass (`backward_kernel` with ADD_DQ): each tile of keys walks the queries that see it, recomputes the
  probabilities from the log-sum-exp and does the five products of the mathematics: S = QKᵀ, dV = Pᵀ dO,
  dP = dO Vᵀ, dK = dSᵀ Q, dQ = dS K. The tiles of dQ meet in a float32 buffer through atomic adds, by the bulk copy
  engine's reduction where there is one. The order of those adds, and so the last bits of dQ, change from run to run.
* two passes, deterministic (`backward_kernel` without ADD_DQ, then `query_gradient_kernel`): seven products, since S
  and dP are computed twice, and every sum in a fixed order.

Scores are held transposed, [keys, queries], so that P and dS feed the products for dV and dK straight from registers.
Shapes and names as in the forward kernel; everything that is a sum over tokens is float32.
"""

import triton
import triton.language as tl

from .flash_attention_forward import load_tile, sequence_descriptor, soft_cap, store_tile, tile_of, visible


@triton.jit
def backward_kernel(
    q_src, k_src, v_src, do_src, dk_ptr, dv_ptr, dq_dst, shift_ptr, delta_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dos, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_dqb, stride_dqh, stride_dqs, stride_lb, stride_lh,
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section, left, right, scale_log2, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, EVEN_N: tl.constexpr,
    VARLEN: tl.constexpr, USE_DESC: tl.constexpr, GROUP: tl.constexpr, ADD_DQ: tl.constexpr, DESC_ADD: tl.constexpr,
    DV_BESIDE: tl.constexpr, DK_BESIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key head, over the queries of every query head that shares it (`num_heads` counts
    key heads of the whole batch). With ADD_DQ it also adds dS K, unscaled, into the float32 `dq_dst`.

    The compiler waits for a product right where its result is read outside of products, and with it for all issued
    before; those that are only accumulated run on. With DV_BESIDE dV's is issued after dP's and runs beside
    the arithmetic of dS, with DK_BESIDE dK's after dQ's, beside dQ's way out.
    """
    # The first tile of keys is the longest under a causal mask, and starts first.
    tile, batch_head = tile_of(tl.program_id(0), num_tiles, num_heads, heads_per_section, False)
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    start_n = tile * BLOCK_N

    row_base = batch.to(tl.int64) * stride_lb
    if VARLEN:
        q_row = tl.load(cu_q_ptr + batch).to(tl.int64)
        k_row = tl.load(cu_k_ptr + batch).to(tl.int64)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_row.to(tl.int32)
        kv_len = tl.load(cu_k_ptr + batch + 1) - k_row.to(tl.int32)
        if start_n >= kv_len:
            return
        row_base += q_row
        q_src += q_row * stride_qs
        do_src += q_row * stride_dos
        k_src += k_row * stride_ks
        v_src += k_row * stride_vs
        dk_ptr += k_row * stride_dks
        dv_ptr += k_row * stride_dvs
        if ADD_DQ:
            dq_dst += q_row * stride_dqs
        batch = 0
        if USE_DESC:
            q_src = sequence_descriptor(q_src, heads, q_len, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
            do_src = sequence_descriptor(do_src, heads, q_len, stride_doh, stride_dos, HEAD_DIM, BLOCK_M, BLOCK_D)
            k_src = sequence_descriptor(k_src, kv_heads, kv_len, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
            v_src = sequence_descriptor(v_src, kv_heads, kv_len, stride_vh, stride_vs, HEAD_DIM, BLOCK_N, BLOCK_D)
            if ADD_DQ and DESC_ADD:
                dq_dst = sequence_descriptor(dq_dst, heads, q_len, stride_dqh, stride_dqs, HEAD_DIM, BLOCK_M, BLOCK_D)
    else:
        dk_ptr += batch.to(tl.int64) * stride_dkb
        dv_ptr += batch.to(tl.int64) * stride_dvb
        if not USE_DESC:
            q_src += batch.to(tl.int64) * stride_qb
            do_src += batch.to(tl.int64) * stride_dob
            k_src += batch.to(tl.int64) * stride_kb
            v_src += batch.to(tl.int64) * stride_vb
        if ADD_DQ and not DESC_ADD:
            dq_dst += batch.to(tl.int64) * stride_dqb

    offset = kv_len - q_len
    offs_n = start_n + tl.arange(0, BLOCK_N)
    last_n = tl.minimum(start_n + BLOCK_N, kv_len) - 1

    # Query tiles that see some key of this tile: [lo, hi). Those all of whose rows see all of it: [full_lo, full_hi).
    lo = 0
    hi = q_len
    full_lo = 0
    full_hi = q_len
    if HAS_RIGHT:
        lo = tl.maximum(start_n - offset - right, 0) // BLOCK_M * BLOCK_M
        full_lo = tl.maximum(start_n + BLOCK_N - 1 - offset - right, 0)
    if HAS_LEFT:
        hi = tl.minimum(q_len, last_n - offset + left + 1)
        full_hi = start_n - offset + left + 1 - BLOCK_M + 1  # a tile may start before this
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN_N
    if not EVEN_N:
        # Rows of K beyond the end read as zeros, and their probabilities would be exp2(-shift): mask the whole tile.
        full_hi = tl.where(start_n + BLOCK_N > kv_len, 0, full_hi)

    k = load_tile(k_src, batch, kv_head, start_n, kv_len, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, USE_DESC)
    v = load_tile(v_src, batch, kv_head, start_n, kv_len, stride_vh, stride_vs, HEAD_DIM, BLOCK_N, BLOCK_D, USE_DESC)
    if HAS_CAP:
        scale_log2 = 1.4426950408889634  # the scale went into the cap
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo = tl.multiple_of(lo, BLOCK_M)
    # One flat loop over the query heads of the group and their tiles: two nested ones would drain the pipeline of
    # loads once a head, and keep the addresses of both in registers.
    span = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M) * BLOCK_M
    for turn in tl.range(lo, hi if GROUP == 1 else lo + GROUP * span, BLOCK_M):
        if GROUP == 1:
            head = kv_head
            start = turn
        else:
            head = kv_head * GROUP + (turn - lo) // span
            start = lo + (turn - lo) % span
        start = tl.multiple_of(start, BLOCK_M)
        rows = row_base + head.to(tl.int64) * stride_lh
        offs_m = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_src, batch, head, start, q_len, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, USE_DESC)
        shift = tl.load(shift_ptr + rows + offs_m, mask=offs_m < q_len, other=float("inf"))
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        if HAS_CAP:
            scores = soft_cap(scores, scale, cap)
        p = tl.exp2(scores * scale_log2 - shift[None, :])
        if MASKED:  # noqa: SIM102 (one is a constant)
            if (start < full_lo) | (start >= full_hi):
                positions = offs_m + offset
                seen = visible(positions[None, :], offs_n[:, None], kv_len, left, right, HAS_LEFT, HAS_RIGHT, EVEN_N)
                p = tl.where(seen, p, 0.0)
        do = load_tile(do_src, batch, head, start, q_len, stride_doh, stride_dos, HEAD_DIM, BLOCK_M, BLOCK_D, USE_DESC)
        if not DV_BESIDE:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        if DV_BESIDE:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + rows + offs_m, mask=offs_m < q_len, other=0.0)
        ds = p * (dp - delta[None, :])
        if HAS_CAP:
            ds = ds * (1.0 - (scores / cap) * (scores / cap))  # the slope of cap · tanh
        ds = ds.to(q.dtype)
        if not (DK_BESIDE and ADD_DQ):
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if ADD_DQ:
            dq = tl.dot(ds.T, k, input_precision=PRECISION)
            if DK_BESIDE:
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if DESC_ADD:
                dq_dst.atomic_add([batch, head, start, 0], dq.reshape(1, 1, BLOCK_M, BLOCK_D))
            else:
                offs_d = tl.arange(0, BLOCK_D)
                target = dq_dst + head.to(tl.int64) * stride_dqh + offs_m.to(tl.int64)[:, None] * stride_dqs
                inside = (offs_m[:, None] < q_len) & (offs_d[None, :] < HEAD_DIM)
                tl.atomic_add(target + offs_d[None, :], dq, mask=inside, sem="relaxed")

    dk = (dk * scale).to(k.dtype)
    dv = dv.to(k.dtype)
    store_tile(dk_ptr, dk, 0, kv_head, start_n, kv_len, stride_dkh, stride_dks, HEAD_DIM, BLOCK_N, BLOCK_D, False)
    store_tile(dv_ptr, dv, 0, kv_head, start_n, kv_len, stride_dvh, stride_dvs, HEAD_DIM, BLOCK_N, BLOCK_D, False)


@triton.jit
def query_gradient_kernel(
    q_src, k_src, v_src, do_src, dq_ptr, shift_ptr, delta_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dos, stride_dqb, stride_dqh, stride_dqs, stride_lb, stride_lh,
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section, left, right, scale_log2, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, EVEN_N: tl.constexpr,
    VARLEN: tl.constexpr, USE_DESC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, over the keys it sees: the second pass of the deterministic backward."""
    tile, batch_head = tile_of(tl.program_id(0), num_tiles, num_heads, heads_per_section, HAS_RIGHT)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // (heads // kv_heads)
    start_m = tile * BLOCK_M

    row_base = batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
    if VARLEN:
        q_row = tl.load(cu_q_ptr + batch).to(tl.int64)
        k_row = tl.load(cu_k_ptr + batch).to(tl.int64)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_row.to(tl.int32)
        kv_len = tl.load(cu_k_ptr + batch + 1) - k_row.to(tl.int32)
        if start_m >= q_len:
            return
        row_base += q_row
        q_src += q_row * stride_qs
        do_src += q_row * stride_dos
        k_src += k_row * stride_ks
        v_src += k_row * stride_vs
        dq_ptr += q_row * stride_dqs
        batch = 0
        if USE_DESC:
            q_src = sequence_descriptor(q_src, heads, q_len, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
            do_src = sequence_descriptor(do_src, heads, q_len, stride_doh, stride_dos, HEAD_DIM, BLOCK_M, BLOCK_D)
            k_src = sequence_descriptor(k_src, kv_heads, kv_len, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
            v_src = sequence_descriptor(v_src, kv_heads, kv_len, stride_vh, stride_vs, HEAD_DIM, BLOCK_N, BLOCK_D)
    else:
        dq_ptr += batch.to(tl.int64) * stride_dqb
        if not USE_DESC:
            q_src += batch.to(tl.int64) * stride_qb
            do_src += batch.to(tl.int64) * stride_dob
            k_src += batch.to(tl.int64) * stride_kb
            v_src += batch.to(tl.int64) * stride_vb

    offset = kv_len - q_len
    offs_m = start_m + tl.arange(0, BLOCK_M)
    positions = offs_m + offset
    first = start_m + offset
    last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + offset
    lo = 0
    hi = kv_len
    full_lo = 0
    full_hi = kv_len
    if HAS_LEFT:
        lo = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.maximum(last - left, 0)
    if HAS_RIGHT:
        hi = tl.minimum(kv_len, last + right + 1)
        full_hi = tl.minimum(kv_len, first + right + 1)
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN_N

    q = load_tile(q_src, batch, head, start_m, q_len, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, USE_DESC)
    do = load_tile(do_src, batch, head, start_m, q_len, stride_doh, stride_dos, HEAD_DIM, BLOCK_M, BLOCK_D, USE_DESC)
    shift = tl.load(shift_ptr + row_base + offs_m, mask=offs_m < q_len, other=float("inf"))
    delta = tl.load(delta_ptr + row_base + offs_m, mask=offs_m < q_len, other=0.0)
    if HAS_CAP:
        scale_log2 = 1.4426950408889634
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo = tl.multiple_of(lo, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k = load_tile(k_src, batch, kv_head, start, kv_len, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, USE_DESC)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if HAS_CAP:
            scores = soft_cap(scores, scale, cap)
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        if MASKED:  # noqa: SIM102 (one is a constant)
            if (start < full_lo) | (start + BLOCK_N > full_hi):
                cols = start + tl.arange(0, BLOCK_N)
                seen = visible(positions[:, None], cols[None, :], kv_len, left, right, HAS_LEFT, HAS_RIGHT, EVEN_N)
                p = tl.where(seen, p, 0.0)
        v = load_tile(v_src, batch, kv_head, start, kv_len, stride_vh, stride_vs, HEAD_DIM, BLOCK_N, BLOCK_D, USE_DESC)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if HAS_CAP:
            ds = ds * (1.0 - (scores / cap) * (scores / cap))
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = (dq * scale).to(q.dtype)
    store_tile(dq_ptr, dq, 0, head, start_m, q_len, stride_dqh, stride_dqs, HEAD_DIM, BLOCK_M, BLOCK_D, False)
