"""The matrix-vector product against float64: odd sizes, strides, refusals, wide loads."""

import pytest
import torch

from kernels.matvec import launch_shape, matvec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 33), (17, 512), (9, 1025), (40, 2048), (3, 300)])
def test_equals_float64(rows, columns, dtype, assert_near):
    x, weight = draw(columns, dtype=dtype), draw(rows, columns, dtype=dtype, seed=1)
    assert_near(matvec(x, weight), weight.double() @ x.double(), units=8 if dtype == torch.float32 else 2)


def test_rows_may_be_apart(assert_near):
    x, wide = draw(64), draw(10, 100, seed=1)
    assert_near(matvec(x, wide[:, :64]), wide[:, :64].double() @ x.double(), units=8)


def test_an_empty_matrix_gives_an_empty_vector():
    assert matvec(draw(4), draw(0, 4)).shape == (0,)


@pytest.mark.parametrize(
    ("x", "weight", "name"),
    [((2, 4), (3, 4), "x"), ((4,), (3, 5), "weight"), ((4,), (4,), "weight")],
)
def test_wrong_arguments_are_named(x, weight, name):
    with pytest.raises(ValueError, match=rf"^{name}"):
        matvec(draw(*x), draw(*weight))
    with pytest.raises(ValueError, match=r"^weight"):
        matvec(draw(4), draw(3, 4).half())


@pytest.mark.slow
def test_nothing_spills_on_hopper_and_loads_are_wide(compile_for_hopper):
    shape = launch_shape(4096, 2)
    arguments = {
        "x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "rows": "i32", "columns": "i32",
        "weight_stride": "i32", "ROWS": shape.rows, "BLOCK": shape.block,
    }  # fmt: skip
    job = {"kernel": "kernels.matvec:matvec_kernel", "arguments": arguments, "warps": shape.warps}
    (report,) = compile_for_hopper([job])
    assert report["stack"] == 0
    assert report["registers"] <= 102, "five programs a multiprocessor no longer fit"
    assert report["accesses"]["ld.v4.b32"] >= 4
