"""Few tokens' products with 8- and 4-bit weights against float64: forms, odd shapes, hostile numbers, the PTX."""

import re

import pytest
import torch

from benchmarks import weight_only_shapes
from kernels import weight_only_tiles as module
from kernels.weight_only_tiles import Launch, blocks_of, launch_shape, pack_tiles, unpack_tiles, weight_only_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [(bits, group) for bits in (8, 4) for group in (None, 64, 128, 256)]
BF16 = torch.bfloat16
H200 = 132
REGISTERS = 65536  # of a multiprocessor


def numbers(bits, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1))
    return torch.randint(low, -low, (rows, columns), generator=generator, dtype=torch.int8).to(DEVICE)


def draw(*shape, dtype=BF16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def scales_for(group, rows, columns, dtype=BF16):
    return draw(1 if group is None else -(-columns // group), rows, dtype=dtype, seed=2).abs() / 100


def exact(x, q, scales, group):
    spread = scales.double().T.repeat_interleave(group or max(1, q.shape[1]), dim=1)[:, : q.shape[1]]
    return x.double() @ (q.double() * spread).T


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 64), (33, 300)])
def test_packing_loses_nothing_and_fills_with_zeros(bits, group, rows, columns):
    q = numbers(bits, rows, columns)
    tiles = pack_tiles(q, bits, group)
    block = 64 if group == 64 else 128
    padded = -(-columns // block) * block
    assert tiles.dtype == torch.int16
    assert tiles.shape == (-(-rows // 16), padded * bits // 256, 256)
    assert torch.equal(unpack_tiles(tiles, rows, columns, bits), q)
    whole = unpack_tiles(tiles, len(tiles) * 16, padded, bits)
    assert not whole[rows:].any()
    assert not whole[:, columns:].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_threads_words_are_its_rows_and_its_eight_neighbouring_inputs(bits):
    step = 256 // bits
    for thread in range(32):
        owned = torch.zeros(16, 2 * step, dtype=torch.int8)
        for eighth in range(step // 32):
            first = step + 32 * eighth + 8 * (thread % 4)  # of the second step
            owned[thread // 4 :: 8, first : first + 8] = 1
        tiles = pack_tiles(torch.nn.functional.pad(owned, (0, -2 * step % 128)), bits, None)
        places = (tiles != 0).nonzero()
        assert places[:, 1].eq(1).all()
        assert places[:, 2].tolist() == list(range(8 * thread, 8 * thread + 8))
        assert unpack_tiles(tiles, 16, 2 * step, bits).equal(owned)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 33, 300), (5, 1, 128), (9, 20, 257), (17, 7, 64)])
def test_equals_float64_and_rounds_at_the_end_only(bits, group, tokens, rows, columns, dtype, assert_near):
    q, scales, x = (
        numbers(bits, rows, columns),
        scales_for(group, rows, columns, dtype),
        draw(tokens, columns, dtype=dtype),
    )
    out = weight_only_tiles(x, pack_tiles(q, bits, group), scales, bits=bits, group=group)
    assert out.dtype == dtype
    assert_near(out, exact(x, q, scales, group), units=2)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
@pytest.mark.parametrize("shape", [Launch(8, 1, 1), Launch(16, 2, 4, 2), Launch(8, 4, 2), Launch(8, 16, 1)], ids=str)
@pytest.mark.parametrize("columns", [1024, 1160])
def test_any_launch_and_any_splits_give_the_same(bits, group, shape, columns, monkeypatch, assert_near):
    monkeypatch.setattr(module, "launch_shape", lambda *_: shape)
    q, scales, x = numbers(bits, 39, columns), scales_for(group, 39, columns), draw(3, columns)
    tiles, truth = pack_tiles(q, bits, group), exact(x, q, scales, group)
    for splits in (1, 2, 3, 32):
        first, second = (weight_only_tiles(x, tiles, scales, bits=bits, group=group, splits=splits) for _ in range(2))
        assert_near(first, truth, units=2)
        assert torch.equal(first, second)


def test_rows_of_tokens_may_be_apart_and_scales_wider(assert_near):
    q, wide = numbers(4, 6, 130), draw(4, 200)
    scales = scales_for(128, 6, 130, torch.float32)
    x = wide[:, :130]
    out = weight_only_tiles(x, pack_tiles(q, 4, 128), scales, bits=4, group=128)
    assert_near(out, exact(x, q, scales, 128), units=2)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(0, 3, 128), (2, 0, 128), (2, 3, 0)])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
