"""Whether what a variant requires is here; if not, the reason that its record gives for being skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.pair import Variant
    from harness.workload import Workload


@dataclass(frozen=True)
class Here:
    """What is at hand: the device type, its compute capability, the number of ranks and torch's version."""

    device: str
    ranks: int
    torch: tuple[int, int]
    capability: tuple[int, int] | None = None


def why_not(variant: Variant, workload: Workload, here: Here, timing: bool) -> str | None:
    """Why a variant is skipped on a workload here, or None. timing: it is to be timed, and not only checked.

    Raises:
        UsageError: a requirement of unknown form.
    """
    reason = unmet(variant.requires, here)
    if reason is None and variant.compiled and workload.tier == "smoke":
        reason = "compilation is not part of the smoke tier"
    if reason is None and variant.supports is not None:
        reason = variant.supports(workload)
    if reason is None and timing and interpreted(variant.requires, here):
        reason = "a Triton kernel on a CPU runs through the interpreter, whose time is not performance"
    return reason or untold(variant.requires, here, (workload.dtype, variant.compute_dtype))


def unmet(requires: Iterable[str], here: Here) -> str | None:
    """The first requirement that is not met, as a reason, or None.

    Raises:
        UsageError: a requirement of unknown form.
    """
    for requirement in requires:
        reason = _unmet(requirement, here)
        if reason is not None:
            return reason
    return None


def interpreted(requires: Iterable[str], here: Here) -> bool:
    """Whether a variant would run through Triton's interpreter: right or wrong can be told there, speed cannot."""
    return here.device == "cpu" and "triton" in requires


def untold(requires: Iterable[str], here: Here, dtypes: Iterable[str | None]) -> str | None:
    """Why right and wrong cannot be told for a variant that would be interpreted, as a reason, or None.

    The interpreter makes a bfloat16 by cutting bits off, and a GPU rounds to the nearest: its error is twice what the
    same kernel has on a GPU, and leans to zero.
    """
    if interpreted(requires, here) and "bfloat16" in dtypes:
        return (
            "Triton's interpreter truncates bfloat16 where a GPU rounds, so right and wrong cannot be told: "
            "check it with --set dtype=float16, or on a GPU"
        )
    return None


def _unmet(requirement: str, here: Here) -> str | None:
    if requirement == "cuda":
        return None if here.device == "cuda" else "needs a CUDA GPU"
    if requirement == "triton":
        return None if importlib.util.find_spec("triton") else "needs Triton, which is not installed"
    if requirement == "compiler":
        names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
        return None if any(n and shutil.which(n) for n in names) else "needs a C++ compiler: install g++ or set CXX"
    if requirement.startswith("package:"):
        name = requirement.removeprefix("package:")
        return None if importlib.util.find_spec(name) else f"needs the package {name}, which is not installed"
    match = re.fullmatch(r"(capability|ranks|torch)(:|>=)(\d+)(?:\.(\d+))?", requirement)
    if match is None:
        raise UsageError(f"requirement {requirement!r} has no known form; see harness.pair.Variant")
    what, relation = match[1], match[2]
    wanted = (int(match[3]), int(match[4] or 0))
    if what == "ranks":
        return None if here.ranks >= wanted[0] else f"needs {wanted[0]} ranks, has {here.ranks}"
    if what == "torch":
        return (
            None if here.torch >= wanted else f"needs torch {match[3]}.{wanted[1]}, has {here.torch[0]}.{here.torch[1]}"
        )
    if here.capability is None:
        return "needs a CUDA GPU"
    met = here.capability >= wanted if relation == ">=" else here.capability == wanted
    has = f"{here.capability[0]}.{here.capability[1]}"
    asked = f"{'at least ' if relation == '>=' else ''}{wanted[0]}.{wanted[1]}"
    return None if met else f"needs compute capability {asked}, has {has}"
