"""What only goes out: github-action-benchmark's JSON, JUnit, and Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from harness.errors import UsageError
from harness.history.store import Store
from harness.metric_names import METRICS

#: Statuses that JUnit calls a failure of the thing tested, rather than an error on the way.
FAILURES: Final = ("wrong", "implausible")


def newest_run(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of the newest run among these."""
    found = list(records)
    if not found:
        return []
    newest = max(found, key=lambda record: (str(record["time"]), str(record["run"])))["run"]
    return [record for record in found if record["run"] == newest]


def action_benchmark(records: Iterable[Mapping[str, Any]], better: str) -> list[dict[str, Any]]:
    """The records of one run for github-action-benchmark: ``customSmallerIsBetter`` takes the metrics of which lower is
    better, ``customBiggerIsBetter`` the others; a file holds one kind only. Units are always the base units.

    Raises:
        UsageError: ``better`` is neither lower nor higher.
    """
    if better not in ("lower", "higher"):
        raise UsageError(f"--better {better}: lower (customSmallerIsBetter) or higher (customBiggerIsBetter)")
    out = []
    for record in records:
        if record["type"] != "measurement" or record["status"] != "passed":
            continue
        name = f"{record['technique']} {record['workload']} {record['dtype']} {record['variant']} ({record['gpu']})"
        for key, entry in (record.get("metrics") or {}).items():
            row = METRICS.get(key)
            # A ratio to a previous value of zero has no meaning there: such figures stay out.
            if row is None or not row.judged or row.better != better or not entry["value"]:
                continue
            item = {"name": f"{name} {key}", "unit": entry["unit"], "value": entry["value"]}
            if "low" in entry:
                item["range"] = f"± {max(entry['high'] - entry['value'], entry['value'] - entry['low']):.6g}"
            item["extra"] = f"commit {record['commit'] or 'unknown'}\nrun {record['run']}"
            out.append(item)
    return out


def junit(records: Iterable[Mapping[str, Any]]) -> str:
    """The records of one run as JUnit XML: a suite a technique, a case a variant and workload."""
    root = ElementTree.Element("testsuites", name="pairbench")
    suites: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record["type"] == "measurement":
            suites.setdefault(record["technique"], []).append(record)
    totals = [0, 0, 0, 0]
    for technique, group in suites.items():
        counts = [
            len(group),
            sum(r["status"] in FAILURES for r in group),
            sum(r["status"] in ("error", "oom", "timeout") for r in group),
            sum(r["status"] == "skipped" for r in group),
        ]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        suite = ElementTree.SubElement(root, "testsuite", _counted(counts, name=technique, timestamp=group[0]["time"]))
        for record in group:
            _case(suite, record)
    root.attrib.update(_counted(totals))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counted(counts: Sequence[int], **more: str) -> dict[str, str]:
    names = ("tests", "failures", "errors", "skipped")
    return {key: clean(value) for key, value in more.items()} | dict(zip(names, map(str, counts), strict=True))


def _case(suite: ElementTree.Element, record: Mapping[str, Any]) -> None:
    latency = (record.get("metrics") or {}).get("latency")
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=clean(f"{record['gpu']}.{record['technique']}"),
        name=clean(f"{record['variant']}[{record['workload']}-{record['dtype']}-{record['ranks']}]"),
        time=f"{latency['value']:.9f}" if latency else "0",
    )
    properties = ElementTree.SubElement(case, "properties")
    values = {
        "run": record["run"],
        "commit": record["commit"] or "",
        "dirty": record["dirty"],
        "status": record["status"],
    }
    values |= {name: entry["value"] for name, entry in (record.get("metrics") or {}).items()}
    for name, value in values.items():
        ElementTree.SubElement(properties, "property", name=name, value=clean(str(value)))
    reason = clean(str(record["reason"] or record["status"]))
    if record["status"] == "skipped":
        ElementTree.SubElement(case, "skipped", message=reason)
    elif record["status"] not in ("passed", "unsettled"):
        kind = "failure" if record["status"] in FAILURES else "error"
        said = ElementTree.SubElement(case, kind, message=reason, type=record["status"])
        said.text = clean(str(record.get("traceback") or record["reason"] or ""))


def clean(text: str) -> str:
    """Text without the characters that XML cannot hold at all."""
    return re.sub(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "\N{REPLACEMENT CHARACTER}", text)


def write_parquet(store_records: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write records as one Parquet table: the flat columns, and the whole record as JSON in ``line``.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    from harness.history.compact import LineFile
    from harness.history.store import gpu_folder
    from harness.record import to_line

    if path.exists():
        raise UsageError(f"{path} exists already; name a new file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = LineFile(path)
    except OSError as err:
        raise UsageError(f"{path} cannot be written: {err}") from err
    numbers: dict[str, int] = {}
    for record in store_records:
        file = f"{gpu_folder(str(record['gpu']))}/{record['run']}.jsonl"
        numbers[file] = numbers.get(file, 0) + 1
        out.add(dict(record), file, numbers[file], to_line(record).encode())
    out.close()
    return out.records


def chosen(
    stores: Sequence[Store],
    damage: list[Any],
    technique: str | None,
    gpu: str | None,
    run: str | None,
    commit: str | None,
) -> Iterable[dict[str, Any]]:
    """The records to export, as they are read; damage is noted."""
    from harness.history.store import read_all

    reading = read_all(stores)
    for record in reading:
        if technique is not None and record.get("technique") != technique:
            continue
        if gpu not in (None, record["gpu"]) or not str(record["run"]).startswith(run or ""):
            continue
        if commit is not None and not str(record["commit"] or "").startswith(commit):
            continue
        yield record
    damage.extend(reading.damage)
