"""The plain way of paged attention moves what its docstring counts, and not a copy more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from harness.pair import Context
from harness.workload import parse_workloads
from impls.serving import paged_attention

SHAPE = {
    "name": "own", "tier": "smoke", "dtype": "float32", "batch": 3, "context": 64, "heads": 4, "kv_heads": 4,
    "head_dim": 32, "block_size": 16, "cache": "same", "ragged": False, "direction": "forward",
}  # fmt: skip


class Made(TorchDispatchMode):
    """The sizes of what operations make anew, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize(("cache", "copies"), [("same", 1), ("int8", 2)])
def test_keys_and_values_are_copied_once_and_widened_once(cache: str, copies: int) -> None:
    (workload,) = parse_workloads("paged_attention", [{**SHAPE, "cache": cache}], "this test")
    tensors = paged_attention.inputs(workload, Context(torch.device("cpu"), torch.float32, seed=1))
    run = paged_attention.gathered(workload, Context(torch.device("cpu"), torch.float32, seed=1))
    with Made() as made:
        out = run(**tensors)
    whole = tensors["k"].numel()
    assert sum(size >= whole for size in made.sizes) == 2 * copies
    wide = {name: t.double() if name in ("q", "k_scale", "v_scale") else t for name, t in tensors.items()}
    if cache == "same":
        wide |= {name: tensors[name].double() for name in "kv"}
    torch.testing.assert_close(out.double(), paged_attention.oracle(**wide), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("cache", ["int8", "float8_e4m3fn"])
def test_compiled_it_widens_while_it_gathers(cache: str) -> None:
    (workload,) = parse_workloads("paged_attention", [{**SHAPE, "cache": cache}], "this test")
    ctx = Context(torch.device("cpu"), torch.float32, seed=1)
    variant = paged_attention.PAIR.variant("torch_compile")
    assert variant.peer == "torch"
    assert variant.compiled
    tensors = paged_attention.inputs(workload, ctx)
    run = variant.fn(workload, ctx)
    torch._dynamo.reset()
    out, (code,) = run_and_get_code(torch.compile(run, dynamic=False), **tensors)
    torch.testing.assert_close(out, run(**tensors))
    made = re.findall(r"= empty_strided\w*\((.*?)\)\n", code)
    assert made
    assert not [call for call in made if cache in call], "a copy in 8 bits"
