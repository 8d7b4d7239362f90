"""Paged decode, paged prefill and the fused cache write against float64: odd lengths, blocks, groups, 8-bit caches."""

import math

import pytest
import torch

from kernels.paged_attention import choose_splits, launch_shape, paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rope_cache import rope_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_DTYPES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def make_cache(lengths, heads, page, width, dtype=torch.float32, seed=0, spare=3):
    """A cache with NaN in every slot that no sequence owns, its shuffled tables, and the contiguous keys and values."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    blocks = sum(counts) + spare
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed + 1)).tolist()
    tables = torch.full((len(lengths), max([*counts, 1]) + 1), 10_000, dtype=torch.int32)
    k, v = (torch.full((blocks, heads, page, width), math.nan, dtype=dtype) for _ in range(2))
    rows = []
    for row, length in enumerate(lengths):
        mine = [order.pop() for _ in range(counts[row])]
        tables[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        dense = torch.randn(2, heads, length, width, generator=generator).to(dtype)
        rows.append(dense)
        for place in range(length):
            k[mine[place // page], :, place % page] = dense[0, :, place]
            v[mine[place // page], :, place % page] = dense[1, :, place]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return k.to(DEVICE), v.to(DEVICE), tables.to(DEVICE), lengths.to(DEVICE), rows


def oracle(q_SHE, dense, scale, first):
    """float64 attention of S queries at positions ``first`` on over one sequence's contiguous keys and values."""
    k, v = dense.double().to(q_SHE.device)
    group = q_SHE.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("she,hce->hsc", q_SHE.double(), k) * scale
    positions = first + torch.arange(q_SHE.shape[0], device=q_SHE.device)
    scores.masked_fill_(torch.arange(k.shape[1], device=q_SHE.device) > positions[:, None], -math.inf)
    return torch.einsum("hsc,hce->she", scores.softmax(-1), v)


def draw(*shape, dtype=torch.float32, seed=9):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "page", "width", "splits"),
    [
        ((1, 17, 100), 2, 4, 16, 32, None),
        ((300, 5), 1, 3, 16, 64, 1),
        ((300, 5), 1, 3, 16, 64, 3),
        ((65, 64, 63), 2, 1, 32, 24, 2),
        ((40,), 1, 20, 256, 16, None),
        ((129, 0, 2), 3, 2, 64, 80, 5),
    ],
    ids=str,
)
def test_decode_equals_float64(lengths, kv_heads, group, page, width, splits, dtype, assert_near):
    k, v, tables, lengths_B, rows = make_cache(lengths, kv_heads, page, width, dtype)
    q = draw(len(lengths), kv_heads * group, width, dtype=dtype)
    out = paged_decode(q, k, v, tables, lengths_B, splits=splits)
    assert out.dtype == dtype
    for row, length in enumerate(lengths):
        if length:
            want = oracle(q[row : row + 1], rows[row], width**-0.5, length - 1)
            assert_near(out[row : row + 1], want, units=16)
        else:
            assert not out[row].any()


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_every_block_size_gives_the_same_numbers(page):
    lengths = (70, 33)
    reference = None
    for size in (16, page):
        k, v, tables, lengths_B, _ = make_cache(lengths, 2, size, 32, seed=4)
        out = paged_decode(draw(2, 4, 32), k, v, tables, lengths_B, splits=1)
        reference = out if reference is None else reference
        assert torch.equal(out, reference)


def test_a_split_context_gives_the_same_as_a_whole_one(assert_near):
    k, v, tables, lengths, _ = make_cache((200, 31, 90), 2, 16, 32)
    q = draw(3, 4, 32)
    whole = paged_decode(q, k, v, tables, lengths, splits=1)
    for splits in (2, 3, 9):
        assert_near(paged_decode(q, k, v, tables, lengths, splits=splits), whole.double(), units=16)


def test_a_sequence_does_not_depend_on_its_neighbours_when_the_splits_are_fixed():
    k, v, tables, lengths, _ = make_cache((90, 7, 130), 2, 16, 32)
    q = draw(3, 4, 32)
    crowd = paged_decode(q, k, v, tables, lengths, splits=2)
    for row in range(3):
        alone = paged_decode(q[row : row + 1], k, v, tables[row : row + 1], lengths[row : row + 1], splits=2)
        assert torch.equal(alone[0], crowd[row])


