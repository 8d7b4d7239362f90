"""A workload: named dimensions, a dtype and a tier, read from plain data in suites.

In suites/<family>/<technique>.py::

    WORKLOADS = [
        {"name": "rows16k", "tier": "full", "dtype": "bfloat16", "rows": 16384, "width": 4096, "direction": "forward"},
    ]

Reserved keys are ``name``, ``tier`` and ``dtype``; every other key is a dimension. Some dimensions have a meaning
that the harness knows: ``ranks`` (how many processes; 1 when absent), ``direction`` (``forward``, ``backward`` or
``both``, for ops), ``model`` (a path or a named shape), ``trace`` (a path) and ``text`` (a named text).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import UsageError, unknown

TIERS = ("smoke", "quick", "full")
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
DIRECTIONS = ("forward", "backward", "both")
RESERVED = ("name", "tier", "dtype")

Dim = int | float | str | bool


@dataclass(frozen=True)
class Workload:
    """One set of dimensions that a technique is measured on.

    Dimensions read as attributes: ``workload.rows``. ``digests`` holds the digests of what the dimensions only
    name (model, trace, text), so that a changed file starts a new series.
    """

    technique: str
    name: str
    tier: str
    dtype: str
    dims: Mapping[str, Dim]
    digests: Mapping[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        dims: Mapping[str, Dim] = self.__dict__.get("dims", {})
        if name in dims:
            return dims[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"workload {self.__dict__.get('name')!r} has no dimension {name!r}; it has {sorted(dims)}")

    @property
    def ranks(self) -> int:
        """How many processes the workload needs."""
        return int(self.dims.get("ranks", 1))

    @property
    def direction(self) -> str:
        """``forward``, ``backward`` or ``both``; an op that names none is a forward."""
        return str(self.dims.get("direction", "forward"))

    @property
    def workload_id(self) -> str:
        """Digest of dimensions, dtype, model, trace and text: what a series keys on, whatever the name says."""
        named = {k: v for k, v in self.dims.items() if k not in self.digests}
        body = {"dims": named, "dtype": self.dtype, "digests": dict(self.digests)}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]

    def replace(self, **dims: Dim) -> Workload:
        """The same workload with some dimensions (or ``dtype``) set anew; its name says which."""
        base, before = split_name(self.name)
        changed = ",".join(f"{k}={v}" for k, v in {**before, **dims}.items())
        dtype = str(dims.pop("dtype", self.dtype))
        return Workload(
            technique=self.technique,
            name=f"{base}[{changed}]" if changed else base,
            tier=self.tier,
            dtype=dtype,
            dims={**self.dims, **dims},
            digests=self.digests,
        )


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """The name that a suite gives and what a user set anew: ``rows16k[width=8,rows=4]``.

    Brackets one behind the other, of names made before they were joined, are read as one.
    """
    base, _, changed = name.partition("[")
    pairs = re.split(r"(?:,|\]\[)(?=\w+=)", changed.removesuffix("]"))
    return base, {key: value for key, sign, value in (pair.partition("=") for pair in pairs) if sign}


def parse_workload(technique: str, raw: Mapping[str, Any], where: str) -> Workload:
    """A workload from a plain mapping.

    Raises:
        UsageError: a missing key, a value that is not a scalar, an unknown tier, dtype or direction; names ``where``.
    """
    for key in RESERVED:
        if not isinstance(raw.get(key), str):
            raise UsageError(f"{where}: a workload needs {key!r} as a string, got {raw.get(key)!r}")
    name, tier, dtype = str(raw["name"]), str(raw["tier"]), str(raw["dtype"])
    if tier not in TIERS:
        raise UsageError(f"{where}: workload {name!r}: {unknown('tier', tier, TIERS)}")
    if dtype not in DTYPES:
        raise UsageError(f"{where}: workload {name!r}: {unknown('dtype', dtype, DTYPES)}")
    dims: dict[str, Dim] = {}
    for key, value in raw.items():
        if key in RESERVED:
            continue
        if not isinstance(value, (int, float, str, bool)) or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"{where}: workload {name!r}: dimension {key!r} must be a finite scalar, got {value!r}")
        dims[key] = value
    direction = dims.get("direction", "forward")
    if direction not in DIRECTIONS:
        raise UsageError(f"{where}: workload {name!r}: {unknown('direction', str(direction), DIRECTIONS)}")
    ranks = dims.get("ranks", 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"{where}: workload {name!r}: ranks must be a whole number of at least 1, got {ranks!r}")
    return Workload(technique=technique, name=name, tier=tier, dtype=dtype, dims=dims)


def parse_workloads(technique: str, raws: Iterable[Mapping[str, Any]], where: str) -> list[Workload]:
    """All workloads of a technique; names must be unique."""
    out: list[Workload] = []
    seen: set[str] = set()
    for raw in raws:
        if not isinstance(raw, Mapping):
            raise UsageError(f"{where}: a workload is a mapping of names to values, got {raw!r}")
        workload = parse_workload(technique, raw, where)
        if workload.name in seen:
            raise UsageError(f"{where}: two workloads are called {workload.name!r}")
        seen.add(workload.name)
        out.append(workload)
    return out


def apply_settings(workload: Workload, settings: Mapping[str, str]) -> Workload:
    """The workload with the user's own values, each parsed as the type that the dimension has.

    Raises:
        UsageError: a name that the workload does not have (the nearest are named), or a value of another type.
    """
    if not settings:
        return workload
    dims: dict[str, Dim] = {}
    for key, text in settings.items():
        if key == "dtype":
            if text not in DTYPES:
                raise unknown("dtype", text, DTYPES)
            dims[key] = text
            continue
        if key not in workload.dims:
            raise unknown(f"dimension of {workload.technique}", key, [*workload.dims, "dtype"])
        dims[key] = _parse_dim(key, text, workload.dims[key])
    have = {**workload.dims, "dtype": workload.dtype}
    changed = workload.replace(**{k: v for k, v in dims.items() if have[k] != v})
    check = {"name": changed.name, "tier": changed.tier, "dtype": changed.dtype, **changed.dims}
    return parse_workload(workload.technique, check, "--set")


def _parse_dim(key: str, text: str, old: Dim) -> Dim:
    if isinstance(old, bool):
        if text.lower() in ("true", "1", "yes", "false", "0", "no"):
            return text.lower() in ("true", "1", "yes")
        raise UsageError(f"--set {key}={text}: expected true or false")
    if isinstance(old, int):
        try:
            number = int(text.replace("_", ""))
        except ValueError:
            raise UsageError(f"--set {key}={text}: expected a whole number") from None
        if number < 0:
            raise UsageError(f"--set {key}={text}: a dimension is not negative")
        return number
    if isinstance(old, float):
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"--set {key}={text}: expected a number") from None
        if not math.isfinite(value):
            raise UsageError(f"--set {key}={text}: expected a finite number")
        return value
    return text
