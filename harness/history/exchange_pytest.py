"""pytest-benchmark's JSON, in and out."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.history.exchange import SHAPE_ERRORS, Defaults, Foreign, Imported, load_json, make_record
from harness.history.moments import utc


def read_pytest_benchmark(path: Path, defaults: Defaults) -> Imported:
    """The benchmarks of a file that ``--benchmark-json`` or ``--benchmark-save`` wrote.

    Raises:
        UsageError: it is no such file.
    """
    data = load_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list) or "machine_info" not in data:
        raise UsageError(f"{path}: not a file of pytest-benchmark (no 'benchmarks' and 'machine_info')")
    try:
        context = _context(data, defaults)
    except SHAPE_ERRORS as err:
        raise UsageError(f"{path}: not of the shape that pytest-benchmark writes: {err}") from err
    done = Imported()
    for number, item in enumerate(data["benchmarks"], 1):
        name = str((item.get("fullname") or item.get("name")) if isinstance(item, dict) else f"benchmark {number}")
        try:
            record = _record(item, name, path, context, done)
        except SHAPE_ERRORS as err:
            done.skip(name, f"not of the shape that pytest-benchmark writes: {err}")
            continue
        if record is not None:
            done.records.append(record)
    return done


def _context(data: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """What holds for every benchmark of a file: commit, time, machine."""
    info, commit = data["machine_info"] or {}, data.get("commit_info") or {}
    cpu = info.get("cpu") or {}
    known = commit.get("id") if re.fullmatch(r"[0-9a-f]{7,40}", str(commit.get("id") or "")) else None
    return {
        "commit": known or defaults.commit,
        "branch": defaults.branch or commit.get("branch"),
        "dirty": commit.get("dirty"),
        "commit_date": utc(commit.get("time")),
        "time": utc(data.get("datetime")) or "1970-01-01T00:00:00Z",
        "gpu": defaults.gpu or str(cpu.get("brand_raw") or info.get("machine") or "unknown CPU"),
        "machine": defaults.machine or str(info.get("node") or "unknown"),
        "stack": {"python": str(info.get("python_version") or ""), "pytest_benchmark": str(data.get("version") or "")},
    }


def _record(
    item: Mapping[str, Any], name: str, path: Path, context: Mapping[str, Any], done: Imported
) -> dict[str, Any] | None:
    stats = item.get("stats") or {}
    median = stats.get("median")
    if not isinstance(median, (int, float)) or not 0 < median < math.inf:
        done.skip(name, f"median {median!r} is not a time")
        return None
    foreign = Foreign(
        technique=str(item.get("group") or name.partition("[")[0]),
        variant=str((item.get("params") or {}).get("variant") or str(item.get("name")).partition("[")[0]),
        workload=str(item.get("param") or "default"),
        metrics={"latency": float(median)},
        dims={k: v for k, v in (item.get("params") or {}).items() if k != "variant"},
        samples=stats.get("data") or (),
    )
    where = {
        "file": path.name,
        "benchmark": name,
        "rounds": stats.get("rounds"),
        "extra_info": item.get("extra_info") or {},
    }
    return make_record(foreign, "pytest-benchmark", where, context)


def pytest_benchmark_json(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The records of one run as pytest-benchmark would have saved them; what has no latency is left out.

    Raises:
        UsageError: no record has a latency.
    """
    found = [
        r for r in records
        if r["type"] == "measurement" and r["status"] == "passed"
        and (r.get("metrics") or {}).get("latency", {}).get("value", 0) > 0
    ]  # fmt: skip
    if not found:
        raise UsageError("nothing to export to pytest-benchmark: no record that passed has a latency")
    first = found[0]
    host = first.get("host") or {}
    return {
        "machine_info": {
            "node": first["machine"],
            "machine": first["gpu"],
            "python_version": str((first.get("stack") or {}).get("python", "")),
            "cpu": {"brand_raw": first["gpu"] if not host.get("cpu") else host["cpu"]},
        },
        "commit_info": {
            "id": first["commit"] or "unversioned",
            "time": first.get("commit_date"),
            "dirty": first["dirty"],
            "project": "pairbench",
            "branch": first["branch"] or "(unknown)",
        },
        "benchmarks": [_benchmark(record) for record in found],
        "datetime": first["time"],
        "version": "5.1.0",
    }


def _benchmark(record: Mapping[str, Any]) -> dict[str, Any]:
    latency = float(record["metrics"]["latency"]["value"])
    values = [float(v) for v in (record.get("samples") or {}).get("values") or []] or [latency]
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [latency] * 3
    param = f"{record['workload']}-{record['dtype']}-{record['ranks']}"
    low, high = quarters[0], quarters[2]
    extra = {name: entry["value"] for name, entry in record["metrics"].items() if name != "latency"}
    return {
        "group": record["technique"],
        "name": f"{record['variant']}[{param}]",
        "fullname": f"{record['technique']}::{record['variant']}[{param}]",
        "params": {**(record.get("dims") or {}), "variant": record["variant"]},
        "param": param,
        "extra_info": extra,
        "options": {"warmup": True},
        "stats": {
            "min": min(values),
            "max": max(values),
            "mean": statistics.fmean(values),
            "stddev": statistics.stdev(values) if len(values) > 1 else 0.0,
            "rounds": len(values),
            "median": latency,
            "iqr": high - low,
            "q1": low,
            "q3": high,
            "iqr_outliers": 0,
            "stddev_outliers": 0,
            "outliers": "0;0",
            "ld15iqr": min(values),
            "hd15iqr": max(values),
            "ops": 1 / latency,
            "total": sum(values),
            "iterations": 1,
            "data": values,
        },
    }
