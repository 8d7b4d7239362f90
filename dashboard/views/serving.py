"""Serving: throughput against latency, waiting times, cache use, goodput under an SLO that the viewer moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard import address, parts, queries
from dashboard.charts import serving
from dashboard.slo import goodput
from dashboard.theme import signed
from harness.history import query
from harness.history.engine import Row
from harness.metric_names import METRICS
from harness.tables import seconds

LATENCIES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99")
#: The SLO on waiting for the first token in the URL: its name, default and bounds.
TTFT_MS = ("ttft_ms", 500.0, 0.001, 1e6)
#: Runs whose quantiles and curves are drawn.
MOST = 8


def render(view: parts.View) -> None:
    """The page."""
    rows = view.source.once("serving", query.serving)
    if not rows:
        parts.nothing(
            "No serve run was recorded.", "Serving techniques feed an engine with a request trace.",
            "Measure one, or all that are here:", "pairbench list\npairbench run continuous_batching",
            view,
        )  # fmt: skip
        return
    with st.container(horizontal=True):
        names = sorted({row["technique"] for row in rows})
        wanted = address.get("technique")
        technique = address.choose("Technique", "technique", names)
        gpus = sorted({row["gpu"] for row in rows})
        gpu = address.choose("GPU type", "gpu", gpus)
        latency = address.choose("Latency", "latency", LATENCIES, "ttft_p99", show=lambda n: METRICS[n].title)
    if wanted is not None and wanted not in names:
        st.caption("The technique in the address has no serve run. Choose another, or all.")
    own = [row for row in rows if technique in (None, row["technique"]) and gpu in (None, row["gpu"])]
    if latency not in LATENCIES:
        latency = "ttft_p99"
    if not own:
        parts.nothing("No serve run fits.", "This technique was not served on this GPU type, or is no serving one.",
                      "Choose others above.")  # fmt: skip
        return
    passed = [row for row in own if row["status"] == "passed" and row["m_output_rate"] and row[f"m_{latency}"]]
    st.subheader("Throughput against latency", anchor="curves")
    if passed:
        parts.figure(serving.curves(passed, latency), "curves")
        if not serving.several_loads(passed):
            st.caption("One load so far: a line needs several, as `pairbench run continuous_batching --request-rate "
                       "1,2,4` measures them. Another model, trace or cache is another line.")  # fmt: skip
    else:
        parts.nothing("No point.", "No newest serve record here passed with both figures.", "Reasons stand below.")
    ids = [row["id"] for row in passed[: MOST * 3]]
    records = view.source.recent(f"records {' '.join(ids)}", lambda history: queries.records_of(history, ids))
    have = [record for record in records if record.get("serve")]
    if len(passed) > MOST and have:
        st.caption(f"Below, the first {MOST} of {len(passed)} serve runs are shown; filter to see others.")
    _distributions(have[:MOST], bool(passed))
    _goodput(have[:MOST])
    st.subheader("All figures", anchor="figures")
    parts.table([_row(row) for row in own], "serving")


def _distributions(records: Sequence[dict[str, Any]], passed: bool) -> None:
    st.subheader("Waiting times", anchor="waiting")
    if not records and passed:
        parts.nothing("No distribution.", "These records keep figures only, no quantiles.", "New runs keep them.")
        return
    if not records:
        parts.nothing("No distribution.", "Only what passed is drawn, and nothing here did.", "Reasons stand below.")
        return
    left, right = st.columns(2)
    with left:
        parts.figure(serving.distributions(records, "ttft", address.within(*TTFT_MS) / 1e3), "ttft")
    with right:
        parts.figure(serving.distributions(records, "itl", None), "itl")
    st.subheader("Cache use and requests running", anchor="cache")
    left, right = st.columns(2)
    for place, curve, title, share in (
        (left, "cache_use", "share of the cache in use", True),
        (right, "running", "requests running", False),
    ):
        with place:
            if any((record["serve"] or {}).get(curve) for record in records):
                parts.figure(serving.over_time(records, curve, title, share), curve)
            else:
                st.caption(f"These engines do not say: {title}.")


def _goodput(records: Sequence[dict[str, Any]]) -> None:
    st.subheader("Goodput under your SLO", anchor="goodput")
    if not records:
        st.caption("Needs the quantiles of a serve run that passed.")
        return
    with st.container(horizontal=True):
        ttft = address.number("TTFT at most, ms", *TTFT_MS, 50.0)
        tpot = address.number("TPOT at most, ms", "tpot_ms", 50.0, 0.001, 1e6, 5.0)
    rows = []
    for record in records:
        found = goodput(record["serve"], ttft / 1e3, tpot / 1e3)
        if found is not None:
            span, finished = record["serve"]["span"], record["serve"]["requests"]["finished"]
            rows.append(
                {
                    "name": f"{record['technique']} {record['variant']}, {record['workload']}, {record['gpu']}",
                    "low": found.low,
                    "high": found.high,
                    "rate": finished / span,
                    "TTFT met": found.ttft,
                    "TPOT met": found.tpot,
                    "reproduce": record.get("reproduce"),
                }
            )
    if rows:
        parts.figure(serving.goodputs(rows), "goodput")
        parts.table(rows, "goodput")
        st.caption("Failed and refused requests meet nothing, and count as none.")
    else:
        st.caption("These records keep neither a span nor quantiles.")


def _row(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "technique": row["technique"],
        "workload": row["workload"],
        "variant": row["variant"],
        "GPU type": row["gpu"],
        "ranks": row["ranks"],
        "status": signed(row["status"]),
        "tokens/s": row["m_output_rate"],
        "tokens/s per rank": row["m_output_rate"] / row["ranks"] if row["m_output_rate"] and row["ranks"] else None,
    }
    for name in LATENCIES:
        value = row[f"m_{name}"]
        cells[METRICS[name].title] = seconds(value) if value is not None else ""
    for name in ("goodput", "failed_requests", "cache_hit_rate", "acceptance_length", "preemptions", "cache_waste"):
        cells[METRICS[name].title] = row[f"m_{name}"]
    return {**cells, "reason": row["reason"] or "", "reproduce": row["reproduce"] or ""}
