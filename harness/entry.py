"""One variant on its way through a measurement, and small facts that the measurement needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness import memory
from harness.check import Verdict
from harness.pair import Variant
from harness.requires import Here


@dataclass
class Entry:
    """One variant on its way through the measurement."""

    name: str
    variant: Variant
    case: Any = None
    status: str = ""
    reason: str = ""
    before: int = 0
    held: int = 0
    device_s: float | None = None
    costs: dict[str, float] = field(default_factory=dict)
    check: Verdict | None = None
    memory: memory.Memory | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    timelines: list[tuple[float, Any]] = field(default_factory=list)

    def end(self, status: str, reason: str, **parts: Any) -> None:
        """Settles what became of the variant."""
        self.status, self.reason = status, reason
        self.parts.update(parts)

    def ask(self) -> None:
        """Keeps what the case tells of its last run; one that is closed after each block is asked before that."""
        if self.case is None:
            return
        if hasattr(self.case, "counters"):
            self.parts["counters"] = dict(self.case.counters())
        if hasattr(self.case, "timeline"):
            self.parts["timeline"] = self.case.timeline()
        if hasattr(self.case, "choice"):
            self.parts["tuned"] = self.case.choice()

    def heard(self, seconds: float) -> None:
        """Keeps the timeline of the run that was just timed, if the case has one."""
        if hasattr(self.case, "timeline"):
            self.timelines.append((seconds, self.case.timeline()))

    def keep_middle(self, values: Sequence[float]) -> None:
        """Of the samples that count, the middle one's timeline is the record's, as its latency is their median."""
        counted = sorted((pair for pair in self.timelines if pair[0] in values), key=lambda pair: pair[0])
        if counted:
            self.parts["timeline"] = counted[(len(counted) - 1) // 2][1]
        self.timelines = []

    @property
    def alive(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return not self.status


class UndeclaredChange(Exception):
    """A variant overwrote an input without declaring it."""


def here_of(device: torch.device, ranks: int) -> Here:
    """What this process has."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Here(device.type, ranks, (int(major), int(minor)), capability)


def tensor_bytes(inputs: Mapping[str, Any] | None) -> int:
    """Bytes of the tensors among the inputs."""
    tensors = [v for v in (inputs or {}).values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def module_bytes(values: Iterable[Any]) -> int:
    """Bytes of the weights among these: variants share them, and each would have to hold them if it were alone."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    held = {p.data_ptr(): p.numel() * p.element_size() for m in modules for p in m.parameters()}
    return sum(held.values())


def first_line(err: BaseException) -> str:
    """What an exception says, on one line."""
    text = str(err).strip() or type(err).__name__
    return text.splitlines()[0][:500]
