"""The state of the machine around a measurement: clocks, temperature, power, throttling and who else was there.

    watch = watch_device("cuda:0")
    watch.start()
    ...                       # measure; watch.poke() between rounds reads once more
    conditions = watch.stop()
    if conditions.disturbed: ...   # measure again

NVML is asked for GPUs, ``/proc`` for the CPU. Without NVML the conditions say so (``available`` false, with the
reason) and blame nobody. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.cpu_watch import CpuWatch, own_tree, parents
from harness.nvml import GpuIdentity, GpuSample, NoNvml, Nvml, match_torch_device, open_nvml, torch_properties
from harness.processes import MARK

#: NVML's clock event reasons by bit (nvml.h, nvmlClocksEventReasons).
REASONS: Mapping[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
#: These make a sample throttled. The software power cap does not: a large matrix product on a 700 W card meets it all
#: the time, and the card's sustained rate is what a user gets; it is recorded all the same.
THROTTLING = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})


@dataclass(frozen=True)
class Conditions:
    """What the watch saw. ``why`` names what made it throttled or contended; ``facts`` goes into the record."""

    available: bool
    reason: str | None = None
    throttled: bool = False
    contended: bool = False
    why: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    energy_j: float | None = None
    device_memory_bytes: int | None = None

    @property
    def disturbed(self) -> bool:
        """Whether the measurement should be taken again."""
        return self.throttled or self.contended

    def as_record(self) -> dict[str, Any]:
        """The record's ``conditions``, plain JSON values."""
        return {
            "available": self.available,
            "reason": self.reason,
            "throttled": self.throttled,
            "contended": self.contended,
            "why": list(self.why),
            **self.facts,
        }


class Watch(Protocol):
    """Sees the machine between ``start`` and ``stop``; ``poke`` takes one more look in between."""

    def start(self) -> None: ...

    def poke(self) -> None: ...

    def stop(self) -> Conditions: ...


def decode_reasons(mask: int) -> list[str]:
    """Names of the bits of a mask of clock event reasons; an unknown bit is named by its value."""
    return [REASONS.get(1 << bit, f"bit_{1 << bit:#x}") for bit in range(mask.bit_length()) if mask >> bit & 1]


class HostWatch:
    """Conditions of a measurement on the CPU."""

    def __init__(self, cpu: CpuWatch) -> None:
        self._cpu = cpu

    def start(self) -> None:
        self._cpu.start()

    def poke(self) -> None:
        """The CPU's counters add up by themselves."""

    def stop(self) -> Conditions:
        seen = self._cpu.stop()
        return Conditions(
            seen.available, seen.reason, seen.throttled, seen.contended, seen.why, {"host": dict(seen.facts)}
        )


class BlindWatch:
    """A GPU that cannot be asked: the reason is recorded, the host is watched, and nobody is blamed."""

    def __init__(self, reason: str, cpu: CpuWatch) -> None:
        self._reason, self._cpu = reason, cpu

    def start(self) -> None:
        self._cpu.start()

    def poke(self) -> None:
        """There is nothing to look at."""

    def stop(self) -> Conditions:
        return Conditions(False, self._reason, facts={"host": dict(self._cpu.stop().facts)})


