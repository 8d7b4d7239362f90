"""Regressions: every verdict with its size, suspects and side; each row opens its series."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from dashboard import address, parts
from dashboard.text import WIDE, cut, short
from dashboard.theme import VERDICTS as LOOKS
from dashboard.theme import verdict_signed
from harness.metric_names import METRICS
from harness.regress.attribution import as_text
from harness.regress.present import change, what_changed
from harness.regress.verdicts import VERDICTS, Verdict

LOUD = ("regressed", "inconclusive", "improved")
MOST = 2000
SORTS = {"worst first": "worst", "newest first": "newest", "largest change": "largest", "by technique": "technique"}


def render(view: parts.View) -> None:
    """The page."""
    judged = parts.verdicts(view)
    if not judged.verdicts and not judged.whole:
        st.caption("The series are being judged for the first time; this page fills by itself.")
        return
    everything = judged.verdicts
    kinds = address.choose_several("Verdicts", "verdict", VERDICTS, LOUD)
    with st.container(horizontal=True):
        technique = address.choose("Technique", "technique", sorted({v.key.technique for v in everything}))
        gpu = address.choose("GPU type", "gpu", sorted({v.key.gpu for v in everything}))
        metric = address.choose("Metric", "metric", sorted({v.key.metric for v in everything}),
                                show=lambda name: METRICS[name].title)  # fmt: skip
    with st.container(horizontal=True):
        accepted = address.choose("Accepted changes", "accepted", ["show", "hide", "only"], "show")
        recovered = address.switch("Recovered regressions too", "recovered", True)
        sort = address.choose("Sort", "sort", list(SORTS), "worst first") or "worst first"
    own = [v for v in everything if technique in (None, v.key.technique) and gpu in (None, v.key.gpu)
           and metric in (None, v.key.metric)]  # fmt: skip
    found = [
        v for v in own
        if (v.verdict in kinds or (recovered and _recovered(v)))
        and (accepted == "show" or (v.acknowledged is not None) == (accepted == "only"))
    ]  # fmt: skip
    _count(everything)
    if everything and not own:
        parts.nothing("Nothing here was judged.", "There is no series of this technique, GPU type and metric.",
                      "Choose others above, or measure it:", "pairbench run", view)  # fmt: skip
    elif not found:
        few = bool(own) and all(v.verdict == "too few runs" for v in own)
        parts.nothing(
            "No verdict fits." if everything else "No series can be judged yet.",
            "There are too few runs in every series to tell a change from noise: measure more commits." if few else
            "Nothing of this kind was found with these filters." if everything else
            "Verdicts need measurements of clean trees that passed.",
            "Choose *unchanged* and *too few runs* above to see everything that is watched." if everything else
            "Commit, and measure:", None if everything else "pairbench run", view,
        )  # fmt: skip
    _detail(view, _rows(found, sort), found)


def _recovered(verdict: Verdict) -> bool:
    return any(event["recovered"] for event in verdict.body.get("events") or [])


def _count(verdicts: Sequence[Verdict]) -> None:
    counts = {name: sum(1 for v in verdicts if v.verdict == name and v.acknowledged is None) for name in VERDICTS}
    counts["acknowledged"] = sum(1 for v in verdicts if v.acknowledged is not None)
    st.caption(WIDE.join(f"{LOOKS[name].sign} {count} {name}" for name, count in counts.items() if count))


def _rows(found: list[Verdict], sort: str) -> list[dict[str, Any]]:
    def size(v: Verdict) -> float:
        ratio = v.body.get("ratio") or 1.0
        return max(ratio, 1 / ratio) if ratio > 0 else 1.0

    if SORTS.get(sort) == "newest":
        found.sort(key=lambda v: str(v.body.get("date") or ""), reverse=True)
    elif SORTS.get(sort) == "largest":
        found.sort(key=size, reverse=True)
    elif SORTS.get(sort) == "technique":
        found.sort(key=lambda v: v.key.text)
    return [_row(v) for v in found[:MOST]]


def _row(v: Verdict) -> dict[str, Any]:
    body, key = v.body, v.key
    suspect = body.get("suspect") or {}
    commit = body.get("commit") or suspect.get("commit")
    smallest = body.get("smallest_change")
    return {
        "verdict": verdict_signed(v.verdict, v.acknowledged is not None) + (", recovered" if _recovered(v) else ""),
        "technique": key.technique,
        "workload": str(body.get("workload")),
        "variant": key.variant,
        "metric": key.metric,
        "GPU type": key.gpu,
        "change": change(body),
        "since": short(commit) if commit else "",
        "subject": cut(body.get("subject") or suspect.get("subject") or ""),
        "side": body.get("side") or "",
        "what else changed": what_changed(body.get("changed")),
        "smallest visible": f"{smallest:.1%}" if smallest is not None else "",
        "runs": body.get("runs"),
        "accepted": v.acknowledged or "",
        "open": f"history?{urlencode({'series': key.text})}",
        "reproduce": body.get("reproduce") or "",
        "series": key.text,
    }


def _detail(view: parts.View, rows: list[dict[str, Any]], found: list[Verdict]) -> None:
    if len(found) > len(rows):
        st.caption(f"The first {len(rows)} of {len(found)} are listed; filter to see others.")
    picked = None
    if rows:
        picked = parts.table(
            rows, "regressions", select=("series",),
            columns={"open": st.column_config.LinkColumn("open", display_text="series"), "series": None},
        )  # fmt: skip
    chosen = rows[picked]["series"] if picked is not None else None
    if parts.newly("regression row", chosen):
        address.put("series", chosen)
    word = address.get("series")
    if word is None:
        if rows:
            st.caption("Select a row for its suspects, or open its series.")
        return
    verdict = next((v for v in view.source.judged.verdicts if v.key.text == word), None)
    if verdict is None:
        parts.nothing("The address names a series that has no verdict.", "", "Select a row of the table.")
        return
    _one(view, verdict)


def _one(view: parts.View, v: Verdict) -> None:
    body, key = v.body, v.key
    st.subheader("Selected verdict", anchor="selected")
    look = LOOKS[v.verdict]
    parts.plain(
        f"{look.sign} {v.verdict}: {key.technique} {key.variant}, {body.get('workload')}, {key.metric}, {key.gpu}"
    )
    parts.plain(body.get("reason") or "")
    with st.container(horizontal=True):
        st.metric("Change", change(body), help="new over old, with its 95 % interval")
        st.metric("Side that moved", str(body.get("side") or "–"))
        smallest = body.get("smallest_change")
        st.metric("Smallest visible change", f"{smallest:.1%}" if smallest is not None else "–")
        st.metric("Noise of one run", f"{body['noise']:.1%}" if body.get("noise") is not None else "–")
    parts.link(view, "history", "Open its series", series=key.text)
    if body.get("side_reason"):
        parts.plain(body["side_reason"])
    if v.acknowledged is not None:
        st.caption("Accepted, with this reason:")
        parts.plain(v.acknowledged)
    changed = body.get("changed")
    if changed:
        st.caption(
            "Commits between, oldest first"
            + (f" (the last {len(changed['commits'])})" if changed["more_commits"] else "")
        )
        suspects = [{"commit": c["commit"], "subject": c["subject"] or ""} for c in changed["commits"]]
        if suspects:
            parts.table(suspects, "suspects", height=min(36 * (len(suspects) + 1) + 3, 220))
        if changed["note"]:
            parts.plain(changed["note"])
        moved = [
            {"what": name, "before": as_text(old), "after": as_text(new)}
            for name, (old, new) in changed["stack"].items()
        ]
        moved += [{"what": name, "before": as_text(changed[name][0]), "after": as_text(changed[name][1])}
                  for name in ("machine", "power_limit_w") if changed[name]]  # fmt: skip
        if moved:
            st.caption("What else changed there")
            parts.table(moved, "also-changed")
    st.caption("Measure it again:")
    parts.command(body.get("reproduce"))
    if v.verdict == "regressed" and v.acknowledged is None and body.get("commit"):
        st.caption("Find the commit, or accept the change in `acknowledged.toml`:")
        parts.command_over(view, f"pairbench bisect {shlex.quote(key.text)}", "bisect")
