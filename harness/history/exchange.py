"""Records from other tools' files: what every importer shares. docs/exchange.md says what each format loses.

An imported record keeps where it came from in ``source`` (``format``, ``file``, and what the format knows), has the
format's name as its clock, so that no imported time is ever compared with one of ours, and an id made of its content:
importing a file again adds nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness import stats
from harness.errors import StoreError, UsageError
from harness.history.store import Store
from harness.metric_names import METRICS
from harness.record import METHOD, SCHEMA, metric, problems

#: What reading a file raises whose parts are JSON of another shape than its format's.
SHAPE_ERRORS: Final = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
#: Raw samples kept of one measurement; more are thinned evenly.
MOST_SAMPLES: Final = 1000


@dataclass(frozen=True)
class Defaults:
    """What a file does not say and the user does."""

    gpu: str | None = None
    machine: str | None = None
    commit: str | None = None
    branch: str | None = None


@dataclass
class Imported:
    """What came of an import: records to keep, and what was left out with the reason."""

    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    written: int = 0
    already: int = 0
    runs: list[str] = field(default_factory=list)

    def skip(self, what: str, why: str) -> None:
        """Note something that no record was made of."""
        self.skipped.append((what, why))


@dataclass(frozen=True)
class Foreign:
    """One measurement of another tool, in our words. ``dims`` are its parameters; times in seconds."""

    technique: str
    variant: str
    workload: str
    metrics: Mapping[str, float]
    dims: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[float] = ()
    dtype: str = "unknown"
    status: str = "passed"
    reason: str | None = None
    family: str = "imported"
    ranks: int = 1


def make_record(foreign: Foreign, format_: str, where: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a foreign measurement.

    Args:
        where: what ``source`` says beside the format: the file, and the names that the tool used.
        context: ``commit``, ``branch``, ``dirty``, ``commit_date``, ``time``, ``gpu``, ``machine``, ``stack``.
    """
    dims = {key: value for key, value in foreign.dims.items() if isinstance(value, (int, float, str, bool))}
    identity = {"dims": dims, "workload": foreign.workload, "dtype": foreign.dtype, "format": format_}
    values = [float(v) for v in foreign.samples if isinstance(v, (int, float)) and math.isfinite(v)]
    if len(values) > MOST_SAMPLES:
        step = len(values) / MOST_SAMPLES
        values = [values[int(i * step)] for i in range(MOST_SAMPLES)]
    metrics: dict[str, Any] = {}
    for name, value in foreign.metrics.items():
        low = high = None
        if name == "latency" and len(values) > 1:
            estimate = stats.median(values)
            low, high = min(estimate.low, value), max(estimate.high, value)
        metrics[name] = metric(name, value, low, high)
    record = {
        "schema": SCHEMA,
        "method": METHOD,
        "type": "measurement",
        "id": "",
        "run": "",
        "time": context["time"],
        "commit": context.get("commit"),
        "branch": context.get("branch"),
        "dirty": bool(context.get("dirty")),
        "commit_date": context.get("commit_date"),
        "gpu": context["gpu"],
        "machine": context["machine"],
        "technique": foreign.technique,
        "family": foreign.family,
        "kind": "op",
        "layer": "system",
        "variant": foreign.variant,
        "peer": "",
        "workload": foreign.workload,
        "workload_id": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12],
        "dtype": foreign.dtype,
        "tier": "full",
        "ranks": foreign.ranks,
        "status": foreign.status,
        "reason": foreign.reason,
        "dims": dims,
        "samples": {"values": values, "clock": format_, "cache": "unknown"},
        "metrics": metrics,
        "stack": dict(context.get("stack") or {}),
        "source": {"format": format_, **where},
    }
    told = {key: record[key] for key in record if key not in ("id", "run", "source")}
    told["source"] = {key: value for key, value in record["source"].items() if key != "file"}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    record["id"] = f"import-{format_}-{digest[:20]}"
    return record


def read_foreign(path: Path, format_: str, defaults: Defaults) -> Imported:
    """What a file or folder holds, as records without a run yet.

    Raises:
        UsageError: the path does not exist, or is not of the format.
    """
    readers = _readers()
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if format_ == "auto":
        format_ = guess(path)
    if format_ not in readers:
        raise UsageError(f"format {format_!r} cannot be imported; known: auto, {', '.join(readers)}")
    return readers[format_](path, defaults)


def _readers() -> dict[str, Callable[[Path, Defaults], Imported]]:
    from harness.history.exchange_asv import read_asv
    from harness.history.exchange_csv import read_csv
    from harness.history.exchange_pytest import read_pytest_benchmark

    return {"asv": read_asv, "pytest-benchmark": read_pytest_benchmark, "csv": read_csv}


def guess(path: Path) -> str:
    """The format of a path by its kind: a folder is asv's, ``.csv`` a table, ``.json`` pytest-benchmark's.

    Raises:
        UsageError: none of them.
    """
    if path.is_dir():
        return "asv"
    if path.suffix.lower() == ".csv":
        return "csv"
    if path.suffix.lower() == ".json":
        return "pytest-benchmark"
    raise UsageError(f"{path}: name its format with --format: asv (a folder), pytest-benchmark or csv")


def load_json(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"{path} cannot be read: {err.strerror}") from err
    except ValueError as err:
        raise UsageError(f"{path} is not JSON: {err}") from err


def keep(store: Store, found: Imported) -> Imported:
    """Write what the store does not hold yet, one run a commit and GPU type.

    Raises:
        StoreError: the store cannot be written.
    """
    known = imported_ids(store)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in found.records:
        if record["id"] in known:
            found.already += 1
            continue
        known.add(record["id"])
        wrong = problems({**record, "run": "r"})
        if wrong:
            found.skip(str(record["source"]), "; ".join(wrong))
            continue
        groups.setdefault((record["gpu"], record["commit"] or "none"), []).append(record)
    for (gpu, commit), records in groups.items():
        digest = hashlib.sha256("".join(r["id"] for r in records).encode()).hexdigest()[:8]
        run = f"import-{records[0]['source']['format']}-{commit[:12]}-{digest}"
        with store.open_run(gpu, run) as writer:
            for record in records:
                writer.append({**record, "run": run})
        found.runs.append(run)
        found.written += len(records)
    return found


def imported_ids(store: Store) -> set[str]:
    """The ids of imported records in a store; only files that can hold some are read."""
    known: set[str] = set()
    for entry in store.entries():
        if entry.name.endswith(".parquet"):
            known.update(_parquet_ids(store, entry.name))
        elif entry.name.rpartition("/")[2].startswith("import-"):
            known.update(str(record["id"]) for _, _, record in store.scan_file(entry.name, []))
    return known


def _parquet_ids(store: Store, name: str) -> Iterable[str]:
    from harness.history.compact import require_pyarrow

    try:
        with store.folder.open(name) as file:
            ids = require_pyarrow().read_table(file, columns=["id"]).column("id").to_pylist()
    except (OSError, ValueError) as err:
        raise StoreError(f"store {store.url}: {name} cannot be read: {err}") from err
    return (value for value in ids if value and value.startswith("import-"))


def known_metric(name: str) -> str | None:
    """The metric that another tool's name ends in: ``track_peak_memory`` is ``peak_memory``; None if none."""
    for known in sorted(METRICS, key=len, reverse=True):
        if name == known or name.endswith(f"_{known}"):
            return known
    return None