def test_nothing_in_gives_nothing_or_zeros(tokens, rows, columns, bits, group):
    tiles, scales = pack_tiles(numbers(bits, rows, columns), bits, group), scales_for(group, rows, columns)
    out = weight_only_tiles(draw(tokens, columns), tiles, scales, bits=bits, group=group)
    assert out.shape == (tokens, rows)
    assert not out.any()
    assert unpack_tiles(tiles, rows, columns, bits).shape == (rows, columns)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
@pytest.mark.parametrize("splits", [1, 2])
def test_hostile_numbers_stay_where_they_are(bits, group, splits, assert_near):
    rows, columns = 12, 260
    q, scales, x = numbers(bits, rows, columns), scales_for(group, rows, columns), draw(5, columns)
    q[0], scales[:, 1], scales[:, 2], q[3] = 0, 0.0, 1e33, 5
    scales[-1, 4] = float("nan")
    x[1] = 0.0
    x[2, 7] = float("nan")
    x[3] = 1e-30
    x[4, -1] = float("inf")
    out = weight_only_tiles(x, pack_tiles(q, bits, group), scales, bits=bits, group=group, splits=splits)
    truth = exact(x, q, scales, group)
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out.isinf(), truth.isinf())
    assert out[2].isnan().all()
    assert out[:, 4].isnan().all()
    assert not out[1, :4].any()
    for row in (0, 3):  # each row and channel on its own scale
        for channel in (c for c in range(rows) if c != 4):
            assert_near(out[row : row + 1, channel], truth[row : row + 1, channel], units=4)


