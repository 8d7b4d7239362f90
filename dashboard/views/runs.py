"""Runs: each with its conditions, its sentinel, its failures and their logs, and the machine's ceilings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import address, parts, queries
from dashboard.text import short
from dashboard.theme import LOOKS, signed
from harness.history.engine import Row
from harness.tables import amount, seconds

MOST_LOGS = 20


def render(view: parts.View) -> None:
    """The page."""
    rows = view.source.once("runs", queries.all_runs)
    if not rows:
        return
    with st.container(horizontal=True):
        gpu = address.choose("GPU type", "gpu", sorted({row["gpu"] for row in rows}))
        broken = address.switch("Only with failures", "broken", False)
    shown = [row for row in rows if gpu in (None, row["gpu"]) and (not broken or _failed(row))]
    if not shown:
        parts.nothing("No run fits.", "There is none on this GPU type, or none with failures.", "Take filters away.",
                      None if broken else "pairbench run", view)  # fmt: skip
        return
    if len(rows) == 1000:
        st.caption("The newest 1000 runs are listed.")
    picked = parts.table([_row(row) for row in shown], "runs", select=("run",))
    chosen = shown[picked]["run"] if picked is not None else None
    if parts.newly("run row", chosen):
        address.put("run", chosen)
    run = address.get("run") or next((row for row in shown if row["dirty"] is False), shown[0])["run"]
    row = next((candidate for candidate in rows if candidate["run"] == run), None)
    if row is None:
        parts.nothing("There is no such run.", "The address names one that is not in this history.",
                      "Select a row of the table.")  # fmt: skip
        return
    _run(view, row)


def _failed(row: Row) -> int:
    return sum(count for status, count in row["statuses"].items() if status not in ("passed", "skipped", "unsettled"))


def _row(row: Row) -> dict[str, Any]:
    moved = {True: "▼ moved", False: "● still", None: "– not read"}[row["moved"]]
    return {
        "run": row["run"],
        "GPU type": row["gpu"],
        "began": row["first"],
        "commit": short(row["commit"]) + (" dirty" if row["dirty"] else ""),
        "subject": row["subject"] or "",
        "branch": row["branch"] or "",
        "standing": row["standing"],
        "records": row["records"],
        "states": ", ".join(f"{signed(status)} {count}" for status, count in sorted(row["statuses"].items())),
        "sentinel": moved,
        "torch": row["torch"] or "",
        "triton": row["triton"] or "",
        "driver": row["driver"] or "",
        "machine": row["machine"],
        "power limit, W": row["power_limit_w"],
        "CI job": row["ci_url"] or "",
    }


def _run(view: parts.View, row: Row) -> None:
    run = row["run"]
    st.subheader("Selected run", anchor="run")
    parts.plain(f"{run} on {row['gpu']} ({row['machine']}), {short(row['commit'])} {row['subject'] or ''}")
    parts.command_over(view, f"pairbench show {shlex.quote(run)}", "command")
    lines = view.source.recent(f"run {run}", lambda history: history.lines("run = ?", [run]))
    _sentinel([line for line in lines if line["type"] == "sentinel"])
    records = [line for line in lines if line["type"] == "measurement"]
    _failures([record for record in records if record["status"] not in ("passed", "skipped")])
    st.subheader("Conditions of each measurement", anchor="conditions")
    if records:
        parts.table([_conditions(record) for record in records], "conditions")
    else:
        parts.nothing("This run has no measurement.", "It was stopped before the first, or everything was refused.", "")
    _machine(
        [line for line in lines if line.get("ceilings")], next((r.get("host") for r in records if r.get("host")), {})
    )


def _sentinel(lines: Sequence[Mapping[str, Any]]) -> None:
    st.subheader("Sentinel", anchor="sentinel")
    if not lines:
        parts.nothing("No sentinel was read.", "Whether the machine stayed as it was is not known.", "")
        return
    parts.table(
        [
            {
                "when": line.get("when"),
                "product": seconds(line["reading"]["matmul_s"]) if line.get("reading", {}).get("matmul_s") else "",
                "copy": seconds(line["reading"]["copy_s"]) if line.get("reading", {}).get("copy_s") else "",
                "moved": "▼ moved" if line.get("moved") else "● still",
                "why": line.get("reason") or "",
            }
            for line in lines
        ],
        "sentinel",
    )


def _failures(records: Sequence[Mapping[str, Any]]) -> None:
    st.subheader("Failures and their logs", anchor="failures")
    if not records:
        st.caption(f"{LOOKS['passed'].sign} None: what was tried passed.")
        return
    parts.table(
        [
            {"status": signed(r["status"]), "technique": r["technique"], "workload": r["workload"],
             "variant": r["variant"], "dtype": r["dtype"], "ranks": r["ranks"], "reason": r["reason"] or "",
             "reproduce": r.get("reproduce") or ""}
            for r in records
        ],
        "failures",
    )  # fmt: skip
    logs = [record for record in records if record.get("traceback")]
    for at, record in enumerate(logs[:MOST_LOGS]):
        with st.expander(f"Log {at + 1} of {len(logs)}"):
            parts.plain(f"{record['technique']} {record['workload']} {record['variant']}: {record['status']}")
            parts.command(str(record["traceback"]), f"log {at}")
            parts.command(record.get("reproduce"), f"command of log {at}")


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    found = record.get("conditions") or {}
    samples, host = record.get("samples") or {}, found.get("host") or {}
    return {
        "technique": record["technique"],
        "workload": record["workload"],
        "variant": record["variant"],
        "status": signed(record["status"]),
        "throttled": _said(found, "throttled"),
        "contended": _said(found, "contended"),
        "why": "; ".join(found.get("why") or []) or found.get("reason") or "",
        "SM clock, MHz": _range(found.get("sm_mhz")),
        "memory clock, MHz": _range(found.get("memory_mhz")),
        "temperature, °C": _range(found.get("temperature_c")),
        "power, W": _range(found.get("power_w")),
        "power capped": _said(found, "power_capped"),
        "clock reasons": ", ".join(map(str, found.get("clock_reasons") or [])),
        "other processes": found.get("other_processes"),
        "other CPU cores used": host.get("other_cores"),
        "clock": samples.get("clock") or "",
        "cache": samples.get("cache") or "",
        "samples": len(samples.get("values") or []) or None,
        "settled": "" if samples.get("settled") is None else "● yes" if samples["settled"] else "◇ no",
    }


def _range(found: Any) -> str:
    """What the watch saw, from the least to the most."""
    if not isinstance(found, Mapping) or not {"min", "max"} <= found.keys():
        return ""
    low, high = found["min"], found["max"]
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _said(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    return "" if value is None else "▼ yes" if value else "● no"


def _machine(lines: Sequence[Mapping[str, Any]], host: Mapping[str, Any] | None) -> None:
    st.subheader("Machine and its ceilings", anchor="machine")
    if host:
        parts.table([{"what": name, "is": str(value)} for name, value in host.items() if value is not None], "host")
    if not lines:
        parts.nothing("No ceilings.", "This run carries none.", "Measure them on that machine:", "pairbench machine")
        return
    ceilings = lines[-1]["ceilings"]
    rates = [("copy, read and written", ceilings.get("copy"), "B/s"), ("read alone", ceilings.get("read"), "B/s")]
    rates += [(f"product {dtype}", rate, "FLOP/s") for dtype, rate in sorted((ceilings.get("matmul") or {}).items())]
    rates += [("host to device", ceilings.get("host_to_device"), "B/s"),
              ("device to host", ceilings.get("device_to_host"), "B/s"),
              ("link", ceilings.get("link"), "B/s")]  # fmt: skip
    rows = [
        {"ceiling": name, "measured": amount(value, unit) if value else "not measured"} for name, value, unit in rates
    ]
    rows += [{"ceiling": title, "measured": seconds(ceilings[key]) if ceilings.get(key) else "not measured"}
             for title, key in (("launch, eager", "launch_eager"), ("launch, in a graph", "launch_graph"))]  # fmt: skip
    rows += [{"ceiling": name, "measured": f"refused: {why}"} for name, why in (ceilings.get("refused") or {}).items()]
    parts.table(rows, "ceilings")
