"""Figures of one technique: speedups with intervals, the roofline, prediction, correctness over time, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dashboard.charts.lines import MOST_MARKED, SPARSE
from dashboard.text import cut, esc, hover, short
from dashboard.theme import GREY, LINES, SYMBOLS, layout
from harness.tables import amount, seconds, size

Rows = Sequence[Mapping[str, Any]]


def looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a symbol for each name, by place, so that they stay the same in all figures of a page."""
    return {name: (LINES[at % len(LINES)], SYMBOLS[at % len(SYMBOLS)]) for at, name in enumerate(names)}


def variant_looks(rows: Rows) -> dict[str, tuple[str, str]]:
    """The looks of variants: baseline and optimized are the same everywhere, whatever else is shown."""
    others = sorted({str(row["variant"]) for row in rows} - {"baseline", "optimized"})
    return looks(["baseline", "optimized", *others])


def label(row: Mapping[str, Any]) -> str:
    """A workload in a few words."""
    ranks = f" ×{row['ranks']}" if (row.get("ranks") or 1) > 1 else ""
    return cut(f"{row['workload']} {row['dtype']}{ranks}", 36)


def speedups(rows: Rows, metric: str = "speedup") -> go.Figure:
    """Speedup of each variant on each workload with its interval; the line at 1 is what it is measured against."""
    marks = variant_looks(rows)
    fig = go.Figure()
    for variant in marks:
        own = [r for r in rows if r["variant"] == variant and r[f"m_{metric}"] is not None]
        if not own:
            continue
        values = [r[f"m_{metric}"] for r in own]
        lows = [r[f"m_{metric}_low"] if r[f"m_{metric}_low"] is not None else r[f"m_{metric}"] for r in own]
        highs = [r[f"m_{metric}_high"] if r[f"m_{metric}_high"] is not None else r[f"m_{metric}"] for r in own]
        colour, symbol = marks[variant]
        fig.add_trace(
            go.Scatter(
                x=values, y=[esc(label(r)) for r in own], mode="markers", name=esc(variant),
                marker={"color": colour, "symbol": symbol, "size": 10},
                error_x={"type": "data", "symmetric": False,
                         "array": [high - v for high, v in zip(highs, values, strict=True)],
                         "arrayminus": [v - low for low, v in zip(lows, values, strict=True)], "color": colour},
                hovertext=[hover(f"{r['variant']} on {label(r)}: {v:.3f}× [{low:.3f}, {high:.3f}]",
                                 f"latency {seconds(r['m_latency'])}" if r["m_latency"] else None, r["reproduce"])
                           for r, v, low, high in zip(own, values, lows, highs, strict=True)],
                hoverinfo="text",
            )
        )  # fmt: skip
    fig.add_vline(x=1, line={"color": GREY, "dash": "dash", "width": 1})
    count = len({label(r) for r in rows})
    fig.update_layout(**layout(height=150 + 44 * count, scattermode="group"))
    fig.update_xaxes(title="speedup (logarithmic)", type="log", tickformat=".2~f", nticks=8)
    fig.update_yaxes(automargin=True, autorange="reversed")
    return fig


