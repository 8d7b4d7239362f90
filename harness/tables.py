"""Prints records as a table, and quantities in units that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

STATUS_STYLE = {
    "passed": "green",
    "skipped": "dim",
    "unsettled": "yellow",
    "wrong": "bold red",
    "error": "red",
    "oom": "red",
    "timeout": "red",
    "implausible": "bold red",
}


def _digits(value: float) -> str:
    """Three digits, and as many as it takes before the point: ``1280``, not ``1.28e+03``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def seconds(value: float) -> str:
    """A time with three digits: ``12.3 µs``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value * 1e9)} ns"


def size(value: float) -> str:
    """A number of bytes in binary units."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(value) >= 1 << power:
            return f"{_digits(value / (1 << power))} {unit}"
    return f"{value:.0f} B"


def amount(value: float, unit: str) -> str:
    """A rate in thousands, millions, billions or trillions of its unit: the largest that the field has a habit of."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def interval(entry: Mapping[str, Any] | None) -> str:
    """A ratio with its interval: ``1.52× [1.49, 1.55]``."""
    if entry is None:
        return "–"
    text = f"{entry['value']:.2f}×"
    return f"{text} [{entry['low']:.2f}, {entry['high']:.2f}]" if "low" in entry else text


def latency(record: Mapping[str, Any]) -> str:
    """The median and the larger half of its interval."""
    entry = record.get("metrics", {}).get("latency")
    if entry is None:
        return "–"
    half = max(entry.get("high", entry["value"]) - entry["value"], entry["value"] - entry.get("low", entry["value"]))
    return f"{seconds(entry['value'])} ±{half / entry['value']:.1%}" if entry["value"] else "0 s"


def share(record: Mapping[str, Any]) -> str:
    """MFU where it is known, else the share of the floor; never a number that the record does not have."""
    metrics = record.get("metrics", {})
    if "mfu" in metrics and record.get("floor", {}).get("limit") == "compute":
        return f"MFU {metrics['mfu']['value']:.1%}"
    if "floor_share" in metrics:
        return f"{metrics['floor_share']['value']:.1%} of floor"
    return f"MFU {metrics['mfu']['value']:.1%}" if "mfu" in metrics else "–"


#: Failures whose reason is longer than this (file and tensor names are) have it in full under the table.
LONG_REASON = 60
FAILURES = ("wrong", "error", "oom", "timeout", "implausible")

#: Column, alignment and least width: tables that follow one another line up.
COLUMNS: tuple[tuple[str, Literal["left", "right"], int], ...] = (
    ("technique", "left", 14),
    ("workload", "left", 16),
    ("variant", "left", 13),
    ("latency", "right", 14),
    ("vs baseline", "right", 18),
    ("vs best one-liner", "right", 19),
    ("throughput", "right", 14),
    ("peak memory", "right", 11),
    ("reached", "right", 14),
    ("limit", "left", 7),
    ("status", "left", 9),
)


def result_table(records: Sequence[Mapping[str, Any]], header: bool = True) -> Table:
    """One row a record: what a reader needs to judge whether the technique pays.

    header: False for a table that goes on where another ended.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_header=header)
    for name, justify, width in COLUMNS:
        no_wrap = name in ("technique", "variant", "latency")
        table.add_column(name, justify=justify, min_width=width, no_wrap=no_wrap, overflow="fold")
    previous = None
    for record in records:
        here = (record["technique"], record["workload"], record["ranks"])
        if previous is not None and here != previous:
            table.add_section()
        table.add_row(*_row(record, first=here != previous))
        previous = here
    return table


