"""Products of ragged rows with the weights of their experts for Hopper, with specialised warps, in Gluon.

Tiles of 128 by 256, two groups of four warps with 64 rows each; one warp feeds both through the bulk copy engine into a
ring in shared memory. Programs are persistent and draw the next tile from a counter when they have fed the present one:
the last tile of an expert's rows is a part of one, of which a group without rows multiplies nothing. The feeder fetches
the next tile while the present one's sums leave.

    ROWS      out[r, n]   = Σ_k a[r, k] · weight_e[n, k]
    ACROSS    out[r, n]   = Σ_k a[r, k] · weight_e[k, n]
    WEIGHTS   out_e[m, n] = Σ_{r of e} a[r, m] · b[r, n]

The engine copies whole boxes, so all rows lie in memory by expert (:mod:`kernels.moe_gate` spreads them). A box at the
end of an expert's rows has the next one's too: over rows they are not stored, over the sum they are cleared first, so
that a NaN stays where it is. Sums leave through shared memory, in rows of 256 bytes, masked.

Bytes through the L2 for a tile and a block of the sum of 64: 48 KiB for 2·128·256·64 operations, 87 a byte.

Sources: CUTLASS's cooperative kernels (two groups on one tile); Gale et al., "MegaBlocks", 2023 (the table of tiles).
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

from kernels.flash_attention_hopper import following, publish, threads_meet

ROWS, ACROSS, WEIGHTS = 0, 1, 2


@gluon.jit
def _work(index, places_ptr, sizes, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Of the `index`-th tile: expert, row of a where it begins, row after the last, its place in out, and steps.

    sizes: how many tiles of rows or experts, rows or (WEIGHTS) columns of a, columns of out, and the sum's length.
    """
    many, m_size, n_size, length = sizes
    n_blocks = gl.cdiv(n_size, 256)
    m_blocks = many
    expert = 0
    within = index
    if KIND == 2:
        m_blocks = gl.cdiv(m_size, 128)
        expert = index // (m_blocks * n_blocks)
        within = index % (m_blocks * n_blocks)
    first = within // (GROUP * n_blocks) * GROUP
    here = gl.minimum(m_blocks - first, GROUP)
    m_block = first + within % (GROUP * n_blocks) % here
    n_at = within % (GROUP * n_blocks) // here * 256
    if KIND == 2:
        row = gl.load(places_ptr + gl.maximum(expert - 1, 0))
        row = row * gl.minimum(expert, 1)
        end = gl.load(places_ptr + expert)
        m_at = m_block * 128
        steps = gl.cdiv(end - row, 64)
    else:
        expert = gl.load(places_ptr + m_block)
        row = gl.load(places_ptr + many + m_block)
        end = gl.load(places_ptr + 2 * many + m_block)
        m_at = row
        steps = gl.cdiv(length, 64) * gl.minimum(expert + 1, 1)  # none where there is no such tile
    return expert, row, end, m_at, n_at, steps


