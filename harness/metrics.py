"""Rates against the datasheet, bandwidths of collectives, and the guard against numbers that physics does not allow.

FLOPs are model FLOPs: what the mathematics needs, causal attention counted as half, recomputation not counted. MFU is
model FLOPs over the dense peak of the dtype really used (PaLM, appendix B); HFU counts recomputation too; MBU is the
least bytes over the datasheet's memory bandwidth. A device without a row has none of them, and says why.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.devices import Device, Found, peak_flops

# Boards clock above the boost clock that datasheet peaks assume (H200: 1980 MHz against about 1830).
RATE_SLACK = 1.10
# Memory and links run at the clock of the datasheet; only rounding and the timer are allowed for.
BANDWIDTH_SLACK = 1.02


@dataclass(frozen=True)
class Figure:
    """A number, or None with the reason that there is none."""

    value: float | None
    reason: str | None = None


def _ratio(amount: float, seconds: float, peak: float, what: str) -> Figure:
    if not (math.isfinite(amount) and math.isfinite(seconds)) or seconds <= 0:
        return Figure(None, f"{what} needs a positive finite time, got {seconds!r} s for {amount!r}")
    if amount <= 0:
        return Figure(None, f"{what}: the work counts none")
    return Figure(amount / seconds / peak)


def mfu(flops: float, seconds: float, dtype: str, device: Device | Found | None) -> Figure:
    """Model FLOPs of one device over its dense peak in ``dtype``, the dtype that the arithmetic really uses.

    Over several ranks, ``flops`` is the share of one: the whole divided by the world size.
    """
    peak = peak_flops(device, dtype)
    if peak.value is None:
        return Figure(None, peak.reason)
    return _ratio(flops, seconds, peak.value, "MFU")


def hfu(flops: float, recomputed_flops: float, seconds: float, dtype: str, device: Device | Found | None) -> Figure:
    """As :func:`mfu`, with the recomputation that activation checkpointing adds."""
    return mfu(flops + recomputed_flops, seconds, dtype, device)


def mbu(least_bytes: float, seconds: float, device: Device | Found | None) -> Figure:
    """Least bytes through device memory over the datasheet's bandwidth."""
    row = device.device if isinstance(device, Found) else device
    if row is None:
        why = device.reason if isinstance(device, Found) else "no GPU: a CPU has no bandwidth in the table"
        return Figure(None, why or "unknown GPU")
    return _ratio(least_bytes, seconds, row.memory_bandwidth, "MBU")


#: Collective → bus bandwidth over algorithm bandwidth at n ranks (nccl-tests, doc/PERFORMANCE.md).
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


def algbw(payload_bytes: float, seconds: float) -> Figure:
    """Algorithm bandwidth, bytes/s: the payload over the time of the slowest rank.

    The payload is one rank's buffer; for all_gather the gathered one, for reduce_scatter the one before it.
    """
    return _ratio(payload_bytes, seconds, 1.0, "algbw")


def busbw(collective: str, payload_bytes: float, seconds: float, ranks: int) -> Figure:
    """Bus bandwidth, bytes/s: comparable with the link each way, whatever the number of ranks.

    Raises:
        ValueError: an unknown collective, or fewer than one rank.
    """
    if collective not in BUS_FACTORS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(sorted(BUS_FACTORS))}")
    if ranks < 1:
        raise ValueError(f"a collective needs at least one rank, got {ranks}")
    if ranks == 1:
        return Figure(None, "a world of one moves nothing over a link")
    alg = algbw(payload_bytes, seconds)
    return alg if alg.value is None else Figure(alg.value * BUS_FACTORS[collective](ranks))


@dataclass(frozen=True)
class Claimed:
    """Figures of one measurement, in bytes, seconds and items; None where there is none.

    flops_rate and bandwidth are of one device. ``reduces_in_switch`` is true where the switch adds up (NVLink SHARP):
    an all_reduce then moves half of what its bus factor assumes.
    """

    dtype: str = ""
    flops_rate: float | None = None
    bandwidth: float | None = None
    collective: str = ""
    busbw: float | None = None
    algbw: float | None = None
    reduces_in_switch: bool = False
    absolute_memory: float | None = None
    input_bytes: float | None = None
    peak_throughput: float | None = None
    mean_throughput: float | None = None
    device_memory: float | None = None


def implausible(claimed: Claimed, device: Device | Found | None = None) -> list[str]:
    """Everything about these figures that cannot be; empty when they can. Without a known device less is judged."""
    row = device.device if isinstance(device, Found) else device
    numbers = {k: v for k, v in vars(claimed).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    found = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value) or value < 0]
    if found:
        return found
    if row is not None:
        found += _beyond_datasheet(claimed, row)
    memory, inputs = claimed.absolute_memory, claimed.input_bytes
    if memory is not None and inputs is not None and memory < inputs:
        found.append(f"absolute peak memory {_gb(memory)} is below the inputs' {_gb(inputs)}")
    peak, mean = claimed.peak_throughput, claimed.mean_throughput
    if peak is not None and mean is not None and peak < mean * (1 - 1e-9):
        found.append(f"peak throughput {peak:.6g} is below the mean {mean:.6g}")
    return found


def _beyond_datasheet(claimed: Claimed, row: Device) -> list[str]:
    found: list[str] = []
    name = row.names[0]
    if _above(claimed.bandwidth, row.memory_bandwidth * BANDWIDTH_SLACK):
        found.append(
            f"bandwidth {_show(claimed.bandwidth, 1e12)} TB/s is above {_show(row.memory_bandwidth, 1e12)} TB/s of "
            f"{name}: a warm cache, work outside the timed span, or too many bytes counted"
        )
    peak = peak_flops(row, claimed.dtype).value if claimed.dtype else None
    if peak is not None and _above(claimed.flops_rate, peak * row.accumulate_factor * RATE_SLACK):
        found.append(
            f"{_show(claimed.flops_rate, 1e12)} TFLOP/s is above the {claimed.dtype} peak of {_show(peak, 1e12)} of "
            f"{name}: another dtype, skipped work, or too many FLOPs counted"
        )
    # Adding up in the switch, each rank sends its buffer once, so that algbw is what the link carries.
    summed = claimed.collective == "all_reduce" and claimed.reduces_in_switch
    over_link = claimed.algbw if summed else claimed.busbw
    if _above(over_link, row.link_each_way * BANDWIDTH_SLACK):
        found.append(
            f"bus bandwidth {_show(over_link, 1e9)} GB/s is above {_show(row.link_each_way, 1e9)} GB/s each way of "
            f"{row.link} of {name}: the factor applied twice, or work outside the timed span"
        )
    if _above(claimed.absolute_memory, row.memory_gib * 1.04 * (1 << 30)):
        held = _gb(claimed.absolute_memory or 0.0)
        found.append(f"absolute peak memory {held} is above the {row.memory_gib:g} GB of {name}")
    return found


def _above(value: float | None, bound: float) -> bool:
    return value is not None and value > bound


def _show(value: float | None, unit: float) -> str:
    return f"{(value or 0.0) / unit:.4g}"


def _gb(size: float) -> str:
    return f"{size / (1 << 30):.3f} GiB"
