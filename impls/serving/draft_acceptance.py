"""Which drafted tokens stay, and what that is worth: the rules of speculative decoding and its cost model.

A pass of the target over the last known token and k drafted ones gives k + 1 rows of logits: row i tells what should
follow the first i drafts. Drafts stay up to the first that the rule rejects; the row there gives one more token, a
correction or, with all accepted, a bonus (Leviathan et al., ICML 2023, "Fast Inference from Transformers via
Speculative Decoding", Algorithm 1; Chen et al., 2023, "Accelerating Large Language Model Decoding with Speculative
Sampling", Algorithm 2).

Shape suffixes: B rows, k drafted tokens, S = k + 1 positions of a pass (1 without drafts), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Proposed tokens_Bk. ``found_B``: which rows have a draft at all; what stands in the others is never accepted.

    ``chances_BkV``: the distributions that the tokens were drawn from; None when they were not drawn (a point mass).
    """

    tokens_Bk: Tensor
    found_B: Tensor
    chances_BkV: Tensor | None = None


class Rule(Protocol):
    """Judges a draft by the target's logits; without one, chooses the next token."""

    def __call__(self, logits_BSV: Tensor, draft: Draft | None) -> tuple[Tensor, Tensor]:
        """(accepted_B, emitted_BS): how many drafts stay, and the tokens, of which the first accepted + 1 count."""
        ...

    def choose(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """(token_B, chances_BV): a token for a draft, and the distribution that it was drawn from."""
        ...


class Greedy:
    """A draft stays while it is the target's most likely token: the tokens are those of plain greedy decoding."""

    def __call__(self, logits_BSV: Tensor, draft: Draft | None) -> tuple[Tensor, Tensor]:
        """See :class:`Rule`. What is emitted is always the target's own choice."""
        best_BS = logits_BSV.argmax(-1)
        if draft is None:
            return torch.zeros_like(best_BS[:, 0]), best_BS
        same_Bk = (best_BS[:, :-1] == draft.tokens_Bk) & draft.found_B.unsqueeze(1)
        return same_Bk.long().cumprod(1).sum(1), best_BS

    def choose(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The most likely token."""
        return logits_BV.argmax(-1), None


class Sampled:
    """Speculative sampling: every token is distributed as the target's own, whatever the draft.

    A draft x drawn from q stays with probability min(1, p(x) / q(x)); at the first that does not, the token is drawn
    from max(0, p - q), normalized; behind the last, from p. A row without a draft draws from p at once.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        if not temperature > 0:
            raise ValueError(f"a temperature above 0 is sampled at, got {temperature}; 0 is Greedy")
        self.temperature, self.generator = temperature, generator

    def chances(self, logits: Tensor) -> Tensor:
        """The distribution over the last dimension, float32."""
        return (logits.float() / self.temperature).softmax(-1)

    def __call__(self, logits_BSV: Tensor, draft: Draft | None) -> tuple[Tensor, Tensor]:
        """See :class:`Rule`."""
        p_BSV = self.chances(logits_BSV)
        if draft is None:
            return torch.zeros_like(p_BSV[:, 0, 0], dtype=torch.long), self._draw(p_BSV[:, 0]).unsqueeze(1)
        tokens_Bk = draft.tokens_Bk
        q_BkV = draft.chances_BkV
        if q_BkV is None:
            q_BkV = torch.zeros_like(p_BSV[:, :-1]).scatter_(2, tokens_Bk.unsqueeze(2), 1.0)
        q_BkV = q_BkV * draft.found_B[:, None, None]
        p_Bk = p_BSV[:, :-1].gather(2, tokens_Bk.unsqueeze(2)).squeeze(2)
        q_Bk = q_BkV.gather(2, tokens_Bk.unsqueeze(2)).squeeze(2)
        kept_Bk = self.kept(p_Bk, q_Bk) & draft.found_B.unsqueeze(1)
        accepted_B = kept_Bk.long().cumprod(1).sum(1)
        each_B = torch.arange(len(tokens_Bk), device=tokens_Bk.device)
        q_BSV = torch.cat((q_BkV, torch.zeros_like(q_BkV[:, :1])), dim=1)
        p_BV = p_BSV[each_B, accepted_B]
        rest_BV = self.rest(p_BV, q_BSV[each_B, accepted_B])
        # p = q leaves nothing, and then rejects nothing either: only rounding comes here.
        rest_BV = torch.where(rest_BV.sum(1, keepdim=True) > 0, rest_BV, p_BV)
        emitted_BS = torch.cat((tokens_Bk, tokens_Bk[:, :1]), dim=1)
        emitted_BS[each_B, accepted_B] = self._draw(rest_BV)
        return accepted_B, emitted_BS

    def kept(self, p_Bk: Tensor, q_Bk: Tensor) -> Tensor:
        """Which drafts stay, each by a coin of its own: u < p / q."""
        u_Bk = torch.rand(p_Bk.shape, generator=self.generator, device=p_Bk.device)
        return u_Bk * q_Bk < p_Bk

    def rest(self, p_BV: Tensor, q_BV: Tensor) -> Tensor:
        """What a rejected draft leaves of the target's distribution, not normalized."""
        return (p_BV - q_BV).clamp(min=0)

    def choose(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """A token drawn at this temperature."""
        chances_BV = self.chances(logits_BV)
        return self._draw(chances_BV), chances_BV

    def _draw(self, weights_BV: Tensor) -> Tensor:
        return torch.multinomial(weights_BV, 1, generator=self.generator).squeeze(1)


def expected_tokens(rate: float, drafted: int) -> float:
    """Tokens a pass emits when each of k drafts is accepted with probability a: (1 - a^(k+1)) / (1 - a), equation 1."""
    return sum(rate**i for i in range(drafted + 1))


def expected_speedup(
    rate: float,
    drafted: int,
    draft_cost: float,
    pass_cost: float = 1.0,
    drafted_share: float = 1.0,
    checked_share: float | None = None,
) -> float:
    """Tokens over cost of a step, in plain steps: Theorem 3.8 of Leviathan et al. when the last three are left out.

    Args:
        rate: a, the probability that a draft is accepted whose forerunners were.
        drafted: k. draft_cost: c, of drafting one token. pass_cost: of the pass over k + 1 positions, which the
            theorem takes to cost as much as one position. All costs are shares of the pass over one position.
        drafted_share: of the steps of a row that had a draft. checked_share: of the passes over k + 1 positions among
            all, more than the former in a batch, where one row's draft is enough; the others run one position.
    """
    checked = drafted_share if checked_share is None else checked_share
    tokens = drafted_share * expected_tokens(rate, drafted) + 1 - drafted_share
    return tokens / (checked * pass_cost + 1 - checked + drafted * draft_cost)
