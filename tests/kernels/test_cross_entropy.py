"""Cross entropy against torch's in float64: ignored rows, smoothing, reductions, extremes, in place."""

import pytest
import torch

import kernels.cross_entropy as module
from kernels.cross_entropy import (
    Launch,
    backward_shape,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_gradient_,
    launch_shape,
)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")  # interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def targets(rows, columns, device, ignored=()):
    target = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(9))
    target[list(ignored)] = -100
    return target.to(device)


def check(logits, target, assert_near, grad=None, units=8, **options):
    leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy(leaf, target, **options)
    want = torch.nn.functional.cross_entropy(double, target.long(), **options)
    grad = torch.full_like(loss, 0.75) if grad is None else grad
    loss.backward(grad)
    want.backward(grad.double())
    assert loss.dtype == torch.float32
    assert_near(loss.detach(), want.detach(), units)
    assert_near(leaf.grad, double.grad, units)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (7, 33), (9, 1000), (4, 20_011)], ids=str)
def test_equals_float64_forward_and_backward(shape, dtype, draw, assert_near):
    check(draw(*shape, dtype=dtype, scale=3.0), targets(*shape, draw(1).device), assert_near)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_options(reduction, label_smoothing, draw, assert_near):
    logits = draw(9, 257, scale=3.0)
    target = targets(9, 257, logits.device, ignored=(0, 4))
    grad = draw(9, seed=3) if reduction == "none" else None
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    check(logits, target, assert_near, grad, **options)
    target[target == -100] = 7
    check(logits, target.int(), assert_near, grad, ignore_index=7, **options)


