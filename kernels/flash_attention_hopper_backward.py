"""Exact attention backward for Hopper, with specialised warps, in Gluon.

One program holds a tile of 128 keys and walks the queries that see it. A feeder warp brings tiles of Q and dO through a
ring in shared memory; two groups of four warps own 64 keys each and keep their rows of dK and dV in registers
(FlashAttention-3, Shah et al. 2024, appendix on the backward pass). Scores are held transposed, [keys, queries]:

    Sᵀ = K Qᵀ                   a turn ahead
    dPᵀ = V dOᵀ                 exponentials of the scores run beside it
    dV += Pᵀ dO                 issued before dSᵀ = Pᵀ ∘ (dPᵀ - delta) is computed, runs beside it
    dK += dSᵀ Q                 from registers, runs while dS goes to shared memory
    dQ += dS K                  over the keys of both groups; each group takes half of it, and the copy engine adds it
                                to a float32 buffer, so that the last bits of dQ change from run to run

Scores of the next turn are issued behind dQ's product and run while dQ leaves.

Dense batches, causal or full, head dimensions 64 and 128; compute capability 9.0 only. Barriers are counted as in the
forward kernel. With D = 128 the halves of dQ are columns, with D = 64 (tiles of 128 queries) rows.
"""

# ruff: noqa: RUF005, RUF059  (Gluon's Python has no starred lists; tuples come apart whole)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .flash_attention_hopper import threads_meet
from .gluon_reduce import async_reduce_add


