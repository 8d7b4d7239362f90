"""Where drafts come from: the text itself, the target's first layers, or the answer with mistakes put in.

Shape suffixes: B rows, C text places, k drafted tokens, V vocabulary, D model width. A text holds known tokens up to
each row's length; what stands behind is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from impls.model.decoder import Attend, Decoder
from impls.serving.draft_acceptance import Draft, Rule


class Drafter(Protocol):
    """Proposes k tokens behind each row's text. Shapes are fixed and nothing is read back, so it can be captured."""

    def __call__(self, text_BC: Tensor, length_B: Tensor) -> Draft:
        """The proposal."""
        ...


class PromptLookup:
    """What followed when the last words stood there before (Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023,
    "Inference with Reference").

    The longest match of the text's last ``longest`` to ``shortest`` tokens counts, of equal ones the latest. A match
    so near that fewer than k tokens follow it is taken for a period and repeated.
    """

    def __init__(self, drafted: int, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"matches of {shortest} to {longest} tokens: give 1 <= shortest <= longest")
        self.drafted, self.longest, self.shortest = drafted, longest, shortest

    def __call__(self, text_BC: Tensor, length_B: Tensor) -> Draft:
        """See :class:`Drafter`."""
        rows, places = text_BC.shape
        length_B1 = length_B.unsqueeze(1)
        end_C = torch.arange(places, device=text_BC.device)
        padded = torch.nn.functional.pad(text_BC, (self.longest, 0), value=-1)
        going_BC = (end_C < length_B1).expand(rows, places)
        matched_BC = torch.zeros_like(text_BC)
        for back in range(self.longest):
            # The token `back` places before each end, and before the text's own end.
            offset = self.longest - 1 - back
            have_BC = padded[:, offset : offset + places]
            want_B1 = padded.gather(1, length_B1 + offset)
            going_BC = going_BC & (have_BC == want_B1) & (want_B1 >= 0)
            matched_BC = matched_BC + going_BC
        best_B, end_B = (matched_BC * places + end_C).max(dim=1)
        found_B = best_B >= self.shortest * places
        period_B1 = (length_B - end_B).clamp(min=1).unsqueeze(1)
        ahead_k = torch.arange(self.drafted, device=text_BC.device)
        at_Bk = torch.where(found_B.unsqueeze(1), end_B.unsqueeze(1) + ahead_k % period_B1, 0)
        return Draft(text_BC.gather(1, at_Bk), found_B)


class LayerSkip:
    """The target's first layers, its norm and its head as the draft model (Zhang et al., ACL 2024, "Draft & Verify";
    the cache shared with the target: Elhoushi et al., ACL 2024, "LayerSkip").

    Keys and values of those layers are the target's own, so what it drafts is written where the target's pass will
    write the very same.
    """

    def __init__(
        self, model: Decoder, layers: int, drafted: int, rule: Rule, attend: Callable[[Tensor], Attend]
    ) -> None:
        if not 1 <= layers < len(model.layers):
            raise ValueError(f"{layers} layers cannot draft for a model of {len(model.layers)}")
        self.model, self.layers, self.drafted, self.rule, self.attend = model, layers, drafted, rule, attend

    def __call__(self, text_BC: Tensor, length_B: Tensor) -> Draft:
        """See :class:`Drafter`. One pass of the first layers a token."""
        at_B1 = length_B.unsqueeze(1) - 1
        token_B1 = text_BC.gather(1, at_B1)
        tokens, chances = [], []
        for _ in range(self.drafted):
            token_B, chances_BV = self.rule.choose(self._logits(token_B1, at_B1))
            tokens.append(token_B)
            if chances_BV is not None:
                chances.append(chances_BV)
            token_B1, at_B1 = token_B.unsqueeze(1), at_B1 + 1
        found_B = torch.ones_like(length_B, dtype=torch.bool)
        return Draft(torch.stack(tokens, 1), found_B, torch.stack(chances, 1) if chances else None)

    def _logits(self, token_B1: Tensor, at_B1: Tensor) -> Tensor:
        model, attend = self.model, self.attend(at_B1)
        x_BSD = model.embed_tokens(token_B1)
        cos_BSE, sin_BSE = model.cos_sin(at_B1)
        delta_BSD = None
        for layer in model.layers[: self.layers]:
            x_BSD, delta_BSD = layer(x_BSD, delta_BSD, cos_BSE, sin_BSE, attend)
        logits_BSV: Tensor = model.lm_head(model.norm(x_BSD, delta_BSD)[0])
        return logits_BSV[:, 0]


class GivenDrafts:
    """The answer, known beforehand, with each token right with probability ``rate``: an instrument, not a drafter.

    It shows what a drafter of that acceptance rate and no cost would bring, on weights that no drafter fits.
    """

    def __init__(self, drafted: int, rate: float, vocab: int, rows: int, places: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.drafted, self.vocab = drafted, vocab
        self.right_BC = torch.rand(rows, places, generator=generator) < rate
        self.proposed_BC = torch.zeros(rows, places, dtype=torch.long)

    def know(self, answer_BN: Tensor, prompt: int) -> None:
        """Takes the text that is to come behind a prompt of so many tokens.

        In place once it is on the answer's device: a captured graph keeps reading it.
        """
        if self.proposed_BC.device != answer_BN.device:
            self.proposed_BC, self.right_BC = (x.to(answer_BN.device) for x in (self.proposed_BC, self.right_BC))
        places = slice(prompt, prompt + answer_BN.shape[1])
        wrong_BN = (answer_BN + 1) % self.vocab
        self.proposed_BC[:, places] = torch.where(self.right_BC[:, places], answer_BN, wrong_BN)

    def __call__(self, text_BC: Tensor, length_B: Tensor) -> Draft:
        """See :class:`Drafter`."""
        ahead_k = torch.arange(self.drafted, device=text_BC.device)
        return Draft(
            self.proposed_BC.gather(1, length_B.unsqueeze(1) + ahead_k), torch.ones_like(length_B, dtype=torch.bool)
        )