def roofline(rows: Rows, ceilings: Mapping[str, Any]) -> go.Figure:
    """Every variant as a point: FLOP rate against arithmetic intensity, under this machine's measured roofs.

    Only rows with FLOPs, bytes and a latency make points. Several ranks stand as one: all their work over the latency.
    """
    own = [r for r in rows if (r["work_flops"] or 0) > 0 and (r["work_bytes"] or 0) > 0 and r["m_latency"]]
    fig = go.Figure()
    marks = variant_looks(rows)
    spots = {id(r): (r["work_flops"] / r["work_bytes"], r["work_flops"] / r["m_latency"]) for r in own}
    roofs = [rate for rate in (ceilings.get("matmul") or {}).values() if rate]
    if own and ceilings.get("copy") and roofs:
        dtypes = {str(row["compute_dtype"] or row["dtype"]) for row in own}
        fig.add_traces(_roofs([x for x, _ in spots.values()], ceilings, dtypes))
    for variant, (colour, symbol) in marks.items():
        group = [r for r in own if r["variant"] == variant]
        if group:
            fig.add_trace(
                go.Scatter(
                    x=[spots[id(r)][0] for r in group], y=[spots[id(r)][1] for r in group], mode="markers",
                    name=esc(variant), marker={"color": colour, "symbol": symbol, "size": 10},
                    hovertext=[hover(f"{variant} on {label(r)}", f"{amount(spots[id(r)][1], 'FLOP/s')}, "
                                     f"{spots[id(r)][0]:.3g} FLOP/B", f"limit: {r['limit_by'] or 'not known'}",
                                     f"{r['floor_share']:.1%} of its floor" if r["floor_share"] is not None else None,
                                     r["reproduce"]) for r in group],
                    hoverinfo="text",
                )
            )  # fmt: skip
    fig.update_layout(**layout(height=380))
    fig.update_xaxes(title="arithmetic intensity, FLOP/B", type="log", exponentformat="power", dtick=1)
    fig.update_yaxes(title="FLOP/s", type="log", exponentformat="power", dtick=1, automargin=True)
    return fig


def _roofs(intensities: Sequence[float], ceilings: Mapping[str, Any], dtypes: set[str]) -> list[go.Scatter]:
    lines = []
    bandwidth = float(ceilings["copy"])
    peaks = {dtype: peak for dtype, peak in ceilings["matmul"].items() if peak}
    # The roofs of the dtypes that were computed in; all of them where none of those was measured.
    peaks = {dtype: peak for dtype, peak in peaks.items() if dtype in dtypes} or peaks
    ridges = [peak / bandwidth for peak in peaks.values()]
    low, high = min(*intensities, *ridges) / 3, max(*intensities, *ridges) * 3
    for at, (dtype, peak) in enumerate(sorted(peaks.items(), key=lambda item: -item[1])[:4]):
        ridge = peak / bandwidth
        text = hover(f"{dtype}: {amount(peak, 'FLOP/s')} measured", f"copy {amount(bandwidth, 'B/s')} measured")
        lines.append(
            go.Scatter(
                x=[low, ridge, high], y=[low * bandwidth, peak, peak], mode="lines", name=f"roof {esc(dtype)}",
                line={"color": GREY, "dash": ("solid", "dash", "dot", "dashdot")[at], "width": 1.5},
                hovertext=[text] * 3, hoverinfo="text",
            )
        )  # fmt: skip
    return lines


def predicted(rows: Rows) -> go.Figure:
    """Predicted speedup by the pair's own count beside the measured one, a pair of points a workload."""
    own = [r for r in rows if r["predicted_speedup"] and r["m_speedup"]]
    fig = go.Figure()
    for name, column, (colour, symbol) in (
        ("predicted", "predicted_speedup", (GREY, "diamond-open")),
        ("measured", "m_speedup", (LINES[0], "circle")),
    ):
        fig.add_trace(
            go.Scatter(
                x=[r[column] for r in own], y=[esc(label(r)) for r in own], mode="markers", name=name,
                marker={"color": colour, "symbol": symbol, "size": 11},
                hovertext=[hover(f"{label(r)}: {name} {r[column]:.2f}×",
                                 f"{r['m_speedup'] / r['predicted_speedup']:.0%} of the prediction", r["reproduce"])
                           for r in own], hoverinfo="text",
            )
        )  # fmt: skip
    for r in own:
        fig.add_shape(type="line", x0=r["predicted_speedup"], x1=r["m_speedup"], y0=esc(label(r)), y1=esc(label(r)),
                      line={"color": GREY, "width": 1}, layer="below")  # fmt: skip
    fig.update_layout(**layout(height=150 + 36 * len(own)))
    fig.update_xaxes(title="speedup over baseline", rangemode="tozero")
    fig.update_yaxes(automargin=True, autorange="reversed")
    return fig


