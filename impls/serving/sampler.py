"""From logits to tokens: greedy, temperature, top-k, top-p, each request with a seed of its own.

A token is drawn by exponential races: over the tokens that are left, the one of smallest E_i / p_i with E_i
exponential is distributed as p (the Gumbel-max trick), so that no probability has to be summed up. The noise is a
hash of the request's seed, the token's place in its sequence and its id: no generator has a state, and a request
draws the same tokens whatever runs beside it, in whatever order, and again after a preemption.

Shape suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from impls.serving.engine import NOT_A_TOKEN
from impls.serving.request import Sampling
from impls.serving.to_device import to_device

#: The nucleus is looked for among so many candidates first; almost always it is there, and nothing is sorted in full.
CANDIDATES = 1024
_MASK = 0xFFFFFFFF
#: Temperatures beyond these draw as these do: the likeliest alone, or all alike. Logits over them stay numbers.
_COLDEST, _HOTTEST = 1e-30, 1e30


@dataclass(frozen=True)
class Draws:
    """The sampling parameters of a batch. ``keys_B``: hash of seed and place; ``temperatures_B`` is 0 for greedy."""

    temperatures_B: Tensor
    top_ks_B: Tensor
    top_ps_B: Tensor
    keys_B: Tensor
    most_k: int
    any_top_p: bool

    @staticmethod
    def of(batch: Items[tuple[Sampling, int]], device: torch.device) -> Draws | None:
        """For each sequence its parameters and the place of the token to draw; None when all are greedy."""
        if all(sampling.greedy for sampling, _ in batch):
            return None
        columns = [
            (
                0.0 if s.greedy else min(max(float(s.temperature), _COLDEST), _HOTTEST),
                0 if s.greedy else s.top_k,
                1.0 if s.greedy else float(s.top_p),
                draw_key(s.seed, place),
            )
            for s, place in batch
        ]
        temperatures, top_ks, top_ps, keys = zip(*columns, strict=True)
        return Draws(
            temperatures_B=to_device(torch.tensor(temperatures, dtype=torch.float32), device),
            top_ks_B=to_device(torch.tensor(top_ks, dtype=torch.int64), device),
            top_ps_B=to_device(torch.tensor(top_ps, dtype=torch.float32), device),
            keys_B=to_device(torch.tensor(keys, dtype=torch.int64), device),
            most_k=max(top_ks),
            any_top_p=any(p < 1.0 for p in top_ps),
        )


def sample(logits_BV: Tensor, draws: Draws | None) -> Tensor:
    """One token a row, int64; :data:`NOT_A_TOKEN` for a row whose largest logit is not a finite number."""
    if draws is not None and logits_BV.device.type == "cuda":
        from kernels.sample import sample_rows

        tokens: Tensor = sample_rows(logits_BV, draws.temperatures_B, draws.top_ks_B, draws.top_ps_B, draws.keys_B)
        return tokens
    best_B, greedy_B = logits_BV.max(dim=-1)
    tokens_B = greedy_B
    if draws is not None:
        logits_BV = logits_BV.float()
        noisy_B1 = (draws.temperatures_B > 0).unsqueeze(1)
        scaled_BV = logits_BV / torch.where(noisy_B1, draws.temperatures_B.unsqueeze(1), 1.0)
        kept_BV = keep_top_p(keep_top_k(scaled_BV, draws), draws)
        raced_BV = kept_BV - exponential_noise(draws.keys_B, logits_BV.shape[1]).log()
        tokens_B = torch.where(noisy_B1.squeeze(1), raced_BV.argmax(dim=-1), greedy_B)
    return torch.where(best_B.isfinite(), tokens_B, NOT_A_TOKEN)


def keep_top_k(logits_BV: Tensor, draws: Draws) -> Tensor:
    """Sets all but each row's k largest logits to -inf; a row with k = 0 keeps all, and ties with the k-th stay."""
    if draws.most_k == 0:
        return logits_BV
    k_B = draws.top_ks_B.clamp(max=logits_BV.shape[1])
    largest = torch.topk(logits_BV, min(draws.most_k, logits_BV.shape[1]), dim=-1).values
    smallest_kept = largest.gather(1, (k_B - 1).clamp(min=0).unsqueeze(1))
    cut = (k_B > 0).unsqueeze(1) & (logits_BV < smallest_kept)
    return logits_BV.masked_fill(cut, -torch.inf)


def keep_top_p(logits_BV: Tensor, draws: Draws) -> Tensor:
    """Sets to -inf what is outside each row's nucleus: the fewest most likely tokens that reach p together.

    The most likely token always stays, and so do ties with the last one kept: of logits, since probabilities that are
    close round to the same number.
    """
    if not draws.any_top_p:
        return logits_BV
    total_B1 = logits_BV.logsumexp(dim=-1, keepdim=True)
    p_B1 = draws.top_ps_B.unsqueeze(1)
    candidates = torch.topk(logits_BV, min(CANDIDATES, logits_BV.shape[1]), dim=-1).values
    masses = (candidates - total_B1).double().exp()
    short = (masses.sum(dim=-1, keepdim=True) < p_B1) & (p_B1 < 1.0)
    if bool(short.any()):
        candidates = logits_BV.sort(dim=-1, descending=True).values
        masses = (candidates - total_B1).double().exp()
    before = masses.cumsum(dim=-1) - masses
    kept = (before < p_B1).sum(dim=-1, keepdim=True).clamp(min=1)
    smallest_kept = candidates.gather(1, kept - 1)
    cut = (p_B1 < 1.0) & (logits_BV < smallest_kept)
    return logits_BV.masked_fill(cut, -torch.inf)


def draw_key(seed: int, place: int) -> int:
    """32 bits from a 64-bit seed and the place of a token in its sequence."""
    key = _mix(seed & _MASK)
    key = _mix(key ^ (seed >> 32 & _MASK))
    return _mix(key ^ (place * 0x9E3779B9 & _MASK))


def exponential_noise(keys_B: Tensor, vocab: int) -> Tensor:
    """Standard exponential numbers, float32 (B, V): a hash of each row's key and the token id, turned by -log(1 - u).

    The race is decided by the smallest numbers, where 1 - u keeps all 32 bits of the hash.
    """
    ids_V = torch.arange(vocab, device=keys_B.device, dtype=torch.int64)
    bits_BV = _mix_tensor(_mix_tensor(keys_B.unsqueeze(1) ^ (ids_V * 0x9E3779B9 & _MASK)) + ids_V & _MASK)
    return -torch.log1p(-((bits_BV.double() + 0.5) * 2.0**-32)).float()


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def _mix_tensor(x: Tensor) -> Tensor:
    """The same permutation of 32 bits (the constants of "lowbias32", C. Wellons, 2018), in int64 without overflow."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)
