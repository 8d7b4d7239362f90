"""Who else used the CPU while something was measured, and did the system slow it down? Linux; imports no torch.

Busy time of the allowed cores, from ``/proc/stat``, less the CPU time of this process tree is what others took; stolen
time is what the hypervisor gave to other guests. Either makes a measurement contended when it is large.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.hostfacts import governor

#: Others may use this many cores, or this share of all, before a measurement counts as contended.
OTHER_CORES, OTHER_SHARE = 0.5, 0.15
#: Time stolen by the hypervisor, of all time of the allowed cores.
STOLEN_SHARE = 0.05
#: Below this many seconds the counters, which tick at 100 Hz, say too little to blame anybody.
SHORTEST_S = 0.2


@dataclass(frozen=True)
class CpuConditions:
    """What happened to the CPU between two readings. ``why`` names what made it contended or throttled."""

    available: bool
    reason: str | None = None
    contended: bool = False
    throttled: bool = False
    why: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reading:
    at: float
    busy: float
    stolen: float
    own: float
    thermal: int | None
    quota: int | None


class CpuWatch:
    """Reads the counters at :meth:`start` and :meth:`stop`.

    Args:
        root_pid: the top of the process tree that counts as ours; this process when None.
        proc, sys: other roots, for tests.
    """

    def __init__(
        self,
        root_pid: int | None = None,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root_pid or os.getpid()
        self._proc, self._sys, self._now = proc, sys, now
        self._hz = float(os.sysconf("SC_CLK_TCK"))
        self._start: _Reading | None = None
        self._why_not: str | None = None

    def start(self) -> None:
        """The first reading."""
        self._start = self._read()

    def stop(self) -> CpuConditions:
        """The second reading, and what lies between; the watch may be started again.

        Raises:
            RuntimeError: it was never started.
        """
        end = self._read()
        if end is None:
            return CpuConditions(False, self._why_not)
        if self._start is None:
            raise RuntimeError("the watch was stopped before it was started")
        start, self._start = self._start, None
        return self._judge(start, end)

    def _judge(self, start: _Reading, end: _Reading) -> CpuConditions:
        wall = max(end.at - start.at, 1e-9)
        cores = len(_allowed())
        own = max(0.0, end.own - start.own) / wall
        busy = max(0.0, end.busy - start.busy) / wall
        others = max(0.0, busy - own)
        stolen = max(0.0, end.stolen - start.stolen) / wall / cores
        facts: dict[str, Any] = {
            "wall_s": round(wall, 4),
            "cores": cores,
            "own_cores": round(own, 3),
            "other_cores": round(others, 3),
            "stolen_share": round(stolen, 4),
            "load_1min": round(os.getloadavg()[0], 2),
            "governor": governor(self._sys),
        }
        contended, throttled = [], []
        if wall >= SHORTEST_S:
            if others > max(OTHER_CORES, OTHER_SHARE * cores):
                contended.append(f"other processes used {others:.2f} of {cores} cores")
            if stolen > STOLEN_SHARE:
                contended.append(f"the hypervisor gave {stolen:.0%} of the time to others")
        for name, before, after in (
            ("thermal_events", start.thermal, end.thermal),
            ("quota_periods", start.quota, end.quota),
        ):
            if before is not None and after is not None:
                facts[name] = after - before
        if facts.get("thermal_events", 0) > 0:
            throttled.append("the CPU slowed down for its temperature")
        if facts.get("quota_periods", 0) > 0:
            throttled.append("the control group's CPU quota was used up")
        return CpuConditions(True, None, bool(contended), bool(throttled), (*contended, *throttled), facts)

    def _read(self) -> _Reading | None:
        try:
            stat = (self._proc / "stat").read_text()
            own = tree_cpu_ticks(self._root, self._proc)
        except OSError as err:
            self._why_not = f"{err.filename} cannot be read: {err.strerror}"
            return None
        busy, stolen = cpu_ticks(stat, _allowed())
        return _Reading(
            self._now(), busy / self._hz, stolen / self._hz, own / self._hz, self._thermal(), self._quota_periods()
        )

    def _thermal(self) -> int | None:
        counts = self._sys.glob("devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count")
        values = [int(text) for path in counts if (text := _text(path)).isdigit()]
        return sum(values) if values else None

    def _quota_periods(self) -> int | None:
        for line in _text(self._sys / "fs/cgroup/cpu.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == "nr_throttled" and value.isdigit():
                return int(value)
        return None


def cpu_ticks(stat: str, cores: set[int]) -> tuple[float, float]:
    """Busy and stolen ticks of these cores, from the text of ``/proc/stat`` (proc(5)); guests are inside user time."""
    busy = stolen = 0.0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if not name.startswith("cpu") or not name[3:].isdigit() or int(name[3:]) not in cores:
            continue
        user, nice, system, _idle, _wait, irq, softirq, *rest = (float(n) for n in numbers)
        busy += user + nice + system + irq + softirq
        stolen += rest[0] if rest else 0.0
    return busy, stolen


def parents(proc: Path = Path("/proc")) -> dict[int, int]:
    """Process id → parent's id, of every process that can be seen."""
    found: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(entry)
            if fields is not None:
                found[int(entry.name)] = int(fields[1])
    return found


def own_tree(root: int, proc: Path = Path("/proc")) -> set[int]:
    """``root`` and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents(proc).items():
        children.setdefault(parent, []).append(pid)
    tree, todo = set[int](), [root]
    while todo:
        pid = todo.pop()
        if pid not in tree:
            tree.add(pid)
            todo.extend(children.get(pid, ()))
    return tree


def tree_cpu_ticks(root: int, proc: Path = Path("/proc")) -> float:
    """CPU ticks of a process tree, ended children that were waited for included.

    Raises:
        OSError: ``proc`` itself cannot be read.
    """
    ticks = 0.0
    for pid in own_tree(root, proc):
        fields = _stat_fields(proc / str(pid))
        if fields is not None:
            ticks += sum(float(n) for n in fields[11:15])
    return ticks


def _stat_fields(folder: Path) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the state on; the name before them may hold spaces and brackets."""
    text = _text(folder / "stat")
    _, _, rest = text.rpartition(")")
    fields = rest.split()
    return fields if len(fields) > 14 else None  # a process that ended meanwhile


def _allowed() -> set[int]:
    try:
        return set(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return set(range(os.cpu_count() or 1))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
