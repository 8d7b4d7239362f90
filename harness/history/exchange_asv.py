"""asv's results folders, in and out: ``<results>/<machine>/<commit>-<env>.json`` (version 2, of asv 0.5 and later)."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from harness.errors import UsageError
from harness.history.exchange import SHAPE_ERRORS, Defaults, Foreign, Imported, known_metric, load_json, make_record
from harness.history.folders import is_hidden
from harness.history.moments import utc
from harness.history.store import gpu_folder
from harness.metric_names import METRICS

SCALE: Final[Mapping[str, float]] = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
#: asv's own kinds of benchmark, by the start of a method's name, and what they measure.
KINDS: Final[Mapping[str, str]] = {"time": "latency", "timeraw": "latency", "peakmem": "peak_memory"}
#: The class that exported benchmarks seem to be of.
EXPORTED: Final = "Pairbench"
COLUMNS: Final = (
    "result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25",
    "stats_q_75", "stats_number", "stats_repeat", "samples", "profile",
)  # fmt: skip


def read_asv(path: Path, defaults: Defaults) -> Imported:
    """The results below an asv results folder (or one machine's folder).

    Raises:
        UsageError: there are none.
    """
    done = Imported()
    files = sorted(p for p in path.rglob("*.json") if p.name not in ("machine.json", "benchmarks.json"))
    found = 0
    about = _benchmarks(path)
    for file in files:
        relative = file.relative_to(path).as_posix()
        if is_hidden(relative):
            continue
        try:
            data = load_json(file)
        except UsageError as err:
            done.skip(relative, str(err))
            continue
        if not isinstance(data, dict) or not {"commit_hash", "results", "params"} <= data.keys():
            done.skip(relative, "not a results file of asv")
            continue
        if data.get("version") != 2 or "result_columns" not in data:
            done.skip(relative, f"results of version {data.get('version')!r}; run 'asv update' on them first")
            continue
        found += 1
        try:
            _read_file(data, relative, about, defaults, done)
        except SHAPE_ERRORS as err:
            done.skip(relative, f"not of the shape that asv writes: {err}")
    if not found:
        raise UsageError(f"{path}: no results of asv (<machine>/<commit>-<env>.json) are here")
    return done


def _benchmarks(path: Path) -> Mapping[str, Any]:
    for folder in (path, path.parent):
        file = folder / "benchmarks.json"
        if file.is_file():
            data = load_json(file)
            return data if isinstance(data, dict) else {}
    return {}


def _read_file(data: dict[str, Any], file: str, about: Mapping[str, Any], defaults: Defaults, done: Imported) -> None:
    params = data["params"]
    machine = str(params.get("machine") or Path(file).parent.name or "unknown")
    date = _iso(data.get("date"))
    context = {
        "commit": data["commit_hash"],
        "branch": defaults.branch,
        "dirty": False,
        "commit_date": date,
        "gpu": defaults.gpu or machine,
        "machine": defaults.machine or machine,
        "stack": {"python": str(data.get("python") or "")}
        | {k: str(v) for k, v in (data.get("requirements") or {}).items()},
    }
    # The metrics of one variant on one workload are one record, whichever benchmark tracked them.
    merged: dict[tuple[Any, ...], tuple[Foreign, dict[str, Any], str]] = {}
    for name, cells in data["results"].items():
        row = dict(zip(data["result_columns"], cells or [], strict=False))
        where = {"file": file, "benchmark": name, "environment": data.get("env_name"), "version": row.get("version")}
        moment = _iso(row.get("started_at")) or date or "1970-01-01T00:00:00Z"
        for foreign in _measurements(name, row, about.get(name) or {}, file, done):
            key = (foreign.technique, foreign.variant, foreign.workload, foreign.dtype, foreign.ranks)
            if key in merged:
                merged[key] = (_merge(merged[key][0], foreign), *merged[key][1:])
            else:
                merged[key] = (foreign, where, moment)
    for foreign, where, moment in merged.values():
        done.records.append(make_record(foreign, "asv", where, {**context, "time": moment}))


def _merge(one: Foreign, other: Foreign) -> Foreign:
    passed = one if one.status == "passed" else other
    return replace(
        passed,
        metrics={**one.metrics, **other.metrics},
        samples=one.samples or other.samples,
        dims={**one.dims, **other.dims},
    )


def _measurements(
    name: str, row: dict[str, Any], info: Mapping[str, Any], file: str, done: Imported
) -> Iterator[Foreign]:
    known = _metric_of(name, str(info.get("unit") or ""))
    if known is None:
        done.skip(f"{file}: {name}", f"no metric of ours: unit {info.get('unit') or 'unknown'!r}")
        return
    metric_name, scale, inverse = known
    levels = row.get("params") or []
    names = list(info.get("param_names") or [f"param{i + 1}" for i in range(len(levels))])
    results = row.get("result")
    combinations = list(itertools.product(*levels))
    if results is None:
        results = [None] * len(combinations)
    if len(results) != len(combinations):
        done.skip(f"{file}: {name}", f"{len(results)} results for {len(combinations)} combinations of parameters")
        return
    samples = row.get("samples") or [None] * len(results)
    for place, (combination, value) in enumerate(zip(combinations, results, strict=True)):
        dims = {key: _literal(text) for key, text in zip(names, combination, strict=False)}
        variant, workload = str(dims.pop("variant", "asv")), dims.pop("workload", None)
        named = ",".join(f"{k}={v}" for k, v in dims.items()) or "default"
        title, dtype, ranks = split_workload(str(workload)) if workload is not None else (named, "unknown", 1)
        status, reason, metrics = "passed", None, {}
        if value is None:
            status, reason = "error", "failed under asv"
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or math.isinf(value):
            done.skip(f"{file}: {name}", f"result {value!r} is not a finite number")
            continue
        elif math.isnan(value):
            status, reason = "skipped", "not applicable under asv (NaN)"
        elif inverse and value == 0:
            done.skip(f"{file}: {name}", "the inverse of zero is no number")
            continue
        else:
            metrics = {metric_name: 1 / value if inverse else value * scale}
        raw = samples[place] if metric_name == "latency" and place < len(samples) else None
        times = [v * scale for v in raw or [] if isinstance(v, (int, float))]
        yield Foreign(_technique(name), variant, title, metrics, dims, times, dtype, status, reason, ranks=ranks)


def _metric_of(name: str, unit: str) -> tuple[str, float, bool] | None:
    """The metric of a benchmark, what its values are multiplied by, and whether it holds the inverse."""
    method = name.rpartition(".")[2].partition("(")[0]
    kind, _, rest = method.partition("_")
    if kind in KINDS:
        return KINDS[kind], 1.0, False
    if kind != "track":
        return None
    metric_name = known_metric(rest)
    if metric_name is not None:
        scale = SCALE.get(unit, 1.0) if METRICS[metric_name].unit == "s" else 1.0
        return metric_name, scale, rest.startswith("inverse_")
    return ("latency", SCALE[unit], False) if unit in SCALE else None


def _technique(name: str) -> str:
    """The technique of a benchmark: the module of a class that tracks metrics of ours, else the benchmark itself."""
    exported = name.rpartition(f".{EXPORTED}.track_")[0]
    if exported:
        return exported  # whatever dots it holds
    parts = name.split(".")
    if len(parts) >= 3 and parts[-1].startswith("track_") and known_metric(parts[-1]):
        return parts[-3]
    return name


def _literal(text: Any) -> Any:
    try:
        value = ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError):
        return str(text)
    return value if isinstance(value, (int, float, str, bool)) else str(text)


def _iso(milliseconds: Any) -> str | None:
    if not isinstance(milliseconds, (int, float)) or isinstance(milliseconds, bool):
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def write_asv(records: Iterable[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write a results folder that asv reads: a machine a GPU type, a file a commit, a benchmark a technique and metric
    with workload and variant as its parameters. Only clean records with a commit go in; the newest of several runs.

    Raises:
        UsageError: a file exists already, or no record has a commit.
    """
    newest: dict[tuple[str, str], dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]]] = {}
    for record in sorted(records, key=lambda r: str(r["time"])):
        if record["type"] != "measurement" or not record["commit"] or record["dirty"]:
            continue
        names = list(record.get("metrics") or {}) if record["status"] == "passed" else ["latency"]
        for name in names:
            place = newest.setdefault((record["gpu"], record["commit"]), {}).setdefault((record["technique"], name), {})
            place[f"{record['workload']}|{record['dtype']}|{record['ranks']}", record["variant"]] = record
    if not newest:
        raise UsageError("nothing to export to asv: it needs records of clean commits")
    written: list[Path] = []
    about: dict[str, Any] = {}
    for (gpu, commit), benchmarks in newest.items():
        machine = gpu_folder(gpu)
        home = folder / machine
        _create(home / "machine.json", {"machine": machine, "version": 1}, written, again=True)
        data = _results(machine, commit, benchmarks, about)
        _create(home / f"{commit[:8]}-pairbench.json", data, written)
    _create(folder / "benchmarks.json", {**about, "version": 2}, written)
    return written


