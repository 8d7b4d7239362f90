"""Compare: two selections side by side, survivors as bars, missing ones apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard import address, parts, queries
from dashboard.charts.diverging import diverging
from dashboard.text import WIDE
from dashboard.theme import verdict_signed
from harness.history import query
from harness.history.engine import Row
from harness.metric_names import METRICS
from harness.regress.compare import Compared, compare
from harness.regress.present import change, means

MOST = 60


def render(view: parts.View) -> None:
    """The page."""
    words = view.source.once("selections", queries.selections)
    if not words:
        return
    default_a, default_b = view.source.once("compared", queries.compared) or _defaults(words)
    with st.container(horizontal=True):
        a = _side(view, "A, the old or the other", "a", words, default_a)
        b = _side(view, "B, the new", "b", words, default_b)
    facets = view.source.once("facets", query.facets)
    with st.container(horizontal=True):
        technique = address.choose("Technique", "technique", facets["technique"])
        gpu = address.choose("GPU type", "gpu", facets["gpu"])
        metric = address.choose("Metric", "metric", [n for n, m in METRICS.items() if m.judged], "latency",
                                show=lambda name: METRICS[name].title)  # fmt: skip
    if a is None or b is None or a == b:
        parts.nothing(
            "Two different selections are needed.", "Both sides name the same, or one names nothing.",
            "Choose another commit, branch, GPU type or version. A history of one run has nothing to compare with yet:",
            "pairbench run", view,
        )  # fmt: skip
        return
    if metric not in METRICS:
        parts.nothing("There is no such metric.", "Choose one of the list.", "")
        return
    filters: dict[str, Any] = {"technique": technique, "gpu": gpu}
    across = [word.partition(":")[0] for word in (a, b) if ":" in word]
    if "gpu" in across:  # the sides say it themselves
        filters.pop("gpu")
    done = view.source.recent(
        f"compare {a} {b} {metric} {sorted(filters.items(), key=str)}",
        lambda history: compare(history, a, b, [metric], **{k: v for k, v in filters.items() if v}),
    )
    _show(done)


def _defaults(words: Sequence[str]) -> tuple[str, str]:
    """Where no two clean commits have anything in common."""
    commits = [word for word in words if ":" not in word and len(word) == 12]
    if len(commits) > 1:
        return commits[1], commits[0]
    gpus = [word for word in words if word.startswith("gpu:")]
    return (gpus[0], gpus[1]) if len(gpus) > 1 else (words[0], words[0])


def _side(view: parts.View, label: str, name: str, words: Sequence[str], default: str) -> str | None:
    def show(word: str) -> str:
        subject = queries.subject_of(view.history, _whole(view, word))
        return f"{word}  {subject[:50]}" if subject else word

    return address.choose(label, name, words, default, show=show,
                          help="A commit, branch, tag or run, or gpu:NAME, torch:VERSION and the like.")  # fmt: skip


def _whole(view: parts.View, word: str) -> str:
    if len(word) != 12:
        return ""
    return next((commit for commit in view.history.order.places if commit.startswith(word)), "")


def _show(done: Compared) -> None:
    parts.plain(f"A: {done.a.describes}\nB: {done.b.describes}")
    counts: dict[str, int] = {}
    for row in done.series:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    if done.series:
        st.caption(WIDE.join(f"{verdict_signed(name)}: {count}" for name, count in sorted(counts.items())))
        for line in means(done):
            parts.plain(line)
        parts.figure(diverging(done.series, MOST), "diverging")
        if len(done.series) > MOST:
            st.caption(f"The {MOST} largest changes of {len(done.series)} are drawn; the table has them all.")
        st.subheader("Survivors: on both sides", anchor="survivors")
        parts.table([_row(row) for row in done.series], "compare")
    else:
        parts.nothing("The two have no series in common.", "What each side has alone stands below.",
                      "Take filters away, or choose other sides.")  # fmt: skip
    st.subheader("Missing: on one side only", anchor="missing")
    missing = [_missing("only in A", row) for row in done.only_a] + [_missing("only in B", row) for row in done.only_b]
    if missing:
        parts.table(missing, "compare-missing")
    else:
        st.caption("None: every series is on both sides.")


def _row(row: Row) -> dict[str, Any]:
    return {
        "verdict": verdict_signed(row["verdict"]),
        "technique": row["technique"],
        "workload": row["workload"],
        "variant": row["variant"],
        "metric": row["metric"],
        "GPU type": row["gpu"],
        "B over A": change(row, ("ratio", "ratio_low", "ratio_high")),
        "ratio": row["ratio"],
        "A": row["a"]["value"],
        "A runs": row["a"]["n"],
        "B": row["b"]["value"],
        "B runs": row["b"]["n"],
        "unit": row["unit"],
        "why": row["reason"],
        "reproduce": f"pairbench run {row['technique']} --workload {row['workload']}",
    }


def _missing(side: str, row: Row) -> dict[str, Any]:
    return {
        "": side,
        "technique": row["technique"],
        "workload": row["workload"],
        "variant": row["variant"],
        "metric": row["metric"],
        "GPU type": row["gpu"],
        "value": row["value"],
        "unit": row["unit"],
        "on the other side": row["there"],
        "reason": row["reason"] or "",
    }
