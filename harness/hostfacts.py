"""The machine around the GPU: its label, CPU, cores and memory that this process may use. Imports no torch."""

from __future__ import annotations

import math
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where no limit is set


def machine_label(environ: Mapping[str, str] | None = None) -> str:
    """``PAIRBENCH_MACHINE``, else the host's name: what tells one machine's history from another's."""
    env = os.environ if environ is None else environ
    return env.get("PAIRBENCH_MACHINE", "").strip() or socket.gethostname() or "unknown"


def cpu_model(proc: Path = Path("/proc")) -> str:
    """The CPU's model, such as ``AMD EPYC 9654 96-Core Processor``; the architecture where nothing names it."""
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    for key in ("model name", "hardware", "cpu model"):
        if fields.get(key):
            return fields[key]
    if fields.get("cpu part"):  # 64-bit Arm gives numbers only
        return f"{platform.machine()} {fields.get('cpu implementer', '')}-{fields['cpu part']}"
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def cores_allowed(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, cut by the CPU quota of its control group."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(proc, cgroup, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Main memory that this process may use, in bytes; None where nothing says."""
    limits: list[int] = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        limits.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else -1
        if pages > 0:
            limits.append(pages * os.sysconf("SC_PAGE_SIZE"))
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text and text.isdigit() and 0 < int(text) < _UNLIMITED:
                limits.append(int(text))
    return min(limits) if limits else None


def governor(sys: Path = Path("/sys")) -> str | None:
    """The frequency governor of the first CPU, where the system shows one (virtual machines seldom do)."""
    return _read(sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor")


def _cpu_quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us) > 0:
        return int(quota_us) / int(period_us)
    return None


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and all above it, in either version's layout."""
    for line in (_read(proc / "self" / "cgroup") or "0::/").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            base = cgroup
        elif controller in controllers.split(","):
            base = cgroup / controllers if (cgroup / controllers).is_dir() else cgroup / controller
        else:
            continue
        folder = base / path.strip("/")
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
