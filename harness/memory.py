"""Peak memory of one call, in a pass of its own: above what was held before it, and in absolute terms.

On a GPU the caching allocator counts. On a CPU the kernel's high-water mark of resident memory does, after it was
reset, so that no earlier peak is inherited; where it cannot be reset there is no figure, and the reason says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

PROC = Path("/proc/self")


@dataclass(frozen=True)
class Memory:
    """Bytes. ``peak`` is above what was allocated before the call; ``absolute`` counts all that the case holds.

    ``device`` is the process's own by NVML, where it answers. ``reason`` says why there is no figure.
    """

    peak: int | None = None
    absolute: int | None = None
    reserved: int | None = None
    device: int | None = None
    reason: str = ""


def allocated(device: torch.device) -> int:
    """Bytes held now: by tensors on a GPU, resident on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_allocated(device))
    trim()
    return _status("VmRSS") or 0


def measure(call: Callable[[], None], device: torch.device, others: int) -> Memory:
    """Runs the call once and reads its peak.

    others: bytes that were held before the case was built; the absolute peak is counted above them.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return Memory(peak - before, peak - others, torch.cuda.max_memory_reserved(device))
    trim()
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError as err:
        return Memory(reason=f"the high-water mark of resident memory cannot be reset here: {err}")
    resident = _status("VmRSS")
    call()
    highest = _status("VmHWM")
    if resident is None or highest is None:
        return Memory(reason="/proc/self/status gives no VmRSS and VmHWM here")
    return Memory(max(0, highest - resident), max(0, highest - others))


def keep_imports(compiles: bool = False) -> None:
    """Takes what is imported by now out of the collector's sight: it lives as long as the process.

    The collector runs several times a variant, and each time the modules of torch alone cost 0.1 s, with the compiler's
    0.2 s. compiles: torch.compile is going to be used, so that its modules come now instead of later.
    """
    if compiles:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._inductor.compile_fx")
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Gives freed heap pages back, so that reuse of them does not hide what a call needs."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def _status(key: str) -> int | None:
    try:
        lines = (PROC / "status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None
