"""Residual add + RMSNorm against float64: values, every gradient, odd shapes, extremes, strides, refusals."""

import pytest
import torch

from kernels.add_rms_norm import (
    MAX_COLUMNS,
    add_rms_norm,
    add_rms_norm_backward,
    add_rms_norm_forward,
    backward_shape,
    forward_shape,
)

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def plain(x, residual, weight, summed=None):
    summed = x + residual if summed is None else summed
    return summed * torch.rsqrt((summed * summed).mean(-1, keepdim=True) + EPS) * weight, summed


def gradients(function, tensors, grads):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    return outputs, torch.autograd.grad(outputs, leaves, grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (1, 7), (7, 33), (2, 5, 100), (37, 64), (3, 2049)], ids=str)
def test_equals_float64_with_every_gradient(shape, dtype, assert_near):
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[-1], dtype=dtype, seed=2)
    grads = [draw(*shape, dtype=dtype, seed=3), draw(*shape, dtype=dtype, seed=4)]
    outputs, got = gradients(lambda *t: add_rms_norm(*t, EPS), [x, residual, weight], grads)
    oracle, want = gradients(plain, [t.double() for t in (x, residual, weight)], [g.double() for g in grads])
    assert [o.dtype for o in outputs] == [dtype, dtype]
    for actual, expected in zip((*outputs, *got), (*oracle, *want), strict=True):
        assert_near(actual.detach(), expected.detach(), units=8)
    assert torch.equal(got[0], got[1])


@pytest.mark.parametrize("columns", [8192, MAX_COLUMNS])
def test_longest_rows(columns, assert_near):
    x, residual, weight = draw(2, columns), draw(2, columns, seed=1), draw(columns, seed=2)
    grads = [draw(2, columns, seed=3), draw(2, columns, seed=4)]
    outputs, got = gradients(lambda *t: add_rms_norm(*t, EPS), [x, residual, weight], grads)
    oracle, want = gradients(plain, [t.double() for t in (x, residual, weight)], [g.double() for g in grads])
    for actual, expected in zip((*outputs, *got), (*oracle, *want), strict=True):
        assert_near(actual.detach(), expected.detach(), units=16)


def test_the_norm_is_that_of_the_rounded_sum(assert_near):
    x, residual = draw(5, 64, dtype=torch.float16), draw(5, 64, dtype=torch.float16, seed=1)
    weight = draw(64, dtype=torch.float16, seed=2)
    # float16: the interpreter truncates to bfloat16 where the GPU rounds
    out, summed, rstd = add_rms_norm_forward(x, residual, weight, EPS)
    assert torch.equal(summed, x + residual)
    assert_near(out, plain(None, None, weight.double(), summed.double())[0], units=1)
    assert_near(rstd, torch.rsqrt((summed.double() ** 2).mean(-1) + EPS), units=4)


