"""What the kernel tests share: the comparison with a float64 oracle, and compilation for a GPU that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ROOT = Path(__file__).parents[2]


def _assert_near(actual: torch.Tensor, oracle: torch.Tensor, units: float = 4.0) -> None:
    assert actual.shape == oracle.shape
    got, want = actual.double(), oracle.double()
    assert torch.equal(got.isnan(), want.isnan()), "NaN is not where the plain formula puts it"
    infinite = want.isinf()
    assert torch.equal(got.isinf(), infinite), "inf is not where the plain formula puts it"
    assert torch.equal(got[infinite], want[infinite]), "inf has another sign"
    finite = want.isfinite()
    if not finite.any():
        return
    got, want = got[finite], want[finite]
    bound = units * UNIT[actual.dtype] * want.abs().max().item()
    error = (got - want).abs()
    worst = int(error.argmax())
    assert error[worst].item() <= bound, (
        f"{int((error > bound).sum())} of {error.numel()} elements are off by more than {bound:.3g}; the worst "
        f"is {got[worst].item()} instead of {want[worst].item()}"
    )


@pytest.fixture(scope="session")
def assert_near() -> Callable[..., None]:
    """assert_near(actual, oracle, units=4): the largest error within `units` roundings of the largest magnitude.

    NaN and inf must stand where the oracle has them. `oracle` is float64 on the same inputs.
    """
    return _assert_near


@pytest.fixture
def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a product's rows are computed apart: the BLAS below it adds a row's terms in an order that
    hangs on the row's place and on the processor, which a GPU's instructions do not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        rows = np.matmul(a.data[..., :, None, :], b.data[..., None, :, :], dtype=d.data.dtype)
        return TensorHandle(rows[..., 0, :] + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="session")
def compile_for_hopper() -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Compile jobs (see hopper_compile.py) for compute capability 9.0; no GPU is needed."""

    def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        script = Path(__file__).with_name("hopper_compile.py")
        process = subprocess.run(
            [sys.executable, str(script)], input=json.dumps(jobs), env=environment, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        reports: list[dict[str, Any]] = json.loads(process.stdout)
        return reports

    return run


@pytest.fixture(scope="session")
def draw() -> Callable[..., torch.Tensor]:
    """draw(*shape, dtype=float32, scale=1, seed=0): normal numbers on the GPU if there is one, else on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    return make


@pytest.fixture(scope="session")
def gradients() -> Callable[..., tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """gradients(function, tensors, grads): outputs, and the gradients of `tensors` for the outputs' `grads`."""

    def run(function: Callable[..., Any], tensors: list[torch.Tensor], grads: list[torch.Tensor]) -> Any:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(output.detach() for output in outputs), torch.autograd.grad(outputs, leaves, grads)

    return run
