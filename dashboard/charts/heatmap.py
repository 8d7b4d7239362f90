"""The coverage of techniques on GPU types: speedup with its interval by colour and number, other states by sign."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dashboard.text import ago, cut, esc, hover, short
from dashboard.theme import LOOKS, SCALE_END, SPEED_SCALE, layout, look, on_colour, speed_colour

ROW_PX = 34


def coverage(rows: Sequence[Mapping[str, Any]], metric: str, ages: Mapping[str, float | None]) -> go.Figure:
    """The heat map.

    Args:
        rows: :func:`dashboard.queries.coverage`.
        metric: ``speedup`` or ``speedup_peer``.
        ages: seconds since a record's time, by that time.
    """
    names = list(dict.fromkeys(row["technique"] for row in rows))
    gpus = list(dict.fromkeys(sorted(row["gpu"] for row in rows)))
    place = {name: at for at, name in enumerate(names)}
    column = {name: at for at, name in enumerate(gpus)}
    fig = go.Figure()
    fig.add_trace(_cells(rows, metric, place, column))
    fig.add_traces(_numbers(rows, metric, place, column, ages))
    fig.add_traces(_signs(rows, metric, place, column, ages))
    height = 70 + ROW_PX * len(names)
    fig.update_layout(**layout(margin={"l": 10, "r": 10, "t": 50, "b": 10}, dragmode=False, height=height))
    fig.update_layout(showlegend=False, plot_bgcolor="rgba(0,0,0,0)")
    fig.update_xaxes(tickvals=list(range(len(gpus))), ticktext=[esc(cut(g, 24)) for g in gpus], side="top",
                     range=[-0.5, len(gpus) - 0.5], showgrid=False, zeroline=False, fixedrange=True)  # fmt: skip
    fig.update_yaxes(tickvals=list(range(len(names))), ticktext=[esc(cut(n, 26)) for n in names],
                     range=[len(names) - 0.5, -0.5], showgrid=False, zeroline=False, fixedrange=True,
                     automargin=True)  # fmt: skip
    return fig


def _cells(rows: Sequence[Mapping[str, Any]], metric: str, place: Any, column: Any) -> go.Heatmap:
    z: list[list[float | None]] = [[None] * len(column) for _ in place]
    for row in rows:
        if row[metric] and look(row["status"]) not in (LOOKS["wrong"], LOOKS["failed"]):
            z[place[row["technique"]]][column[row["gpu"]]] = math.log2(row[metric]["value"])
    return go.Heatmap(
        z=z, zmin=-SCALE_END, zmax=SCALE_END, colorscale=[list(stop) for stop in SPEED_SCALE], xgap=3, ygap=3,
        hoverinfo="skip", showscale=False,
    )  # fmt: skip


def words(row: Mapping[str, Any], age: float | None) -> str:
    """Everything about a cell, for its hover box."""
    lines = [f"{row['technique']} on {row['gpu']}: {row['status']}"]
    for name, title in (("speedup", "over baseline"), ("speedup_peer", "over best one-liner")):
        if row[name]:
            entry = row[name]
            count = entry["workloads"]
            lines.append(
                f"{entry['value']:.2f}× [{entry['low']:.2f}, {entry['high']:.2f}] {title}, {count} workload(s)"
            )
    if row.get("reason"):
        lines.append(row["reason"])
    if row["status"] != "not run":
        lines.append(", ".join(f"{count} {status}" for status, count in row["statuses"].items()))
        lines.append(f"commit {short(row['commit'])}" + (f", {ago(age)} ago" if age is not None else ""))
        if row["stale"]:
            lines.append(f"stale: {row['behind']} newer measured commit(s) on this GPU type")
    lines.append(f"pairbench run {row['technique']}")
    return hover(*lines)


def _numbers(
    rows: Sequence[Mapping[str, Any]], metric: str, place: Any, column: Any, ages: Mapping[str, float | None]
) -> list[go.Scatter]:
    """Numbers in black or white, whichever reads on the cell; these are also what a click meets."""
    found = []
    for ink in ("#000000", "#FFFFFF"):
        own = [r for r in rows if r[metric] and look(r["status"]) not in (LOOKS["wrong"], LOOKS["failed"])
               and on_colour(speed_colour(r[metric]["value"])) == ink]  # fmt: skip
        if own:
            found.append(
                go.Scatter(
                    x=[column[r["gpu"]] for r in own], y=[place[r["technique"]] for r in own], mode="markers+text",
                    text=[f"<b>{r[metric]['value']:.2f}×</b><br><span style='font-size:9px'>"
                          f"{r[metric]['low']:.2f}–{r[metric]['high']:.2f}</span>" for r in own],
                    textfont={"color": ink, "size": 12}, marker={"size": 30, "opacity": 0, "color": ink},
                    customdata=[[r["technique"], r["gpu"]] for r in own], showlegend=False,
                    hovertext=[words(r, ages.get(r["time"])) for r in own], hoverinfo="text",
                )
            )  # fmt: skip
    return found


def _signs(
    rows: Sequence[Mapping[str, Any]], metric: str, place: Any, column: Any, ages: Mapping[str, float | None]
) -> list[go.Scatter]:
    """A sign in every cell that is not simply passed: in the middle without a number, in the corner beside one."""
    groups: dict[str, list[tuple[float, float, Mapping[str, Any]]]] = {}
    for row in rows:
        shown = look(row["status"])
        numbered = bool(row[metric]) and shown not in (LOOKS["wrong"], LOOKS["failed"])
        at = column[row["gpu"]] + (0.38 if numbered else 0.0)
        if shown is not LOOKS["passed"]:
            groups.setdefault(shown.title, []).append((at, place[row["technique"]], row))
        elif not numbered:
            groups.setdefault("passed", []).append((at, place[row["technique"]], row))
        if row["stale"]:
            groups.setdefault("stale", []).append((column[row["gpu"]] - 0.38, place[row["technique"]], row))
    found = []
    for title, own in sorted(groups.items()):
        shown = LOOKS[title]
        found.append(
            go.Scatter(
                x=[x for x, _, _ in own], y=[y for _, y, _ in own], mode="markers", name=f"{shown.sign} {shown.title}",
                marker={"symbol": shown.symbol, "size": 11, "color": shown.colour,
                        "line": {"width": 2, "color": shown.colour}},
                customdata=[[r["technique"], r["gpu"]] for _, _, r in own],
                hovertext=[words(r, ages.get(r["time"])) for _, _, r in own], hoverinfo="text",
            )
        )  # fmt: skip
    return found