def test_magnitudes_and_all_equal_rows(draw, assert_near):
    logits = draw(4, 300, scale=1e4)
    logits[1], logits[2] = 1e4, 0.0
    check(logits, targets(4, 300, logits.device), assert_near, units=32)
    check(logits, targets(4, 300, logits.device), assert_near, units=32, label_smoothing=0.2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_far_from_zero_are_as_right_as_others(smoothing, draw, assert_near):
    """Each row by itself: a loss of seven beside a row whose losses are thousands would pass at any error."""
    logits = draw(5, 700)
    logits[0], logits[1] = 1e4, 1e4 + 0.37
    logits[2] += 1e4
    logits[3] -= 1e4
    target = targets(5, 700, logits.device, ignored=())
    double, single = logits.double().requires_grad_(), logits.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(double, target, reduction="none", label_smoothing=smoothing)
    got = cross_entropy(single, target, label_smoothing=smoothing, reduction="none")
    want.sum().backward()
    got.sum().backward()
    losses, scale = torch.full((5,), float("nan"), device=logits.device), torch.ones((), device=logits.device)
    cross_entropy_gradient_(logits, target, losses, scale, label_smoothing=smoothing)
    for row in range(5):
        assert_near(got.detach()[row], want.detach()[row], units=8)
        assert_near(losses[row], want.detach()[row], units=8)
        assert_near(single.grad[row], double.grad[row], units=8)
        assert_near(logits[row], double.grad[row], units=8)


def test_nan_and_inf_where_the_plain_way_has_them(draw, assert_near):
    logits = draw(6, 50)
    logits[0, 3], logits[1, 4], logits[2, 5], logits[3] = float("nan"), float("inf"), float("-inf"), float("-inf")
    target = torch.tensor([1, 1, 5, 1, 2, 3], device=logits.device)
    for smoothing in (0.0, 0.1):
        check(logits, target, assert_near, reduction="none", label_smoothing=smoothing)
    loss, _, _ = cross_entropy_forward(logits, target, reduction="none")
    assert loss[2] == float("inf")


def test_ignored_rows_are_not_read(draw):
    logits = draw(3, 40)
    logits[1] = float("nan")
    target = torch.tensor([3, -100, 5], device=logits.device)
    loss, norm, count = cross_entropy_forward(logits, target)
    assert loss.isfinite()
    assert count == 2
    grad = cross_entropy_backward(torch.ones_like(loss), logits, target, norm, count)
    assert torch.equal(grad[1], torch.zeros(40, device=logits.device))


def test_every_row_ignored_and_no_rows(draw):
    logits = draw(3, 40)
    target = torch.full((3,), -100, device=logits.device)
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0
    assert cross_entropy(logits[:0], target[:0]).isnan()
    assert cross_entropy(logits[:0], target[:0], reduction="none").shape == (0,)


def test_a_target_outside_the_vocabulary_gives_nan(draw):
    logits = draw(3, 40)
    loss, _, _ = cross_entropy_forward(logits, torch.tensor([3, 40, -1], device=logits.device), reduction="none")
    assert loss.isnan().tolist() == [False, True, True]


def test_in_place_gives_the_same_gradient_over_the_logits_once(draw):
    logits, target = draw(5, 333), targets(5, 333, draw(1).device)
    leaf = logits.clone().requires_grad_()
    cross_entropy(leaf, target).backward()
    other = logits.clone().requires_grad_()
    mine = other * 1.0
    loss = cross_entropy(mine, target, inplace=True)
    loss.backward(retain_graph=True)
    assert torch.equal(other.grad, leaf.grad)
    assert torch.equal(mine.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="inplace=False"):
        loss.backward()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_at_once(smoothing, draw, assert_near):
    logits = draw(7, 500, scale=2.0)
    target = targets(7, 500, logits.device, ignored=(2,))
    losses = torch.full((7,), float("nan"), device=logits.device)
    double = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(double, target, reduction="none", label_smoothing=smoothing)
    (0.25 * want.sum()).backward()
    scale = torch.tensor(0.25, device=logits.device)
    assert cross_entropy_gradient_(logits, target, losses, scale, label_smoothing=smoothing) is None
    assert_near(losses, want.detach(), units=8)
    assert_near(logits, double.grad, units=8)


def test_strided_rows(draw):
    wide = draw(4, 100)
    logits, target = wide[:, 10:60], targets(4, 50, wide.device)
    loss, norm, count = cross_entropy_forward(logits, target)
    assert torch.equal(loss, cross_entropy_forward(logits.contiguous(), target)[0])
    outside = wide[:, :10].clone(), wide[:, 60:].clone()
    want = cross_entropy_backward(torch.ones_like(loss), logits.contiguous(), target, norm, count)
    grad = cross_entropy_backward(torch.ones_like(loss), logits, target, norm, count, inplace=True)
    assert grad.data_ptr() == logits.data_ptr()
    assert torch.equal(wide[:, 10:60], want)
    assert torch.equal(wide[:, :10], outside[0])
    assert torch.equal(wide[:, 60:], outside[1])


def test_bad_input_is_named(draw):
    logits, target = draw(4, 8), torch.zeros(4, dtype=torch.long, device=draw(1).device)
    for arguments, message in [
        ((logits.double(), target), "logits: dtype"),
        ((logits[0], target), "logits: shape"),
        ((logits.T, target), "logits: its last dimension"),
        ((draw(4, 0), target), "use 1 to"),
        ((logits, target.float()), "target: dtype"),
        ((logits, target[:3]), "target: shape"),
        ((logits, target, -100, 1.0), "label_smoothing: 1.0"),
        ((logits, target, -100, 0.0, "max"), "reduction: 'max'"),
    ]:
        with pytest.raises(ValueError, match=message):
            cross_entropy_forward(*arguments)
    loss, norm, count = cross_entropy_forward(logits, target)
    with pytest.raises(ValueError, match="grad_loss: shape"):
        cross_entropy_backward(norm, logits, target, norm, count)
    with pytest.raises(ValueError, match="norm: "):
        cross_entropy_backward(loss, logits, target, loss, count)
    with pytest.raises(ValueError, match="losses: "):
        cross_entropy_gradient_(logits, target, norm[:3, 0], loss)
    with pytest.raises(ValueError, match="scale: "):
        cross_entropy_gradient_(logits, target, norm[:, 0].contiguous(), norm)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [40, 256, 2048, 3001])  # part of a turn, one turn, whole turns, turns and a rest
@pytest.mark.parametrize("shape", [Launch(32, 4, 2, 1), Launch(64, 4, 1, 2, ahead=False)], ids=["2", "1"])
def test_every_launch_shape_gives_the_same(shape, columns, smoothing, draw, assert_near, monkeypatch):
    monkeypatch.setattr(module, "launch_shape", lambda *_, **__: shape)
    monkeypatch.setattr(module, "backward_shape", lambda *_: (256, 1))
    logits, target = draw(5, columns, scale=3.0), targets(5, columns, draw(1).device, ignored=(3,))
    check(logits, target, assert_near, label_smoothing=smoothing)
    double, losses = logits.double().requires_grad_(), draw(5)
    want = torch.nn.functional.cross_entropy(double, target, reduction="none", label_smoothing=smoothing)
    want.sum().backward()
    cross_entropy_gradient_(logits, target, losses, torch.ones_like(losses[0]), label_smoothing=smoothing)
    assert_near(losses, want.detach(), units=8)
    assert_near(logits, double.grad, units=8)