@gluon.jit
def _feed(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, places_ptr, counter_ptr, taken, sizes, tiles,
    STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The feeder: fills the ring, as far ahead as it is empty."""
    turn = 0
    done = 0
    index = gl.program_id(0)
    while index < tiles:
        expert, row, end, m_at, n_at, steps = _work(index, places_ptr, sizes, GROUP, KIND)
        for step in range(steps):
            slot = turn % STAGES
            at = step * 64
            mbarrier.wait(empty.index(slot), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            for group in gl.static_range(2):
                if KIND == 2:
                    tma.async_copy_global_to_shared(
                        a_desc, [row + at, m_at + group * 64], full.index(slot), a_bufs.index(slot * 2 + group)
                    )
                else:
                    tma.async_copy_global_to_shared(
                        a_desc, [row + group * 64, at], full.index(slot), a_bufs.index(slot * 2 + group)
                    )
            if KIND == 0:
                tma.async_copy_global_to_shared(b_desc, [expert, n_at, at], full.index(slot), b_bufs.index(slot))
            elif KIND == 1:
                tma.async_copy_global_to_shared(b_desc, [expert, at, n_at], full.index(slot), b_bufs.index(slot))
            else:
                tma.async_copy_global_to_shared(b_desc, [0, row + at, n_at], full.index(slot), b_bufs.index(slot))
            turn += 1
        tile_bufs, tile_full, tile_empty = taken
        index = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        mbarrier.wait(tile_empty.index(done % 2), (done // 2 & 1) ^ 1)
        publish(tile_bufs.index(done % 2), index)
        threads_meet()
        mbarrier.arrive(tile_full.index(done % 2), count=1)
        done += 1


@gluon.jit
def _clear_rows(buffer, left, COLUMNS: gl.constexpr):
    """Zeros in the rows of a (64, COLUMNS) buffer from `left` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    values = buffer.load(LAYOUT)
    zeros = gl.zeros([64, COLUMNS], buffer.dtype, LAYOUT)
    buffer.store(gl.where(gl.expand_dims(row < left, 1), values, zeros))


@gluon.jit
def halves(sums):
    """Their left and their right columns."""
    return sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _leave(sums, stage, out_ptr, row, limit, column, n_size):
    """Write (64, 128) sums at a row and a column of out (…, n_size), whose rows from `limit` on are another's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    threads_meet()  # what was here has been read
    stage.store(sums.to(stage.dtype))
    threads_meet()
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    place = gl.expand_dims(rows.to(gl.int64) * n_size, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(rows < limit, 1) & gl.expand_dims(columns < n_size, 0)
    gl.store(out_ptr + place, stage.load(LAYOUT), mask=inside)


@gluon.jit
def _multiply(
    out_ptr, a_bufs, b_bufs, stages, full, empty, places_ptr, taken, sizes, tiles,
    HALF: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 rows of every tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    many, m_size, n_size, length = sizes
    stage = stages.index(HALF)
    turn = 0
    done = 0
    index = gl.program_id(0)
    while index < tiles:
        expert, row, end, m_at, n_at, steps = _work(index, places_ptr, sizes, GROUP, KIND)
        first = m_at + HALF * 64
        limit = end
        if KIND == 2:
            first += expert * m_size
            limit = expert * m_size + m_size
        sums = gl.zeros([64, 256], gl.float32, LAYOUT)
        if first < limit:
            for step in range(steps):
                slot = turn % STAGES
                mbarrier.wait(full.index(slot), turn // STAGES & 1)
                a = a_bufs.index(slot * 2 + HALF)
                if KIND == 0:
                    b = b_bufs.index(slot).reshape([256, 64])
                    token = warpgroup_mma(a, b.permute((1, 0)), sums, is_async=True)
                elif KIND == 1:
                    token = warpgroup_mma(a, b_bufs.index(slot).reshape([64, 256]), sums, is_async=True)
                else:
                    b = b_bufs.index(slot).reshape([64, 256])
                    if step * 64 + 64 > end - row:
                        _clear_rows(a, end - row - step * 64, 64)
                        _clear_rows(b, end - row - step * 64, 256)
                        fence_async_shared()
                        threads_meet()
                    token = warpgroup_mma(a.permute((1, 0)), b, sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
                turn += 1
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
                mbarrier.arrive(empty.index(turn % STAGES), count=1)
                turn += 1
        index = following(index, done, taken, True)
        done += 1
        if first < limit:
            left, right = halves(sums)
            _leave(left, stage, out_ptr, first, limit, n_at, n_size)
            _leave(right, stage, out_ptr, first, limit, n_at + 128, n_size)


@gluon.jit(do_not_specialize=["places_ptr", "many", "tiles"])  # which hang on the number of pairs
def hopper_product_kernel(
    a_desc, b_desc, out_ptr, places_ptr, counter_ptr, many, m_size, n_size, length, tiles,
    STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, STAGE_LAYOUT: gl.constexpr,
):  # fmt: skip
    """This program's share of `tiles` tiles.

    `places_ptr` is the order's table of tiles, or (WEIGHTS) the rows after each expert's last; `counter_ptr` an int32
    zero. Products of rows write their rows alone; those of weights everything.
    """
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    stages = gl.allocate_shared_memory(a_desc.dtype, [2, 64, 128], STAGE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_bufs = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    threads_meet()
    taken = (tile_bufs, tile_full, tile_empty)
    sizes = (many, m_size, n_size, length)
    gl.warp_specialize(
        [
            (_multiply, (
                out_ptr, a_bufs, b_bufs, stages, full, empty, places_ptr, taken, sizes, tiles, 0, STAGES, GROUP, KIND,
            )),
            (_multiply, (
                out_ptr, a_bufs, b_bufs, stages, full, empty, places_ptr, taken, sizes, tiles, 1, STAGES, GROUP, KIND,
            )),
            (_feed, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, places_ptr, counter_ptr, taken, sizes, tiles,
                STAGES, GROUP, KIND,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
