"""What backward makes again: forward's results, in the memory of what is read for the last time."""

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm_forward
from kernels.recompute import normalize, swiglu_backward_again
from kernels.swiglu import swiglu_backward, swiglu_forward, tile_shape

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # NumPy's, interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (9, 1), (7, 33), (2, 5, 100), (3, 4097)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_again_is_the_norm(shape, dtype, draw):
    x, delta, weight = (draw(*s, dtype=dtype, seed=seed) for seed, s in enumerate((shape, shape, shape[-1:])))
    out, summed, rstd = add_rms_norm_forward(x, delta, weight, 1e-6)
    again = normalize(summed, weight, rstd)
    if not out.is_cuda:
        assert torch.equal(again, out)
    torch.testing.assert_close(again, out, rtol=torch.finfo(dtype).eps, atol=0.0)  # one rounding, seen on an H200
    assert (again != out).float().mean() < 1e-3


def test_rows_that_lie_apart_and_a_wide_weight(draw):
    whole = draw(6, 80, dtype=torch.float16)
    part, weight = whole[:, :40], draw(40, seed=1)
    assert not part.is_contiguous()
    zeros = torch.zeros(40, dtype=torch.float16, device=whole.device).expand(6, 40)
    out, _, rstd = add_rms_norm_forward(part, zeros, weight, 1e-6)
    assert torch.equal(normalize(part, weight, rstd), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gates_gradients_and_its_product_take_the_place_of_what_they_came_from(shape, dtype, draw):
    grad, gate, up = (draw(*shape, dtype=dtype, seed=seed) for seed in range(3))
    wanted = (*swiglu_backward(grad, gate, up), swiglu_forward(gate, up))
    given = gate.clone(), up.clone(), grad.clone()
    found = swiglu_backward_again(given[2], given[0], given[1])
    for got, want, place in zip(found, wanted, given, strict=True):
        assert torch.equal(got, want)
        assert got.data_ptr() == place.data_ptr()


def test_nan_and_large_values_as_forward_and_backward_have_them(draw):
    grad, gate, up = (draw(4, 16, scale=100.0, seed=seed) for seed in range(3))
    gate[0, 0], gate[1, 1], gate[2, 2] = float("nan"), 1e4, -1e4
    wanted = (*swiglu_backward(grad, gate, up), swiglu_forward(gate, up))
    for got, want in zip(swiglu_backward_again(grad, gate, up), wanted, strict=True):
        assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))


def test_autograd_is_told_what_was_written_over(draw):
    grad, gate, up = (draw(4, 8, seed=seed) for seed in range(3))
    before = [t._version for t in (grad, gate, up)]
    swiglu_backward_again(grad, gate, up)
    assert all(t._version > v for t, v in zip((grad, gate, up), before, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty(shape, draw):
    x = draw(*shape)
    assert [t.shape for t in swiglu_backward_again(x, x.clone(), x.clone())] == [shape] * 3
    if shape[1]:
        assert normalize(x, draw(shape[1]), draw(0)).shape == shape


def test_bad_input_is_named(draw):
    x, weight, rstd = draw(4, 8), draw(8), draw(4)
    for bad, message in [
        ((x.double(), weight, rstd), "summed: dtype"),
        ((x.T, weight, rstd), "summed: its last dimension"),
        ((x, weight[:3], rstd), "weight: shape"),
        ((x, weight, rstd[:3]), "rstd: "),
        ((x.half(), weight, rstd.half()), "rstd: "),
    ]:
        with pytest.raises(ValueError, match=message):
            normalize(*bad)
    wide = draw(4, 16)
    for bad, message in [
        ((x, x.double(), x), "gate: dtype"),
        ((x, x, x[:3]), "up: shape"),
        ((x.half(), x, x), "grad_out: dtype"),
        ((x, wide[:, :8], x), "gate: is not contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            swiglu_backward_again(*bad)


@pytest.mark.slow
def test_compiled_for_hopper_with_16_byte_accesses(compile_for_hopper):
    jobs, accesses = [], []
    for pointer, itemsize in (("*bf16", 2), ("*fp32", 4)):
        for columns in (4096 * 8192, 2048):
            rows, block = tile_shape(columns, itemsize)
            common = {"rows": 1, "columns": "i32", "ROWS": rows, "BLOCK": block}
            gate = common | dict.fromkeys(("grad_ptr", "gate_ptr", "up_ptr"), pointer)
            norm = common | dict.fromkeys(("summed_ptr", "weight_ptr", "out_ptr"), pointer)
            norm |= {"rows": "i32", "summed_stride": "i32", "rstd_ptr": "*fp32"}
            jobs += [{"kernel": "kernels.recompute:_gate_kernel", "arguments": gate, "warps": 4}]
            jobs += [{"kernel": "kernels.recompute:_normalize_kernel", "arguments": norm, "warps": 4}]
            accesses += [(6, 6), (4, 2)]
    for job, report, (loads, stores) in zip(jobs, compile_for_hopper(jobs), accesses, strict=True):
        assert report["stack"] == 0
        found = report["accesses"]
        assert (found["ld.v4.b32"], found["st.v4.b32"]) == (loads, stores), (job, found)