def test_the_target_s_own_element_can_be_kept_apart_and_unrounded(draw, assert_near):
    logits = (4 * draw(6, 700)).half()
    target = torch.tensor([0, 699, 5, -100, 300, 900], device=logits.device)  # one ignored, one that is no column
    together, apart = logits.clone(), logits.clone()
    losses, own, scale = torch.empty(6), torch.full((6,), float("nan")), torch.tensor(0.25)
    losses, own, scale = (t.to(logits.device) for t in (losses, own, scale))
    cross_entropy_gradient_(together, target, losses, scale, label_smoothing=0.1)
    cross_entropy_gradient_(apart, target, losses, scale, label_smoothing=0.1, own=own)
    rows, columns = torch.arange(3), target[:3].cpu()
    exact = 0.25 * (logits.double().softmax(-1).cpu()[rows, columns] - 0.1 / 700 - 0.9)
    assert_near(own[:3].cpu(), exact, units=8)
    assert own[3] == own[5] == 0
    assert (apart.cpu()[rows, columns] == 0).all()
    apart[:3][rows, columns] = own[:3].half()
    apart[4, 300] = own[4].half()
    assert torch.equal(apart, together)
    with pytest.raises(ValueError, match="own: "):
        cross_entropy_gradient_(apart, target, losses, scale, own=own[:2])


@pytest.mark.slow
def test_compiled_for_hopper_with_16_byte_accesses(compile_for_hopper):
    pointers = {"logits_ptr": "*bf16", "grad_ptr": "*bf16", "target_ptr": "*i64", "ignore_index": "i32"}
    pointers |= dict.fromkeys(("loss_ptr", "norm_ptr", "own_ptr", "scale_ptr", "count_ptr"), "*fp32")
    pointers |= dict.fromkeys(("stride", "grad_stride"), "i32") | {"smoothing": "fp32", "scale_stride": 1}
    jobs = []
    for columns in (32_000, 128_256):
        arguments = pointers | {"MEAN": True, "COLUMNS": columns, "APART": True}
        for name, gradient in (("loss_kernel", False), ("loss_and_gradient_kernel", True)):
            constants = launch_shape(columns, 2, gradient=gradient).constants()
            warps, options = constants.pop("num_warps"), {"maxnreg": constants.pop("maxnreg")}
            for smoothed in (False, True):
                job = {"kernel": f"kernels._cross_entropy:{name}", "warps": warps, "options": options}
                jobs.append(job | {"arguments": arguments | constants | {"SMOOTHED": smoothed}})
        block, warps = backward_shape(columns, 2)
        job = {"kernel": "kernels._cross_entropy:backward_kernel", "arguments": arguments | {"BLOCK": block}}
        jobs.append(job | {"warps": warps})
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        assert report["stack"] == 0, job
        accesses = report["accesses"]
        assert accesses["ld.v4.b32"] >= 2
        assert accesses.get("st.v4.b32", 0) >= (0 if "loss_kernel" in job["kernel"] else 2)
        assert "st.b16" not in accesses


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near):
    columns = 128_256
    rows = 2**31 // columns + 3
    if torch.cuda.mem_get_info()[0] < 6 * rows * columns:
        pytest.skip("needs 13 GiB of free GPU memory")
    logits = torch.zeros((rows, columns), dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 4.0
    target = torch.full((rows,), 5, device="cuda")
    loss, norm, count = cross_entropy_forward(logits, target, reduction="none")
    want = logits[-1:].double().requires_grad_()
    torch.nn.functional.cross_entropy(want, target[-1:]).backward()
    assert_near(loss[-1:], torch.nn.functional.cross_entropy(want.detach(), target[-1:], reduction="none"), units=8)
    cross_entropy_backward(torch.ones_like(loss), logits, target, norm, count, reduction="none", inplace=True)
    assert_near(logits[-1:], want.grad, units=2)
