"""Products with 8- and 4-bit weights against float64: forms, odd shapes, splits, hostile numbers, refusals, the PTX."""

import re

import pytest
import torch
import triton.language as tl

from benchmarks import launch_shapes
from kernels import _weight_only
from kernels.weight_only_matmul import Launch, launch_shape, pack, unpack, weight_only_matmul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [(bits, group) for bits in (8, 4) for group in (None, 64, 128, 256)]
H200 = 132


def numbers(bits, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1))
    return torch.randint(low, -low, (rows, columns), generator=generator, dtype=torch.int8).to(DEVICE)


def draw(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def scales_for(group, rows, columns, dtype=torch.float32):
    return draw(1 if group is None else -(-columns // group), rows, dtype=dtype, seed=2).abs()


def exact(x, q, scales, group):
    spread = scales.double().T.repeat_interleave(group or max(1, q.shape[1]), dim=1)[:, : q.shape[1]]
    return x.double() @ (q.double() * spread).T


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("columns", [1, 63, 128, 300])
def test_packing_loses_nothing_and_fills_with_zeros(bits, group, columns):
    q = numbers(bits, 5, columns)
    packed = pack(q, bits, group)
    assert packed.dtype == torch.int16
    block = 64 if group == 64 else 128
    padded = -(-columns // block) * block
    assert packed.shape == (5, padded * bits // 16)
    assert torch.equal(unpack(packed, columns, bits, group), q)
    assert not unpack(packed, padded, bits, group)[:, columns:].any()


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 33, 300), (5, 1, 128), (17, 70, 257)])
def test_equals_float64(bits, group, tokens, rows, columns, assert_near):
    q, scales = numbers(bits, rows, columns), scales_for(group, rows, columns)
    x = draw(tokens, columns)
    out = weight_only_matmul(x, pack(q, bits, group), scales, bits=bits, group=group)
    assert_near(out, exact(x, q, scales, group), units=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 128), (4, None), (4, 128), (4, 64)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_sixteen_bits_are_rounded_at_the_end_only(bits, group, tokens, dtype, assert_near):
    q, x = numbers(bits, 40, 200), draw(tokens, 200, dtype=dtype)
    scales = (scales_for(group, 40, 200) / 100).to(dtype)
    out = weight_only_matmul(x, pack(q, bits, group), scales, bits=bits, group=group)
    assert out.dtype == dtype
    assert_near(out, exact(x, q, scales, group), units=2)


@pytest.mark.parametrize("tokens", [40, 130])
def test_many_tokens_take_several_tiles(tokens, assert_near):
    q, x, scales = numbers(4, 20, 140), draw(tokens, 140, dtype=torch.bfloat16), scales_for(128, 20, 140)
    assert_near(weight_only_matmul(x, pack(q, 4, 128), scales, bits=4, group=128), exact(x, q, scales, 128), units=2)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
@pytest.mark.parametrize("splits", [1, 2, 3, 32])
def test_splits_add_up_and_repeat_to_the_bit(bits, group, splits, assert_near):
    q, scales, x = numbers(bits, 9, 700), scales_for(group, 9, 700), draw(3, 700)
    packed = pack(q, bits, group)
    first, second = (weight_only_matmul(x, packed, scales, bits=bits, group=group, splits=splits) for _ in range(2))
    assert_near(first, exact(x, q, scales, group), units=16)
    assert torch.equal(first, second)


def test_rows_of_tokens_may_be_apart(assert_near):
    q, scales, wide = numbers(4, 6, 130), scales_for(128, 6, 130), draw(4, 200)
    x = wide[:, :130]
    assert_near(weight_only_matmul(x, pack(q, 4, 128), scales, bits=4, group=128), exact(x, q, scales, 128), units=16)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(0, 3, 128), (2, 0, 128), (2, 3, 0)])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
