"""Softmax against float64: rows read once, rows read twice, extremes."""

import pytest
import torch

import kernels.softmax as softmax_module
from kernels.softmax import (
    MAX_COLUMNS,
    launch_shape,
    long_shape,
    reads_once,
    softmax,
    softmax_backward,
    softmax_forward,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero):RuntimeWarning"
)  # NumPy's, interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(x, grad, gradients, assert_near, units=8):
    (out,), (got,) = gradients(softmax, [x], [grad])
    (want,), (wanted,) = gradients(lambda x: x.softmax(-1), [x.double()], [grad.double()])
    assert_near(out, want, units)
    assert_near(got, wanted, 4 * units)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (9, 1), (1, 7), (7, 33), (2, 5, 100), (37, 64), (3, 4097)], ids=str)
def test_equals_float64_forward_and_backward(shape, dtype, draw, gradients, assert_near):
    check(draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1), gradients, assert_near)


@pytest.mark.parametrize(
    ("columns", "dtype"), [(32_768, torch.bfloat16), (32_768, torch.float32), (20_001, torch.float16)], ids=str
)
def test_the_longest_rows_read_once(columns, dtype, draw, gradients, assert_near):
    assert reads_once(columns, dtype.itemsize, backward=False)
    check(draw(2, columns, dtype=dtype), draw(2, columns, dtype=dtype, seed=1), gradients, assert_near, units=32)


@pytest.mark.parametrize(("columns", "dtype"), [(MAX_COLUMNS, torch.float16), (40_003, torch.float32)], ids=str)
def test_rows_read_twice(columns, dtype, draw, gradients, assert_near):
    assert not reads_once(columns, dtype.itemsize, backward=False)
    assert not reads_once(columns, dtype.itemsize, backward=True)
    check(draw(4, columns, dtype=dtype), draw(4, columns, dtype=dtype, seed=1), gradients, assert_near, units=32)


@pytest.mark.parametrize("columns", [24, 33_000])
def test_magnitudes_and_all_equal_rows(columns, draw, gradients, assert_near):
    x = draw(3, columns, scale=1e4)
    x[1], x[2] = 1e4, -1e4
    check(x, draw(3, columns, seed=1), gradients, assert_near, units=64)
    assert torch.equal(softmax_forward(x)[1], softmax_forward(x)[2])


@pytest.mark.parametrize("columns", [24, 40_000])
def test_nan_and_inf_where_the_plain_way_has_them(columns, draw, assert_near):
    x = draw(6, columns)
    x[0, 3], x[1, 4], x[2, 5], x[3] = float("nan"), float("inf"), float("-inf"), float("-inf")
    x[4, : columns - 3] = float("-inf")  # whole lanes that have seen nothing yet
    y = softmax_forward(x)
    assert_near(y, x.double().softmax(-1), units=16)
    assert y.isnan().all(-1).tolist() == [True, True, False, True, False, False]
    grad = draw(6, columns, seed=1)
    assert torch.equal(softmax_backward(grad, y).isnan().all(-1), y.isnan().all(-1))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(shape, draw):
    assert softmax_forward(draw(*shape)).shape == shape
    assert softmax_backward(draw(*shape), draw(*shape)).shape == shape


@pytest.mark.parametrize("columns", [40, 33_000])
def test_strided_rows_give_what_contiguous_rows_give(columns, draw):
    wide = draw(2, 2 * columns + 7)
    x, grad = wide[:, :columns], wide[:, columns : 2 * columns]
    y = softmax_forward(x)
    assert torch.equal(y, softmax_forward(x.contiguous()))
    assert torch.equal(softmax_backward(grad, x), softmax_backward(grad.contiguous(), x.contiguous()))


def test_expanded_gradient(draw):
    x = draw(4, 8).requires_grad_()
    softmax(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-7, rtol=0)


def test_bad_input_is_named(draw):
    for x, message in [
        (draw(4, 8).double(), "x: dtype"),
        (draw(8, 4).T, "x: its last dimension"),
        (draw(1)[0], "x: is a scalar"),
        (draw(2, 0), "use 1 to 131072"),
        (torch.empty(1, MAX_COLUMNS + 1, device=draw(1).device), "use 1 to 131072"),
    ]:
        with pytest.raises(ValueError, match=message):
            softmax_forward(x)
    with pytest.raises(ValueError, match="grad_out: shape"):
        softmax_backward(draw(4, 7), draw(4, 8))


@pytest.mark.parametrize(
    ("columns", "change"),
    [
        (64, {"tile_rows": 4}),
        (64, {"tile_rows": 1}),
        (100, {"tile_rows": 8}),
    ],
    ids=str,
)
def test_every_launch_shape_gives_the_same(columns, change, draw, monkeypatch):
    x, grad = draw(9, columns), draw(9, columns, seed=1)
    y = softmax_forward(x)
    want = y, softmax_backward(grad, y)

    def changed(columns, itemsize, *, backward):
        return launch_shape(columns, itemsize, backward=backward)._replace(**change)

    monkeypatch.setattr(softmax_module, "launch_shape", changed)
    for got, wanted in zip((softmax_forward(x), softmax_backward(grad, y)), want, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_compiled_for_hopper_nothing_spills_and_accesses_are_16_bytes(compile_for_hopper):
    jobs = []
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "grad_ptr", "grad_x_ptr"), "*bf16")
    pointers |= dict.fromkeys(("rows", "x_stride", "y_stride", "grad_stride"), "i32")
    for columns in (1024, 4096, 16_384, 32_768):
        for backward in (False, True):
            launch = launch_shape(columns, 2, backward=backward)
            arguments = pointers | {"COLUMNS": columns, "BLOCK": launch.block, "ROWS": launch.tile_rows}
            arguments |= {"MASKED": False, "AGAIN": launch.convert_again}
            name = "_backward_kernel" if backward else "_forward_kernel"
            job = {"kernel": f"kernels.softmax:{name}", "arguments": arguments, "warps": launch.warps}
            jobs.append(job | {"options": {"maxnreg": launch.registers}})
    for backward in (False, True):
        long = long_shape(MAX_COLUMNS, 2, backward=backward)
        arguments = pointers | {"COLUMNS": MAX_COLUMNS, "LANES": long.lanes, "VECTOR": long.vector}
        arguments |= {"UNROLL": long.unroll, "AHEAD": long.ahead}
        arguments |= {"LANES": long.unroll * long.lanes} if backward else {}
        name = "_long_backward_kernel" if backward else "_long_forward_kernel"
        jobs.append({"kernel": f"kernels.softmax:{name}", "arguments": arguments, "warps": long.warps})
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        assert report["stack"] == 0, job
        assert set(report["accesses"]) <= {"ld.v4.b32", "st.v4.b32"}, job


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near):
    for columns in (4096, 65_536):
        rows = 2**31 // columns + 3
        if torch.cuda.mem_get_info()[0] < 9 * rows * columns:
            pytest.skip("needs 18 GiB of free GPU memory")
        x = torch.zeros((rows, columns), dtype=torch.bfloat16, device="cuda")
        x[-1, 7] = 3.0
        y = softmax_forward(x)
        assert_near(y[-1], x[-1].double().softmax(-1), units=2)
        assert torch.equal(softmax_backward(x, y)[-1:], softmax_backward(x[-1:], y[-1:]))
        del x, y