def test_wrong_arguments_are_named():
    q, scales, x = numbers(4, 6, 256), scales_for(128, 6, 256), draw(2, 256)
    tiles = pack_tiles(q, 4, 128)
    right = {"x_MK": x, "tiles": tiles, "scales_GN": scales, "bits": 4, "group": 128}
    wrong = [
        ("x", {"x_MK": x[0]}),
        ("x", {"x_MK": x.float()}),
        ("x", {"x_MK": draw(256, 2).T}),
        ("bits", {"bits": 3}),
        ("group", {"group": 32}),
        ("tiles", {"tiles": tiles.view(torch.uint8)}),
        ("tiles", {"tiles": tiles[:, :-1]}),
        ("tiles", {"tiles": tiles.transpose(1, 2).contiguous().transpose(1, 2)}),
        ("tiles", {"bits": 8}),
        ("scales", {"scales_GN": scales[:1]}),
        ("scales", {"scales_GN": scales.T.contiguous().T}),
        ("scales", {"scales_GN": scales.double()}),
        ("scales", {"group": None}),
        ("splits", {"splits": 0}),
        ("splits", {"splits": 33}),
    ]
    weight_only_tiles(**right)
    for name, change in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            weight_only_tiles(**(right | change))
    unpackable = [((q.float(), 4, 128), "q"), ((q + 8, 4, 128), "q"), ((q, 5, 128), "bits"), ((q, 4, 5), "group")]
    for arguments, name in unpackable:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            pack_tiles(*arguments)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(14336, 4096), (4096, 14336), (1024, 4096), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_every_launch_has_work_for_each_warp_and_enough_in_flight(tokens, rows, columns, bits):
    blocks, tiles = blocks_of(columns, None), -(-rows // 16)
    shape = launch_shape(tokens, rows, blocks, H200)
    assert shape.tokens == (8 if tokens <= 8 else 16)
    assert 1 <= shape.splits <= module.MAX_SPLITS
    assert shape.warps * shape.ahead * shape.splits <= max(1, blocks)
    if rows >= 4096:
        flying = tiles * shape.warps * shape.ahead * 128 * 16 * bits // 8
        assert flying / H200 >= 15 * 1024, "more is slower where it takes registers, and so programs"
        assert shape.splits == 1


@pytest.mark.slow
def test_on_hopper_loads_run_ahead_and_become_the_operand_as_they_are(compile_for_hopper):
    jobs = []
    for tokens, bits, group, kind, tiles in [
        (1, 4, 128, "bf16", 1),
        (1, 8, None, "bf16", 1),
        (16, 4, 128, "fp16", 2),
        (16, 8, None, "bf16", 2),
    ]:
        shape = launch_shape(tokens, 14336, 32, H200)
        assert shape.tiles == tiles
        arguments = {
            "x_ptr": f"*{kind}", "tiles_ptr": "*i16", "scales_ptr": f"*{kind}", "out_ptr": f"*{kind}",
            "tokens": "i32", "rows": "i32", "columns": "i32", "x_stride": "i32", "blocks": "i32", "share": "i32",
            "BITS": bits, "BLOCK": 128, "BLOCKS_A_GROUP": int(group is not None), "TOKENS": shape.tokens,
            "WARPS": shape.warps, "AHEAD": shape.ahead, "TILES": shape.tiles, "EVEN": True,
            "BIT_TRICKS": True, "WIDE": False,
        }  # fmt: skip
        name = "kernels.weight_only_tiles:weight_only_tiles_kernel"
        options = {"num_stages": 1}
        jobs.append({"kernel": name, "arguments": arguments, "warps": shape.warps, "options": options, "ptx": True})
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        given = job["arguments"]
        before, _, _ = report["ptx"].rpartition("mma.sync.aligned.m16n8k16")
        assert before, "no product on the tensor cores"
        assert not re.search(r"(ld|st)\.shared|matrix|shfl|bar\.sync", before), "a number changes its thread on the way"
        assert not re.search(r"cvt\.rn\.\w+\.s(8|16|32)", before), "a conversion instruction a weight"
        ahead, fence, _ = before.partition("bar.warp.sync")
        assert fence
        wide = len(re.findall(r"ld\.global\S*\.v4\.b32", ahead))
        assert wide == given["TILES"] * given["AHEAD"] * 128 * given["BITS"] // 256, (
            "each warp asks for all its words before the first use"
        )
        assert report["stack"] == 0, given
        resident = REGISTERS // (32 * 8 * -(-report["registers"] // 8))  # warps
        assert resident * given["TILES"] * given["AHEAD"] * 128 * 2 * given["BITS"] >= 26 * 1024


@pytest.mark.parametrize("case", [c._replace(outputs=20, inputs=520) for c in weight_only_shapes.CASES[:4]], ids=str)
def test_candidates_of_the_benchmark_change_no_result(case):
    torch.manual_seed(0)
    product = weight_only_shapes.Product(case, DEVICE)
    truth = product.truth().float()
    found = list(weight_only_shapes.candidates(case))
    assert len({weight_only_shapes.name(shape) for shape in found}) == len(found) > 8
    for shape in (None, found[0], found[-1]):
        torch.testing.assert_close(product.few(shape).float(), truth, rtol=2e-2, atol=2e-2 * float(truth.abs().max()))


def test_a_candidate_that_is_wrong_is_said_and_not_timed(monkeypatch):
    torch.manual_seed(0)
    shapes = [Launch(8, 2, 1), Launch(8, 4, 1)]
    few = weight_only_shapes.Product.few
    monkeypatch.setattr(weight_only_shapes, "UNIT", 2.0**-6)  # the interpreter cuts bfloat16 off
    monkeypatch.setattr(weight_only_shapes, "candidates", lambda case: shapes)
    monkeypatch.setattr(weight_only_shapes, "seconds", lambda calls, rounds: dict.fromkeys(calls, 2e-6))
    monkeypatch.setattr(weight_only_shapes.Product, "few", lambda self, s=None: few(self, s) + (s == shapes[1]))
    said = weight_only_shapes.measure(weight_only_shapes.Case(4, 1, 20, 256), 3, 9, DEVICE)
    timed, wrong = said.split("\n")
    assert "over rows 2.0" in timed
    assert "2x1 2.0" in timed
    assert "4x1" not in timed
    assert "WRONG 4x1" in wrong


def test_the_benchmark_says_that_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert weight_only_shapes.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