def correctness(rows: Rows) -> go.Figure:
    """Error over its bound, by commit; a check that failed is a cross. What was not checked has no point."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["error"] is not None:
            groups.setdefault(f"{row['variant']}, {row['workload']}", []).append(row)
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    at = {commit: n for n, commit in enumerate(commits)}
    fig = go.Figure()
    sparse = SPARSE if sum(map(len, groups.values())) > MOST_MARKED else 0
    for (name, own), (colour, symbol) in zip(groups.items(), looks(list(groups)).values(), strict=True):
        shares = [r["error"] / r["bound"] if r["bound"] else (0.0 if not r["error"] else None) for r in own]
        fig.add_trace(
            go.Scatter(
                x=[at[r["commit"]] for r in own], y=shares, mode="lines+markers", name=esc(cut(name, 40)),
                line={"color": colour, "width": 1},
                marker={"color": colour, "size": 7, "symbol": [symbol if r["passed"] else "x" for r in own],
                        "maxdisplayed": sparse},
                hovertext=[hover(name, f"error {r['error']:.3g}, bound {r['bound']:.3g} ({r['rule']})" if r["bound"]
                                 is not None else f"error {r['error']:.3g}", "passed" if r["passed"] else "WRONG",
                                 f"{short(r['commit'])} {r['subject'] or ''}") for r in own],
                hoverinfo="text",
            )
        )  # fmt: skip
        wrong = [(at[r["commit"]], share) for r, share in zip(own, shares, strict=True) if not r["passed"]]
        if wrong and sparse:
            fig.add_trace(
                go.Scatter(x=[x for x, _ in wrong], y=[y for _, y in wrong], mode="markers", name="wrong",
                           marker={"color": colour, "size": 7, "symbol": "x"}, showlegend=False, hoverinfo="skip")
            )  # fmt: skip
    fig.add_hline(y=1, line={"color": LINES[3], "dash": "dash", "width": 1}, annotation_text="bound")
    fig.update_layout(**layout(height=340))
    fig.update_xaxes(title="commits, oldest first", tickvals=_ticks(len(commits)),
                     ticktext=[esc(short(commits[n])[:7]) for n in _ticks(len(commits))])  # fmt: skip
    fig.update_yaxes(title="error over its bound", rangemode="tozero")
    return fig


def _ticks(count: int, wanted: int = 6) -> list[int]:
    return list(range(0, count, max(1, count // wanted)))


def bars(rows: Rows, column: str, title: str, bytes_: bool = False) -> go.Figure:
    """A bar a variant and workload; what was not measured has none, which is not zero."""
    variants = list(variant_looks(rows))
    fig = go.Figure()
    say = size if bytes_ else seconds
    scale = 2.0**20 if bytes_ else 1.0
    for at, variant in enumerate(variants):
        own = [r for r in rows if r["variant"] == variant and r[column] is not None]
        if own:
            fig.add_trace(
                go.Bar(
                    y=[esc(label(r)) for r in own], x=[r[column] / scale for r in own], name=esc(variant),
                    orientation="h", marker={"color": LINES[at % len(LINES)],
                                             "pattern": {"shape": ("", "/", ".", "x", "-", "|", "+")[at % 7]}},
                    hovertext=[hover(f"{variant} on {label(r)}: {say(r[column])}", r["reproduce"]) for r in own],
                    hoverinfo="text",
                )
            )  # fmt: skip
    count = len({label(r) for r in rows})
    fig.update_layout(**layout(height=150 + 18 * count * max(1, len(variants)), barmode="group"))
    fig.update_xaxes(title=title, rangemode="tozero")
    fig.update_yaxes(automargin=True, autorange="reversed")
    return fig
