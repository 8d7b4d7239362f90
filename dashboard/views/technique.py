"""Technique: what it is, what it claims beside what was measured, what limits it, and the code of the pair."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import address, parts, queries
from dashboard.charts import pair
from dashboard.claims import claim_rows
from dashboard.text import cut, short
from dashboard.theme import signed
from harness.discover import Technique
from harness.history import query
from harness.history.engine import Row
from harness.tables import amount, seconds, size

MOST_CODE = 60_000
#: Commits over which the error is drawn.
NEWEST = 200


def render(view: parts.View) -> None:
    """The page."""
    facets = view.source.once("facets", query.facets)
    known = queries.declared()
    names = sorted({*facets["technique"], *(known if set(known) & set(facets["technique"]) else ())})
    with st.container(horizontal=True):
        technique = address.choose("Technique", "technique", names, queries.first_measured(view.history, names))
        gpu = address.choose("GPU type", "gpu", facets["gpu"])
    if technique is None:
        return
    rows = view.source.recent(f"latest {technique}", lambda history: query.latest(history, technique=technique))
    there = sorted({row["gpu"] for row in rows})
    why = ""
    if gpu is None and there:
        # A machine that lacks what the technique needs, or was busy, is measured last as often as any other.
        told = [r for r in rows if r["variant"] == "optimized" and r["status"] not in ("skipped", "unsettled")]
        gpu, newest = (max(found, key=lambda r: str(r["time"]))["gpu"] for found in (told or rows, rows))
        why = ", the newest" + (" with a result" if gpu != newest else "")
    own = [row for row in rows if row["gpu"] == gpu]
    _about(technique, known.get(technique), own or rows)
    if own:
        others = ", ".join(name for name in there if name != gpu)
        parts.plain(f"Measured on {gpu}" + (f"{why}; choose above for {others}" if why and others else ""))
    with st.container(horizontal=True):
        parts.link(view, "history", "Its history", technique=technique, gpu=gpu)
        parts.link(view, "regressions", "Its verdicts", technique=technique, gpu=gpu)
    if not own:
        parts.nothing(
            "Never measured here.", "There is no record of this technique on this GPU type.",
            "It was measured on other types, choose one above. To measure it here:" if there else "To measure it:",
            f"pairbench run {technique}" if technique in known else "pairbench run",
            view,
        )  # fmt: skip
        _code(known.get(technique), None)
        return
    _claim(technique, known.get(technique), own)
    _variants(own)
    _limits(view, own, str(gpu))
    _correctness(view, technique, str(gpu))
    _costs(own)
    _code(known.get(technique), own[0]["commit"])


def _about(technique: str, info: Technique | None, rows: list[Row]) -> None:
    st.subheader("What it is", anchor="about")
    parts.plain(technique if info is None else f"{technique}: {info.summary}")
    row = rows[0] if rows else {}
    facts = [
        ("layer", info.layer if info else row.get("layer")),
        ("family", info.family if info else row.get("family")),
        ("kind", info.kind if info else row.get("kind")),
        ("relieves", info.relieves if info else row.get("relieves")),
    ]
    parts.plain("   ".join(f"{name}: {value}" for name, value in facts if value))


def _claim(technique: str, info: Technique | None, rows: list[Row]) -> None:
    st.subheader("Claim beside measurement", anchor="claim")
    claim = dict(rows[0]["claim"] or (info.claim if info else {}))
    parts.table(claim_rows(rows, claim), f"claim-{technique}", columns={
        "ratio": st.column_config.NumberColumn(format="%.3f"), "low": st.column_config.NumberColumn(format="%.3f"),
        "high": st.column_config.NumberColumn(format="%.3f")})  # fmt: skip
    if claim.get("cost"):
        st.caption("At the cost of:")
        parts.plain(claim["cost"])


def _variants(rows: list[Row]) -> None:
    st.subheader("Variants by workload", anchor="variants")
    timed = [row for row in rows if row["m_speedup"] is not None or row["m_speedup_peer"] is not None]
    over = address.choose("Speedup over", "over", ["baseline", "best one-liner"], "baseline")
    metric = "speedup" if over == "baseline" else "speedup_peer"
    if any(row[f"m_{metric}"] is not None for row in timed):
        parts.figure(pair.speedups([row for row in timed if row[f"m_{metric}"] is not None], metric), "speedups")
    else:
        why = next((w for row in rows for n, w in (row["missing"] or {}).items() if n == metric), None)
        parts.nothing("No speedup.", "No variant has one here; the table below says what each one met.", "")
        if why:
            parts.plain(why)
    parts.table([_row(row) for row in rows], "variants", columns={
        "latency": st.column_config.TextColumn(help="median and 95 % interval")})  # fmt: skip


def _row(row: Row) -> dict[str, Any]:
    def ratio(name: str) -> str:
        value, low, high = (row[f"m_{name}{end}"] for end in ("", "_low", "_high"))
        return "" if value is None else f"{value:.2f}×" + (f" [{low:.2f}, {high:.2f}]" if low is not None else "")

    latency = row["m_latency"]
    spread = f" [{seconds(row['m_latency_low'])}, {seconds(row['m_latency_high'])}]" if row["m_latency_low"] else ""
    return {
        "workload": pair.label(row),
        "variant": row["variant"],
        "status": signed(row["status"]),
        "latency": seconds(latency) + spread if latency else "",
        "over baseline": ratio("speedup"),
        "over best one-liner": ratio("speedup_peer"),
        "predicted": f"{row['predicted_speedup']:.2f}×" if row["predicted_speedup"] else "",
        "throughput": amount(row["m_throughput"], f"{row['unit'] or 'items'}/s") if row["m_throughput"] else "",
        "peak memory": size(row["m_peak_memory"]) if row["m_peak_memory"] is not None else "",
        "limit": row["limit_by"] or "",
        "of its floor": f"{row['floor_share']:.1%}" if row["floor_share"] is not None else "",
        "MFU": f"{row['m_mfu']:.1%}" if row["m_mfu"] is not None else (row["missing"] or {}).get("mfu", ""),
        "reason": row["reason"] or "",
        "reproduce": row["reproduce"] or "",
        "commit": short(row["commit"]),
    }


def _limits(view: parts.View, rows: list[Row], gpu: str) -> None:
    st.subheader("What limits it", anchor="roofline")
    ceilings = view.source.once(f"ceilings {gpu}", lambda history: queries.newest_ceilings(history, gpu))
    fig = pair.roofline([row for row in rows if row["status"] == "passed"], ceilings)
    if fig.data:
        parts.figure(fig, "roofline")
        limits = sorted({row["limit_by"] for row in rows if row["limit_by"]})
        st.caption("Limit named by the floor: " + (", ".join(n for n in limits if n.isalpha()) or "none is known"))
        if not (ceilings.get("copy") and ceilings.get("matmul")):
            st.caption("No roof is drawn: no run on this GPU type carries measured ceilings (`pairbench machine`).")
    else:
        parts.nothing("No roofline.", "No passed record here counts both FLOPs and bytes.", "")
    if any(row["predicted_speedup"] and row["m_speedup"] for row in rows):
        st.subheader("Predicted beside measured", anchor="predicted")
        parts.figure(pair.predicted(rows), "predicted")


def _correctness(view: parts.View, technique: str, gpu: str) -> None:
    st.subheader("Correctness error over time", anchor="correctness")
    rows = view.source.recent(f"checks {technique} {gpu}", lambda h: queries.correctness(h, technique, gpu))
    if not rows:
        parts.nothing("No check was recorded.", "Nothing here was compared with an oracle yet.", "",
                      f"pairbench check {technique}")  # fmt: skip
        return
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    newest = set(commits[-NEWEST:])
    parts.figure(pair.correctness([row for row in rows if row["commit"] in newest]), "correctness")
    if len(commits) > NEWEST:
        failed = sum(row["passed"] is False for row in rows if row["commit"] not in newest)
        st.caption(f"The newest {NEWEST} of {len(commits)} commits are drawn; before them {failed} check(s) failed.")
    if len(commits) == 1:
        st.caption("One commit so far: the line begins with the second.")


def _costs(rows: list[Row]) -> None:
    left, right = st.columns(2)
    with left:
        st.subheader("Memory", anchor="memory")
        if any(row["m_peak_memory"] is not None for row in rows):
            parts.figure(pair.bars(rows, "m_peak_memory", "peak memory above the start, MiB", bytes_=True), "memory")
        else:
            parts.nothing("No memory figure.", "No newest record here has one.", "")
    with right:
        st.subheader("First-run cost", anchor="first-run")
        if any(row["compile_s"] is not None for row in rows):
            parts.figure(pair.bars(rows, "compile_s", "building, compiling, first call, s"), "first-run")
        else:
            parts.nothing("No first-run cost.", "No newest record here has one.", "")


def _code(info: Technique | None, commit: str | None) -> None:
    st.subheader("The code of the pair", anchor="code")
    if info is None or not info.path.is_file():
        st.caption("This installation does not have this technique's code.")
        return
    target = queries.source_link(info, commit)
    parts.plain(f"{info.module}  ({info.path.name})")
    if target:
        st.link_button("Open at its repository", target, icon=":material/open_in_new:")
    with parts.unfolded("Read it here", "code") as seen:
        if seen:
            st.code(info.path.read_text(encoding="utf-8", errors="replace")[:MOST_CODE], language="python")
    st.caption("Variants:")
    parts.plain(cut(", ".join(v.name + (f" ({v.peer} peer)" if v.peer else "") for v in info.variants), 400))
