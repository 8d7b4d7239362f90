"""Exact attention forward for Hopper, with specialised warps, in Gluon.

After FlashAttention-3 (Shah et al. 2024): one warp feeds tiles of K and V through the bulk copy engine into a ring in
shared memory; two groups of four warps, 64 query rows each, keep the matrix units busy. Inside a group the product
for the next scores is issued before the softmax of the present ones is needed, so that exponentials and products
overlap (section 3.2); with PING_PONG the two groups also take turns (section 3.1), so that one's softmax runs while the
other's products do. Programs are persistent: the feeder fetches the next tile's keys while the present one ends. A
program takes every n-th tile, or with COUNTER the next one that nobody has taken, which it learns from an atomic add
when its feeder has fed the present one: under a causal mask some tiles are many times as long as others. With two
Q_SLOTS the next tile's queries arrive during the present one, whose output leaves while the next one's first product
runs.

Keys are walked from the last to the first, so that the tiles that a mask cuts come first and the rest of the walk
knows no mask. Dense batches, causal or full, head dimensions 64 and 128; compute capability 9.0 only.

Barriers come in pairs, full and empty, one pair a slot of a ring. Every partition counts its own turns: turn i uses
slot i mod STAGES, and the parity of i // STAGES tells one round of a slot from the next.
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

# Renamed between Triton 3.6 and 3.7.
threads_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _tile(index, schedule, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the `index`-th tile: batch, head, key head, and first row."""
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    section = index // (heads_per_section * num_tiles)
    within = index % (heads_per_section * num_tiles)
    here = gl.minimum(heads_per_section, num_heads - section * heads_per_section)
    tile = within // here
    if CAUSAL:
        tile = num_tiles - 1 - tile  # the longest first
    batch_head = section * heads_per_section + within % here
    batch = batch_head // heads
    head = batch_head % heads
    return batch, head, head // (heads // kv_heads), tile * BLOCK_M


