"""Which GPU is this, and what is the most that it could do?

The device in use decides: a name and a memory size are looked up in :data:`harness.device_table.DEVICES`. A
GPU that no row describes has no peak and therefore no MFU, and the answer says why; there is no default. MIG
slices are recognised and refused, since a slice has a part of the card's units. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.device_table import DEVICES, Device

__all__ = ["DEVICES", "Device", "Found", "Peak", "canonical_dtype", "gpu_slug", "lookup", "peak_flops"]

GIB = 1 << 30
# NVML and torch report less than the printed size: ECC in the same memory takes 1/16, the driver some more.
SIZE_LOW, SIZE_HIGH = 0.88, 1.04

_DTYPES = {
    "fp64": "float64",
    "double": "float64",
    "float64": "float64",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "tf32": "tf32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp8": "float8",
    "float8": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
    "float8_e4m3fnuz": "float8",
    "float8_e5m2fnuz": "float8",
    "int8": "int8",
    "fp4": "float4",
    "nvfp4": "float4",
    "mxfp4": "float4",
    "float4": "float4",
    "float4_e2m1fn_x2": "float4",
}


@dataclass(frozen=True)
class Found:
    """The row of a GPU, or None with the reason that none fits."""

    device: Device | None
    reason: str | None = None


@dataclass(frozen=True)
class Peak:
    """A dense peak in FLOP/s (OP/s for integers) with its source, or None with the reason."""

    value: float | None
    reason: str | None = None
    source: str | None = None


def canonical_dtype(dtype: str) -> str | None:
    """The key of a dtype in a row's peaks: ``torch.bfloat16``, ``bf16`` and ``bfloat16`` are one; None if
    unknown."""
    return _DTYPES.get(dtype.lower().removeprefix("torch."))


def _normal(name: str) -> str:
    words = name.casefold().split()
    return " ".join(words[1:] if words[:1] == ["nvidia"] and len(words) > 1 else words)


def is_mig(name: str) -> bool:
    """Whether a device name is that of a MIG slice, such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``."""
    return re.search(r"\bMIG\b", name) is not None


def lookup(
    name: str, memory_bytes: int | None = None, *, mig: bool = False, table: Sequence[Device] = DEVICES
) -> Found:
    """The row of the GPU that NVML or torch calls ``name``.

    Args:
        name: as NVML or ``torch.cuda.get_device_name`` gives it.
        memory_bytes: total memory; when given it must fit the row, since a slice or a virtual GPU may carry
        the
            card's name.
        mig: NVML says that this device is, or is split into, MIG slices.
    """
    if not name.strip():
        return Found(None, "the device has no name")
    if mig or is_mig(name):
        return Found(None, f"{name!r} is a MIG slice: it has a part of the card's units, and no row describes it")
    wanted = _normal(name)
    rows = [row for row in table if any(_normal(known) == wanted for known in row.names)]
    if not rows:
        return Found(None, f"no row in harness/device_table.py describes {name!r}")
    if memory_bytes is None:
        return Found(rows[0]) if len(rows) == 1 else Found(None, f"{name!r} exists with several memory sizes")
    gib = memory_bytes / GIB
    fitting = [row for row in rows if SIZE_LOW * row.memory_gib <= gib <= SIZE_HIGH * row.memory_gib]
    if len(fitting) == 1:
        return Found(fitting[0])
    sizes = " or ".join(f"{row.memory_gib:g}" for row in rows)
    return Found(None, f"{name!r} has {sizes} GB by its datasheet, this device has {gib:.1f} GiB: a slice or a variant")


def peak_flops(found: Found | Device | None, dtype: str) -> Peak:
    """The highest dense rate that the device offers for arithmetic in ``dtype`` (matrix units where they
    serve it).

    ``float32`` is true float32; say ``tf32`` where float32 products are allowed to run in it.
    """
    if found is None:
        return Peak(None, "no GPU: a CPU has no peak in the table")
    if isinstance(found, Found):
        if found.device is None:
            return Peak(None, found.reason or "unknown GPU")
        found = found.device
    key = canonical_dtype(dtype)
    if key is None:
        return Peak(None, f"no peak is known for dtype {dtype!r}")
    rates = [found.peaks[k] for k in (key, f"{key}_tensor") if k in found.peaks]
    if not rates:
        return Peak(None, f"the datasheet of {found.names[0]} gives no {key} rate")
    return Peak(max(rates), source=found.source)


_NOISE = re.compile(r"\((?:r|tm|c)\)|®|™|@.*$|\b\d+-core\b|\b(?:cpu|processor)\b|\bwith radeon.*$", flags=re.IGNORECASE)


def gpu_slug(name: str, table: Sequence[Device] = DEVICES) -> str:
    """A file-safe GPU type, as in results/history/<gpu type>/: ``NVIDIA H200`` is ``nvidia-h200``.

    Other spellings of a known GPU give the slug of its row, so that a driver that renames it splits no
    history. A CPU's model loses marks, clock and core count: ``AMD EPYC 9654 96-Core Processor`` is
    ``amd-epyc-9654``.
    """
    wanted = _normal(name)
    for row in table:
        if any(_normal(known) == wanted for known in row.names):
            name = row.names[0]
            break
    else:
        name = _NOISE.sub(" ", name)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"
