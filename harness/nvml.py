"""The few questions that are put to NVML, behind a protocol, so that tests and machines without it can stand in.

pynvml is imported when :func:`open_nvml` is called, never at import. A figure that the driver or the board does not
give is None; a library that is not there is :class:`NoNvml` with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class GpuIdentity:
    """One GPU as NVML knows it; ``index`` is NVML's, in PCI order."""

    index: int
    uuid: str
    pci: str
    name: str
    memory_bytes: int
    power_limit_w: float | None = None
    mig: bool = False
    ecc: bool | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process on the GPU: it computes, or only draws (``graphics``). ``memory_bytes`` is None where unknown."""

    pid: int
    memory_bytes: int | None = None
    graphics: bool = False


@dataclass(frozen=True)
class GpuSample:
    """The state of one GPU at one moment. ``reasons`` is NVML's bit mask of clock event reasons."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    reasons: int | None = None
    energy_j: float | None = None
    memory_used_bytes: int | None = None
    utilization: int | None = None
    processes: tuple[GpuProcess, ...] | None = None


class Nvml(Protocol):
    """What the harness asks."""

    def driver(self) -> str | None: ...

    def cuda(self) -> str | None:
        """The newest CUDA that the driver supports, such as ``13.0``."""
        ...

    def gpus(self) -> Sequence[GpuIdentity]: ...

    def sample(self, index: int) -> GpuSample: ...


@dataclass(frozen=True)
class NoNvml:
    """NVML cannot be asked, and why."""

    reason: str


class PyNvml:
    """NVML through nvidia-ml-py."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._handles: dict[int, Any] = {}

    def _ask(self, name: str, *args: Any) -> Any:
        """The answer, or None where this driver or board does not give it."""
        function = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(*args)
        except self._nvml.NVMLError:
            return None

    def _handle(self, index: int) -> Any:
        """NVML's handle, or None for a GPU that fell off the bus or that this user may not see."""
        if self._handles.get(index) is None:
            self._handles[index] = self._ask("nvmlDeviceGetHandleByIndex", index)
        return self._handles[index]

    def driver(self) -> str | None:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def cuda(self) -> str | None:
        version = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return None if not version else f"{version // 1000}.{version % 1000 // 10}"

    def gpus(self) -> Sequence[GpuIdentity]:
        count = self._ask("nvmlDeviceGetCount") or 0
        return [self._identity(index) for index in range(count) if self._handle(index) is not None]

    def _identity(self, index: int) -> GpuIdentity:
        handle = self._handle(index)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        mig = self._ask("nvmlDeviceGetMigMode", handle)
        ecc = self._ask("nvmlDeviceGetEccMode", handle)
        return GpuIdentity(
            index=index,
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)) or "",
            pci=normal_pci(_text(pci.busId) or "") if pci is not None else "",
            name=_text(self._ask("nvmlDeviceGetName", handle)) or "",
            memory_bytes=int(memory.total) if memory is not None else 0,
            power_limit_w=None if limit is None else limit / 1000,
            mig=bool(mig and mig[0]),
            ecc=None if ecc is None else bool(ecc[0]),
        )

    def sample(self, index: int) -> GpuSample:
        handle, nvml = self._handle(index), self._nvml
        if handle is None:
            return GpuSample()
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        busy = self._ask("nvmlDeviceGetUtilizationRates", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # drivers before 535 know it by its old name
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000,
            reasons=reasons,
            energy_j=None if energy is None else energy / 1000,
            memory_used_bytes=None if memory is None else int(memory.used),
            utilization=None if busy is None else int(busy.gpu),
            processes=self._processes(handle),
        )

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        compute = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if compute is None:
            return None
        draws = self._ask("nvmlDeviceGetGraphicsRunningProcesses", handle) or []
        found = {int(p.pid): GpuProcess(int(p.pid), p.usedGpuMemory, graphics=True) for p in draws}
        found.update({int(p.pid): GpuProcess(int(p.pid), p.usedGpuMemory) for p in compute})
        return tuple(found[pid] for pid in sorted(found))


def open_nvml(load: Callable[[], Any] | None = None) -> Nvml | NoNvml:
    """NVML ready for questions, or the reason that it is not.

    Args:
        load: gives the pynvml module; for tests.
    """
    try:
        module = (load or _load)()
    except ImportError:
        return NoNvml("the package nvidia-ml-py is not installed")
    try:
        module.nvmlInit()
    except module.NVMLError as err:
        return NoNvml(f"NVML did not start: {err}")
    return PyNvml(module)


def _load() -> Any:
    import pynvml

    return pynvml


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def normal_pci(bus_id: str) -> str:
    """A PCI address as ``0000:1b:00.0``: NVML pads the domain to eight digits, torch and sysfs to four."""
    domain, _, rest = bus_id.strip("\0 ").lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest else domain


def visible_gpus(
    gpus: Sequence[GpuIdentity], environ: Mapping[str, str] | None = None
) -> tuple[list[GpuIdentity], str | None]:
    """The GPUs that CUDA shows this process, in torch's order, and why the order is doubtful, if it is.

    ``CUDA_VISIBLE_DEVICES`` holds indices or UUID prefixes and ends at the first that does not exist. Its indices
    follow NVML's order only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or among equal GPUs.
    """
    env = os.environ if environ is None else environ
    by_pci = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    mixed = len({gpu.name for gpu in gpus}) > 1
    doubt = None if by_pci or not mixed else "GPUs of several types: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus), doubt
    chosen: list[GpuIdentity] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdigit():
            match = [gpu for gpu in gpus if gpu.index == int(entry)]
        elif entry.startswith("GPU-"):
            match = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        elif entry.startswith("MIG-"):
            return chosen, "CUDA_VISIBLE_DEVICES names a MIG slice"
        else:
            break
        if len(match) != 1 or match[0] in chosen:
            break
        chosen.append(match[0])
    uses_index = any(part.strip().isdigit() for part in wanted.split(","))
    return chosen, doubt if uses_index else None


def torch_properties(index: int) -> Any:
    """``torch.cuda.get_device_properties(index)`` where this process uses CUDA already, else None; starts nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_properties(index)


def match_torch_device(
    index: int, gpus: Sequence[GpuIdentity], properties: Any = None, environ: Mapping[str, str] | None = None
) -> tuple[GpuIdentity | None, str | None]:
    """The GPU that torch calls ``cuda:<index>``, or None with the reason.

    Args:
        properties: ``torch.cuda.get_device_properties(index)`` where torch was asked already; its UUID or PCI address
            decides. Without it, ``CUDA_VISIBLE_DEVICES`` does.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        text = str(uuid)
        text = text if text.startswith("GPU-") else f"GPU-{text}"
        for gpu in gpus:
            if gpu.uuid == text:
                return gpu, None
    bus = getattr(properties, "pci_bus_id", None)
    if isinstance(bus, int):
        domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        for gpu in gpus:
            if gpu.pci == address:
                return gpu, None
    if properties is not None and (uuid is not None or isinstance(bus, int)):
        return None, f"NVML knows no GPU with the UUID or PCI address of cuda:{index}"
    visible, doubt = visible_gpus(gpus, environ)
    if doubt is not None:
        return None, doubt
    if index >= len(visible):
        return None, f"cuda:{index} is not among the {len(visible)} visible GPUs"
    return visible[index], None