def long_reasons(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands under a table: the reasons of failures that are too long for a cell, whole, one a line."""
    return [
        f"{r['status']}: {r['technique']} {r['workload']} {r['variant']}: {r['reason']}" for r in records if _long(r)
    ]


def _long(record: Mapping[str, Any]) -> bool:
    return record["status"] in FAILURES and len(str(record["reason"] or "")) > LONG_REASON


def _row(record: Mapping[str, Any], first: bool) -> list[str | Text]:
    metrics = record.get("metrics", {})
    memory = metrics.get("peak_memory")
    rate = metrics.get("throughput")
    peer = interval(metrics.get("speedup_peer"))
    if peer != "–" and record.get("best_peer"):
        peer += f" {record['best_peer']}"
    status = Text(str(record["status"]), style=STATUS_STYLE.get(str(record["status"]), ""))
    if _long(record):
        status.append(" (below)", style="dim")
    elif record["reason"]:
        status.append(f": {record['reason']}", style="dim")
    workload = f"{record['workload']} {record['dtype']}" + (f" ×{record['ranks']}" if record["ranks"] > 1 else "")
    return [
        Text(str(record["technique"]) if first else ""),
        Text(workload if first else ""),
        Text(str(record["variant"])),
        latency(record),
        interval(metrics.get("speedup")),
        peer,
        amount(rate["value"], rate["unit"]) if rate else "–",
        size(memory["value"]) if memory else "–",
        share(record),
        str((record.get("floor") or {}).get("limit") or "–"),
        status,
    ]


def _two(record: Mapping[str, Any], family: str) -> str:
    """A median and a p99, or a dash."""
    both = [record["metrics"].get(f"{family}_{name}") for name in ("p50", "p99")]
    return " · ".join(seconds(entry["value"]) for entry in both if entry) or "–"


def _figure(name: str, show: Callable[[float], str]) -> Callable[[Mapping[str, Any]], str]:
    def cell(record: Mapping[str, Any]) -> str:
        entry = record["metrics"].get(name)
        return show(entry["value"]) if entry else "–"

    return cell


def of_allowed(record: Mapping[str, Any]) -> str:
    """What was reached of the speedup that the two schedules allow at the measured price of a step."""
    allowed = (record.get("counters") or {}).get("allowed_speedup")
    got = record["metrics"].get("speedup")
    if record["variant"] != "optimized" or not allowed or got is None:
        return "–"
    return f"{got['value'] / allowed:.0%} of {allowed:.2f}×"


#: Wider than any table.
WIDEST = 10_000
#: What requests saw; a column that no record has a figure for is left out.
SERVE_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("TTFT p50 · p99", lambda record: _two(record, "ttft")),
    ("ITL p50 · p99", lambda record: _two(record, "itl")),
    ("e2e p50 · p99", lambda record: _two(record, "e2e")),
    ("output", _figure("output_rate", lambda value: amount(value, "tokens/s"))),
    ("goodput", _figure("goodput", lambda value: amount(value, "requests/s"))),
    ("failed", _figure("failed_requests", lambda value: f"{value:.1%}")),
    ("running", _figure("running_requests", _digits)),
    ("cache wasted", _figure("cache_waste", lambda value: f"{value:.1%}")),
    ("cache hits", _figure("cache_hit_rate", lambda value: f"{value:.1%}" if value else "–")),
    ("preemptions", _figure("preemptions", lambda value: f"{value:.2f} a request" if value else "–")),
    ("cost a Mtok", _figure("cost_per_mtok", _digits)),
    ("of allowed", of_allowed),
)


def print_served(out: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """What the requests of serve runs saw, one row a record, or one line where the rows are wider than the screen.

    Nothing is printed where nothing was served.
    """
    served = [record for record in records if record.get("serve") and record["metrics"]]
    cells = {name: [cell(record) for record in served] for name, cell in SERVE_COLUMNS}
    shown = {name: column for name, column in cells.items() if set(column) - {"–"}}
    if not shown:
        return
    names = ("technique", "workload", "variant")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for place, record in enumerate(served):
        table.add_row(*(Text(str(record[name])) for name in names), *(column[place] for column in shown.values()))
    if Measurement.get(out, out.options.update(max_width=WIDEST), table).maximum <= out.width:
        out.print(table)
        return
    for place, record in enumerate(served):
        said = ", ".join(f"{name} {column[place]}" for name, column in shown.items() if column[place] != "–")
        out.print(f"{' '.join(str(record[name]) for name in names)}: {said}", markup=False, soft_wrap=True)


def console(stderr: bool = False) -> Console:
    """A console that does not cut a table when the output is a file."""
    out = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not out.is_terminal:
        out = Console(stderr=stderr, highlight=False, width=220, soft_wrap=False)
    return out
