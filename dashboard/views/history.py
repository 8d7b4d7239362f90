"""History: any series over commits, several GPU types and variants together, with its changes and their commands."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import address, parts, queries
from dashboard.charts import lines
from dashboard.plot import Selected
from dashboard.seriesview import lines_of
from dashboard.source import Judged
from dashboard.text import cut, short
from dashboard.theme import verdict_signed
from harness.errors import PairbenchError
from harness.history import query
from harness.history.query import SeriesKey
from harness.metric_names import METRICS
from harness.regress.attribution import reproduce
from harness.regress.present import change, what_changed

MOST = 8
#: Commits shown unless the address says which.
NEWEST = 200


def render(view: parts.View) -> None:
    """The page."""
    chosen = _chosen(view)
    if not chosen:
        return
    with st.container(horizontal=True):
        normalised = address.switch("Relative to its start", "relative", len({row["gpu"] for _, row in chosen}) > 1,
                                    help="Each line over the median of its first five points.")  # fmt: skip
        every = address.switch("Points that are not judged", "all", True,
                               help="Dirty trees, other branches, merged side branches and orphans.")  # fmt: skip
    keys = [key for key, _ in chosen]
    judged = view.source.judge()
    words = " ".join(key.text for key in keys)
    found = view.source.recent(
        f"lines {words} {every} {judged.whole}", lambda history: lines_of(history, judged, chosen, every)
    )
    commits = lines.axis(found)
    if not commits:
        parts.nothing("No point to show.", "What was measured here is not judged (dirty trees, other branches).",
                      "Turn on *Points that are not judged*.")  # fmt: skip
        return
    options = [short(point["commit"]) for point in commits]
    shown = address.span("Commits", options, newest=NEWEST)
    figure = lines.history(found, normalised, shown)
    event = parts.figure(figure, "history", words, selects=True)
    _zoom(event, options)
    if len(commits) == 1:
        st.info("One commit so far: there is a level, and no change to be seen. Measure another commit with the "
                "command below.", icon=":material/looks_one:")  # fmt: skip
    _point(event, found)
    _changes(found, judged)
    _points(found)


def _chosen(view: parts.View) -> list[tuple[SeriesKey, Any]]:
    """The series that the address names: one by its word, or all that fit the filters."""
    facets = view.source.once("facets", query.facets)
    word = address.get("series")
    if word is not None:
        try:
            key = query.resolve_series(view.history, word)
        except PairbenchError as err:
            parts.nothing("There is no such series.", "The address names one that is not in this history.",
                          "Choose by filters instead.")  # fmt: skip
            parts.plain(err)
        else:
            rows = query.series_list(view.history, technique=key.technique, gpu=key.gpu)
            row = next((r for r in rows if SeriesKey.of(r, key.metric) == key), None)
            parts.plain(key.text)
            st.button("Choose by filters instead", on_click=_by_filters, args=(key, row), icon=":material/tune:")
            return [(key, row or {"gpu": key.gpu, "workload": key.workload_id})]
    names = facets["technique"]
    if not names:
        return []
    columns = st.columns([2, 2, 2])
    with columns[0]:
        technique = address.choose("Technique", "technique", names, queries.first_measured(view.history, names))
        metric = address.choose("Metric", "metric", [n for n, m in METRICS.items() if m.judged], "latency",
                                show=lambda name: METRICS[name].title) or "latency"  # fmt: skip
    rows = query.series_list(view.history, technique=technique)
    if metric not in METRICS:
        parts.nothing("There is no such metric.", "Choose one of the list.", "")
        return []
    with columns[1]:
        workloads = list(dict.fromkeys(str(row["workload"]) for row in rows))
        workload = address.choose("Workload", "workload", workloads, workloads[0] if workloads else None)
        dtypes = sorted({row["dtype"] for row in rows if row["workload"] == workload})
        dtype = address.choose("dtype", "dtype", dtypes)
    with columns[2]:
        gpus = address.choose_several("GPU types", "gpu", sorted({row["gpu"] for row in rows}),
                                      help="None chosen: all of them.")  # fmt: skip
        variants = address.choose_several("Variants", "variant", sorted({row["variant"] for row in rows}),
                                          help="None chosen: baseline and optimized.")  # fmt: skip
    wanted = variants or ["baseline", "optimized"]
    if metric.startswith("speedup") and not variants:
        wanted = ["optimized"]
    fits: dict[str, Any] = {
        "technique": technique,
        "workload": workload,
        "dtype": dtype,
        "variant": wanted,
        "gpu": gpus,
    }
    found = queries.keys_of(view.history, fits, metric)
    if not found:
        have = [(key, row) for key, row in queries.keys_of(view.history, {"technique": technique}, metric)]
        parts.nothing(
            "No series fits these filters.",
            "Nothing that passed has this metric here; what was skipped, wrong or failed makes no point, and a gap is "
            "never a zero.",
            "Take filters away; the technique page says what happened instead." if have else
            "This technique has no such metric in the history. To measure it:",
            None if have else f"pairbench run {technique}" if technique in queries.declared() else "pairbench run",
            view,
        )  # fmt: skip
        return []
    if len(found) > MOST:
        st.caption(f"{len(found)} series fit; the first {MOST} are drawn. Filter to see others.")
    return found[:MOST]


def _by_filters(key: SeriesKey, row: Any) -> None:
    address.put("series", None)
    address.put("technique", key.technique)
    address.put("metric", None if key.metric == "latency" else key.metric)
    address.put("gpu", key.gpu)
    address.put("variant", key.variant)
    if row is not None:
        address.put("workload", str(row["workload"]))
        address.put("dtype", key.dtype)


def _zoom(event: Selected, options: list[str]) -> None:
    """A stretch dragged over the chart becomes the stretch in the address."""
    if not event["stretch"]:
        return
    ends = sorted(float(x) for x in event["stretch"])
    first, last = max(0, round(ends[0])), min(len(options) - 1, round(ends[-1]))
    if last > first and parts.newly("history box", (first, last, len(options))):
        address.put_both("from", options[first], "to", options[last] if last < len(options) - 1 else None)
        st.rerun()


def _point(event: Selected, found: list[lines.Line]) -> None:
    """The point that was selected, else the newest: its commit, and its command to copy."""
    point, line = None, None
    number, commit, dirty = [*event["point"], -1, "", ""][:3]
    if isinstance(number, int) and 0 <= number < len(found) and commit:
        line = found[number]
        point = next((p for p in line.points if p["commit"] == commit and bool(p["dirty"]) == bool(dirty)), None)
    if point is None:
        line = max((candidate for candidate in found if candidate.points), key=lambda item: item.points[-1]["rank"])
        point = line.points[-1]
        st.caption("The newest point (select another in the chart):")
    assert line is not None
    words = lines.say(line.metric, point["value"], point["unit"])
    parts.plain(f"{line.name}: {words} at {short(point['commit'])} {cut(point['subject'] or '')}")
    parts.command(reproduce(point))


def _changes(found: list[lines.Line], judged: Judged) -> None:
    rows = [
        {
            "change": verdict_signed(event["verdict"], bool(event.get("acknowledged"))),
            "series": line.name,
            "size": change(event),
            "commit": short(event["commit"]),
            "subject": event["subject"] or "",
            "side": event.get("side") or "",
            "what else changed": what_changed(event.get("changed")),
            "recovered at": short(event["recovered"]) if event.get("recovered") else "",
            "accepted": event.get("acknowledged") or "",
            "reproduce": event["reproduce"],
        }
        for line in found
        for event in line.events
    ]
    st.subheader("Changes", anchor="changes")
    if not judged.whole:
        st.caption("The series are still being judged: marks may be missing, and whose doing a change was.")
    if rows:
        parts.short(rows, "changes", "changes of these series")
    else:
        st.caption("None was found in these series.")


def _points(found: list[lines.Line]) -> None:
    with parts.unfolded("All points as a table, each with its command", "points") as seen:
        if seen:
            rows = [
                {
                    "series": line.name,
                    "commit": short(point["commit"]),
                    "subject": point["subject"] or "",
                    "date": point["date"] or point["first"],
                    "value": point["value"],
                    "low": point["low"],
                    "high": point["high"],
                    "unit": point["unit"],
                    "runs": point["n"],
                    "judged": "yes" if point["judged"] else "no",
                    "torch": point["torch"] or "",
                    "triton": point["triton"] or "",
                    "driver": point["driver"] or "",
                    "machine": point["machine"] or "",
                    "reproduce": reproduce(point),
                }
                for line in found
                for point in line.points
            ]
            parts.table(rows, "points")
