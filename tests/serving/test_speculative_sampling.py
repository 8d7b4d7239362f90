"""Speculative sampling: whatever is drafted, answers are distributed as the target's own, and wrong rules are caught.

The chance of every answer of a few tokens is computed by the chain rule on a small vocabulary; many rows are decoded
from one prompt, and their counts are held against it by chi-square.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from impls.model.config import ModelConfig
from impls.model.weights import load_model
from impls.serving.draft_acceptance import Draft, Sampled
from impls.serving.drafted_loop import DraftedLoop
from impls.serving.drafts import LayerSkip, PromptLookup

FEW = 5
SMALLEST = ModelConfig(
    vocab_size=FEW, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8
)
ROWS, TOKENS, TEMPERATURE = 6_000, 3, 0.8
PROMPT = [1, 3, 2, 1, 3]


class KeepsAll(Sampled):
    """Accepts every draft."""

    def kept(self, p_Bk, q_Bk):
        return torch.ones_like(p_Bk, dtype=torch.bool)


class ForgetsTheDraft(Sampled):
    """Accepts with probability p, as if the draft had been certain."""

    def kept(self, p_Bk, q_Bk):
        return super().kept(p_Bk, torch.ones_like(q_Bk))


class KeepsTheRest(Sampled):
    """Draws a rejected token from the whole distribution again."""

    def rest(self, p_BV, q_BV):
        return p_BV


class SubtractsAnyway(Sampled):
    """Corrects also where there was no draft."""

    def __call__(self, logits_BSV, draft):
        self.found_B = None if draft is None else draft.found_B
        if draft is not None:
            draft = Draft(draft.tokens_Bk, torch.ones_like(draft.found_B), draft.chances_BkV)
        return super().__call__(logits_BSV, draft)

    def kept(self, p_Bk, q_Bk):
        return super().kept(p_Bk, q_Bk) & self.found_B.unsqueeze(1)


@pytest.fixture(scope="module")
def smallest():
    return load_model(shape=SMALLEST, seed=1)


@pytest.fixture(scope="module")
def exact(smallest):
    """Probability of every answer of TOKENS tokens, by the chain rule."""
    paths = list(itertools.product(range(FEW), repeat=TOKENS))
    with torch.inference_mode():
        logits = smallest(torch.tensor([PROMPT + list(path[:-1]) for path in paths]))
    chances = (logits[:, len(PROMPT) - 1 :].double() / TEMPERATURE).softmax(-1)
    each = chances.gather(2, torch.tensor(paths).unsqueeze(2)).squeeze(2).prod(1)
    assert float(each.sum()) == pytest.approx(1.0)
    return each


def surprise(smallest, exact, drafter, rule) -> float:
    """How many standard deviations the answers' chi-square lies above its mean (Wilson and Hilferty, 1931)."""
    loop = DraftedLoop(smallest, ROWS, len(PROMPT), TOKENS, 2, rule(TEMPERATURE, torch.Generator().manual_seed(5)))
    if drafter == "lookup":
        loop.drafter = PromptLookup(2)
    elif drafter == "skip":
        loop.drafter = LayerSkip(smallest, 1, 2, loop.rule, loop.attend)
    loop.prefill(torch.tensor([PROMPT]).expand(ROWS, -1))
    loop.run()
    places = loop.answer() @ torch.tensor([FEW**i for i in reversed(range(TOKENS))])
    have = torch.bincount(places, minlength=FEW**TOKENS).double()
    want = exact * ROWS
    rare = want < 8
    have = torch.cat((have[~rare], have[rare].sum().view(1)))
    want = torch.cat((want[~rare], want[rare].sum().view(1)))
    freedom = len(want) - 1
    assert freedom > 20
    chi2 = float(((have - want).square() / want).sum())
    spread = 2 / (9 * freedom)
    return ((chi2 / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("drafter", [None, "lookup", "skip"])
def test_sampled_answers_are_distributed_as_the_targets_own(smallest, exact, drafter):
    assert abs(surprise(smallest, exact, drafter, Sampled)) < 3


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("lookup", KeepsAll),
        ("skip", KeepsAll),
        ("skip", ForgetsTheDraft),
        ("lookup", KeepsTheRest),
        ("skip", KeepsTheRest),
        ("lookup", SubtractsAnyway),
    ],
)
def test_a_wrong_rule_fails_that_test(smallest, exact, drafter, rule):
    assert surprise(smallest, exact, drafter, rule) > 6


def test_drafts_drawn_from_the_target_itself_all_stay():
    rule = Sampled(1.0, torch.Generator().manual_seed(1))
    logits_BSV = torch.randn(50, 4, 9, generator=torch.Generator().manual_seed(2))
    chances = logits_BSV[:, :3].softmax(-1)
    tokens = torch.multinomial(chances.flatten(0, 1), 1, generator=rule.generator).view(50, 3)
    accepted_B, emitted_BS = rule(logits_BSV, Draft(tokens, torch.ones(50, dtype=torch.bool), chances))
    assert accepted_B.tolist() == [3] * 50
    assert torch.equal(emitted_BS[:, :3], tokens)


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="0 is Greedy"):
        Sampled(0.0, torch.Generator())