@gluon.jit
def _key_tiles(start, q_len, kv_len, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles some of the rows from `start` on see, at least one, and how many every row sees whole."""
    blocks = gl.cdiv(kv_len, BLOCK_N)
    whole = kv_len // BLOCK_N
    if CAUSAL:
        offset = kv_len - q_len
        # The last row sees keys up to start + ROWS - 1 + offset, the first up to start + offset.
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(start + ROWS + offset, 1), BLOCK_N))
        whole = gl.minimum(whole, gl.maximum(start + offset + 1, 0) // BLOCK_N)
    return blocks, whole


@gluon.jit
def publish(buffer, index):
    """Write a tile's index where the computing groups read it."""
    buffer.store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def published(buffer):
    """The tile's index, read by a computing group."""
    return gl.sum(buffer.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def following(index, done, taken, COUNTER: gl.constexpr):
    """The tile after `index`, as the feeder published it or by the fixed share."""
    following = index + gl.num_programs(0)
    if COUNTER:
        tile_bufs, tile_full, tile_empty = taken
        mbarrier.wait(tile_full.index(done % 2), done // 2 & 1)
        following = published(tile_bufs.index(done % 2))
        threads_meet()  # everybody has read it
        mbarrier.arrive(tile_empty.index(done % 2), count=1)
    return following


@gluon.jit
def _feed(
    q_desc, k_desc, v_desc, rings, schedule, counter_ptr, taken, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, Q_SLOTS: gl.constexpr, COUNTER: gl.constexpr,
):  # fmt: skip
    """The feeder: fills the rings, as far ahead as they are empty."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    GROUPS: gl.constexpr = BLOCK_M // 64
    turn = 0
    done = 0
    index = gl.program_id(0)
    while index < num_tiles * num_heads:
        batch, head, kv_head, start = _tile(index, schedule, BLOCK_M, CAUSAL)
        blocks, whole = _key_tiles(start, q_len, kv_len, BLOCK_M, BLOCK_N, CAUSAL)
        for group in gl.static_range(GROUPS):
            place = done % Q_SLOTS * GROUPS + group
            mbarrier.wait(q_empty.index(place), (done // Q_SLOTS & 1) ^ 1)
            mbarrier.expect(q_full.index(place), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, start + group * 64, 0], q_full.index(place), q_bufs.index(place)
            )
        for step in range(blocks):
            row = (blocks - 1 - step) * BLOCK_N
            slot = turn % STAGES
            parity = (turn // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), parity)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, row, 0], k_full.index(slot), k_bufs.index(slot))
            mbarrier.wait(v_empty.index(slot), parity)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, row, 0], v_full.index(slot), v_bufs.index(slot))
            turn += 1
        index += gl.num_programs(0)
        if COUNTER:
            tile_bufs, tile_full, tile_empty = taken
            index = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
            mbarrier.wait(tile_empty.index(done % 2), (done // 2 & 1) ^ 1)
            publish(tile_bufs.index(done % 2), index)
            threads_meet()
            mbarrier.arrive(tile_full.index(done % 2), count=1)
        done += 1


@gluon.jit
def _masked(
    scores, block, start, q_len, kv_len,
    layout: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Scores with -inf where a query does not see a key."""
    cols = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    seen = gl.expand_dims(cols < kv_len, 0)
    if CAUSAL:
        rows = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)) + (kv_len - q_len)
        seen = seen & (gl.expand_dims(cols, 0) <= gl.expand_dims(rows, 1))
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def settled(values):
    """The same values (none of them negative), which are computed before any instruction after this one that waits.

    The assembler moves a wait for the matrix units up past arithmetic that does not depend on it, which would put the
    softmax behind the product that it should run beside. It moves none past an event that the arithmetic decides on;
    this one, raised by a negative exponential, never happens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never pmevent 1; mov.f32 $0, $1; }",
        "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _softmax_step(scores, row_max, scale_log2, MASKED: gl.constexpr):
    """The new row maximum, the probabilities against it, and the factor that old sums shrink by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    return new_max, p, gl.exp2(row_max - shift)


@gluon.jit
def _walk(
    acc, row_sum, row_max, p, turn, first, last, q, rings, turns, start, q_len, kv_len, scale_log2,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, PING_PONG: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key tiles first, first - 1, ... last + 1: scores of each beside the output of the one before it."""
    ROWS: gl.constexpr = 64
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    for block in range(first, last, -1):
        slot = turn % STAGES
        parity = turn // STAGES & 1
        before = (turn - 1) % STAGES
        mbarrier.wait(k_full.index(slot), parity)
        if PING_PONG:
            mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (GROUP == 0))
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        k = k_bufs.index(slot).reshape([BLOCK_N, q.type.shape[1]])
        scores_token = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
        v = v_bufs.index(before).reshape([BLOCK_N, q.type.shape[1]])
        acc_token = warpgroup_mma(p, v, acc, is_async=True)
        if PING_PONG:
            mbarrier.arrive(turns.index((GROUP + 1) % GROUPS), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores_token])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            scores = _masked(scores, block, start, q_len, kv_len, S_LAYOUT, ROWS, BLOCK_N, CAUSAL)
        row_max, new_p, alpha = _softmax_step(scores, row_max, scale_log2, MASKED)
        row_sum = settled(row_sum * alpha + gl.sum(new_p, 1))
        next_p = gl.convert_layout(new_p.to(q.dtype), P_LAYOUT)
        acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
        p = next_p
        turn += 1
    return acc, row_sum, row_max, p, turn


@gluon.jit
def _attend(
    o_desc, lse_ptr, rings, turns, schedule, scale_log2, taken,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, EVEN_N: gl.constexpr, PING_PONG: gl.constexpr, Q_SLOTS: gl.constexpr, COUNTER: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 rows of every tile of this program."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section = schedule
    ROWS: gl.constexpr = 64
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = CAUSAL or not EVEN_N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    turn = 0
    done = 0
    index = gl.program_id(0)
    while index < num_tiles * num_heads:
        batch, head, kv_head, tile_start = _tile(index, schedule, BLOCK_M, CAUSAL)
        start = tile_start + GROUP * ROWS
        blocks, whole = _key_tiles(tile_start, q_len, kv_len, BLOCK_M, BLOCK_N, CAUSAL)
        place = done % Q_SLOTS * GROUPS + GROUP
        q = q_bufs.index(place).reshape([ROWS, HEAD_DIM])
        mbarrier.wait(q_full.index(place), done // Q_SLOTS & 1)

        if CAUSAL and BLOCK_M > BLOCK_N:  # the last key tiles are later groups' alone
            longest = blocks
            blocks, whole = _key_tiles(start, q_len, kv_len, ROWS, BLOCK_N, CAUSAL)
            for _ in range(longest - blocks):
                slot = turn % STAGES
                mbarrier.wait(k_full.index(slot), turn // STAGES & 1)
                if PING_PONG:
                    mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (GROUP == 0))
                    mbarrier.arrive(turns.index((GROUP + 1) % GROUPS), count=1)
                mbarrier.arrive(k_empty.index(slot), count=1)
                mbarrier.wait(v_full.index(slot), turn // STAGES & 1)
                mbarrier.arrive(v_empty.index(slot), count=1)
                turn += 1
        slot = turn % STAGES
        mbarrier.wait(k_full.index(slot), turn // STAGES & 1)
        if PING_PONG:
            mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (GROUP == 0))
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        k = k_bufs.index(slot).reshape([BLOCK_N, HEAD_DIM])
        scores_token = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if PING_PONG:
            mbarrier.arrive(turns.index((GROUP + 1) % GROUPS), count=1)
        if Q_SLOTS == 2:
            # The output before this one has left by now, and its slot is free for the queries after these.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((done + 1) % 2 * GROUPS + GROUP), count=1, pred=done > 0)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            scores = _masked(scores, blocks - 1, start, q_len, kv_len, S_LAYOUT, ROWS, BLOCK_N, CAUSAL)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        row_max, first_p, alpha = _softmax_step(scores, row_max, scale_log2, MASKED)
        row_sum = gl.sum(first_p, 1)
        p = gl.convert_layout(first_p.to(q.dtype), P_LAYOUT)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
        turn += 1
        edge = gl.minimum(whole, blocks - 1)
        if CAUSAL:
            acc, row_sum, row_max, p, turn = _walk(
                acc, row_sum, row_max, p, turn, blocks - 2, edge - 1, q, rings, turns, start, q_len, kv_len, scale_log2,
                GROUP, GROUPS, BLOCK_N, STAGES, CAUSAL, True, PING_PONG, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
        acc, row_sum, row_max, p, turn = _walk(
            acc, row_sum, row_max, p, turn, edge - 1, -1, q, rings, turns, start, q_len, kv_len, scale_log2,
            GROUP, GROUPS, BLOCK_N, STAGES, CAUSAL, False, PING_PONG, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip

        before = (turn - 1) % STAGES
        mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
        v = v_bufs.index(before).reshape([BLOCK_N, HEAD_DIM])
        acc_token = warpgroup_mma(p, v, acc, is_async=True)
        empty = row_sum == 0.0
        total = gl.where(empty, 1.0, row_sum)
        lse = gl.where(empty, float("-inf"), (row_max + gl.log2(total)) * 0.6931471805599453)
        rows = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        gl.store(lse_ptr + (batch * heads + head).to(gl.int64) * q_len + rows, lse, mask=rows < q_len)
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))
        acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
        mbarrier.arrive(v_empty.index(before), count=1)

        # The output leaves through the slot of its queries, which the last product has read.
        q.store((acc * gl.expand_dims(inverse, 1)).to(q.dtype))
        fence_async_shared()
        threads_meet()
        tma.async_copy_shared_to_global(o_desc, [batch, head, start, 0], q_bufs.index(place))
        if Q_SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(place), count=1)
        index = following(index, done, taken, COUNTER)
        done += 1
    if Q_SLOTS == 2:
        tma.store_wait(0)


@gluon.jit
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr,
    q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN_N: gl.constexpr, PING_PONG: gl.constexpr, Q_SLOTS: gl.constexpr, COUNTER: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M (two groups of 64, or three) queries by BLOCK_N keys, this program's share of them all.

    `counter_ptr` holds an int32 zero where COUNTER is set.
    """
    GROUPS: gl.constexpr = BLOCK_M // 64
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [GROUPS * Q_SLOTS] + q_desc.block_type.shape, q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_bufs = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS * Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS * Q_SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = (0, 0, 0)
    if COUNTER:
        tile_bufs = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        taken = (tile_bufs, tile_full, tile_empty)
        for i in gl.static_range(2):
            mbarrier.init(tile_full.index(i), count=1)
            mbarrier.init(tile_empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS * Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    threads_meet()

    schedule = (q_len, kv_len, num_tiles, heads, kv_heads, num_heads, heads_per_section)
    rings = (q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_attend, (
                    o_desc, lse_ptr, rings, turns, schedule, scale_log2, taken, 0, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
                    CAUSAL, EVEN_N, PING_PONG, Q_SLOTS, COUNTER,
                )),
                (_attend, (
                    o_desc, lse_ptr, rings, turns, schedule, scale_log2, taken, 1, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
                    CAUSAL, EVEN_N, PING_PONG, Q_SLOTS, COUNTER,
                )),
                (_attend, (
                    o_desc, lse_ptr, rings, turns, schedule, scale_log2, taken, 2, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
                    CAUSAL, EVEN_N, PING_PONG, Q_SLOTS, COUNTER,
                )),
                (_feed, (
                    q_desc, k_desc, v_desc, rings, schedule, counter_ptr, taken, BLOCK_M, BLOCK_N, STAGES, CAUSAL,
                    Q_SLOTS, COUNTER,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    o_desc, lse_ptr, rings, turns, schedule, scale_log2, taken, 0, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
                    CAUSAL, EVEN_N, PING_PONG, Q_SLOTS, COUNTER,
                )),
                (_attend, (
                    o_desc, lse_ptr, rings, turns, schedule, scale_log2, taken, 1, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
                    CAUSAL, EVEN_N, PING_PONG, Q_SLOTS, COUNTER,
                )),
                (_feed, (
                    q_desc, k_desc, v_desc, rings, schedule, counter_ptr, taken, BLOCK_M, BLOCK_N, STAGES, CAUSAL,
                    Q_SLOTS, COUNTER,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
