"""Linear cross entropy in chunks against the full logits in float64."""

import pytest
import torch

from kernels.linear_cross_entropy import (
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_gradients,
    scale_,
)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")  # interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHUNK = 3  # tokens


def targets(rows, columns, device, ignored=()):
    target = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(9))
    target[list(ignored)] = -100
    return target.to(device)


def check(hidden, weight, target, assert_near, grad=1.0, units=24, accumulate=None, chunk=CHUNK, **options):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    doubles = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    size = chunk * weight.shape[0] * weight.element_size()
    loss = linear_cross_entropy(*leaves, target, accumulate=accumulate, logits_bytes=size, **options)
    want = torch.nn.functional.cross_entropy(doubles[0] @ doubles[1].T, target, **options)
    (grad * loss).backward()
    (grad * want).backward()
    unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[hidden.dtype]
    assert loss.dtype == torch.float32
    assert abs(loss.item() - want.item()) <= units * unit * abs(want.item())
    for leaf, double in zip(leaves, doubles, strict=True):
        assert_near(leaf.grad, double.grad, units)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 33), (8, 16, 257), (3, 4, 1000)], ids=str)
def test_equals_float64_with_every_gradient(shape, dtype, draw, assert_near):
    rows, width, columns = shape
    hidden, weight = draw(rows, width, dtype=dtype), draw(columns, width, dtype=dtype, seed=1)
    if columns == 1:  # one class: the loss and both gradients are zero, and exactly so
        loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets(1, 1, hidden.device))
        loss.backward()
        assert loss == 0
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))
        return
    check(hidden, weight, targets(rows, columns, hidden.device), assert_near)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_options(reduction, label_smoothing, draw, assert_near):
    hidden, weight = draw(8, 12), draw(65, 12, seed=1)
    target = targets(8, 65, hidden.device, ignored=(0, 1, 2, 6))  # one chunk has nothing that counts
    check(hidden, weight, target, assert_near, grad=0.5, reduction=reduction, label_smoothing=label_smoothing)


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_accumulation_over_many_chunks(accumulate, draw, assert_near):
    hidden, weight = draw(40, 8, dtype=torch.float16), draw(50, 8, dtype=torch.float16, seed=1)
    target = targets(40, 50, hidden.device)
    check(hidden, weight, target, assert_near, accumulate=accumulate, chunk=1, units=24 if accumulate is None else 4)


def test_the_number_of_chunks_does_not_change_the_loss(draw):
    hidden, weight = draw(9, 12), draw(70, 12, seed=1)
    target = targets(9, 70, hidden.device)
    losses = [
        linear_cross_entropy_gradients(hidden, weight, target, logits_bytes=280 * chunk)[0] for chunk in (1, 4, 9)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-5, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(losses[0], linear_cross_entropy(hidden, weight, target), rtol=1e-5, atol=0)


def test_a_frozen_weight_has_no_gradient_and_costs_none(draw):
    hidden, weight = draw(6, 12).requires_grad_(), draw(70, 12, seed=1)
    target = targets(6, 70, hidden.device)
    linear_cross_entropy(hidden, weight, target).backward()
    assert hidden.grad is not None
    assert linear_cross_entropy_gradients(hidden.detach(), weight, target, needs=(True, False))[2] is None


def test_gradients_are_handed_out_once(draw):
    hidden, weight = draw(6, 12).requires_grad_(), draw(70, 12, seed=1)
    loss = linear_cross_entropy(hidden, weight, targets(6, 70, hidden.device))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="earlier backward"):
        loss.backward()


def test_large_logits_and_every_token_ignored(draw, assert_near):
    hidden, weight = draw(5, 8, scale=100.0), draw(40, 8, scale=100.0, seed=1)
    check(hidden, weight, targets(5, 40, hidden.device), assert_near)
    none = torch.full((5,), -100, device=hidden.device)
    assert linear_cross_entropy(hidden, weight, none).isnan()
    assert linear_cross_entropy(hidden, weight, none, reduction="sum") == 0


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_nan_stays_with_its_token(draw):
    hidden, weight = draw(5, 8), draw(40, 8, seed=1)
    hidden[2, 3] = float("nan")
    loss, grad_hidden, _ = linear_cross_entropy_gradients(hidden, weight, targets(5, 40, hidden.device))
    assert loss.isnan()
    assert grad_hidden.isnan().all(-1).tolist() == [False, False, True, False, False]


