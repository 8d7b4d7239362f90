"""Keeps the measured ceilings of machines in the user's data folder. Imports no torch.

One file a calibration, ``<data>/machines/<gpu>/<machine>-<time>-<digits>.json``, written whole or not at all and never
again: the newest one that is whole, plausible and of the same GPU, machine, driver, torch and method is used.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import StoreError
from harness.history.store import data_folder, require_writable

#: Changes whenever the way of measuring ceilings changes what they mean; older calibrations are then measured anew.
CEILING_METHOD = 1


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached, whatever its datasheet says. None where it was not measured.

    copy: bytes/s of a large device copy, read and written bytes together. read: bytes/s of reading alone.
    matmul: FLOP/s (OP/s for int8) of a large product by dtype key, as in the device table.
    launch_eager, launch_graph: seconds a kernel costs when launched one by one, and inside a replayed graph.
    cores: that a CPU's figures were measured with. host_to_device, device_to_host: bytes/s with pinned memory. link:
        bytes/s to another GPU of the host, one way.
    refused: what was measured and not believed, with the reason. details: sizes and such, for the reader.
    """

    gpu: str
    machine: str
    torch: str
    driver: str | None
    time: str
    cores: int | None = None
    copy: float | None = None
    read: float | None = None
    matmul: Mapping[str, float] = field(default_factory=dict)
    launch_eager: float | None = None
    launch_graph: float | None = None
    host_to_device: float | None = None
    device_to_host: float | None = None
    link: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    method: int = CEILING_METHOD

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class MachineKey:
    """What must be equal for a calibration to speak of this machine; ``cores`` only where the CPU is the device."""

    gpu: str
    machine: str
    torch: str
    driver: str | None
    cores: int | None = None


def save_ceilings(ceilings: Ceilings, folder: Path | None = None) -> Path:
    """Writes a new file beside all earlier ones and returns it.

    Raises:
        StoreError: the folder cannot be written, or a figure is not finite.
    """
    target, what = gpu_folder(ceilings.gpu, folder), f"ceilings of {ceilings.gpu}"
    return write_new(target, safe_name(ceilings.machine), ceilings.time, ceilings.as_dict(), what)


def require_room(key: MachineKey, always: bool = False) -> None:
    """Finds out, before anything is measured, whether what this machine reaches can be kept.

    always: it is measured though ceilings are known.

    Raises:
        StoreError: it would be measured, and the folder cannot be written; names the folder and the way out.
    """
    if always or load_ceilings(key)[0] is None:
        require_writable(gpu_folder(key.gpu), "the ceilings of this machine")


def write_new(target: Path, stem: str, time: str, values: Mapping[str, Any], what: str) -> Path:
    """Writes ``<stem>-<time>-<digits>.json`` whole or not at all, beside whatever is there.

    Raises:
        StoreError: the folder cannot be written, or a figure is not finite; says ``what`` is lost.
    """
    stamp = re.sub(r"[^0-9TZ]", "", time)
    path = target / f"{stem}-{stamp}-{secrets.token_hex(4)}.json"
    partial = path.with_suffix(".partial")
    try:
        text = json.dumps(values, indent=1, allow_nan=False)
    except ValueError as err:
        raise StoreError(f"{what} refused: {err}") from err
    try:
        target.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as err:
        raise StoreError(f"{what} cannot be kept in {target}: {err.strerror}; set PAIRBENCH_DATA") from err
    return path


def load_ceilings(key: MachineKey, folder: Path | None = None) -> tuple[Ceilings | None, list[str]]:
    """The newest calibration of this machine, or None, and what was passed over with the reason.

    A calibration of another driver or torch is not damage and is passed over in silence.
    """
    problems: list[str] = []
    found: list[Ceilings] = []
    place = gpu_folder(key.gpu, folder)
    for path in sorted(place.glob("*.json")) if place.is_dir() else []:
        try:
            ceilings = _parse(path.read_text())
        except (OSError, ValueError) as err:
            problems.append(f"{path.name}: {err}")
            continue
        theirs = MachineKey(ceilings.gpu, ceilings.machine, ceilings.torch, ceilings.driver, ceilings.cores)
        if theirs == key and ceilings.method == CEILING_METHOD:
            found.append(ceilings)
    return max(found, key=lambda c: c.time, default=None), problems


def _parse(text: str) -> Ceilings:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("is not an object")
    known = {name: raw[name] for name in Ceilings.__dataclass_fields__ if name in raw}
    missing = [name for name in ("gpu", "machine", "torch", "time") if not isinstance(known.get(name), str)]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    known.setdefault("driver", None)
    known.setdefault("method", 0)
    if not isinstance(known.get("matmul", {}), dict):
        raise ValueError("matmul is not an object")
    numbers = ("copy", "read", "launch_eager", "launch_graph", "host_to_device", "device_to_host", "link")
    figures = {name: known[name] for name in numbers if known.get(name) is not None}
    figures.update({f"matmul.{dtype}": rate for dtype, rate in known.get("matmul", {}).items()})
    for name, value in figures.items():
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if not good:
            raise ValueError(f"{name} is {value!r}, not a positive number")
    return Ceilings(**known)


def gpu_folder(gpu: str, folder: Path | None = None) -> Path:
    """Where the calibrations of machines with this GPU lie."""
    return (folder or data_folder() / "machines") / safe_name(gpu)


def safe_name(name: str) -> str:
    """The name, fit for a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unknown"
