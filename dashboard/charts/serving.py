"""Serve runs: throughput against latency, waiting times, and what the cache held over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from dashboard.charts.pair import looks
from dashboard.slo import pareto
from dashboard.text import cut, esc, hover
from dashboard.theme import DASHES, GREY, LINES, SYMBOLS, layout
from harness.metric_names import METRICS
from harness.tables import seconds

Rows = Sequence[Mapping[str, Any]]
#: Dimensions that say how much is asked of an engine, and nothing of what it serves.
LOAD: Final = ("request_rate", "rate", "requests", "max_concurrency", "concurrency", "batch", "time_scale")


def same_service(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What must be alike for points to be of one curve: all but the variant and the load. Another model, trace or cache
    is another service, whatever the workload is called."""
    dims = row["dims"] if isinstance(row["dims"], Mapping) else {}
    rest = sorted((name, str(value)) for name, value in dims.items() if name not in LOAD)
    return (*(str(row[name]) for name in ("technique", "gpu", "dtype", "ranks")), str(rest))


def _lines(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Name → the points of a line over its loads."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["variant"], *same_service(row)), []).append(row)
    found: dict[str, list[Mapping[str, Any]]] = {}
    for group in groups.values():
        names = {str(row["workload"]) for row in group}
        names = names if len(names) == 1 else {name.partition("[")[0] for name in names}
        words = [f"{group[0]['technique']} {group[0]['variant']}", *(names if len(names) == 1 else ()), group[0]["gpu"]]
        name = ", ".join(words)
        found[name if name not in found else f"{name}, {len(found) + 1}"] = group
    return found


def curves(rows: Rows, latency: str) -> go.Figure:
    """Output tokens a second against a latency quantile, a line a variant over its loads; the Pareto front of what
    serves the same joined."""
    own = [r for r in rows if r["m_output_rate"] and r[f"m_{latency}"]]
    found = _lines(own)
    fig = go.Figure()
    for name, (colour, symbol) in looks(list(found)).items():
        group = sorted(found[name], key=lambda r: r["m_output_rate"])
        fig.add_trace(
            go.Scatter(
                x=[r[f"m_{latency}"] for r in group], y=[r["m_output_rate"] for r in group], mode="lines+markers",
                name=esc(cut(name, 60)), line={"color": colour, "width": 1},
                marker={"color": colour, "symbol": symbol, "size": 8},
                hovertext=[hover(name, f"{r['workload']} {r['dtype']}", f"{r['m_output_rate']:.4g} tokens/s at "
                                 f"{METRICS[latency].title} {seconds(r[f'm_{latency}'])}", _load(r), r["reproduce"])
                           for r in group], hoverinfo="text",
            )
        )  # fmt: skip
    x: list[float | None] = []
    y: list[float | None] = []
    for service in dict.fromkeys(map(same_service, own)):
        spots = [(r["m_output_rate"], r[f"m_{latency}"]) for r in own if same_service(r) == service]
        front = [spots[at] for at in pareto(spots)]
        x += [*(wait for _, wait in front), None]
        y += [*(rate for rate, _ in front), None]
    if own:
        fig.add_trace(
            go.Scatter(
                x=x, y=y, mode="lines+markers", connectgaps=False,
                name="Pareto front", line={"color": GREY, "dash": "dot", "width": 2}, hoverinfo="skip",
                marker={"symbol": "circle-open", "size": 17, "color": GREY, "line": {"width": 2}},
            )
        )  # fmt: skip
    fig.update_layout(**layout(height=440))
    fig.update_xaxes(title=f"{METRICS[latency].title}, s (lower is better)", type="log", exponentformat="SI")
    fig.update_yaxes(title="output tokens/s (higher is better)", rangemode="tozero", exponentformat="SI")
    return fig


def several_loads(rows: Rows) -> bool:
    """Whether any line has more than one point."""
    return any(len(group) > 1 for group in _lines(rows).values())


def _load(row: Mapping[str, Any]) -> str:
    dims = row["dims"] if isinstance(row["dims"], Mapping) else {}
    return ", ".join(f"{name.replace('_', ' ')} {dims[name]:g}" if isinstance(dims[name], float) else
                     f"{name.replace('_', ' ')} {dims[name]}" for name in LOAD if name in dims)  # fmt: skip


def _names(records: Rows) -> list[str]:
    """Variant and workload of each record, and whatever else tells them apart."""
    more = [key for key in ("technique", "gpu", "dtype", "ranks") if len({record[key] for record in records}) > 1]
    found = []
    for record in records:
        tells = [f"{record[key]} ranks" if key == "ranks" else str(record[key]) for key in more]
        found.append(", ".join([record["variant"], record["workload"], *tells]))
    return found


def distributions(records: Rows, family: str, bound: float | None) -> go.Figure:
    """The share of requests (or of tokens, for ITL) that waited at most so long, from the quantiles kept."""
    fig = go.Figure()
    for at, (record, name) in enumerate(zip(records, _names(records), strict=True)):
        grid = (record.get("serve") or {}).get(family) or []
        if grid:
            fig.add_trace(
                go.Scatter(
                    x=[value for _, value in grid], y=[quantile for quantile, _ in grid], mode="lines+markers",
                    name=esc(cut(name, 50)),
                    line={"color": LINES[at % len(LINES)], "dash": DASHES[(at // len(LINES)) % len(DASHES)],
                          "width": 2},
                    marker={"symbol": SYMBOLS[at % len(SYMBOLS)], "size": 6},
                    hovertext=[hover(name, f"{q:.1%} waited at most {seconds(v)}", record.get("reproduce"))
                               for q, v in grid], hoverinfo="text",
                )
            )  # fmt: skip
    if bound is not None:
        fig.add_vline(x=bound, line={"color": GREY, "dash": "dash", "width": 1})
        # On a logarithmic axis the place of words is the logarithm's, and that of lines the value's.
        fig.add_annotation(x=math.log10(bound), y=1, yref="paper", yanchor="bottom", text="SLO", showarrow=False)
    fig.update_layout(**layout(height=340))
    fig.update_xaxes(title=f"{family.upper()}, s", type="log", exponentformat="SI")
    fig.update_yaxes(title="share", range=[0, 1.02], tickformat=".0%")
    return fig


def over_time(records: Rows, curve: str, title: str, share: bool) -> go.Figure:
    """A curve of a serve run over its seconds; each value holds until the next, the last until the run's end."""
    fig = go.Figure()
    for at, (record, name) in enumerate(zip(records, _names(records), strict=True)):
        serve = record.get("serve") or {}
        points = list(serve.get(curve) or [])
        if points:
            if (serve.get("span") or 0.0) > points[-1][0]:
                points.append([serve["span"], points[-1][1]])
            fig.add_trace(
                go.Scatter(
                    x=[t for t, _ in points], y=[v for _, v in points], mode="lines", name=esc(cut(name, 50)),
                    line={"color": LINES[at % len(LINES)], "dash": DASHES[(at // len(LINES)) % len(DASHES)],
                          "shape": "hv", "width": 2},
                    hovertext=[hover(name, f"{v:.1%} at {t:.2f} s" if share else f"{v:g} at {t:.2f} s",
                                     record.get("reproduce")) for t, v in points], hoverinfo="text",
                )
            )  # fmt: skip
    fig.update_layout(**layout(height=320))
    fig.update_xaxes(title="seconds into the run")
    fig.update_yaxes(title=title, rangemode="tozero", tickformat=".0%" if share else None)
    return fig


def goodputs(rows: Rows) -> go.Figure:
    """Goodput of each run between its two ends.

    Args:
        rows: ``name``, ``low``, ``high``, ``rate`` (requests/s that finished at all), ``reproduce``.
    """
    fig = go.Figure()
    names = [esc(cut(f"{at + 1}. {row['name']}", 60)) for at, row in enumerate(rows)]
    fig.add_trace(
        go.Bar(y=names, x=[r["rate"] for r in rows], orientation="h", name="finished at all", width=0.7,
               marker={"color": "rgba(127,127,127,0.3)", "pattern": {"shape": "/"}},
               hovertext=[hover(r["name"], f"{r['rate']:.3g} requests/s finished", r["reproduce"]) for r in rows],
               hoverinfo="text")
    )  # fmt: skip
    fig.add_trace(
        go.Bar(y=names, x=[r["low"] for r in rows], orientation="h", name="goodput, at least (bar: at most)",
               marker={"color": LINES[0]}, width=0.4,
               error_x={"type": "data", "symmetric": False, "array": [r["high"] - r["low"] for r in rows],
                        "arrayminus": [0.0 for _ in rows], "color": LINES[1], "thickness": 2},
               hovertext=[hover(r["name"], f"{r['low']:.3g} to {r['high']:.3g} requests/s meet the SLO", r["reproduce"])
                          for r in rows], hoverinfo="text")
    )  # fmt: skip
    fig.update_layout(**layout(height=150 + 34 * len(rows), barmode="overlay"))
    fig.update_xaxes(title="requests/s", rangemode="tozero")
    fig.update_yaxes(automargin=True, autorange="reversed")
    return fig
