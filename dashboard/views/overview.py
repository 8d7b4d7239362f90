"""Overview: what pays where, what broke, what changed last, and whether each GPU type was measured lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import address, grid, parts, queries
from dashboard.charts import heatmap
from dashboard.text import WIDE, ago, short
from dashboard.theme import FAILURES, LOOKS, VERDICTS, look, signed, verdict_signed
from harness.regress.present import change, what_changed

NEWEST = 8


def render(view: parts.View) -> None:
    """The page."""
    rows = view.source.once("coverage", queries.coverage)
    with st.container(horizontal=True):
        family = address.choose("Family", "family", sorted({str(row["family"]) for row in rows}))
        gpu = address.choose("GPU type", "gpu", sorted({row["gpu"] for row in rows}))
        over = address.choose("Speedup over", "over", ["baseline", "best one-liner"], "baseline")
    shown = [row for row in rows if family in (None, row["family"]) and gpu in (None, row["gpu"])]
    if not shown:
        parts.nothing("Nothing fits these filters.", "No technique of this family was recorded on this GPU type.",
                      "Choose others, or measure it there:", "pairbench run", view)  # fmt: skip
    else:
        _figures(shown)
        _coverage(view, shown, "speedup" if over == "baseline" else "speedup_peer")
    _verdicts(view, family, gpu)
    _gpus(view)


def _figures(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [row for row in rows if row["status"] != "not run"]
    measured = {name: [row[name]["low"] for row in cells if row[name]] for name in ("speedup", "speedup_peer")}
    faster, paying = (f"{sum(low > 1 for low in lows)} of {len(lows)} measured" for lows in measured.values())
    broken = sum(row["status"] in ("wrong", *FAILURES) for row in cells)
    stale = sum(1 for row in cells if row["stale"])
    with st.container(horizontal=True):
        for label, value, means in (
            ("Faster than baseline", faster, "the whole interval lies above 1"),
            ("Beat the best one-liner", paying, "what decides whether a technique pays"),
            ("Wrong or failed", str(broken), "newest records of the optimized variant"),
            ("Stale", str(stale), LOOKS["stale"].means),
            ("Not run", str(len(rows) - len(cells)), LOOKS["not run"].means),
        ):
            st.metric(label, value, help=means)


def _coverage(view: parts.View, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    st.subheader("What pays where", anchor="coverage")
    ages = {row["time"]: queries.age_s(row["time"]) for row in rows}
    signs = {look(row["status"]) for row in rows} | ({LOOKS["stale"]} if any(row["stale"] for row in rows) else set())
    st.caption(WIDE.join(f"{one.sign} {one.title}" for one in LOOKS.values() if one in signs))
    clicked, when = grid.grid(heatmap.coverage(rows, metric, ages), "coverage")
    if clicked:
        parts.opens(view, "coverage cell", when, "technique", technique=clicked[0], gpu=clicked[1])
    picked = None
    with parts.unfolded("The same as a table", "coverage") as seen:
        if seen:
            picked = parts.table([_row(row) for row in rows], "coverage", select=("technique", "GPU type"))
    cell = (rows[picked]["technique"], rows[picked]["gpu"]) if picked is not None else (None, None)
    parts.opens(view, "coverage row", cell if picked is not None else None, "technique", technique=cell[0], gpu=cell[1])


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {"technique": row["technique"], "GPU type": row["gpu"], "status": signed(row["status"])}
    for name, title in (("speedup", "over baseline"), ("speedup_peer", "over best one-liner")):
        entry = row[name] or {}
        cells |= {title: entry.get("value"), f"{title}, low": entry.get("low"), f"{title}, high": entry.get("high")}
    return {**cells, "stale": "stale" if row["stale"] else "", "reason": row["reason"] or "", "last": row["time"],
            "commit": short(row["commit"]) if row["commit"] else ""}  # fmt: skip


def _verdicts(view: parts.View, family: str | None, gpu: str | None) -> None:
    st.subheader("Newest verdicts", anchor="verdicts")
    judged = parts.verdicts(view)
    own = [v for v in judged.verdicts if gpu in (None, v.key.gpu) and family in (None, v.body.get("family"))]
    found = [v for v in own if v.verdict in ("regressed", "improved", "inconclusive")]
    found.sort(key=lambda v: str(v.body.get("date") or ""), reverse=True)
    counts = {name: sum(1 for v in found if v.verdict == name) for name in ("regressed", "improved", "inconclusive")}
    if not found:
        if judged.whole and judged.verdicts and not own:
            parts.nothing("Nothing here was judged.", "Verdicts are of what passed on clean trees of this branch.",
                          "Choose other filters above, or measure such a tree:", "pairbench run", view)  # fmt: skip
        elif judged.whole:
            plenty = any(v.verdict == "unchanged" for v in own)
            parts.nothing(
                "No change was found.", "Every series that can be judged is within its noise." if plenty else
                "There are too few runs to tell a change from noise.",
                "" if plenty else "Verdicts come by themselves once several commits were measured:",
                None if plenty else "pairbench run", view,
            )  # fmt: skip
        else:
            st.caption("The series are being judged; verdicts appear here by themselves.")
        return
    st.caption(", ".join(f"{VERDICTS[name].sign} {count} {name}" for name, count in counts.items() if count))
    rows = [
        {
            "verdict": verdict_signed(v.verdict, v.acknowledged is not None),
            "technique": v.key.technique,
            "variant": v.key.variant,
            "workload": v.body.get("workload"),
            "metric": v.key.metric,
            "GPU type": v.key.gpu,
            "change": change(v.body),
            "since": f"{short(v.body['commit'])} {v.body.get('subject') or ''}" if v.body.get("commit") else "",
            "side": v.body.get("side") or "",
            "what else changed": what_changed(v.body.get("changed")),
        }
        for v in found[:NEWEST]
    ]
    picked = parts.table(rows, "newest-verdicts", select=("technique", "variant", "workload", "metric", "GPU type"))
    word = found[picked].key.text if picked is not None else None
    parts.opens(view, "verdict row", word, "regressions", series=word)
    parts.link(view, "regressions", "All verdicts")


def _gpus(view: parts.View) -> None:
    st.subheader("When each GPU type last ran", anchor="gpus")
    rows = view.source.once("last runs", queries.last_runs)
    shown = []
    for row in rows:
        last, nightly = queries.age_s(row["last"]), queries.age_s(row["nightly"])
        late = row["nightly_late"]
        said = "– no CI run recorded" if late is None else f"{'▼ late' if late else '● came'}, {ago(nightly or 0)} ago"
        shown.append(
            {
                "GPU type": row["gpu"],
                "last run": f"{ago(last)} ago" if last is not None else "unknown",
                "at": row["last"],
                "nightly": said,
                "runs": row["runs"],
                "records": row["records"],
                "run": row["run"],
                "device": row["gpu_name"] or "",
            }
        )
    picked = parts.table(shown, "gpu-types", select=("GPU type",))
    run = rows[picked]["run"] if picked is not None else None
    parts.opens(view, "gpu row", run, "runs", run=run)
    if any(row["nightly_late"] for row in rows):
        st.warning(
            f"A nightly is late: none came in the last {queries.NIGHTLY_S / 3600:.0f} hours. Look at the CI job, or "
            "measure by hand with `pairbench run --tier quick`.",
            icon=":material/schedule:",
        )
