"""What several commands share: parsing ``NAME=VALUE``, finding the device, printing JSON."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UsageError, unknown

DEVICES = ("auto", "cpu", "cuda")


def settings(pairs: Sequence[str]) -> dict[str, str]:
    """``["rows=4", …]`` as a mapping.

    Raises:
        UsageError: one without ``=``.
    """
    out = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise UsageError(f"--set {pair!r}: expected NAME=VALUE")
        out[name.strip()] = value.strip()
    return out


def device(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` takes the GPU when one is visible and torch was built for it.

    Raises:
        UsageError: an unknown name, or ``cuda`` where torch was built without it.
    """
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    if name == "cuda" and not torch_has_cuda():
        raise UsageError("--device cuda: the torch here was built without CUDA; use --device cpu, or see doctor")
    if name != "auto":
        return name
    from harness.nvml import NoNvml, open_nvml, visible_gpus

    nvml = open_nvml()
    if isinstance(nvml, NoNvml) or not visible_gpus(nvml.gpus())[0]:
        return "cpu"
    return "cuda" if torch_has_cuda() else "cpu"


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, read from its files without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).parent / "version.py"
    found = re.search(r"^cuda[^=]*=\s*(.+)$", version.read_text(), flags=re.MULTILINE) if version.exists() else None
    return found is not None and found[1].strip() != "None"


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False, default=str)
    sys.stdout.write("\n")
