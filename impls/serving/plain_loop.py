"""The trusted path: each request alone, the whole text again for every token, no cache at all.

Also the judge of low-precision serving: every token that an engine emitted is scored by the float32 plain loop on the
engine's own prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from impls.model.cache import KVCache
from impls.model.decoder import CausalAttention, Decoder
from impls.serving.request import Request


@torch.inference_mode()
def plain_tokens(model: Decoder, request: Request) -> list[int]:
    """The greedy answer to a request, up to its length or a stop token."""
    device = model.embed_tokens.weight.device
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        logits = model(torch.tensor([tokens], device=device), last_B=torch.tensor([len(tokens) - 1], device=device))
        tokens.append(int(logits.argmax()))
        if tokens[-1] in request.sampling.stop:
            break
    return tokens[len(request.prompt) :]


@torch.inference_mode()
def cached_tokens(model: Decoder, request: Request) -> list[int]:
    """The same answer, still one request alone, with a contiguous cache: quick enough for a whole trace."""
    device = model.embed_tokens.weight.device
    prompt, new = len(request.prompt), request.sampling.max_tokens
    cache = KVCache(model.config, 1, prompt + new, model.embed_tokens.weight.dtype, device)
    positions = torch.arange(prompt, device=device).unsqueeze(0)
    text = torch.tensor([list(request.prompt)], device=device)
    logits = model(text, positions, cache.prefill(positions), last_B=torch.tensor([prompt - 1], device=device))
    tokens = [int(logits.argmax())]
    while len(tokens) < new and tokens[-1] not in request.sampling.stop:
        place = torch.tensor([[prompt + len(tokens) - 1]], device=device)
        attend = cache.extend(place, context=prompt + len(tokens))
        tokens.append(int(model(torch.tensor([[tokens[-1]]], device=device), place, attend).argmax()))
    return tokens


@torch.inference_mode()
def score_tokens(
    exact: Decoder, plain: Decoder, requests: Iterable[Request], answers: Mapping[str, Items[int]]
) -> dict[str, float]:
    """How far emitted tokens are from the best ones, against what rounding alone explains (design: serving).

    Args:
        exact: the model in float32. plain: the same in the engine's precision.
        requests, answers: greedy requests and the tokens that the engine gave for each id.

    Returns:
        ``gap``, ``bound``: of the token nearest to or furthest over its bound: the logit that it lacks to the best
        one, and twice the plain low-precision loop's largest logit error at that place. ``over``: tokens over their
        bound. ``divergences``: tokens that are not the best. ``tokens``: how many were scored.
    """
    worst_gap, worst_bound, worst_share = 0.0, 0.0, -1.0
    over = divergences = count = 0
    for request in requests:
        answer = list(answers[request.id])
        if not answer:
            continue
        want, have = (_logits(model, request, answer) for model in (exact, plain))
        chosen = want.gather(1, torch.tensor(answer, device=want.device).unsqueeze(1)).squeeze(1)
        gaps = (want.max(dim=1).values - chosen).tolist()
        bounds = (2 * (have - want).abs().max(dim=1).values).tolist()
        for gap, bound in zip(gaps, bounds, strict=True):
            count += 1
            divergences += gap > 0
            over += gap > bound
            share = gap / bound if bound > 0 else (0.0 if gap == 0 else float("inf"))
            if share > worst_share:
                worst_gap, worst_bound, worst_share = gap, bound, share
    return {
        "gap": worst_gap,
        "bound": worst_bound,
        "over": float(over),
        "divergences": float(divergences),
        "tokens": float(count),
    }


def _logits(model: Decoder, request: Request, answer: Items[int]) -> Tensor:
    """float32 logits that each token of the answer was chosen from, (tokens, V)."""
    device = model.embed_tokens.weight.device
    text = torch.tensor([[*request.prompt, *answer[:-1]]], device=device)
    first = len(request.prompt) - 1
    positions = torch.arange(text.shape[1], device=device).unsqueeze(0)
    hidden = model.hidden(text, positions, CausalAttention())[0, first:]
    logits: Tensor = model.lm_head(hidden)
    return logits.float()
