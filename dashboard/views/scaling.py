"""Scaling: throughput and latency apart, memory, exposed communication and the bubble, by number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard import address, parts, queries
from dashboard.charts import scaling
from dashboard.theme import signed
from harness.history.engine import Row
from harness.tables import amount, seconds, size


def render(view: parts.View) -> None:
    """The page."""
    rows = view.source.once("several ranks", queries.several_ranks)
    if not rows:
        parts.nothing(
            "Nothing was measured on several numbers of ranks.", "A curve needs one workload at two of them at least.",
            "Techniques of the family *parallel* have such workloads:", "pairbench run data_parallel --ranks 2",
            view,
        )  # fmt: skip
        return
    with st.container(horizontal=True):
        names = sorted({row["technique"] for row in rows})
        technique = address.choose("Technique", "technique", names, names[0])
        gpu = address.choose("GPU type", "gpu", sorted({row["gpu"] for row in rows if row["technique"] == technique}))
        variants = address.choose_several("Variants", "variant", sorted({row["variant"] for row in rows}),
                                          help="None chosen: baseline and optimized.")  # fmt: skip
    if technique not in names:
        st.caption("The technique in the address was measured at one number of ranks only. Choose another.")
    wanted = variants or ["baseline", "optimized"]
    own = [row for row in rows if row["technique"] == technique and gpu in (None, row["gpu"])
           and row["variant"] in wanted]  # fmt: skip
    passed = [row for row in own if row["status"] == "passed"]
    if not passed:
        parts.nothing("No figure fits these filters.", "What did not pass makes no point; a gap is never a zero.",
                      "The table below says what happened, if anything did.")  # fmt: skip
    else:
        ranks: dict[str, set[int]] = {}
        for row in passed:
            ranks.setdefault(scaling.group_of(row), set()).add(row["ranks"])
        if all(len(found) == 1 for found in ranks.values()):
            st.caption("No workload here was measured at two numbers of ranks: there are points, and no line yet.")
        _speed(passed)
        _costs(passed)
        _bubble(passed)
    st.subheader("All figures", anchor="figures")
    parts.table([_row(row) for row in own], "scaling")


def _speed(rows: list[Row]) -> None:
    left, right = st.columns(2)
    with left:
        st.subheader("Throughput", anchor="throughput")
        unit = next((str(row["unit"]) for row in rows if row["unit"]), "items")
        parts.figure(
            scaling.by_ranks(rows, lambda r: r["m_throughput"], f"{unit}/s (higher is better)",
                             lambda v: amount(v, f"{unit}/s"), ideal=1.0, log=True),
            "throughput",
        )  # fmt: skip
    with right:
        st.subheader("Latency", anchor="latency")
        parts.figure(
            scaling.by_ranks(rows, lambda r: r["m_latency"], "s (lower is better)", seconds, ideal=-1.0, log=True),
            "latency",
        )
    st.caption("Ideal throughput grows with the ranks; ideal latency of a fixed problem falls with them. Where the "
               "problem grows with the ranks (data and pipeline parallelism), latency at best stays.")  # fmt: skip


def _costs(rows: list[Row]) -> None:
    left, right = st.columns(2)
    with left:
        st.subheader("Memory of the fullest rank", anchor="memory")
        if any(row["m_peak_memory"] is not None for row in rows):
            less = any((row["claim"] or {}).get("memory") == "lower" for row in rows)
            ideal = -1.0 if less else 0.0
            parts.figure(scaling.by_ranks(rows, lambda r: r["m_peak_memory"], "B", size, ideal=ideal), "memory")
            st.caption("Ideal memory falls with the ranks, since the technique promises less of it." if less else
                       "Ideal memory stays: the technique does not promise that ranks share it.")  # fmt: skip
        else:
            parts.nothing("No memory figure.", "None of these records has one.", "")
    with right:
        st.subheader("Exposed communication", anchor="exposed")
        if any(row["m_exposed_comm"] is not None for row in rows):
            parts.figure(scaling.by_ranks(rows, _exposed, "share of the step", "{:.1%}".format), "exposed")
        else:
            parts.nothing(
                "No exposed communication.", "None of these records says how long a step without it takes.", ""
            )


def _exposed(row: Mapping[str, Any]) -> float | None:
    """Exposed communication over the step."""
    exposed, whole = row["m_exposed_comm"], row["m_latency"]
    return exposed / whole if exposed is not None and whole else None


def _bubble(rows: list[Row]) -> None:
    """The share of a pipeline's time that stages wait, by counter ``bubble``; the formula's by ``bubble_formula``."""
    found = [
        {
            "name": f"{scaling.group_of(row)}, {row['ranks']} ranks",
            "measured": counters.get("bubble"),
            "formula": counters.get("bubble_formula"),
            "reproduce": row["reproduce"],
        }
        for row in rows
        if isinstance(counters := row["counters"] or {}, Mapping) and counters.get("bubble") is not None
    ]
    st.subheader("Bubble, measured beside formula", anchor="bubble")
    if found:
        parts.figure(scaling.bubbles(found), "bubble")
    else:
        st.caption("No record here counts a bubble: only pipeline parallelism has one.")


def _row(row: Row) -> dict[str, Any]:
    return {
        "technique": row["technique"],
        "workload": row["workload"],
        "variant": row["variant"],
        "GPU type": row["gpu"],
        "ranks": row["ranks"],
        "status": signed(row["status"]),
        "latency": seconds(row["m_latency"]) if row["m_latency"] else "",
        "throughput": row["m_throughput"],
        "throughput per rank": row["m_throughput"] / row["ranks"] if row["m_throughput"] else None,
        "peak memory": size(row["m_peak_memory"]) if row["m_peak_memory"] is not None else "",
        "kept for backward": size(kept) if (kept := (row["counters"] or {}).get("saved_bytes")) is not None else "",
        "exposed communication": seconds(row["m_exposed_comm"]) if row["m_exposed_comm"] is not None else "",
        "bus bandwidth": amount(row["m_busbw"], "B/s") if row["m_busbw"] is not None else "",
        "skew": seconds(row["m_skew"]) if row["m_skew"] is not None else "",
        "reason": row["reason"] or "",
        "reproduce": row["reproduce"] or "",
    }