@gluon.jit
def _share(schedule, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """This program's batch, key head, first key, first query tile, and where the queries that need no mask begin."""
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    index = gl.program_id(0)
    section = index // (heads_per_section * num_tiles)
    within = index % (heads_per_section * num_tiles)
    here = gl.minimum(heads_per_section, num_heads - section * heads_per_section)
    batch_head = section * heads_per_section + within % here
    start = within // here * BLOCK_N  # under a causal mask the first keys have the longest walk, and start first
    first = 0
    plain = 0
    if CAUSAL:
        offset = kv_len - q_len
        first = gl.maximum(start - offset, 0) // BLOCK_M
        plain = gl.maximum(start + BLOCK_N - 1 - offset, 0)
    return batch_head // kv_heads, batch_head % kv_heads, start, first, plain


@gluon.jit
def _walked(turn, kv_head, first, tiles, GROUP: gl.constexpr):
    """The query head and tile of a turn: one flat walk over the heads of the group."""
    head = kv_head
    tile = first + turn
    if GROUP != 1:
        head = kv_head * GROUP + turn // (tiles - first)
        tile = first + turn % (tiles - first)
    return head, tile


@gluon.jit
def _feed(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, k_buf, v_bufs, kv_full, buffers, barriers, schedule,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The feeder: the keys and values once, then queries and output gradients as far ahead as the ring is empty."""
    q_bufs, do_bufs, shift_bufs, delta_bufs, ds_bufs, dq_bufs = buffers
    q_full, q_empty, do_full, ds_full = barriers
    batch, kv_head, start, first, plain = _share(schedule, BLOCK_M, BLOCK_N, CAUSAL)
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, start, 0], kv_full.index(0), k_buf.index(0))
    for half in gl.static_range(2):
        row = start + half * (BLOCK_N // 2)
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, row, 0], kv_full.index(0), v_bufs.index(half))
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    tiles = gl.cdiv(q_len, BLOCK_M)
    for turn in range(GROUP * gl.maximum(tiles - first, 0)):
        head, tile = _walked(turn, kv_head, first, tiles, GROUP)
        slot = turn % STAGES
        parity = (turn // STAGES & 1) ^ 1
        mbarrier.wait(q_empty.index(slot), parity)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + shift_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            shift_desc, [batch * heads + head, tile * BLOCK_M], q_full.index(slot), shift_bufs.index(slot)
        )
        tma.async_copy_global_to_shared(
            q_desc, [batch, head, tile * BLOCK_M, 0], q_full.index(slot), q_bufs.index(slot)
        )
        # dO's slot needs no waiting: it was read before the queries' slot was given back.
        mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            delta_desc, [batch * heads + head, tile * BLOCK_M], do_full.index(slot), delta_bufs.index(slot)
        )
        tma.async_copy_global_to_shared(
            do_desc, [batch, head, tile * BLOCK_M, 0], do_full.index(slot), do_bufs.index(slot)
        )


@gluon.jit
def _turns(
    begin, end, turns, dk, dv, scores, k, keys, v, buffers, barriers, dq_desc, place, schedule, scale_log2,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A group's turns from `begin` to `end` of `turns`, those that a causal mask may cut or those that none does."""
    q_bufs, do_bufs, shift_bufs, delta_bufs, ds_bufs, dq_bufs = buffers
    q_full, q_empty, do_full, ds_full = barriers
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    batch, kv_head, tile_start, first, plain = place
    ROWS: gl.constexpr = BLOCK_N // 2
    BY_COLUMNS: gl.constexpr = BLOCK_M == 64
    DQ_ROWS: gl.constexpr = 64
    DQ_COLS: gl.constexpr = HEAD_DIM // 2 if BY_COLUMNS else HEAD_DIM
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
    rows = tile_start + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    masked_tile = tile_start + BLOCK_N > kv_len
    tiles = gl.cdiv(q_len, BLOCK_M)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    for turn in range(begin, end):
        head, tile = _walked(turn, kv_head, first, tiles, GROUP)
        slot = turn % STAGES
        parity = turn // STAGES & 1
        q = q_bufs.index(slot).reshape([BLOCK_M, HEAD_DIM])
        do = do_bufs.index(slot).reshape([BLOCK_M, HEAD_DIM])
        mbarrier.wait(do_full.index(slot), parity)
        dp_token = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        p = gl.exp2(scores * scale_log2 - shift_bufs.index(slot).load(S_LAYOUT))
        # A branch, not a select: the assembler would move the wait below up past the exponentials, which are to run
        # beside that product, and moves nothing past a branch that reads them.
        if MASKED:
            if (tile * BLOCK_M < plain) | masked_tile:
                last = gl.minimum(tile * BLOCK_M + columns + (kv_len - q_len), kv_len - 1)
                p = gl.where(gl.expand_dims(rows, 1) <= gl.expand_dims(last, 0), p, 0.0)
        elif masked_tile:
            p = gl.where(gl.expand_dims(rows < kv_len, 1), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        p_operand = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
        dv_token = warpgroup_mma(p_operand, do, dv, is_async=True)
        ds = (p * (dp - delta_bufs.index(slot).load(S_LAYOUT))).to(q.dtype)
        ds_operand = gl.convert_layout(ds, P_LAYOUT)
        dk_token = warpgroup_mma(ds_operand, q, dk, is_async=True)

        side = turn % 2
        # The other group has read this buffer: it came to the last turn only after its product of two turns ago.
        ds_bufs.index(side).slice(HALF * ROWS, ROWS, 0).store(ds)
        fence_async_shared()
        tma.store_wait(0)  # the last turn's part of dQ has left its buffer
        mbarrier.arrive(ds_full.index(side), count=1)
        mbarrier.wait(ds_full.index(side), turn // 2 & 1)
        ds_t = ds_bufs.index(side).permute((1, 0))
        empty = gl.zeros([DQ_ROWS, DQ_COLS], gl.float32, Q_LAYOUT)
        if BY_COLUMNS:
            dq_token = warpgroup_mma(ds_t, keys.slice(HALF * DQ_COLS, DQ_COLS, 1), empty, use_acc=False, is_async=True)
        else:
            dq_token = warpgroup_mma(ds_t.slice(HALF * DQ_ROWS, DQ_ROWS, 0), keys, empty, use_acc=False, is_async=True)
        dv, p_operand = warpgroup_mma_wait(2, deps=[dv_token, p_operand])
        next_slot = (turn + 1) % STAGES
        if turn + 1 < turns:  # after the last turn the product is nobody's, and reads whatever lies there
            mbarrier.wait(q_full.index(next_slot), (turn + 1) // STAGES & 1)
        next_q = q_bufs.index(next_slot).reshape([BLOCK_M, HEAD_DIM])
        scores_token = warpgroup_mma(k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dk, ds_operand = warpgroup_mma_wait(2, deps=[dk_token, ds_operand])
        mbarrier.arrive(q_empty.index(slot), count=1)
        dq = warpgroup_mma_wait(1, deps=[dq_token])
        dq_bufs.index(HALF).reshape([DQ_ROWS, DQ_COLS]).store(dq)
        fence_async_shared()
        threads_meet()
        row = tile * BLOCK_M
        if BY_COLUMNS:
            async_reduce_add(dq_desc, [batch, head, row, HALF * DQ_COLS], dq_bufs.index(HALF))
        else:
            async_reduce_add(dq_desc, [batch, head, row + HALF * DQ_ROWS, 0], dq_bufs.index(HALF))
        scores = warpgroup_mma_wait(0, deps=[scores_token])
    return dk, dv, scores


@gluon.jit
def _differentiate(
    dk_desc, dv_desc, dq_desc, k_buf, v_bufs, kv_full, buffers, barriers, schedule, scale_log2, scale,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 keys, over every query tile."""
    q_bufs, do_bufs, shift_bufs, delta_bufs, ds_bufs, dq_bufs = buffers
    q_full, q_empty, do_full, ds_full = barriers
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    ROWS: gl.constexpr = BLOCK_N // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    place = _share(schedule, BLOCK_M, BLOCK_N, CAUSAL)
    batch, kv_head, tile_start, first, plain = place
    keys = k_buf.index(0).reshape([BLOCK_N, HEAD_DIM])
    k = keys.slice(HALF * ROWS, ROWS, 0)
    v = v_bufs.index(HALF).reshape([ROWS, HEAD_DIM])
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, D_LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    turns = GROUP * gl.maximum(gl.cdiv(q_len, BLOCK_M) - first, 0)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    if turns > 0:
        mbarrier.wait(q_full.index(0), 0)
    first_q = q_bufs.index(0).reshape([BLOCK_M, HEAD_DIM])
    scores_token = warpgroup_mma(k, first_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    masked = 0
    if CAUSAL:
        # The turns that the mask cuts come first, and have a loop of their own: the other one gets by with fewer
        # instructions and registers. Over several heads they recur, and with D = 128 two loops take more registers.
        masked = turns
        if GROUP == 1 and HEAD_DIM == 64:
            masked = gl.minimum(gl.maximum(gl.cdiv(plain, BLOCK_M) - first, 0), turns)
        dk, dv, scores = _turns(
            0, masked, turns, dk, dv, scores, k, keys, v, buffers, barriers, dq_desc, place, schedule, scale_log2,
            HALF, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, GROUP, True,
        )  # fmt: skip
    if not CAUSAL or (GROUP == 1 and HEAD_DIM == 64):
        dk, dv, scores = _turns(
            masked, turns, turns, dk, dv, scores, k, keys, v, buffers, barriers, dq_desc, place, schedule, scale_log2,
            HALF, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, GROUP, False,
        )  # fmt: skip

    # The gradients leave through buffers that nobody else reads: the group's values, and its part of dQ.
    v.store(dv.to(k.dtype))
    tma.store_wait(0)
    dk_buf = dq_bufs.index(HALF)._reinterpret(k.dtype, dk_desc.block_type.shape, dk_desc.layout)
    dk_buf.reshape([ROWS, HEAD_DIM]).store((dk * scale).to(k.dtype))
    fence_async_shared()
    threads_meet()
    row = tile_start + HALF * ROWS
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, row, 0], v_bufs.index(HALF))
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, row, 0], dk_buf)
    tma.store_wait(0)


@gluon.jit
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_desc, dv_desc, dq_desc,
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section, scale_log2, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, DS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile of keys: writes its dK and dV, and adds dS K, unscaled, to what `dq_desc` describes, in float32."""
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    shift_bufs = gl.allocate_shared_memory(gl.float32, [STAGES] + shift_desc.block_type.shape, shift_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES] + shift_desc.block_type.shape, shift_desc.layout)
    ds_bufs = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_N, BLOCK_M], DS_LAYOUT)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
    fence_async_shared()
    threads_meet()

    buffers = (q_bufs, do_bufs, shift_bufs, delta_bufs, ds_bufs, dq_bufs)
    barriers = (q_full, q_empty, do_full, ds_full)
    schedule = (q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section)
    gl.warp_specialize(
        [
            (_differentiate, (
                dk_desc, dv_desc, dq_desc, k_buf, v_bufs, kv_full, buffers, barriers, schedule, scale_log2, scale,
                0, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, GROUP, CAUSAL,
            )),
            (_differentiate, (
                dk_desc, dv_desc, dq_desc, k_buf, v_bufs, kv_full, buffers, barriers, schedule, scale_log2, scale,
                1, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, GROUP, CAUSAL,
            )),
            (_feed, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, k_buf, v_bufs, kv_full, buffers, barriers,
                schedule, BLOCK_M, BLOCK_N, STAGES, GROUP, CAUSAL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