def test_many_rows_run_side_by_side_without_splits():
    few, many = launch_shape(128, 2, 1.9), launch_shape(128, 2, 3.9)
    assert (few.resident, many.resident) == (3, 4)
    assert choose_splits(512, 16384, 132, many.tile, many.programs, many.resident) == 1
    assert choose_splits(1024, 4096, 132, many.tile, many.programs, many.resident) == 1


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_eight_bit_cache_at_odd_bytes_gives_the_same(kind):
    """Pairs of columns need even addresses; where rows begin at odd ones they are read one by one."""
    k, v, tables, lengths, _ = make_cache((70, 33), 2, 16, 32)
    k, v = ((torch.nan_to_num(pages) * 20).to(kind) for pages in (k, v))
    room = torch.zeros(v.shape[0], v[0].numel() + 1, dtype=torch.int8, device=DEVICE)
    room[:, 1:] = v.view(torch.int8).flatten(1)
    odd = room[:, 1:].view(kind).unflatten(1, v.shape[1:])
    assert odd.stride(0) % 2 == 1
    q, scales = draw(2, 4, 32, dtype=torch.float16), torch.full((2,), 0.05, device=DEVICE)
    paired, apart = (
        paged_decode(q, k, pages, tables, lengths, splits=2, k_scale_K=scales, v_scale_K=scales) for pages in (v, odd)
    )
    torch.testing.assert_close(paired, apart, rtol=2e-3, atol=2e-3)
    assert not torch.equal(paired[:, :, ::2], paired[:, :, 1::2])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((torch.int8, dtype) for dtype in (torch.float32, *HALF_DTYPES)),
        *((torch.float8_e4m3fn, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("splits", [1, 3])
def test_an_eight_bit_cache_is_read_through_its_scales(kind, dtype, splits, assert_near):
    lengths, kv_heads, width = (50, 21), 2, 32
    k, v, tables, lengths_B, rows = make_cache(lengths, kv_heads, 16, width)
    k_scale, v_scale = (torch.tensor(s, dtype=torch.float32, device=DEVICE) for s in ([0.03, 0.02], [0.025, 0.04]))

    def narrow(pages, scale):
        scaled = pages.nan_to_num() / scale[:, None, None]
        return scaled.round().clamp(-127, 127).to(kind) if kind is torch.int8 else scaled.to(kind)

    k8, v8 = narrow(k, k_scale), narrow(v, v_scale)
    q = draw(2, 4, width, dtype=dtype)
    # Heads of any size: nothing, and what half precision could not hold or would lose bits of.
    q[0, 0] = 0
    if dtype == torch.bfloat16 and kind != torch.int8:
        q[0, 1], q[1, 3] = q[0, 1] * 1e6, q[1, 3] * 1e-7
    out = paged_decode(q, k8, v8, tables, lengths_B, k_scale_K=k_scale, v_scale_K=v_scale, splits=splits)
    assert out.dtype == dtype
    for row, length in enumerate(lengths):
        dense = torch.stack(
            [
                narrow(part, scale).float() * scale[:, None, None]
                for part, scale in zip(rows[row].to(DEVICE), (k_scale, v_scale), strict=True)
            ]
        )
        assert_near(out[row : row + 1], oracle(q[row : row + 1], dense, width**-0.5, length - 1), units=32)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize(
    ("chunks", "kv_heads", "group", "page", "width"),
    [
        (((0, 1), (0, 19), (60, 7)), 2, 4, 16, 32),
        (((0, 150),), 1, 3, 16, 64),
        (((5, 40), (127, 2)), 2, 1, 64, 24),
        (((31, 33),), 1, 20, 32, 16),
    ],
    ids=str,
)
def test_prefill_of_chunks_equals_float64(chunks, kv_heads, group, page, width, dtype, assert_near):
    lengths = [before + new for before, new in chunks]
    k, v, tables, lengths_B, rows = make_cache(lengths, kv_heads, page, width, dtype)
    starts = [0]
    for _, new in chunks:
        starts.append(starts[-1] + new)
    q = draw(starts[-1] + 3, kv_heads * group, width, dtype=dtype)
    starts_B1 = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    out = paged_prefill(
        q, k, v, tables, lengths_B, starts_B1, widest=max(n for _, n in chunks), out_THE=torch.zeros_like(q)
    )
    assert not out[starts[-1] :].any()
    for row, (before, _) in enumerate(chunks):
        part = slice(starts[row], starts[row + 1])
        assert_near(out[part], oracle(q[part], rows[row], width**-0.5, before), units=16)


def test_a_row_is_the_same_to_the_bit_however_its_prompt_is_cut(rows_apart):
    k, v, tables, _, _ = make_cache((100,), 2, 16, 32)
    q = draw(100, 4, 32)

    def chunk(start, stop):
        end = torch.tensor([stop], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE)
        return paged_prefill(q[start:stop], k, v, tables, end, starts, widest=stop - start, rows=32)

    whole = chunk(0, 100)
    assert torch.equal(torch.cat([chunk(0, 37), chunk(37, 38), chunk(38, 100)]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "width"), [(2, 4, 32), (3, 3, 64), (1, 1, 20)])
def test_rope_and_the_cache_write_equal_the_plain_two_steps(kv_heads, group, width, dtype, assert_near):
    tokens, page, half = 7, 16, width // 2
    heads = kv_heads * group
    packed = draw(tokens, (heads + 2 * kv_heads) * width, dtype=dtype)
    q, k, v = packed.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    q, k, v = q.unflatten(1, (heads, width)), k.unflatten(1, (kv_heads, width)), v.unflatten(1, (kv_heads, width))
    angles = torch.arange(50, device=DEVICE)[:, None] * torch.rand(half, generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    positions = torch.tensor([0, 3, 49, 7, 7, 21, 2], device=DEVICE)
    slots = torch.tensor([5, 0, 63, -1, 17, 40, 18], device=DEVICE)
    cache = torch.full((2, 4, kv_heads, page, width), 7.0, dtype=dtype, device=DEVICE)
    out = rope_cache(q, k, v, angles.cos(), angles.sin(), positions, slots, cache[0], cache[1])
    cos, sin = (torch.cat([f(angles.double())] * 2, 1)[positions][:, None] for f in (torch.cos, torch.sin))

    def turned(x):
        low, high = x.double().chunk(2, -1)
        return x.double() * cos + torch.cat([-high, low], -1) * sin

    assert_near(out, turned(q), units=2)
    written = {int(s): t for t, s in enumerate(slots.tolist()) if s >= 0}
    for slot in range(64):
        cell = cache[:, slot // page, :, slot % page]
        if slot in written:
            assert_near(cell[0], turned(k)[written[slot]], units=2)
            assert torch.equal(cell[1], v[written[slot]])
        else:
            assert (cell == 7.0).all()


def test_the_cache_write_rounds_and_saturates_int8():
    k = torch.tensor([[[0.26, -0.24, 100.0, -100.0]]], device=DEVICE)
    cache = torch.zeros(2, 1, 1, 16, 4, dtype=torch.int8, device=DEVICE)
    still = torch.zeros(1, 2, device=DEVICE)
    place = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    scale = torch.full((1,), 0.5, device=DEVICE)
    rope_cache(k, k, k, still + 1, still, place, place, cache[0], cache[1], k_scale_K=scale, v_scale_K=scale)
    assert cache[0, 0, 0, 0].tolist() == cache[1, 0, 0, 0].tolist() == [1, 0, 127, -127]


def test_splits_fill_the_last_wave():
    def chosen(rows: int, longest: int) -> int:
        return choose_splits(rows, longest, 132, tile=64, programs=2, resident=3)

    assert chosen(256, 4096) == 1, "two programs on nearly every multiprocessor"
    assert chosen(8, 32_768) == 30
    assert chosen(8, 200) == 1
    assert chosen(512, 16_384) == 3, "instead of 1.3 waves of three, the last of them a third full"
    assert chosen(1024, 4096) == 3
    for rows in range(400, 3000, 7):
        waves = rows * chosen(rows, 8192) / (3 * 132)
        assert waves / math.ceil(waves) >= 0.8


REFUSED = {
    "page": ({"page": 24}, "blocks of 24 slots"),
    "page 8": ({"page": 8}, "blocks of 8 slots"),
    "heads": ({"heads": 3}, "3 heads of 32 do not go with a cache of 2 heads"),
    "dtype": ({"dtype": torch.float64}, "dtype torch.float64 is not supported"),
    "cache dtype": ({"cache": torch.float16}, "use the queries' torch.float32"),
    "scales": ({"cache": torch.int8}, "needs scales"),
    "tables": ({"tables": torch.int64}, "tables: torch.int64"),
    "splits": ({"splits": 0}, "splits: 0"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_supported_is_refused_by_name(change, message):
    page, heads = change.get("page", 16), change.get("heads", 4)
    q = torch.zeros(1, heads, 32, dtype=change.get("dtype", torch.float32), device=DEVICE)
    pages = torch.zeros(2, 2, page, 32, dtype=change.get("cache", torch.float32), device=DEVICE)
    tables = torch.zeros(1, 2, dtype=change.get("tables", torch.int32), device=DEVICE)
    lengths = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        paged_decode(q, pages, pages, tables, lengths, splits=change.get("splits"))


def decode_job(dtype, cache, width, page, split, group=4, overlapped=False, rows=0.0):
    quantized = cache in ("i8", "fp8e4nv")
    shape = launch_shape(width, {"fp32": 4, "i8": 1, "fp8e4nv": 1}.get(cache, 2), rows)
    scales = "*fp32" if quantized else None
    padded = 1 << (width - 1).bit_length()
    return {
        "kernel": "kernels.paged_attention:paged_decode_kernel",
        "arguments": {
            "q_ptr": f"*{dtype}", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}",
            "tables_ptr": "*i32", "lengths_ptr": "*i32",
            "k_scale_ptr": scales, "v_scale_ptr": scales, "out_ptr": "*fp32" if split else f"*{dtype}",
            "lse_ptr": "*fp32" if split else None, "q_stride": "i32", "tables_stride": "i32", "k_stride": "i32",
            "v_stride": "i32", "splits": "i32", "scale_log2": "fp32", "KV_HEADS": 8, "GROUP": group, "GROUP_PAD": 16,
            "PAGE": page, "WIDTH": width, "WIDTH_PAD": padded, "TILE": shape.tile, "QUANTIZED": quantized,
            "SPLIT": split, "EXACT": dtype == "fp32", "OVERLAPPED": overlapped, "PAIRED": quantized and dtype != "fp32",
        },
        "warps": shape.warps,
        "options": {"num_stages": shape.stages},
    }  # fmt: skip


def prefill_job(dtype, width, rows, warps, stages, group=4, tile=64):
    return {
        "kernel": "kernels.paged_prefill:paged_prefill_kernel",
        "arguments": {
            "q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}",
            "tables_ptr": "*i32", "lengths_ptr": "*i32",
            "starts_ptr": "*i32", "k_scale_ptr": None, "v_scale_ptr": None, "out_ptr": f"*{dtype}", "q_stride": "i32",
            "out_stride": "i32", "tables_stride": "i32", "k_stride": "i32", "v_stride": "i32", "scale_log2": "fp32",
            "GROUP": group, "PAGE": 16, "WIDTH": width, "WIDTH_PAD": width, "ROWS": rows, "TOKENS": rows // group,
            "TILE": tile, "QUANTIZED": False, "EXACT": dtype == "fp32",
        },
        "warps": warps,
        "options": {"num_stages": stages},
    }  # fmt: skip


def test_decode_does_not_spill_on_hopper_and_its_programs_fit_a_multiprocessor(compile_for_hopper):
    few, many = decode_job("bf16", "bf16", 128, 16, False), decode_job("bf16", "bf16", 128, 16, False, rows=3.9)
    narrow = decode_job("bf16", "fp8e4nv", 128, 16, True)
    for resident, report in zip((3, 4, 3), compile_for_hopper([few, many, narrow]), strict=True):
        assert report["stack"] == 0
        assert resident * (report["shared"] + 1024) <= 228 * 1024
        assert report["registers"] <= 65_536 // (resident * 128)


@pytest.mark.slow
def test_no_other_shape_spills_on_hopper(compile_for_hopper):
    decodes = [
        decode_job("bf16", "bf16", 128, 16, True),
        decode_job("bf16", "bf16", 128, 16, True, overlapped=True),
        decode_job("fp16", "i8", 128, 64, True),
        decode_job("bf16", "fp8e4nv", 128, 16, False),
        decode_job("bf16", "bf16", 64, 256, True, group=3),
    ]
    others = [
        prefill_job("bf16", 128, 128, 8, 3),
        prefill_job("bf16", 128, 16, 4, 3),
        prefill_job("bf16", 64, 64, 4, 3, group=3),
        {
            "kernel": "kernels.rope_cache:rope_cache_kernel",
            "arguments": {
                **{f"{n}_ptr": "*bf16" for n in ("q", "k", "v", "k_cache", "v_cache", "q_out")},
                "cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64",
                "k_scale_ptr": None, "v_scale_ptr": None,
                **{f"{n}_stride": "i32" for n in ("q", "k", "v", "q_out", "k_cache", "v_cache")},
                "GROUP": 4, "GROUP_PAD": 4, "PAGE": 16, "HALF": 64, "HALF_PAD": 64,
                "QUANTIZED": False, "INTEGER": False,
            },
            "warps": 1,
        },
    ]  # fmt: skip
    reports = compile_for_hopper([*decodes, *others])
    for job, report in zip([*decodes, *others], reports, strict=True):
        assert report["stack"] == 0, (job["kernel"], report["registers"], report["stack"])
    for report in reports[: len(decodes)]:
        assert 3 * report["shared"] <= 227 * 1024
        assert report["registers"] <= 65_536 // (3 * 128)