def test_gradient_of_out_alone_and_of_summed_alone(assert_near):
    x, residual, weight = draw(6, 40), draw(6, 40, seed=1), draw(40, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    doubles = [t.double().requires_grad_() for t in (x, residual, weight)]
    add_rms_norm(*leaves, EPS)[0].sum().backward()  # an expanded gradient, stride 0
    plain(*doubles)[0].sum().backward()
    for leaf, double in zip(leaves, doubles, strict=True):
        assert_near(leaf.grad, double.grad, units=16)
    x = x.clone().requires_grad_()
    (alone,) = torch.autograd.grad(add_rms_norm(x, residual, weight, EPS)[1].sum(), [x])
    assert torch.equal(alone, torch.ones_like(x))


def test_float32_weight_beside_bfloat16_rows(assert_near):
    x, residual = draw(6, 48, dtype=torch.bfloat16), draw(6, 48, dtype=torch.bfloat16, seed=1)
    weight = draw(48, seed=2)
    out, summed, rstd = add_rms_norm_forward(x, residual, weight, EPS)
    _, grad_weight = add_rms_norm_backward(out, None, summed, weight, rstd)
    assert out.dtype == torch.bfloat16
    assert grad_weight.dtype == torch.float32
    want = (out.double() * summed.double() * rstd.double()[:, None]).sum(0)
    assert_near(grad_weight, want, units=8)


def test_extremes(assert_near):
    weight = draw(64, seed=2)
    for row in (torch.full((64,), 1e4), torch.full((64,), -3.0), torch.zeros(64), torch.full((64,), 1e-20)):
        x = row.repeat(3, 1).to(DEVICE)
        grad = draw(3, 64, seed=3)
        outputs, got = gradients(lambda *t: add_rms_norm(*t, EPS), [x, x, weight], [grad, grad])
        doubles = [t.double() for t in (x, x, weight)]
        oracle, want = gradients(plain, doubles, [grad.double()] * 2)
        for actual, expected in zip((*outputs, *got), (*oracle, *want), strict=True):
            assert_near(actual.detach(), expected.detach(), units=64)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, from the interpreter
def test_nan_and_inf_stay_in_their_rows(assert_near):
    x, residual, weight = draw(5, 33), draw(5, 33, seed=1), draw(33, seed=2)
    x[1, 4], x[2, 0], x[3, 5], residual[3, 5] = float("nan"), float("inf"), float("inf"), float("-inf")
    grad = draw(5, 33, seed=3)
    out, summed, rstd = add_rms_norm_forward(x, residual, weight, EPS)
    doubles, want = gradients(plain, [t.double() for t in (x, residual, weight)], [grad.double()] * 2)
    assert_near(out, doubles[0])
    assert_near(summed, doubles[1])
    grad_in, grad_weight = add_rms_norm_backward(grad, grad, summed, weight, rstd)
    assert torch.equal(grad_in.isfinite().all(-1), want[0].isfinite().all(-1))
    assert torch.equal(grad_weight.isnan(), want[2].isnan())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(shape):
    x, weight = draw(*shape), draw(8)
    out, summed, rstd = add_rms_norm_forward(x, x, weight, EPS)
    assert out.shape == summed.shape == shape
    grad_in, grad_weight = add_rms_norm_backward(out, out, summed, weight, rstd)
    assert grad_in.shape == shape
    assert torch.equal(grad_weight, torch.zeros(8, device=DEVICE))


def test_strided_rows_give_what_contiguous_rows_give():
    wide = draw(6, 100)
    x, residual, weight = wide[:, 10:50], wide[:, 60:100], draw(40, seed=1)
    assert not x.is_contiguous()
    out, summed, rstd = add_rms_norm_forward(x, residual, weight, EPS)
    want, want_sum, want_rstd = add_rms_norm_forward(x.contiguous(), residual.contiguous(), weight, EPS)
    assert torch.equal(out, want)
    assert torch.equal(summed, want_sum)
    strided = add_rms_norm_backward(x, residual, x, weight, rstd)
    straight = add_rms_norm_backward(x.contiguous(), residual.contiguous(), x.contiguous(), weight, want_rstd)
    assert all(torch.equal(a, b) for a, b in zip(strided, straight, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": draw(4, 8).double()}, "x: dtype torch.float64"),
        ({"residual": draw(4, 7)}, "residual: shape"),
        ({"residual": draw(4, 8, dtype=torch.float16)}, "residual: dtype"),
        ({"weight": draw(7)}, "weight: shape"),
        ({"weight": draw(8, dtype=torch.bfloat16)}, "weight: dtype"),
        ({"weight": draw(16)[::2]}, "weight: stride"),
        ({"x": draw(8, 4).T}, "x: its last dimension has stride"),
        ({"x": draw(2, 4, 8).transpose(0, 1)[:, :, :], "residual": draw(4, 2, 8)}, "x: strides"),
        ({"x": draw(1), "residual": draw(1), "weight": draw(1)}, None),
        ({"x": draw(1)[0], "residual": draw(1)[0]}, "x: is a scalar"),
        ({"x": draw(2, 16385), "residual": draw(2, 16385), "weight": draw(16385)}, "use 1 to 16384"),
        ({"x": draw(2, 0), "residual": draw(2, 0), "weight": draw(0)}, "use 1 to 16384"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"x": draw(4, 8), "residual": draw(4, 8), "weight": draw(8)} | change
    if message is None:
        assert add_rms_norm_forward(**arguments, eps=EPS)[0].shape == (1,)
        return
    with pytest.raises(ValueError, match=message):
        add_rms_norm_forward(**arguments, eps=EPS)


def test_bad_rstd_is_named():
    x, weight = draw(4, 8), draw(8)
    with pytest.raises(ValueError, match=r"rstd: .* must be float32 of \(4,\)"):
        add_rms_norm_backward(x, None, x, weight, torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="grad_summed: shape"):
        add_rms_norm_backward(x, draw(3, 8), x, weight, torch.ones(4, device=DEVICE))


def jobs(columns, pointer, itemsize):
    common = {"weight_ptr": pointer, "rstd_ptr": "*fp32", "rows": "i32", "COLUMNS": columns}
    forward = dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr", "summed_ptr"), pointer)
    forward |= {"x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
    backward = dict.fromkeys(("grad_out_ptr", "grad_summed_ptr", "summed_ptr", "grad_in_ptr"), pointer)
    backward |= dict.fromkeys(("grad_out_stride", "grad_summed_stride", "summed_stride"), "i32")
    backward |= {"partial_ptr": "*fp32", "HAS_GRAD_SUMMED": True}
    one, many = forward_shape(columns, itemsize), backward_shape(columns, itemsize)
    backward |= {"STAGES": many.stages, "HOLD": many.hold}
    return [
        {
            "kernel": f"kernels.add_rms_norm:{name}",
            "arguments": common | specific | {"BLOCK": shape.block, "ROWS": shape.tile_rows},
            "warps": shape.warps,
            "options": options,
            "resident": resident,
            "ptx": True,
        }
        for name, specific, shape, options, resident in (
            ("_forward_kernel", forward, one, {}, 1),
            ("_backward_kernel", backward, many, {"maxnreg": many.registers}, 1),
        )
    ]


def test_compiled_for_hopper_all_programs_are_resident_and_accesses_are_16_bytes(compile_for_hopper):
    work = []
    for columns, pointer, itemsize in [(4096, "*bf16", 2), (5120, "*fp32", 4), (16384, "*bf16", 2)]:
        work += jobs(columns, pointer, itemsize)
    for job, report in zip(work, compile_for_hopper(work), strict=True):
        assert report["stack"] == 0, job
        assert report["registers"] * 32 * job["warps"] * job["resident"] <= 65_536, job
        narrow = {access for access in report["accesses"] if not access.endswith("v4.b32")}
        assert narrow <= {"ld.b32", "st.b32"}, job  # rstd, one a row
        assert report["accesses"]["st.v4.b32"] >= 1
        if job["arguments"].get("STAGES", 1) > 1:  # tiles come by asynchronous copies, 16 bytes each, of three tensors
            assert report["ptx"].count("cp.async.cg.shared.global") >= 3
        else:
            assert report["accesses"]["ld.v4.b32"] >= 3


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near):
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    rows, columns = 2**31 // 4096 + 3, 4096
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1] = draw(columns, dtype=torch.bfloat16)
    weight = draw(columns, dtype=torch.bfloat16, seed=1)
    out, summed, rstd = add_rms_norm_forward(x, x, weight, EPS)
    assert torch.equal(summed[-1], 2 * x[-1])
    assert_near(out[-1], plain(None, None, weight.double(), summed[-1].double())[0], units=2)
    grad_in, _ = add_rms_norm_backward(out, None, summed, weight, rstd)
    alone, _ = add_rms_norm_backward(out[-1:], None, summed[-1:], weight, rstd[-1:])
    assert torch.equal(grad_in[-1:], alone)
