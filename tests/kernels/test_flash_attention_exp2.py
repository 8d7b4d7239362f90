"""2^x by polynomial: the PTX as it stands, executed in numpy, and attention with it against float64."""

from __future__ import annotations

import re
import types
from typing import Any

import numpy as np
import pytest
import torch

from kernels import flash_attention_hopper
from kernels.flash_attention_exp2 import assembly, constraints
from kernels.flash_attention_hopper_launch import HopperTile
from tests.kernels.test_flash_attention_hopper import exact, on_threads, problem

Registers = dict[str, Any]


def execute(ptx: str, operands: list[np.ndarray]) -> list[np.ndarray]:
    """Run the straight-line PTX of an inline assembly block on arrays of float32."""
    every = len(operands)
    registers: Registers = {f"${every + i}": values for i, values in enumerate(operands)}

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return np.frombuffer(bytes.fromhex(name[2:])[::-1], np.float32)[0]
        return np.int32(name) if name.isdigit() else registers[name]

    def rounded_down(a: Any, b: Any) -> Any:
        total = a.astype(np.float64) + np.float64(b)  # exact for these magnitudes
        near = total.astype(np.float32)
        return np.where(near > total, np.nextafter(near, np.float32(-np.inf)), near)

    operations: dict[str, Any] = {
        "max.ftz.f32": np.maximum,
        "add.rm.ftz.f32": rounded_down,
        "sub.rn.ftz.f32": lambda a, b: a - b,
        "fma.rn.ftz.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
        "mov.b32": lambda a: a,
        "shl.b32": lambda a, b: np.left_shift(a.view(np.int32), b),
        "add.s32": lambda a, b: a.view(np.int32) + b.view(np.int32),
        "ex2.approx.ftz.f32": np.exp2,
    }
    for line in re.findall(r"[^;{}]+;", ptx):
        operation, rest = line.strip(" ;").split(" ", 1)
        if operation == ".reg":
            continue
        target, *sources = rest.split(", ")
        registers[target] = operations[operation](*(value(name) for name in sources))
    return [registers[f"${i}"].view(np.float32) for i in range(every)]


@pytest.mark.parametrize("every", [4, 8])
def test_the_assembly_computes_powers_of_two(every: int) -> None:
    x = np.concatenate([np.linspace(-126, 9, 200_001), -np.geomspace(1e-30, 1.0, 1000)]).astype(np.float32)
    results = execute(assembly(every), [x] * every)
    truth = np.exp2(x.astype(np.float64))
    worst = [np.max(np.abs(result / truth - 1)) for result in results]
    assert 1e-5 < worst[0] < 9e-5, "the first element is the polynomial's"
    assert max(worst[1:]) < 1e-6
    whole = np.arange(-126, 100, dtype=np.float32)
    assert np.array_equal(execute(assembly(every), [whole] * every)[0], np.exp2(whole)), "whole powers are exact"
    tiny = execute(assembly(every), [np.array([-127, -1e4, -1e30, -np.inf], np.float32)] * every)[0]
    assert np.all(tiny == 0)
    assert len(constraints(every).split(",")) == 2 * every


def spread(values: Any, every: Any) -> Any:
    """What the kernel's function does, in torch: one column in `every` by the polynomial."""
    import torch

    from kernels.flash_attention_exp2 import COEFFICIENTS

    whole = torch.floor(values.clamp(min=-127.0))
    f = values.clamp(min=-127.0) - whole
    power = torch.zeros_like(f)
    for coefficient in reversed(COEFFICIENTS):
        power = power * f + coefficient
    taken = (torch.arange(values.shape[-1]) % int(every) == 0).expand(values.shape)
    return torch.where(taken, torch.where(whole <= -127, 0.0, torch.ldexp(power, whole)), torch.exp2(values))


@pytest.mark.parametrize("shape", [(2, 2, 1, 200, 300, 64, False, 3), (1, 2, 1, 300, 130, 64, True, 1)], ids=str)
@pytest.mark.parametrize("every", [4, 8])
def test_attention_with_a_part_of_the_exponentials_by_polynomial(
    shape: tuple[Any, ...], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention_hopper, "exp2_spread", types.SimpleNamespace(fn=spread))
    p = problem(*shape[:7])
    q, k, v, out, lse = on_threads(p, HopperTile(64, 2, q_slots=2, exp2_every=every), shape[7])
    expected, expected_lse = exact(p, q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    seen = lse.isfinite()
    off = (lse.double() - expected_lse)[seen].abs().max().item()
    assert off > 1e-6, "some of the exponentials were the polynomial's"
