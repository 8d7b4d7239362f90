"""How well a model predicts a text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.model.decoder import Attend, Decoder
from impls.model.errors import ModelError


@torch.inference_mode()
def token_losses(model: Decoder, tokens_N: Tensor, window: int = 1024, attend: Attend | None = None) -> Tensor:
    """Negative log-likelihood in nats of each token after the first of its window; float64, on the CPU.

    The text is cut into windows that do not overlap, each read from its beginning: the first tokens of a window have
    little before them, so a smaller window gives a higher perplexity. Compare only equal windows.

    Raises:
        ModelError: fewer than two tokens, a token outside the vocabulary, or a window outside 2 to the model's length.
    """
    if tokens_N.ndim != 1 or tokens_N.numel() < 2:
        raise ModelError(f"perplexity needs a row of at least two tokens, got shape {tuple(tokens_N.shape)}")
    if not 2 <= window <= model.config.max_position_embeddings:
        raise ModelError(f"a window of {window} is not within 2 and {model.config.max_position_embeddings}")
    if int(tokens_N.min()) < 0 or int(tokens_N.max()) >= model.config.vocab_size:
        raise ModelError(f"token ids must lie within 0 and {model.config.vocab_size - 1}")
    losses = []
    for piece in tokens_N.to(model.embed_tokens.weight.device).split(window):
        if piece.numel() > 1:
            logits = model(piece[None], attend=attend)[0, :-1]
            losses.append(F.cross_entropy(logits.float(), piece[1:], reduction="none").double().cpu())
    return torch.cat(losses)


def perplexity(model: Decoder, tokens_N: Tensor, window: int = 1024, attend: Attend | None = None) -> float:
    """exp of the mean of `token_losses`."""
    return math.exp(float(token_losses(model, tokens_N, window, attend).mean()))
