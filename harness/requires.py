"""Whether what a variant requires is here; if not, the reason that its record gives for being skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from harness.errors import UsageError


@dataclass(frozen=True)
class Here:
    """What is at hand: the device type, its compute capability, the number of ranks and torch's version."""

    device: str
    ranks: int
    torch: tuple[int, int]
    capability: tuple[int, int] | None = None


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