def _results(
    machine: str, commit: str, benchmarks: Mapping[tuple[str, str], Mapping[tuple[str, str], Mapping[str, Any]]],
    about: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    results: dict[str, Any] = {}
    moment = 0
    python = "unknown"
    for (technique, name), cells in benchmarks.items():
        lower = METRICS[name].better == "lower"
        title = f"{technique}.{EXPORTED}.track_{'' if lower else 'inverse_'}{name}"
        workloads, variants = sorted({w for w, _ in cells}), sorted({v for _, v in cells})
        values = [_value(cells.get((w, v)), name, lower) for w in workloads for v in variants]
        first = next(iter(cells.values()))
        version = hashlib.sha256(f"method {first['method']}".encode()).hexdigest()
        params = [[repr(w) for w in workloads], [repr(v) for v in variants]]
        started = _milliseconds(first["time"])
        results[title] = [values, params, version, started]
        moment = max(moment, _milliseconds(first.get("commit_date") or first["time"]))
        python = next(iter(str((first.get("stack") or {}).get("python") or "").split()), python)
        unit = METRICS[name].unit if lower else f"1/({METRICS[name].unit})"
        known = about.setdefault(title, {
            "code": "", "name": title, "param_names": ["workload", "variant"], "params": [[], []], "timeout": 60.0,
            "type": "track", "unit": unit, "version": version,
        })  # fmt: skip
        known["params"] = [sorted({*old, *new}) for old, new in zip(known["params"], params, strict=True)]
    return {
        "commit_hash": commit,
        "env_name": "pairbench",
        "date": moment,
        "params": {"machine": machine, "python": python},
        "python": python,
        "requirements": {},
        "env_vars": {},
        "result_columns": list(COLUMNS),
        "results": results,
        "durations": {},
        "version": 2,
    }


def _value(record: Mapping[str, Any] | None, name: str, lower: bool) -> float | None:
    """NaN is asv's "not applicable" (never run, skipped), null its "failed"."""
    if record is None or record["status"] == "skipped":
        return math.nan
    entry = (record.get("metrics") or {}).get(name)
    if record["status"] != "passed" or entry is None:
        return None
    value = float(entry["value"])
    return value if lower else (1 / value if value else None)


def _milliseconds(text: str) -> int:
    """A moment as asv writes it; 0 for a text that is none, which ``pairbench history verify`` lists."""
    moment = utc(text)
    return 0 if moment is None else int(datetime.fromisoformat(moment).timestamp() * 1000)


def _create(path: Path, data: Any, written: list[Path], again: bool = False) -> None:
    if again and path in written:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            json.dump(data, file)
    except FileExistsError as err:
        raise UsageError(f"{path} exists already; export into a new folder") from err
    except OSError as err:
        raise UsageError(f"{path} cannot be written: {err.strerror}") from err
    written.append(path)


def split_workload(text: str) -> tuple[str, str, int]:
    """The workload, dtype and ranks of an exported benchmark's parameter (``rows|float32|1``)."""
    found = re.fullmatch(r"(.*)\|([^|]*)\|(\d+)", text)
    return (found[1], found[2], int(found[3])) if found else (text, "unknown", 1)