def test_nothing_in_gives_nothing_or_zeros(tokens, rows, columns, bits, group):
    scales = scales_for(group, rows, columns)
    out = weight_only_matmul(
        draw(tokens, columns), pack(numbers(bits, rows, columns), bits, group), scales, bits=bits, group=group
    )
    assert out.shape == (tokens, rows)
    assert not out.any()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
def test_hostile_numbers_stay_where_they_are(bits, group, assert_near):
    rows, columns = 12, 260
    q, scales, x = numbers(bits, rows, columns), scales_for(group, rows, columns), draw(4, columns)
    q[0], scales[:, 1], scales[:, 2], q[3] = 0, 0.0, 1e33, 5
    scales[-1, 4] = float("nan")
    x[1] = 0.0
    x[2, 7] = float("nan")
    x[3] = 1e-30
    out = weight_only_matmul(x, pack(q, bits, group), scales, bits=bits, group=group)
    truth = exact(x, q, scales, group)
    assert torch.equal(out.isnan(), truth.isnan())
    assert out[2].isnan().all()
    assert out[:, 4].isnan().all()
    assert not out[1, :4].any()
    for row in (0, 3):  # each row and channel on its own scale
        for channel in (c for c in range(rows) if c != 4):
            assert_near(out[row : row + 1, channel], truth[row : row + 1, channel], units=2000)


def test_wrong_arguments_are_named():
    q, scales, x = numbers(4, 6, 256), scales_for(128, 6, 256), draw(2, 256)
    packed = pack(q, 4, 128)
    right = {"x_MK": x, "packed": packed, "scales_GN": scales, "bits": 4, "group": 128}
    wrong = [
        ("x", {"x_MK": x[0]}),
        ("x", {"x_MK": x.double()}),
        ("x", {"x_MK": draw(256, 2).T}),
        ("bits", {"bits": 3}),
        ("group", {"group": 32}),
        ("group", {"group": 0}),
        ("packed", {"packed": packed.view(torch.uint8)}),
        ("packed", {"packed": packed[:, :-1]}),
        ("packed", {"packed": packed.T.contiguous().T}),
        ("packed", {"bits": 8}),
        ("scales", {"scales_GN": scales[:1]}),
        ("scales", {"scales_GN": scales.T.contiguous().T}),
        ("scales", {"scales_GN": scales.double()}),
        ("scales", {"group": None}),
        ("splits", {"splits": 0}),
        ("splits", {"splits": 33}),
    ]
    weight_only_matmul(**right)
    for name, change in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            weight_only_matmul(**(right | change))
    unpackable = [((q.float(), 4, 128), "q"), ((q + 8, 4, 128), "q"), ((q, 5, 128), "bits"), ((q, 4, 5), "group")]
    for arguments, name in unpackable:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            pack(*arguments)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(14336, 4096), (4096, 14336), (1, 1)])
def test_every_launch_fits_a_multiprocessor_and_its_parts_are_few(rows, columns, bits, itemsize):
    for tokens in (0, 1, 4, 5, 16, 17, 64, 65, 256):
        shape = launch_shape(tokens, rows, columns, bits, itemsize, H200)
        stage = shape.rows * _weight_only.BLOCK * bits // 8 + shape.tokens * _weight_only.BLOCK * itemsize
        assert stage * (shape.stages - 1) <= 200 * 1024
        assert 1 <= shape.splits <= _weight_only.MAX_SPLITS
        assert shape.splits == 1 or shape.splits * tokens * 8 <= 0.25 * columns * bits / 8
        assert shape.tokens >= min(tokens, 32)


def half(word, kind):
    bits = torch.tensor(word, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16 if kind == "bf16x2" else torch.float16)


