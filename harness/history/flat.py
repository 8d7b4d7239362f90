"""A record as one flat row: what one filters, groups and plots by, as typed columns.

Compacted files carry these columns beside the whole line, and the reader's index carries them for runs that are not
compacted yet, so that a query never parses JSON. Metrics become three columns each: ``m_latency``,
``m_latency_low`` and ``m_latency_high``; empty where a record does not have them. Objects that a view only shows
(``dims``, ``claim``, ``stack``, ``env``, ``counters``, ``missing``, ``digests``) stay JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from harness.metric_names import METRICS

#: Changes whenever the meaning of a column does, so that indexes made before are made anew.
FLAT_VERSION: Final = 1

Path = tuple[str, ...]

TEXT: Final[Mapping[str, Path]] = {
    **{
        key: (key,)
        for key in (
            "type",
            "id",
            "run",
            "time",
            "commit",
            "branch",
            "gpu",
            "machine",
            "technique",
            "family",
            "kind",
            "layer",
            "variant",
            "peer",
            "workload",
            "workload_id",
            "dtype",
            "tier",
            "status",
            "reason",
            "commit_date",
            "commit_subject",
            "commit_source",
            "relieves",
            "compute_dtype",
            "reproduce",
            "when",
        )
    },
    "clock": ("samples", "clock"),
    "cache": ("samples", "cache"),
    "check_rule": ("check", "rule"),
    "check_tensor": ("check", "tensor"),
    "limit_by": ("floor", "limit"),
    "unit": ("work", "unit"),
    "torch": ("stack", "torch"),
    "triton": ("stack", "triton"),
    "cuda": ("stack", "cuda"),
    "driver": ("stack", "driver"),
    "gpu_name": ("host", "gpu_name"),
    "device": ("host", "device"),
    "ci_url": ("ci", "url"),
    "source": ("source", "format"),
}
NUMBER: Final[Mapping[str, Path]] = {
    "check_error": ("check", "error"),
    "check_bound": ("check", "bound"),
    "work_flops": ("work", "flops"),
    "work_bytes": ("work", "bytes"),
    "work_link_bytes": ("work", "link_bytes"),
    "work_items": ("work", "items"),
    "floor_seconds": ("floor", "seconds"),
    "floor_share": ("floor", "share"),
    "predicted_speedup": ("predicted", "speedup"),
    "build_s": ("costs", "build_s"),
    "compile_s": ("costs", "compile_s"),
    "check_s": ("costs", "check_s"),
    "gpu_count": ("host", "gpu_count"),
    "power_limit_w": ("host", "power_limit_w"),
    "matmul_s": ("reading", "matmul_s"),
    "copy_s": ("reading", "copy_s"),
}
WHOLE: Final[Mapping[str, Path]] = {"schema": ("schema",), "method": ("method",), "ranks": ("ranks",)}
FLAG: Final[Mapping[str, Path]] = {
    "dirty": ("dirty",),
    "declared": ("declared",),
    "synthetic": ("synthetic",),
    "moved": ("moved",),
    "check_passed": ("check", "passed"),
    "host_bound": ("samples", "host_bound"),
    "settled": ("samples", "settled"),
}
OBJECT: Final = ("dims", "digests", "claim", "stack", "env", "counters", "missing")
PARTS: Final = ("value", "low", "high")


def metric_column(name: str, part: str = "value") -> str:
    """The column of a metric: ``m_latency`` for its value, ``m_latency_low`` and ``_high`` for its interval."""
    return f"m_{name}" if part == "value" else f"m_{name}_{part}"


METRIC_COLUMNS: Final = tuple((name, part, metric_column(name, part)) for name in METRICS for part in PARTS)


def columns() -> list[tuple[str, str]]:
    """Every column in order, with its type as PyArrow calls it."""
    return [
        *((key, "string") for key in TEXT),
        *((key, "float64") for key in NUMBER),
        *((key, "int32") for key in WHOLE),
        *((key, "bool") for key in FLAG),
        *((key, "string") for key in OBJECT),
        ("samples_n", "int32"),
        *((column, "float64") for _, _, column in METRIC_COLUMNS),
    ]


def columns_digest() -> str:
    """A digest of the columns: an index made with others is made anew."""
    return hashlib.sha256(repr((FLAT_VERSION, columns())).encode()).hexdigest()[:12]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None if value is None else json.dumps(value)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


Reader = Callable[[Any], Any]
_ALL: Final[tuple[tuple[str, Path, Reader], ...]] = tuple(
    (key, path, read)
    for table, read in ((TEXT, _text), (NUMBER, _number), (WHOLE, _whole), (FLAG, _flag))
    for key, path in table.items()
)
_PLAIN: Final = tuple((key, path[0], read) for key, path, read in _ALL if len(path) == 1)
_NESTED: Final = tuple(
    (parent, tuple((key, path[1], read) for key, path, read in _ALL if len(path) == 2 and path[0] == parent))
    for parent in dict.fromkeys(path[0] for _, path, _ in _ALL if len(path) == 2)
)
_METRIC_PARTS: Final = {name: tuple((part, metric_column(name, part)) for part in PARTS) for name in METRICS}
_encode: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a record, by column; absent columns are empty. A field of another type than expected is empty."""
    row: dict[str, Any] = {}
    for key, name, read in _PLAIN:
        value = record.get(name)
        if value is not None:
            row[key] = read(value)
    for parent, children in _NESTED:
        inner = record.get(parent)
        if isinstance(inner, dict):
            for key, name, read in children:
                value = inner.get(name)
                if value is not None:
                    row[key] = read(value)
    for key in OBJECT:
        value = record.get(key)
        if value:
            row[key] = _encode(value)
    samples = record.get("samples")
    if isinstance(samples, dict) and isinstance(samples.get("values"), list):
        row["samples_n"] = len(samples["values"])
    metrics = record.get("metrics")
    if isinstance(metrics, dict):
        for name, entry in metrics.items():
            for part, column in _METRIC_PARTS.get(name, ()):
                if part in entry:
                    row[column] = _number(entry[part])
    return row


