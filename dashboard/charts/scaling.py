"""Speed and memory over the number of ranks, beside the ideal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dashboard.charts.pair import looks
from dashboard.text import cut, esc, hover
from dashboard.theme import GREY, layout

Rows = Sequence[Mapping[str, Any]]
Value = Callable[[Mapping[str, Any]], float | None]


def group_of(row: Mapping[str, Any]) -> str:
    """What stays the same while ranks change, in words."""
    return f"{row['variant']}, {row['group']} {row['dtype']}, {row['gpu']}"


def by_ranks(
    rows: Rows, value: Value, title: str, say: Callable[[float], str], ideal: float | None = None, log: bool = False
) -> go.Figure:
    """A line a group over its numbers of ranks; a number of ranks that was not measured has no point.

    Args:
        ideal: the power of the ranks that the ideal follows from each group's fewest ranks: 1 for throughput, −1 for
            the time of a fixed problem, 0 for what should stay; None draws no ideal.
    """
    groups: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if value(row) is not None:
            groups.setdefault(group_of(row), {}).setdefault(int(row["ranks"]), []).append(row)
    fig = go.Figure()
    drawn = False
    for name, (colour, symbol) in looks(list(groups)).items():
        points = [(ranks, found[0], float(value(found[0]) or 0.0)) for ranks, found in sorted(groups[name].items())]
        fig.add_trace(
            go.Scatter(
                x=[n for n, _, _ in points], y=[v for _, _, v in points], mode="lines+markers", name=esc(cut(name, 60)),
                line={"color": colour, "width": 2}, marker={"color": colour, "symbol": symbol, "size": 9},
                hovertext=[hover(name, f"{n} ranks: {say(v)}", row["reproduce"]) for n, row, v in points],
                hoverinfo="text",
            )
        )  # fmt: skip
        if ideal is not None and len(points) > 1:
            first, _, start = points[0]
            fig.add_trace(
                go.Scatter(
                    x=[n for n, _, _ in points], y=[start * (n / first) ** ideal for n, _, _ in points], mode="lines",
                    name="ideal", showlegend=not drawn, line={"color": GREY, "dash": "dot", "width": 1},
                    hovertext=[hover(f"ideal of {name}", f"{n} ranks: {say(start * (n / first) ** ideal)}")
                               for n, _, _ in points], hoverinfo="text",
                )
            )  # fmt: skip
            drawn = True
    ranks = sorted({int(row["ranks"]) for row in rows})
    fig.update_layout(**layout(height=380))
    fig.update_xaxes(title="ranks", type="log", tickvals=ranks, ticktext=[str(n) for n in ranks])
    fig.update_yaxes(title=title, type="log" if log else "linear", rangemode=None if log else "tozero",
                     exponentformat="SI")  # fmt: skip
    return fig


def bubbles(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Bubble measured beside formula.

    Args:
        rows: ``name``, ``measured``, ``formula``, ``reproduce``.
    """
    fig = go.Figure()
    for title, key, colour, pattern in (("formula", "formula", GREY, "/"), ("measured", "measured", "#0072B2", "")):
        fig.add_trace(
            go.Bar(
                y=[esc(cut(row["name"], 60)) for row in rows], x=[row[key] for row in rows], orientation="h",
                name=title,
                marker={"color": colour, "pattern": {"shape": pattern}},
                hovertext=[hover(row["name"], f"{title} {row[key]:.1%}" if row[key] is not None else title,
                                 row["reproduce"]) for row in rows], hoverinfo="text",
            )
        )  # fmt: skip
    fig.update_layout(**layout(height=150 + 50 * len(rows), barmode="group"))
    fig.update_xaxes(title="share of the step that stages wait", tickformat=".0%", rangemode="tozero")
    fig.update_yaxes(automargin=True, autorange="reversed")
    return fig