def evaluate(ptx, word):
    """The PTX of one widening on a register of two words; only the instructions that it uses."""
    registers = {"$1": word}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in ptx.strip("{} ").split(";"):
        operation, *rest = line.replace(",", " ").split() or [".reg"]
        if operation == ".reg":
            continue
        target, *arguments = rest
        a = [value(name) for name in arguments]
        if operation == "shr.b32":
            registers[target] = a[0] >> a[1]
        elif operation == "mov.b32":
            registers[target] = a[0]
        elif operation == "lop3.b32":
            bits = range(32)
            at = [4 * (a[0] >> i & 1) + 2 * (a[1] >> i & 1) + (a[2] >> i & 1) for i in bits]
            registers[target] = sum((a[3] >> at[i] & 1) << i for i in bits)
        else:
            kind = re.fullmatch(r"fma\.rn\.(bf16x2|f16x2)", operation)[1]
            low, high = ([half(v >> up & 0xFFFF, kind) for v in a] for up in (0, 16))
            return [float(x[0] * x[1] + x[2]) for x in (low, high)]
    raise AssertionError("no result")


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_ptx_of_widening_gives_every_number(bits, dtype):
    q = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int8)
    for place in range(16 // bits):
        text = _weight_only.widen_ptx(bits, place, dtype)
        ptx = str(getattr(text, "value", text))
        other = 0xA5C3 & ~((2**bits - 1) << bits * place)  # what stands in the other fields must not matter
        for number in q.tolist():
            low = other | (number & (2**bits - 1)) << bits * place
            high = (0xFFFF ^ other) & ~((2**bits - 1) << bits * place) | ((-1 - number) & (2**bits - 1)) << bits * place
            assert evaluate(ptx, high << 16 | low) == [number, -1 - number]


@pytest.mark.slow
def test_on_hopper_weights_are_widened_in_registers_and_nothing_spills(compile_for_hopper):
    jobs = []
    for tokens, bits, kind in [(1, 4, "bf16"), (1, 8, "bf16"), (16, 4, "fp16"), (16, 8, "bf16"), (64, 4, "bf16")]:
        shape: Launch = launch_shape(tokens, 14336, 4096, bits, 2, H200)
        arguments = {
            "x_ptr": f"*{kind}", "weight_ptr": "*i16", "scales_ptr": f"*{kind}", "out_ptr": f"*{kind}",
            "tokens": "i32", "rows": "i32", "columns": "i32", "x_stride": "i32", "blocks": "i32", "share": "i32",
            "BITS": bits, "BLOCK": 128, "BLOCKS_A_GROUP": int(bits == 4), "ROWS": shape.rows, "TOKENS": shape.tokens,
            "EVEN": True, "EXACT": False, "BIT_TRICKS": True, "WIDE": False,
        }  # fmt: skip
        options = {"num_stages": shape.stages}
        name = "kernels.weight_only_matmul:weight_only_kernel"
        jobs.append({"kernel": name, "arguments": arguments, "warps": shape.warps, "options": options, "ptx": True})
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        assert report["stack"] == 0, job["arguments"]
        assert report["shared"] <= 227 * 1024
        tall = job["arguments"]["ROWS"] >= 64
        assert ("wgmma.mma_async" if tall else "mma.sync") in report["ptx"]
        assert "lop3.b32" in report["ptx"]
        assert not re.search(r"cvt\.rn\.\w+\.s(8|16|32)", report["ptx"]), "a conversion instruction a weight"
        assert re.search(r"cp\.async\.c[ag]\.shared\.global .*0x10", report["ptx"])
        grouped = bool(job["arguments"]["BLOCKS_A_GROUP"])  # its scales would come from memory one latency a group
        assert ("prefetch.global.L2" in report["ptx"]) == grouped


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # the interpreter's
def test_candidates_of_the_launch_shapes_change_no_result():
    torch.manual_seed(0)
    for case in launch_shapes.FAMILIES["weight_only_matmul"](launch_shapes.Place(DEVICE, few=2)):
        assert case.nbytes > 0
        assert all(given["launch_shape"]().tokens >= 8 for given in case.candidates.values())
        if "1 tokens by" in case.label:
            want = case.call().float()
            for name in (min(case.candidates), max(case.candidates)):
                got = launch_shapes.run(case, case.candidates[name]).float()
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
