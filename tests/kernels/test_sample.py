"""Sampling without a sort: exact thresholds, the noise of the plain sampler, rows that are not numbers."""

import math

import pytest
import torch

from impls.serving.request import Sampling
from impls.serving.sampler import Draws, exponential_noise, keep_top_k, keep_top_p
from kernels.sample import sample_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_of(rows, vocab, seed=0, scale=3.0, dtype=torch.float32):
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(dtype).to(DEVICE)


def draw(logits, *batch):
    draws = Draws.of(batch, logits.device)
    return sample_rows(logits, draws.temperatures_B, draws.top_ks_B, draws.top_ps_B, draws.keys_B), draws


def plain(logits, draws):
    """The same by sorting: thresholds from the plain sampler, the same noise, float64 where it decides."""
    noisy = draws.temperatures_B > 0
    scaled = logits.float() / torch.where(noisy, draws.temperatures_B, 1.0)[:, None]
    kept = keep_top_p(keep_top_k(scaled, draws), draws)
    raced = kept.double() - exponential_noise(draws.keys_B, logits.shape[1]).double().log()
    return torch.where(noisy, raced.argmax(-1), logits.float().argmax(-1))


SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.0),
    Sampling(0.7, top_k=5),
    Sampling(1.0, top_p=0.6),
    Sampling(1.4, top_k=40, top_p=0.9),
    Sampling(1.0, top_k=10_000, top_p=0.999),
    Sampling(0.2, top_p=1e-6),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [3, 100, 2048, 5001])
def test_the_tokens_are_those_of_the_sorting_sampler(vocab, dtype):
    logits = logits_of(21, vocab, dtype=dtype)
    batch = [(Sampling(s.temperature, s.top_k, s.top_p, seed=seed), 7) for seed in range(3) for s in SAMPLINGS]
    tokens, draws = draw(logits, *batch)
    assert tokens.tolist() == plain(logits, draws).tolist()


def test_thresholds_keep_ties_and_nothing_below():
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, -5.0]], device=DEVICE)
    seen = {int(draw(logits, (Sampling(50.0, top_k=2, seed=s), 0))[0]) for s in range(12)}
    assert seen == {1, 2}
    seen = {int(draw(logits, (Sampling(50.0, top_k=4, seed=s), 0))[0]) for s in range(25)}
    assert seen <= {0, 1, 2, 3, 4}
    assert seen >= {0, 1, 2}


def test_tokens_cut_off_before_are_never_drawn():
    logits = torch.full((1, 50), -math.inf, device=DEVICE)
    logits[0, [3, 40]] = torch.tensor([0.5, 0.4], device=DEVICE)
    for seed in range(6):
        token = int(draw(logits, (Sampling(9.0, top_p=0.99, seed=seed), seed))[0])
        assert token in (3, 40)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_is_told_apart(bad):
    logits = torch.zeros(3, 10, device=DEVICE)
    logits[1, 4] = bad
    logits[2] = -math.inf
    tokens, _ = draw(logits, *[(Sampling(1.0, top_p=0.9), 0)] * 3)
    assert tokens[1:].tolist() == [-1, -1]
    assert 0 <= int(tokens[0]) < 10


def test_wrong_arguments_are_named():
    logits = torch.zeros(2, 10, device=DEVICE)
    _, draws = draw(logits, (Sampling(1.0), 0), (Sampling(1.0), 0))
    with pytest.raises(ValueError, match="top_ps"):
        sample_rows(logits, draws.temperatures_B, draws.top_ks_B, draws.top_ps_B.double(), draws.keys_B)
    with pytest.raises(ValueError, match="logits"):
        sample_rows(logits.t(), draws.temperatures_B, draws.top_ks_B, draws.top_ps_B, draws.keys_B)


@pytest.mark.slow
def test_nothing_spills_on_hopper(compile_for_hopper):
    arguments = {
        "logits_ptr": "*bf16", "temperatures_ptr": "*fp32", "top_ks_ptr": "*i64", "top_ps_ptr": "*fp32",
        "keys_ptr": "*i64", "out_ptr": "*i64", "stride": "i32", "vocab": "i32", "TILE": 2048,
    }  # fmt: skip
    (report,) = compile_for_hopper([{"kernel": "kernels.sample:sample_kernel", "arguments": arguments, "warps": 16}])
    assert report["stack"] == 0, report
