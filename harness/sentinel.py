"""A fixed matrix product and a fixed copy, run at the start and the end of every run.

They never change, so that when their times do, the machine moved (heat, power, a neighbour) and not a technique.
torch is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.stopwatch import sample_seconds, steady

#: Changes with what is run; readings of different methods are not compared.
SENTINEL_METHOD = 1
GPU_SIZE, GPU_COPY_BYTES = 4096, 1 << 30
CPU_SIZE, CPU_COPY_BYTES = 512, 64 << 20
#: Relative change that has a cause. A GPU's product follows a clock that heat and power move by a few percent from a
#: cold start to a warm end; its copy follows the memory clock, which does not move.
GPU_TOLERANCE: Mapping[str, float] = {"product": 0.05, "copy": 0.03}
#: Times on a CPU vary by tens of percent with turbo, neighbours and the scheduler even on an idle host, so that only a
#: gross change, a factor of two (a build started beside, a laptop gone to battery), can be told from the usual.
CPU_TOLERANCE: Mapping[str, float] = {"product": 1.0, "copy": 1.0}


@dataclass(frozen=True)
class Reading:
    """One reading. Seconds of the product and the copy: the median on a GPU, the least on a CPU.

    ``dtype``, ``size`` and ``copy_bytes`` say what was run.
    """

    device: str
    dtype: str
    size: int
    copy_bytes: int
    matmul_s: float
    copy_s: float
    method: int = SENTINEL_METHOD

    def as_record(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_record` reads them back."""
        return asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Reading:
        """The reading that :meth:`as_record` wrote; other keys are let be.

        Raises:
            KeyError: a key is missing.
        """
        return Reading(**{name: record[name] for name in Reading.__dataclass_fields__})


@dataclass(frozen=True)
class Verdict:
    """Whether the machine moved between two readings. ``product`` and ``copy``: end over start, 1 is unmoved."""

    moved: bool
    reason: str | None
    product: float | None
    copy: float | None
    tolerance: Mapping[str, float]

    def as_record(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "tolerance": dict(self.tolerance)}


def read_sentinel(device: str, budget_s: float = 0.3) -> Reading:
    """Runs the product and the copy on ``cpu``, ``cuda`` or ``cuda:N``; about three times ``budget_s``."""
    import torch

    target = torch.device(device)
    cuda = target.type == "cuda"
    size, copy_bytes = (GPU_SIZE, GPU_COPY_BYTES) if cuda else (CPU_SIZE, CPU_COPY_BYTES)
    dtype = torch.float32
    if cuda:
        # An index always: torch 2.11 sets no "cuda" without one.
        target = torch.device("cuda", torch.cuda.current_device() if ":" not in device else int(device.split(":")[1]))
        torch.cuda.set_device(target)
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(target) >= (8, 0) else torch.float16
        copy_bytes = min(copy_bytes, int(torch.cuda.mem_get_info(target)[0]) // 4)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(target, dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=target)
    copied = torch.empty_like(source)
    return Reading(
        device=target.type,
        dtype=str(dtype).removeprefix("torch."),
        size=size,
        copy_bytes=copy_bytes,
        matmul_s=steady(sample_seconds(lambda: torch.mm(a, b, out=out), cuda, budget_s, 10, 200), cuda),
        copy_s=steady(sample_seconds(lambda: copied.copy_(source), cuda, budget_s, 10, 200), cuda),
    )


def moved(start: Reading, end: Reading, tolerance: float | None = None) -> Verdict:
    """Whether either time changed by more than the tolerance, in either direction.

    Args:
        tolerance: relative, for both; None takes the device's own (:data:`GPU_TOLERANCE`, :data:`CPU_TOLERANCE`).
    """
    allowed = CPU_TOLERANCE if start.device == "cpu" else GPU_TOLERANCE
    if tolerance is not None:
        allowed = dict.fromkeys(allowed, tolerance)
    same = ("device", "dtype", "size", "copy_bytes", "method")
    unlike = [name for name in same if getattr(start, name) != getattr(end, name)]
    times = {"product": (start.matmul_s, end.matmul_s), "copy": (start.copy_s, end.copy_s)}
    if unlike or not all(0 < t < float("inf") for pair in times.values() for t in pair):
        why = f"their {', '.join(unlike)} differ" if unlike else f"a time is not a positive number: {times}"
        return Verdict(True, f"the two sentinel readings cannot be compared: {why}", None, None, allowed)
    ratios = {name: after / before for name, (before, after) in times.items()}
    parts = [
        f"the fixed {name} went from {times[name][0] * 1e3:.4g} to {times[name][1] * 1e3:.4g} ms"
        f" ({max(ratio, 1 / ratio):.3g}× {'slower' if ratio > 1 else 'faster'}; {1 + allowed[name]:.3g}× is allowed)"
        for name, ratio in ratios.items()
        if max(ratio, 1 / ratio) > 1 + allowed[name]
    ]
    return Verdict(bool(parts), " and ".join(parts) or None, ratios["product"], ratios["copy"], allowed)
