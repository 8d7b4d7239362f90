"""Bias + GELU against float64, in both forms."""

import pytest
import torch

import kernels.bias_gelu as bias_gelu_module
from kernels.bias_gelu import bias_gelu, bias_gelu_backward, bias_gelu_forward, launch_shape

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # NumPy's, interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["tanh", "erf"]


def plain(form):
    approximate = "tanh" if form == "tanh" else "none"
    return lambda x, bias: torch.nn.functional.gelu(x + bias, approximate=approximate)


def check(form, x, bias, grad, gradients, assert_near, units=8):
    (out,), got = gradients(lambda x, bias: bias_gelu(x, bias, form), [x, bias], [grad])
    (want,), wanted = gradients(plain(form), [x.double(), bias.double()], [grad.double()])
    assert_near(out, want, units)
    for actual, expected in zip(got, wanted, strict=True):
        assert_near(actual, expected, units)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (1, 7), (23, 33), (2, 5, 100), (3, 1031)], ids=str)
def test_equals_float64_with_every_gradient(shape, dtype, form, draw, gradients, assert_near):
    x, bias, grad = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1), draw(*shape, dtype=dtype, seed=2)
    check(form, x, bias, grad, gradients, assert_near, units=24)  # sums over rows cancel


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.0, 1e-3, 10.0, 1e4])
def test_magnitudes(scale, form, draw, gradients, assert_near):
    x, bias, grad = draw(8, 24, scale=scale), draw(24, scale=scale, seed=1), draw(8, 24, seed=2)
    check(form, x, bias, grad, gradients, assert_near)


def test_the_16_bit_erf_form_is_far_finer_than_its_rounding(draw):
    x = torch.linspace(-6, 6, 481, device=draw(1).device).half()[None]
    zero = torch.zeros(481, device=x.device).half()
    got = bias_gelu_forward(x, zero, "erf").double()
    want = torch.nn.functional.gelu(x.double())
    assert ((got - want).abs() <= 2.0**-11 * want.abs() + 2.0**-21).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_16_bit_formulas_are_within_a_rounding_over_the_whole_range(form, dtype, draw, assert_near):
    for reach in (0.01, 1.0, 8.0, 200.0, 6e4):
        x = torch.linspace(-reach, reach, 2001, device=draw(1).device).to(dtype)[None]
        zero = torch.zeros(2001, device=x.device, dtype=dtype)
        leaf = x.double().requires_grad_()
        want = plain(form)(leaf, zero.double())
        (slope,) = torch.autograd.grad(want.sum(), leaf)
        assert_near(bias_gelu_forward(x, zero, form), want.detach(), units=2.01)
        assert_near(bias_gelu_backward(torch.ones_like(x), x, zero, form)[0], slope, units=2.01)


@pytest.mark.parametrize("form", FORMS)
def test_16_bit_inf_and_nan_come_out_as_from_the_formula(form, draw):
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0]], device=draw(1).device).bfloat16()
    got = bias_gelu_forward(x, torch.zeros_like(x[0]), form)
    assert got.isnan().tolist() == [[True, False, True, False]]
    assert got[0, 1] == float("inf")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(8, 64), (9, 64), (8, 60), (5, 37)], ids=str)