class FlatTable:
    """Rows gathered into a PyArrow table; ``extra`` names columns beside the record's own, with their types."""

    def __init__(self, extra: Mapping[str, str]) -> None:
        self._types = dict([*columns(), *extra.items()])
        self._sparse: dict[str, tuple[list[int], list[Any]]] = {}
        self.count = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of :func:`flatten`, with the extra columns in it."""
        sparse, count = self._sparse, self.count
        for key, value in row.items():
            if value is not None:
                cells = sparse.get(key)
                if cells is None:
                    cells = sparse[key] = ([], [])
                cells[0].append(count)
                cells[1].append(value)
        self.count += 1

    def schema(self) -> Any:
        """The PyArrow schema of every table taken."""
        import pyarrow as pa

        return pa.schema([(key, pa.type_for_alias(kind)) for key, kind in self._types.items()])

    def take(self) -> Any:
        """The rows so far as a PyArrow table, and begin anew."""
        import numpy as np
        import pyarrow as pa

        arrays = []
        for key, kind in self._types.items():
            arrow = pa.type_for_alias(kind)
            places, values = self._sparse.get(key, ([], []))
            if not places:
                arrays.append(pa.nulls(self.count, arrow))
            elif len(places) == self.count:
                arrays.append(pa.array(values, arrow))
            else:
                # Where the value of each row lies among the values, or nowhere.
                where = np.full(self.count, -1, dtype=np.int64)
                where[places] = np.arange(len(places))
                arrays.append(pa.array(values, arrow).take(pa.array(where, mask=where < 0)))
        table = pa.Table.from_arrays(arrays, schema=self.schema())
        self._sparse, self.count = {}, 0
        return table