class GpuWatch:
    """Conditions of a measurement on one GPU.

    Args:
        gpu: which one.
        root_pid: the top of the process tree that is ours; found by :func:`launch_root` when None.
        contexts: how many of our processes hold a context on this GPU. Where process ids are of another namespace (a
            container), ours cannot be told apart, and this many unknown ones are taken to be us.
    """

    def __init__(
        self,
        nvml: Nvml,
        gpu: GpuIdentity,
        cpu: CpuWatch,
        root_pid: int | None = None,
        contexts: int = 1,
        proc: Path = Path("/proc"),
    ) -> None:
        self._nvml, self._gpu, self._cpu, self._proc = nvml, gpu, cpu, proc
        self._root = root_pid if root_pid is not None else launch_root(proc)
        self._contexts = contexts
        self._samples: list[GpuSample] = []

    def start(self) -> None:
        self._cpu.start()
        self._samples = []
        self.poke()

    def poke(self) -> None:
        self._samples.append(self._nvml.sample(self._gpu.index))

    def stop(self) -> Conditions:
        if not self._samples:
            raise RuntimeError("the watch was stopped before it was started")
        self.poke()
        samples, host = self._samples, self._cpu.stop()
        self._samples = []
        masks = [s.reasons for s in samples if s.reasons is not None]
        reasons = sorted({name for mask in masks for name in decode_reasons(mask)})
        slowed = [name for name in reasons if name in THROTTLING]
        others = self._others(samples)
        why = [f"{self._gpu.name} slowed down: {', '.join(slowed)}"] if slowed else []
        if others:
            why.append(f"{len(others)} other process{'es' if len(others) > 1 else ''} on the GPU: {sorted(others)}")
        first, last = samples[0].energy_j, samples[-1].energy_j
        energy = None if first is None or last is None or last < first else last - first
        facts = {
            "samples": len(samples),
            "sm_mhz": _range([s.sm_mhz for s in samples]),
            "memory_mhz": _range([s.memory_mhz for s in samples]),
            "temperature_c": _range([s.temperature_c for s in samples]),
            "power_w": _range([s.power_w for s in samples]),
            "power_limit_w": self._gpu.power_limit_w,
            "clock_reasons": reasons,
            "power_capped": "sw_power_cap" in reasons,
            "other_processes": len(others),
            "processes_known": any(s.processes is not None for s in samples),
            "energy_j": energy,
            "host": {**host.facts, "contended": host.contended},
        }
        return Conditions(
            available=True,
            throttled=bool(slowed),
            contended=bool(others),
            why=tuple(why),
            facts=facts,
            energy_j=energy,
            device_memory_bytes=self._own_memory(samples[-1]),
        )

    def _ours(self) -> set[int]:
        return own_tree(self._root, self._proc) | ancestors(self._root, self._proc) | {os.getpid()}

    def _others(self, samples: list[GpuSample]) -> set[int]:
        """Pids of compute processes that are not ours, in any sample."""
        ours, seen = self._ours(), set(parents(self._proc))
        found: set[int] = set()
        for sample in samples:
            pids = {p.pid for p in sample.processes or () if not p.graphics}
            foreign = pids - ours
            if not pids & ours:
                unseen = sorted(foreign - seen)
                foreign -= set(unseen[: self._contexts])
            found |= foreign
        return found

    def _own_memory(self, sample: GpuSample) -> int | None:
        ours = self._ours()
        sizes = [p.memory_bytes for p in sample.processes or () if p.pid in ours and p.memory_bytes is not None]
        return sum(sizes) if sizes else None


def ancestors(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """The parents of a process, up to the first."""
    parent_of, found = parents(proc), set[int]()
    while (parent := parent_of.get(pid, 0)) > 0 and parent not in found:
        found.add(parent)
        pid = parent
    return found


def launch_root(proc: Path = Path("/proc"), pid: int | None = None) -> int:
    """The process at the top of this launch: the one that started the topmost marked ancestor, else this process.

    A launch marks what it starts by an environment variable (:mod:`harness.processes`); ranks are siblings under it.
    In a world that torchrun or srun has made, the supervisors of one host are siblings too, under what started them.
    """
    root = os.getpid() if pid is None else pid
    parent_of = parents(proc)
    while MARK in _environment(proc / str(root)) and parent_of.get(root, 0) > 1:  # an orphan is its own root
        root = parent_of[root]
    around = _environment(proc / str(root))
    if (around.get("WORLD_SIZE", "1") != "1" or "SLURM_STEP_ID" in around) and parent_of.get(root, 0) > 1:
        root = parent_of[root]
    return root


def _environment(folder: Path) -> dict[str, str]:
    try:
        items = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in items if b"=" in item)
    return {key: value for key, _, value in pairs}


def _range(values: list[int | None] | list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"min": min(known), "max": max(known), "last": known[-1]} if known else None


def watch_device(
    device: str,
    *,
    nvml: Nvml | NoNvml | None = None,
    properties: Any = None,
    environ: Mapping[str, str] | None = None,
    contexts: int = 1,
) -> Watch:
    """A watch for ``cpu``, ``cuda`` or ``cuda:N``.

    Args:
        properties: ``torch.cuda.get_device_properties(N)``: its UUID finds the GPU whatever CUDA_VISIBLE_DEVICES says.
            When None they are asked for where this process uses CUDA already.
        contexts: our processes on this GPU (ranks that share it).
    """
    kind, _, index = device.partition(":")
    cpu = CpuWatch(launch_root())
    if kind == "cpu":
        return HostWatch(cpu)
    backend = open_nvml() if nvml is None else nvml
    if isinstance(backend, NoNvml):
        return BlindWatch(backend.reason, cpu)
    number = int(index or 0)
    gpu, reason = match_torch_device(number, backend.gpus(), properties or torch_properties(number), environ)
    if gpu is None:
        return BlindWatch(reason or f"{device} is not known to NVML", cpu)
    return GpuWatch(backend, gpu, cpu, contexts=contexts)
