"""Two selections side by side: a bar for each series, B over A."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dashboard.text import cut, esc, hover
from dashboard.theme import GREY, VERDICTS, layout
from harness.regress.present import change

PATTERNS = {"regressed": "/", "improved": "", "unchanged": ".", "inconclusive": "x", "too few runs": "-"}


def diverging(rows: Sequence[Mapping[str, Any]], most: int) -> go.Figure:
    """Bars of B over A in percent, the largest change at the top; the colour and pattern say whether that is good.

    Args:
        rows: ``series`` of :func:`harness.regress.compare.compare` with a ratio, the largest change first.
    """
    shown = [row for row in rows if row["ratio"] is not None][:most]
    names = [_name(row, at) for at, row in enumerate(shown)]
    fig = go.Figure()
    for verdict, look in VERDICTS.items():
        own = [(name, row) for name, row in zip(names, shown, strict=True) if row["verdict"] == verdict]
        if not own:
            continue
        fig.add_trace(
            go.Bar(
                y=[name for name, _ in own], x=[(r["ratio"] - 1) * 100 for _, r in own], orientation="h",
                name=f"{look.sign} {verdict}",
                marker={"color": look.colour, "pattern": {"shape": PATTERNS.get(verdict, "")}},
                error_x={"type": "data", "symmetric": False, "color": GREY,
                         "array": [((r["ratio_high"] or r["ratio"]) - r["ratio"]) * 100 for _, r in own],
                         "arrayminus": [(r["ratio"] - (r["ratio_low"] or r["ratio"])) * 100 for _, r in own]},
                hovertext=[hover(f"{r['technique']} {r['variant']} {r['workload']} {r['metric']} {r['gpu']}",
                                 change(r, ("ratio", "ratio_low", "ratio_high")), f"{verdict}: {r['reason']}",
                                 f"A {r['a']['value']:.4g} {r['unit']} (n={r['a']['n']})",
                                 f"B {r['b']['value']:.4g} {r['unit']} (n={r['b']['n']})",
                                 f"pairbench run {r['technique']} --workload {r['workload']}") for _, r in own],
                hoverinfo="text",
            )
        )  # fmt: skip
    fig.update_layout(**layout(height=140 + 22 * len(shown), barmode="overlay", bargap=0.25))
    fig.update_xaxes(title="B over A, %", zeroline=True, zerolinecolor=GREY, ticksuffix=" %")
    fig.update_yaxes(automargin=True, categoryorder="array", categoryarray=list(reversed(names)), tickfont={"size": 10})
    return fig


def _name(row: Mapping[str, Any], at: int) -> str:
    """A name that no other bar has: bars of one name would be added up."""
    text = cut(f"{row['technique']} {row['variant']} {row['workload']} {row['metric']} {row['gpu']}", 60)
    return esc(f"{at + 1}. {text}")
