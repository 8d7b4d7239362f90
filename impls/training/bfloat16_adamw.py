"""AdamW on bfloat16 weights alone, with what keeps small updates from being rounded away.

A bfloat16 number has 8 bits: an update below 1/512 of a weight is lost when the sum is rounded to the nearest one, and
training stops while the gradient does not (Zamirai et al. 2020, "Revisiting BFloat16 Training", section 3). Two ways
out, both of section 4:

    stochastic    round up with the probability of how near the upper neighbour is: right on average
    kahan         keep what rounding dropped in a second bfloat16 number, and add it to the next update

Moments are bfloat16 too. The second moment's average forgets 1/20 a step here, which bfloat16 can hold; at the 1/1000
of other settings it could not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "kahan"]


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up with the probability of how near the upper neighbour is; on average x itself.

    A bfloat16 number is the upper half of a float32 number's bits: a random number of 16 bits is added and the lower
    half cut off, so that it carries as often as the lower half is large. NaN and inf stay what they are.
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = x.view(torch.int32) + noise
    cut = torch.bitwise_and(bits, ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


class BFloat16AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) over bfloat16 parameters, moments and gradients.

    Each parameter's update is computed in float32 and rounded once. ``nearest`` is there to show what the others mend.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        rounding: Rounding,
        generator: torch.Generator,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.params = list(params)
        self.rounding, self.generator = rounding, generator
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        self.dropped = [torch.zeros_like(p) for p in self.params] if rounding == "kahan" else []
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter from its gradient."""
        self.steps += 1
        rate = self.lr / (1 - self.betas[0] ** self.steps)
        root = (1 - self.betas[1] ** self.steps) ** 0.5
        for number, (param, first, second) in enumerate(zip(self.params, self.first, self.second, strict=True)):
            assert param.grad is not None
            grad = param.grad.float()
            m = first.float().lerp_(grad, 1 - self.betas[0])
            v = second.float().mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
            first.copy_(m)
            second.copy_(v)
            update = m.div_(v.sqrt_().div_(root).add_(self.eps)).mul_(-rate)
            update.add_(param.float(), alpha=-self.lr * self.weight_decay)
            self._add(number, param, update)

    def _add(self, number: int, param: Tensor, update: Tensor) -> None:
        if self.rounding == "kahan":
            dropped = self.dropped[number]
            update.add_(dropped)
            before = param.float()
            param.copy_(before + update)
            dropped.copy_(update.sub_(param.float().sub_(before)))
        elif self.rounding == "stochastic":
            param.copy_(round_stochastically(update.add_(param.float()), self.generator))
        else:
            param.copy_(update.add_(param.float()))