def test_every_way_to_launch_gives_the_same(shape, form, draw, monkeypatch):
    x, bias, grad = draw(*shape).bfloat16(), draw(shape[-1], seed=1).bfloat16(), draw(*shape, seed=2).bfloat16()
    got, gradients = [], []
    for block, rows, programs in [(64, 1, 0), (32, 2, 0), (64, 2, 1), (16, 4, 2), (128, 2, 0)]:
        launch = bias_gelu_module.Launch(block, rows, 4, 64, programs)
        monkeypatch.setattr(bias_gelu_module, "launch_shape", lambda *_, launch=launch, **__: launch)
        got.append(bias_gelu_forward(x, bias, form))
        if programs:
            gradients.append(bias_gelu_backward(grad, x, bias, form))
    assert all(torch.equal(got[0], other) for other in got[1:])
    assert torch.equal(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_inf_where_the_plain_way_has_them(form, draw, assert_near):
    x, bias, grad = draw(6, 16), draw(16, seed=1), draw(6, 16, seed=2)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    leaves = [x.double().requires_grad_(), bias.double().requires_grad_()]
    want = plain(form)(*leaves)
    wanted = torch.autograd.grad(want, leaves, grad.double())
    assert_near(bias_gelu_forward(x, bias, form), want.detach())
    grad_x, grad_bias = bias_gelu_backward(grad, x, bias, form)
    assert torch.equal(grad_x.isfinite(), wanted[0].isfinite())
    assert torch.equal(grad_bias.isfinite(), wanted[1].isfinite())


def test_an_infinite_bias_keeps_to_its_column(draw):
    x, bias = draw(3, 8), draw(8, seed=1)
    bias[2] = float("inf")
    _, grad_bias = bias_gelu_backward(torch.ones_like(x), x, bias, "tanh")
    assert grad_bias[[0, 1, 3, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty(shape, draw):
    x, bias = draw(*shape), draw(shape[-1])
    assert bias_gelu_forward(x, bias).shape == shape
    grad_x, grad_bias = bias_gelu_backward(x, x, bias)
    assert grad_x.shape == shape
    assert torch.equal(grad_bias, torch.zeros_like(bias))


def test_strided_rows_give_what_contiguous_rows_give(draw):
    wide = draw(6, 100)
    x, grad, bias = wide[:, :40], wide[:, 60:], draw(40, seed=1)
    assert torch.equal(bias_gelu_forward(x, bias), bias_gelu_forward(x.contiguous(), bias))
    strided = bias_gelu_backward(grad, x, bias)
    straight = bias_gelu_backward(grad.contiguous(), x.contiguous(), bias)
    assert all(torch.equal(a, b) for a, b in zip(strided, straight, strict=True))


def test_bad_input_is_named(draw):
    x, bias = draw(4, 8), draw(8)
    for arguments, message in [
        ((x.double(), bias), "x: dtype"),
        ((x, bias[:7]), "bias: shape"),
        ((x, bias.half()), "bias: dtype"),
        ((x.T, bias[:4]), "x: its last dimension"),
        ((x, bias, "sigmoid"), "form: 'sigmoid'"),
    ]:
        with pytest.raises(ValueError, match=message):
            bias_gelu_forward(*arguments)
    with pytest.raises(ValueError, match="grad_out: shape"):
        bias_gelu_backward(x[:3], x, bias)


@pytest.mark.slow
def test_compiled_for_hopper_it_is_short_all_programs_are_resident_and_accesses_are_16_bytes(compile_for_hopper):
    common = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr", "grad_ptr", "grad_x_ptr"), "*bf16")
    common |= dict.fromkeys(("rows", "columns", "x_stride", "grad_stride"), "i32") | {"partial_ptr": "*fp32"}
    jobs, launches = [], []
    for backward in (False, True):
        launch = launch_shape(16384, 2, backward=backward)
        arguments = common | {"EXACT": False, "BLOCK": launch.block, "ROWS": launch.tile_rows, "WALK": backward}
        arguments |= {"ACROSS": 16384 // launch.block, "EVEN": True}
        kernel = f"kernels.bias_gelu:_{'backward' if backward else 'forward'}_kernel"
        for tanh in (True, False):
            job = {"kernel": kernel, "arguments": arguments | {"TANH": tanh}, "warps": launch.warps, "ptx": True}
            jobs.append(job | {"options": {"maxnreg": launch.registers}})
            launches.append(launch)
    for launch, job, report in zip(launches, jobs, compile_for_hopper(jobs), strict=True):
        assert report["stack"] == 0, job
        assert report["registers"] * 32 * launch.warps * max(launch.programs, 4) <= 65_536, job
        assert {access for access in report["accesses"] if "v4" not in access} <= {"st.v2.b32", "st.b32"}, report
        elements = launch.block * launch.tile_rows // (32 * launch.warps)
        assert report["ptx"].count("ex2.approx.ftz") == report["ptx"].count("rcp.approx.ftz") == elements
        assert "div." not in report["ptx"]


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near):
    rows, columns = 2**31 // 4096 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 9 * rows * columns:
        pytest.skip("needs 18 GiB of free GPU memory")
    x = torch.full((rows, columns), 0.5, dtype=torch.bfloat16, device="cuda")
    bias = torch.zeros(columns, dtype=torch.bfloat16, device="cuda")
    x[-1] = -1.0
    out = bias_gelu_forward(x, bias)
    assert_near(out[-2:], plain("tanh")(x[-2:].double(), bias.double()), units=2)
    grad_x, _ = bias_gelu_backward(x, x, bias)
    assert torch.equal(grad_x[-2:], bias_gelu_backward(x[-2:], x[-2:], bias)[0])
