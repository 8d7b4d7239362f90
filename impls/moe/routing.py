"""Where tokens go: seeded choices of experts, even or skewed, and what is expected of them without drawing any.

An expert's popularity is that of its rank in Zipf's law, 1 / (e + 1)^skew; 0 makes all alike. Real routers lie between:
trained with a balancing loss they are nearly even over many tokens, while single batches and domains are skewed.
"""

# Shapes: T tokens, K choices a token, E experts.

from __future__ import annotations

import math

import torch

from harness.pair import Context
from harness.workload import Workload


def popularity(experts: int, skew: float) -> list[float]:
    """The experts' shares of all first choices."""
    weights = [(expert + 1.0) ** -skew for expert in range(experts)]
    return [weight / sum(weights) for weight in weights]


def choices_of(workload: Workload) -> int:
    """How many experts a token has.

    Raises:
        ValueError: fewer than one, or more than there are.
    """
    if not 1 <= workload.choices <= workload.experts:
        raise ValueError(f"a token cannot choose {workload.choices} of {workload.experts} experts")
    return int(workload.choices)


def draw_routing(workload: Workload, ctx: Context, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's K distinct experts (T, K), int64, and their weights (T, K), which add up to one.

    Log-popularity plus Gumbel noise stands for the router's logits: the best K are K draws without replacement. The
    weights are the softmax of the noise of the chosen (Jiang et al. 2024, "Mixtral of Experts", section 2.1).
    """
    choices, shape = choices_of(workload), (int(workload.tokens), int(workload.experts))
    uniform = torch.rand(shape, generator=ctx.generator(salt), dtype=torch.float64).clamp_min(1e-12)
    noise = -torch.log(-torch.log(uniform))
    logits = noise + torch.tensor(popularity(shape[1], float(workload.skew)), dtype=torch.float64).log()
    experts = logits.topk(choices, dim=1).indices
    weights = torch.softmax(noise.gather(1, experts), dim=1)
    return experts.to(ctx.device), weights.to(device=ctx.device, dtype=ctx.dtype)


def chances(experts: int, choices: int, skew: float) -> list[float]:
    """The chance that a token has an expert among its K: 1 - exp(-τ · share), with the τ for which they add up to K.

    Exact where all are alike, else asymptotic in E (Rosén 1972, "Asymptotic theory for successive sampling").
    """
    if choices >= experts:
        return [1.0] * experts
    shares = popularity(experts, skew)
    low, high = 0.0, 1.0
    while sum(1 - math.exp(-high * share) for share in shares) < choices:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if sum(1 - math.exp(-middle * share) for share in shares) < choices:
            low = middle
        else:
            high = middle
    return [1 - math.exp(-high * share) for share in shares]


def touched(tokens: int, experts: int, choices: int, skew: float) -> float:
    """How many experts are expected to have a token at all: the weights that must be read."""
    return sum(1 - (1 - chance) ** tokens for chance in chances(experts, choices, skew))