def test_no_tokens(draw):
    hidden, weight = draw(0, 8), draw(40, 8, seed=1)
    target = torch.empty(0, dtype=torch.long, device=hidden.device)
    loss, grad_hidden, grad_weight = linear_cross_entropy_gradients(hidden, weight, target)
    assert loss.isnan()
    assert grad_hidden.shape == (0, 8)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


def test_many_chunks_are_no_less_exact_than_the_plain_way(draw):
    """A 16-bit sum over eight chunks, which with the targets' own elements in it is off by twice as much or more."""
    hidden, weight = draw(96, 40).half(), (draw(300, 40, seed=1) / 6).half()
    target = targets(96, 300, hidden.device, ignored=(3, 50))
    doubles = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    want = torch.nn.functional.cross_entropy(doubles[0] @ doubles[1].T, target)
    exact = torch.autograd.grad(want, doubles)
    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    torch.nn.functional.cross_entropy((plain[0] @ plain[1].T).float(), target).backward()
    _, *got = linear_cross_entropy_gradients(hidden, weight, target, logits_bytes=2 * 300 * 12)
    for leaf, mine, truth in zip(plain, got, exact, strict=True):
        own = (leaf.grad.double() - truth).abs().max()
        assert (mine.double() - truth).abs().max() <= 0.9 * own


def test_non_contiguous_hidden(draw, assert_near):
    hidden, weight = draw(12, 7).T, draw(40, 24, seed=1)[:, ::2]
    check(hidden, weight, targets(7, 40, hidden.device), assert_near)


def test_chunks_are_few_and_equal():
    assert chunk_rows(8192, 128_256, 2) == 2048  # 0.49 GiB of logits, four chunks
    assert chunk_rows(10, 128_256, 2) == 128
    assert chunk_rows(4100, 128_256, 2) == 2050
    assert chunk_rows(5, 1000, 4, logits_bytes=1) == 1
    for rows in (1, 100, 2049, 9000):
        assert chunk_rows(rows, 128_256, 2) * 128_256 * 2 <= 2**29


@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_scale_in_place(factor, draw):
    tensor = draw(5001)
    want = tensor * factor
    scale_(tensor, torch.tensor(factor, device=tensor.device))
    assert torch.equal(tensor, want)


def test_bad_input_is_named(draw):
    hidden, weight = draw(4, 8), draw(16, 8)
    target = targets(4, 16, hidden.device)
    for arguments, message in [
        ((hidden.double(), weight, target), "hidden: dtype"),
        ((hidden, weight.half(), target), "weight: dtype"),
        ((hidden, weight.T, target), "weight: shape"),
        ((hidden, weight, target[:3]), "target: shape"),
        ((hidden, weight, target, -100, 0.0, "none"), "reduction: 'none'"),
        ((hidden, weight, target, -100, 2.0), "label_smoothing: 2.0"),
        ((hidden, weight, target, -100, 0.0, "mean", torch.float64), "accumulate: torch.float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy_gradients(*arguments)


@pytest.mark.gpu
def test_float32_sums_of_bfloat16_products_on_the_gpu(draw, assert_near):
    # Logits of about one: where they are sixteen, their own rounding moves the softmax by more than any bound here.
    hidden = draw(600, 256, dtype=torch.bfloat16)
    weight = (draw(5000, 256, seed=1) / 16).to(torch.bfloat16)
    target = targets(600, 5000, hidden.device)
    check(hidden, weight, target, assert_near, accumulate=torch.float32, chunk=100, units=8)
    check(hidden, weight, target, assert_near, chunk=100, units=24)
