"""How many variants of each kernel a Hopper GPU would compile for launches of many sizes; no GPU, nothing is run.

Run as a program, apart from the tests' interpreter: a list of [rows, choices, experts, most] as JSON on stdin, for each
of which the routed experts run forward and backward; on stdout, as JSON, by kernel its launches and its variants, and
as ``torch`` the same of torch's own operations. With the argument ``large`` by the plan for large experts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels import moe_experts, moe_order
from kernels.moe_plan import LAID_OUT

WIDTH, INNER = 64, 48
launches: dict[str, list[str]] = defaultdict(list)

#: Operations of torch that launch nothing.
FREE = {"empty", "new_empty", "empty_like", "split_with_sizes", "unsqueeze", "view", "detach"}


class Watched(TorchDispatchMode):
    """Keeps operations that would launch something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            launches["torch"].append(name)
        return func(*args, **(kwargs or {}))


def launched(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of a launch: what Triton would look the compiled kernel up by."""
    bind = create_function_from_signature(self.signature, self.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, specialization, rest = bind(*args, **options)
    launches[self.__name__].append(str((specialization, rest)))


def step(rows: int, choices: int, experts: int, most: int | None) -> None:
    """Forward and backward of the layer in bfloat16."""
    shapes = ((rows, WIDTH), (rows, choices), (experts, 2 * INNER, WIDTH), (experts, WIDTH, INNER))
    x, router, gate_up, down = leaves = [torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    chosen = torch.zeros(rows, choices, dtype=torch.int32)
    grad = torch.zeros_like(x)
    with Watched():
        out = moe_experts.moe_experts(x, chosen, router, gate_up, down, most, LAID_OUT if "many" in sys.argv else None)
        torch.autograd.grad(out, leaves, grad)


if __name__ == "__main__":
    JITFunction.run = launched
    for module in (moe_experts, moe_order):
        module.check_device = lambda *_: None
    moe_experts.check_float = lambda *_: None
    for sizes in json.load(sys.stdin):
        step(*sizes)
    json.dump({name: [len(keys), len(set(keys))] for name, keys in launches.items()}, sys.stdout)
