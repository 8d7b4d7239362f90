"""AdamW against its formula in float64 and against torch.optim.AdamW, over many shapes and dtypes at once."""

import pytest
import torch

from kernels.adamw import _REGISTERS, _WARPS, CHUNK, AdamW, bytes_per_parameter

SHAPES = [(1,), (3, 5), (), (2, 0, 4), (CHUNK,), (CHUNK + 1,), (7, 131), (2 * CHUNK + 17,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def formula(params, gradients, lr, betas, eps, weight_decay):
    """Loshchilov and Hutter's algorithm 2 in float64, over the steps in `gradients`."""
    params = [param.double().clone() for param in params]
    first, second = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    for step, grads in enumerate(gradients, 1):
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            grad = grad.double()
            params[index] *= 1 - lr * weight_decay
            first[index] = betas[0] * first[index] + (1 - betas[0]) * grad
            second[index] = betas[1] * second[index] + (1 - betas[1]) * grad**2
            root = (second[index] / (1 - betas[1] ** step)).sqrt()
            params[index] -= lr * first[index] / (1 - betas[0] ** step) / (root + eps)
    return params, first, second


def tensors(draw, dtype, seed=0, shapes=SHAPES, scale=1.0):
    return [draw(*shape, dtype=dtype, seed=seed + index, scale=scale) for index, shape in enumerate(shapes)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_the_formula_over_steps(dtype, grad_dtype, on_device, draw, assert_near):
    params = tensors(draw, dtype)
    start = [param.clone() for param in params]
    gradients = [tensors(draw, grad_dtype or dtype, seed=100 * step) for step in (1, 2, 3)]
    optimizer = AdamW(params, on_device=on_device, **OPTIONS)
    for grads in gradients:
        optimizer.step(grads)
    assert optimizer.steps == 3
    want, first, second = formula(start, gradients, **OPTIONS)
    for index, param in enumerate(params):
        if not param.numel():
            continue
        exact = param if dtype == torch.float32 else optimizer.masters[index]
        assert exact.dtype == torch.float32
        assert_near(exact, want[index], units=32)
        assert_near(optimizer.exp_avgs[index], first[index], units=16)
        assert_near(optimizer.exp_avg_sqs[index], second[index], units=16)
        assert_near(param, want[index], units=2 if dtype != torch.float32 else 32)


def test_equals_torch(draw):
    mine, theirs = tensors(draw, torch.float32), tensors(draw, torch.float32)
    leaves = [param.requires_grad_() for param in theirs]
    optimizer, other = AdamW(mine, **OPTIONS), torch.optim.AdamW(leaves, **OPTIONS)
    for step in range(5):
        grads = tensors(draw, torch.float32, seed=100 * step + 50)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.clone()
        other.step()
        optimizer.step(grads)
    for actual, expected in zip(mine, leaves, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-6)


def test_masters_keep_what_a_16_bit_parameter_cannot(draw):
    param = torch.ones(64, dtype=torch.bfloat16, device=draw(1).device)
    optimizer = AdamW([param], lr=1e-5, weight_decay=0.0)
    for _ in range(3):
        optimizer.step([torch.ones_like(param)])
    assert torch.equal(optimizer.masters[0].float(), optimizer.masters[0])
    assert (optimizer.masters[0] < 1.0).all()
    assert (optimizer.masters[0] > 1.0 - 1e-4).all()


def test_parameters_without_a_gradient_are_left_alone(draw, assert_near):
    params = tensors(draw, torch.float32)
    start = [param.clone() for param in params]
    gradients = []
    for step in (1, 2):
        grads = tensors(draw, torch.float32, seed=100 * step)
        grads[1] = grads[4] = None
        gradients.append(grads)
    optimizer = AdamW(params, **OPTIONS)
    for grads in gradients:
        optimizer.step(grads)
    want, _, _ = formula(start, gradients, **OPTIONS)
    assert torch.equal(params[1], start[1])
    assert torch.equal(optimizer.exp_avgs[4], torch.zeros_like(params[4]))
    assert_near(params[6], want[6], units=32)


def test_mixed_dtypes_and_unaligned_views_in_one_step(draw, assert_near):
    whole = draw(4099)
    view = whole[1:]  # 4 bytes past a 16-byte boundary
    params = [view, draw(70, dtype=torch.bfloat16, seed=1), draw(5000, seed=2)]
    start = [param.clone() for param in params]
    grads = [draw(4098, seed=3), draw(70, seed=4), draw(5000, seed=5)]
    optimizer = AdamW(params, **OPTIONS)
    outside = whole[0].clone()
    optimizer.step(grads)
    want, _, _ = formula(start, [grads], **OPTIONS)
    assert whole[0] == outside
    assert_near(view, want[0], units=16)
    assert_near(params[1], want[1], units=2)
    assert_near(params[2], want[2], units=16)


def test_first_step_of_a_late_beta_is_exact(draw, assert_near):
    params = [draw(100)]
    start = [params[0].clone()]
    options = OPTIONS | {"betas": (0.9, 0.9999)}
    grads = [draw(100, seed=1)]
    for on_device in (False, True):
        params[0].copy_(start[0])
        AdamW(params, on_device=on_device, **options).step(grads)
        assert_near(params[0], formula(start, [grads], **options)[0][0], units=16)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")  # interpreted
def test_extremes_stay_in_their_elements(draw, assert_near):
    params, grads = [draw(50)], [draw(50, seed=1)]
    start = [params[0].clone()]
    grads[0][3], grads[0][4], grads[0][5] = 0.0, 1e4, 1e-20
    want, _, _ = formula(start, [grads], **OPTIONS)
    grads[0][0] = float("nan")
    AdamW(params, **OPTIONS).step(grads)
    assert params[0].isnan().nonzero().flatten().tolist() == [0]
    # A gradient of 1e-20 squares to nothing in float32; eps then decides the size of its step.
    keep = [index for index in range(50) if index not in (0, 5)]
    assert_near(params[0][keep], want[0][keep], units=16)


@pytest.mark.parametrize("on_device", [False, True])
def test_goes_on_from_given_state(on_device, draw):
    params = [draw(300, dtype=torch.bfloat16), draw(40, seed=1)]
    grads = [[draw(300, dtype=torch.bfloat16, seed=step), draw(40, seed=step + 9)] for step in (2, 3)]
    again = [param.clone() for param in params]
    whole = AdamW(params, on_device=on_device, **OPTIONS)
    whole.step(grads[0])
    half = AdamW(again, **OPTIONS)
    half.step(grads[0])
    state = [[t.clone() for t in moments] for moments in (half.exp_avgs, half.exp_avg_sqs)]
    masters = [half.masters[0].clone(), torch.empty(40, device=params[0].device)]
    rest = AdamW(again, on_device=on_device, masters=masters, exp_avgs=state[0], exp_avg_sqs=state[1], **OPTIONS)
    rest.steps = 1
    whole.step(grads[1])
    rest.step(grads[1])
    assert rest.steps == 2
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    with pytest.raises(ValueError, match=r"exp_avgs\[0\]: "):
        AdamW(params, exp_avgs=[params[0], params[1]])
    with pytest.raises(ValueError, match="masters: has 1"):
        AdamW(params, masters=masters[:1])


def test_bytes_a_parameter():
    assert bytes_per_parameter(torch.float32, torch.float32) == 28
    assert bytes_per_parameter(torch.bfloat16, torch.bfloat16) == 28
    assert bytes_per_parameter(torch.bfloat16, torch.float32) == 30


def test_new_gradient_tensors_are_found(draw):
    once, again = [draw(300)], [draw(300)]
    first, second = AdamW(once, **OPTIONS), AdamW(again, **OPTIONS)
    buffer = torch.empty(300, device=once[0].device)
    kept = []
    for step in range(3):
        grad = draw(300, seed=step + 1)
        kept.append(grad)  # so that the allocator cannot give the same address twice
        first.step([grad])
        second.step([buffer.copy_(grad)])
    assert torch.equal(once[0], again[0])


def test_bad_input_is_named(draw):
    for arguments, message in [
        (([],), "params: is empty"),
        (([draw(4).double()],), r"params\[0\]: dtype"),
        (([draw(4), draw(4, 8).T],), r"params\[1\]: stride"),
        (([draw(4)], -1.0), "lr: -1.0"),
        (([draw(4)], 1e-3, (1.0, 0.9)), "betas"),
        (([draw(4)], 1e-3, (0.9, 0.9), -1.0), "eps"),
    ]:
        with pytest.raises(ValueError, match=message):
            AdamW(*arguments)
    optimizer = AdamW([draw(4), draw(2, 3).half()])
    for grads, message in [
        ([draw(4)], "grads: has 1"),
        ([draw(5), None], r"grads\[0\]: shape"),
        ([None, draw(3, 2).half().T], r"grads\[1\]: shape"),
        ([None, draw(2, 3).bfloat16()], r"grads\[1\]: dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.step(grads)


@pytest.mark.slow
def test_compiled_for_hopper_with_16_byte_accesses(compile_for_hopper):
    arguments = dict.fromkeys(("chunk_ptr", "address_ptr", "grad_address_ptr"), "*i64") | {"correction_ptr": "*fp32"}
    arguments |= dict.fromkeys(("keep", "rate", "root", "beta1", "beta2", "eps"), "fp32")
    arguments |= {"ON_DEVICE": False, "HAS_MASTER": True, "ALIGNED": True, "BLOCK": CHUNK}
    arguments |= {"PARAM": {"dtype": "bf16"}, "GRAD": {"dtype": "bf16"}}
    job = {
        "kernel": "kernels.adamw:_adamw_kernel",
        "arguments": arguments,
        "warps": _WARPS,
        "options": {"maxnreg": _REGISTERS},
    }
    (report,) = compile_for_hopper([job])
    assert report["stack"] == 0
    assert report["registers"] * 32 * 48 <= 65_536
    # Whole chunks: 16 bytes a thread of the three float32 tensors, 8 of the gradient and the parameter.
    assert report["accesses"]["ld.v4.b32"] == report["accesses"]["st.v4.b32"] == 3
    assert report["accesses"]["ld.v2.b32"] == report["accesses"]["st.v2.b32"] == 1
    assert report["shared"] == 0


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 18 * count:
        pytest.skip("needs 36 GiB of free GPU memory")
    param = torch.ones(count, dtype=torch.bfloat16, device="cuda")
    optimizer = AdamW([param], lr=0.5, weight_decay=0.0)
    optimizer.step([param.clone()])
    # Whole chunks and the last one are two paths, which need not contract their products alike.
    lowest, highest = (bound.item() for bound in torch.aminmax(optimizer.masters[0]))
    assert (lowest, highest) == pytest.approx((0.5, 0.5), rel=1e-5)
    assert torch.equal(param[-3:].float(), torch.full((3,), 0.5, device="cuda"))


@pytest.mark.gpu
def test_a_captured_graph_keeps_counting(draw):
    params, grad = [draw(5000)], draw(5000, seed=1)
    want, _, _ = formula(params, [[grad]] * 4, **OPTIONS)
    optimizer = AdamW(params, on_device=True, **OPTIONS)
    optimizer.step([grad])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step([grad])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert optimizer.steps == 4
    torch.testing.assert_close(params[0].double(), want[0], rtol=1e-5, atol=1e-5)
