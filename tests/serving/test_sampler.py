"""The sampler keeps the distribution: a statistical test, and the faults that it must be able to see."""

from __future__ import annotations

import math

import pytest
import torch

from impls.serving.engine import NOT_A_TOKEN
from impls.serving.request import Sampling
from impls.serving.sampler import CANDIDATES, Draws, draw_key, exponential_noise, keep_top_k, keep_top_p, sample

CPU = torch.device("cpu")
DRAWS = 20_000


def draws_of(*batch: tuple[Sampling, int]) -> Draws:
    found = Draws.of(batch, CPU)
    assert found is not None
    return found


def counts(logits: torch.Tensor, sampling: Sampling, seeds: range = range(DRAWS)) -> torch.Tensor:
    """How often each token is drawn, one draw a seed."""
    batch = [(Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=s), 5) for s in seeds]
    tokens = sample(logits.expand(len(batch), -1), draws_of(*batch))
    return torch.bincount(tokens, minlength=logits.numel())


def chi_square(seen: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic over its degrees of freedom, in standard deviations from 1 (Wilson and Hilferty, 1931)."""
    kept = probabilities > 0
    assert int(seen[~kept].sum()) == 0, "a token of no probability was drawn"
    expected = probabilities[kept].double() * int(seen.sum())
    free = int(kept.sum()) - 1
    statistic = float(((seen[kept].double() - expected) ** 2 / expected).sum())
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.2, 0.0, -0.3, -0.6, -1.0, -1.5, -2.0, -2.5])


def nucleus(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """By hand: take the largest until they reach p, then make them sum to one."""
    order = probabilities.argsort(descending=True).tolist()
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += float(probabilities[token])
        if total >= p:
            break
    out = torch.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()


def expected(sampling: Sampling) -> torch.Tensor:
    logits = LOGITS / sampling.temperature
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
    return nucleus(logits.softmax(0), sampling.top_p)


CASES = {
    "temperature 1": Sampling(1.0),
    "hot": Sampling(2.5),
    "cold": Sampling(0.6),
    "top-k": Sampling(1.0, top_k=4),
    "top-p": Sampling(1.0, top_p=0.8),
    "all": Sampling(1.3, top_k=7, top_p=0.9),
}


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_distribution(sampling):
    assert abs(chi_square(counts(LOGITS, sampling), expected(sampling))) < 4


FAULTS = {
    "temperature forgotten": (Sampling(1.0), Sampling(1.3)),
    "temperature a tenth off": (Sampling(1.1), Sampling(1.0)),
    "one token too few in the nucleus": (Sampling(1.0, top_k=3), Sampling(1.0, top_k=4)),
    "nucleus ignored": (Sampling(1.0), Sampling(1.0, top_p=0.95)),
}


@pytest.mark.parametrize(("drawn", "claimed"), FAULTS.values(), ids=FAULTS.keys())
def test_the_statistical_test_sees_planted_faults(drawn, claimed):
    seen, probabilities = counts(LOGITS, drawn), expected(claimed)
    beyond = int(seen[probabilities == 0].sum()) > 0
    assert beyond or chi_square(seen, probabilities) > 6


def test_neighbouring_places_and_tokens_draw_independent_noise():
    places = torch.tensor([draw_key(1, place) for place in range(400)])
    noise = exponential_noise(places, 300)
    assert noise.mean() == pytest.approx(1.0, abs=0.01)
    assert noise.var() == pytest.approx(1.0, abs=0.03)
    flat = noise - noise.mean()
    for a, b in ((flat[1:], flat[:-1]), (flat[:, 1:], flat[:, :-1])):
        assert abs(float((a * b).mean())) < 0.015
    assert float(noise.min()) > 0


def test_a_request_draws_the_same_tokens_beside_anyone():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 200, generator=generator)
    mine = Sampling(0.9, top_k=50, top_p=0.9, seed=77)
    alone = sample(logits[2:3], draws_of((mine, 12)))
    batch = [(Sampling(1.5, seed=i), i) for i in range(5)]
    batch[2] = (mine, 12)
    crowd = sample(logits, draws_of(*batch))
    assert crowd[2] == alone[0]


def test_greedy_rows_take_the_largest_among_rows_that_draw():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits, None), logits.argmax(-1))
    batch = [(Sampling(0.0), 3), (Sampling(1.0, top_k=1), 3), (Sampling(1.0, seed=3), 3), (Sampling(0.0, top_k=5), 3)]
    tokens = sample(logits, draws_of(*batch))
    assert torch.equal(tokens[[0, 1, 3]], logits.argmax(-1)[[0, 1, 3]])


def test_only_equal_logits_are_ties():
    # So hot that every probability rounds to a third: the two largest logits reach a half, and the third is no tie.
    draws = Draws.of([(Sampling(temperature=1e30, top_p=0.5), 3)], CPU)
    assert draws is not None
    assert keep_top_p(torch.tensor([[1.0, 2.0, 0.0]]) / 1e30, draws).isfinite().tolist() == [[True, True, False]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-39, 1e-44, 1e-300])
def test_the_coldest_draw_is_the_likeliest_token(temperature):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    limits = ({}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.9})
    batch = [(Sampling(temperature=temperature, **limit), 3) for limit in limits]
    assert torch.equal(sample(logits, Draws.of(batch, CPU)), logits.argmax(dim=1))


def test_the_hottest_draw_takes_any_token_but_the_impossible():
    logits = torch.zeros(64, 8).index_fill(1, torch.tensor([0, 3]), -torch.inf)
    batch = [(Sampling(temperature=1e300, seed=seed), 3) for seed in range(64)]
    assert set(sample(logits, Draws.of(batch, CPU)).tolist()) == {1, 2, 4, 5, 6, 7}


def test_all_greedy_needs_no_draws():
    assert Draws.of([(Sampling(), 1), (Sampling(1.0, top_k=1), 2)], CPU) is None


def test_a_nucleus_wider_than_the_candidates_is_still_exact():
    vocab = 3 * CANDIDATES
    logits = torch.linspace(0.5, 0.0, vocab)
    batch = draws_of((Sampling(1.0, top_p=0.9), 1), (Sampling(1.0, top_p=0.01), 1))
    kept = keep_top_p(logits.expand(2, -1), batch).isfinite()
    for row, p in enumerate((0.9, 0.01)):
        want = nucleus(logits.double().softmax(0), p) > 0
        assert abs(int(kept[row].sum()) - int(want.sum())) <= 1


def test_ties_stay_together_and_the_best_always_stays():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert keep_top_k(logits, draws_of((Sampling(1.0, top_k=2), 0))).isfinite().tolist() == [[True, True, True, False]]
    tiny = draws_of((Sampling(1.0, top_p=1e-9), 0))
    assert keep_top_p(torch.tensor([[0.0, 3.0, 1.0]]), tiny).isfinite().tolist() == [[False, True, False]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_numbers_are_told_apart(bad):
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    logits[2] = -math.inf
    assert sample(logits, None).tolist() == [0, NOT_A_TOKEN, NOT_A_TOKEN]
    tokens = sample(logits, draws_of(*[(Sampling(1.0, top_p=0.9), 0)] * 3)).tolist()
    assert tokens[1:] == [NOT_A_TOKEN, NOT_A_TOKEN]
    assert 0 <= tokens[0] < 10
