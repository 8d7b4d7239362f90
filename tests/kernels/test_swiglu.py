"""SwiGLU's gate against float64."""

import pytest
import torch

from kernels.swiglu import swiglu, swiglu_backward, swiglu_forward, tile_shape

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # NumPy's, interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def plain(gate, up):
    return torch.nn.functional.silu(gate) * up


def check(gradients, assert_near, gate, up, grad, units=4):
    (out,), got = gradients(swiglu, [gate, up], [grad])
    (want,), wanted = gradients(plain, [gate.double(), up.double()], [grad.double()])
    assert_near(out, want, units)
    for actual, expected in zip(got, wanted, strict=True):
        assert_near(actual, expected, units)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (9, 1), (7, 33), (2, 5, 100), (3, 4097)], ids=str)
def test_equals_float64_with_every_gradient(shape, dtype, draw, gradients, assert_near):
    gate, up, grad = (draw(*shape, dtype=dtype, seed=seed) for seed in range(3))
    check(gradients, assert_near, gate, up, grad)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 50.0, 1e4])
def test_magnitudes(scale, draw, gradients, assert_near):
    gate, up, grad = draw(8, 40, scale=scale), draw(8, 40, scale=scale, seed=1), draw(8, 40, seed=2)
    check(gradients, assert_near, gate, up, grad)


def test_all_equal(draw, gradients, assert_near):
    gate = torch.full_like(draw(4, 24), -2.5)
    check(gradients, assert_near, gate, gate, torch.ones_like(gate))


def test_nan_and_inf_where_the_plain_way_has_them(draw, gradients, assert_near):
    gate, up, grad = draw(4, 16), draw(4, 16, seed=1), draw(4, 16, seed=2)
    gate[0, 0], gate[1, 1], gate[2, 2], up[3, 3], up[0, 5] = (float(v) for v in ("nan", "inf", "-inf", "inf", "nan"))
    assert_near(swiglu_forward(gate, up), plain(gate.double(), up.double()))
    grad_gate, grad_up = swiglu_backward(grad, gate, up)
    leaves = [gate.double().requires_grad_(), up.double().requires_grad_()]
    want = torch.autograd.grad(plain(*leaves), leaves, grad.double())
    assert torch.equal(grad_gate.isfinite(), want[0].isfinite())
    assert torch.equal(grad_up.isfinite(), want[1].isfinite())


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_empty(shape, draw):
    gate = draw(*shape)
    assert swiglu_forward(gate, gate).shape == shape
    assert [grad.shape for grad in swiglu_backward(gate, gate, gate)] == [shape, shape]


def test_halves_of_a_merged_projection(draw):
    merged = draw(6, 80)
    gate, up = merged.chunk(2, dim=-1)
    assert not gate.is_contiguous()
    straight = gate.contiguous(), up.contiguous()
    assert torch.equal(swiglu_forward(gate, up), swiglu_forward(*straight))
    for strided, whole in zip(swiglu_backward(up, gate, up), swiglu_backward(straight[1], *straight), strict=True):
        assert torch.equal(strided, whole)


def test_expanded_gradient(draw):
    gate, up = draw(4, 8).requires_grad_(), draw(4, 8, seed=1)
    swiglu(gate, up).sum().backward()
    assert torch.equal(gate.grad, swiglu_backward(torch.ones_like(up), gate.detach(), up)[0])


def test_bad_input_is_named(draw):
    gate = draw(4, 8)
    for bad, message in [
        ((gate.double(), gate.double()), "gate: dtype"),
        ((gate, gate[:3]), "up: shape"),
        ((gate, gate.half()), "up: dtype"),
        ((gate.T, gate.T), "gate: its last dimension"),
        ((gate[0, 0], gate[0, 0]), "gate: is a scalar"),
    ]:
        with pytest.raises(ValueError, match=message):
            swiglu_forward(*bad)
    with pytest.raises(ValueError, match="grad_out: shape"):
        swiglu_backward(gate[:3], gate, gate)


@pytest.mark.slow
def test_compiled_for_hopper_with_16_byte_accesses(compile_for_hopper):
    jobs = []
    for pointer, itemsize in (("*bf16", 2), ("*fp32", 4)):
        rows, block = tile_shape(16384 * 14336, itemsize)
        common = {"gate_ptr": pointer, "up_ptr": pointer, "rows": 1, "columns": "i32", "ROWS": rows, "BLOCK": block}
        common |= {"gate_stride": "i64", "up_stride": "i64", "grad_stride": "i64"}
        common |= dict.fromkeys(("out_ptr", "grad_ptr", "grad_gate_ptr", "grad_up_ptr"), pointer)
        names = ("_forward_kernel", "_backward_kernel")
        jobs += [{"kernel": f"kernels.swiglu:{name}", "arguments": common, "warps": 4} for name in names]
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        assert report["stack"] == 0
        loads, stores = (2, 1) if "forward" in job["kernel"] else (3, 2)
        assert report["accesses"] == {"ld.v4.b32": 2 * loads, "st.v4.b32": 2 * stores}


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near):
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 9 * count:
        pytest.skip("needs 18 GiB of free GPU memory")
    gate = torch.full((count,), 2.0, dtype=torch.bfloat16, device="cuda")
    gate[-1] = -1.0
    out = swiglu_forward(gate, gate)
    assert_near(out[-4:], plain(gate[-4:].double(), gate[-4:].double()), units=2)
    grad_gate, grad_up = swiglu_backward(gate, gate, gate)
    small = swiglu_backward(gate[-8:], gate[-8:], gate[-8:])
    assert torch.equal(grad_gate[-8:], small[0])
    assert torch.equal(grad_up[-8:], small[1])
