"""Series over commits: intervals, gaps, changes, stack changes, and what each point takes to be measured again.

Figures are plain values as Plotly's script reads them: thousands of points would be checked one by one otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dashboard.queries import STACK
from dashboard.text import cut, esc, hover, short
from dashboard.theme import DASHES, GREY, LINES, SYMBOLS, VERDICTS, layout
from harness.metric_names import METRICS
from harness.regress.attribution import reproduce
from harness.regress.present import change
from harness.tables import amount, seconds, size

Point = dict[str, Any]
Trace = dict[str, Any]
#: Points in one figure that all have a mark of their own; each is a node of the browser's.
MOST_MARKED = 500
#: Marks on a line of more, so that lines differ by more than colour.
SPARSE = 24


@dataclass
class Line:
    """One series to draw: its name, its points in commit order, its changes (as verdicts hold them)."""

    name: str
    points: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    metric: str = "latency"


def say(metric: str, value: float, unit: str | None = None) -> str:
    """A value in units that a person reads."""
    plain = METRICS[metric].unit
    if plain == "s":
        return seconds(value)
    if plain == "B":
        return size(value)
    return f"{value:.3f}×" if metric.startswith("speedup") else amount(value, unit or plain)


def axis(lines: Sequence[Line]) -> list[Point]:
    """One point for each commit that any line has, in commit order."""
    found: dict[tuple[int, str], Point] = {}
    for line in lines:
        for point in line.points:
            found.setdefault((point["rank"], str(point["commit"])), point)
    return [found[key] for key in sorted(found)]


def history(lines: Sequence[Line], normalised: bool, shown: tuple[int, int] | None = None) -> dict[str, Any]:
    """The lines over commits, evenly spaced, as ``data`` and ``layout``.

    Args:
        normalised: each line over the median of its own first five judged points.
        shown: first and last place on the axis to look at.
    """
    commits = axis(lines)
    place = {str(point["commit"]): at for at, point in enumerate(commits)}
    first, last = shown or (0, len(commits) - 1)
    traces: list[Trace] = []
    shapes: list[dict[str, Any]] = []
    stretch = [[p for p in line.points if first <= place[str(p["commit"])] <= last] for line in lines]
    every = sum(map(len, stretch)) <= MOST_MARKED
    for at, (line, inside) in enumerate(zip(lines, stretch, strict=True)):
        look = (LINES[at % len(LINES)], SYMBOLS[at % len(SYMBOLS)], DASHES[(at // len(LINES)) % len(DASHES)])
        scale = _scale(line.points) if normalised else 1.0
        traces += _line(line, inside, place, look, scale, at, len(commits), every)
        traces += _changes(line, place, scale, (first, last))
    for at, words in stack_changes(lines, place):
        if first <= at <= last:
            shapes.append({"type": "line", "x0": at - 0.5, "x1": at - 0.5, "y0": 0, "y1": 1, "yref": "y domain",
                           "line": {"color": GREY, "dash": "dot", "width": 1}})  # fmt: skip
            traces.append(_stack_mark(at - 0.5, words))
    better = METRICS[lines[0].metric].better if lines else "lower"
    title = METRICS[lines[0].metric].title if lines else ""
    unit = "relative to its start" if normalised else _unit(lines)
    plain = METRICS[lines[0].metric].unit if lines and not normalised else ""
    # 200µs and 22ms, not 0.0002 and 0.022.
    said = {"tickformat": "~s", "ticksuffix": plain} if plain in ("s", "B") else {"exponentformat": "SI"}
    ticks = list(range(first, last + 1, max(1, (last - first + 1) // 8)))
    return {
        "data": traces,
        # A drag selects only where the button for it was pressed: a finger on a phone scrolls the page.
        "layout": layout(
            height=480, dragmode=False, selectdirection="h", clickmode="event+select", shapes=shapes,
            xaxis={
                "title": {"text": "commits, oldest first"}, "range": [first - 0.7, last + 0.7], "tickvals": ticks,
                "ticktext": [esc(short(commits[n]["commit"])[:7]) for n in ticks], "showgrid": False,
                "fixedrange": True,
            },
            yaxis={
                "title": {"text": f"{esc(title)}, {esc(unit)} ({better} is better)"}, "automargin": True,
                **said,
            },
            # The marks of stack changes stand at the upper edge, whatever the values are.
            yaxis2={"overlaying": "y", "range": [0, 1.02], "visible": False, "fixedrange": True},
        ),
    }  # fmt: skip


def _unit(lines: Sequence[Line]) -> str:
    return next((str(point["unit"]) for line in lines for point in line.points), "")


def _scale(points: Sequence[Point]) -> float:
    values = sorted(p["value"] for p in [p for p in points if p["judged"]][:5] or points[:5])
    return float(values[len(values) // 2]) if values and values[len(values) // 2] > 0 else 1.0


def point_hover(line: Line, point: Point) -> str:
    """What the box over a point says, its command last."""
    low, high = point["low"], point["high"]
    spread = "" if low is None else f" [{say(line.metric, low)}, {say(line.metric, high)}]"
    marks = [] if point["judged"] else [f"not judged: {'dirty tree' if point['dirty'] else point['standing']}"]
    return hover(
        line.name,
        f"{say(line.metric, point['value'], point['unit'])}{spread}, {point['n']} run(s)",
        f"{short(point['commit'])} {point['subject'] or ''}",
        point["date"] or point["first"],
        " ".join(f"{name} {point[name]}" for name in ("torch", "triton", "driver") if point.get(name)),
        *marks,
        reproduce(point),
    )


def _line(
    line: Line,
    points: Sequence[Point],
    place: Mapping[str, int],
    look: tuple[str, str, str],
    scale: float,
    number: int,
    width: int,
    every: bool,
) -> list[Trace]:
    """A line, its intervals and its marks; without ``every`` intervals are one path, and marks are sparse but for the
    points that a line alone would not show: those that are not judged, and those without a neighbour."""
    colour, symbol, dash = look
    x: list[float | None] = []
    y: list[float | None] = []
    up: list[float] = []
    down: list[float] = []
    texts: list[str] = []
    marks: list[str] = []
    custom: list[list[Any]] = []
    previous: int | None = None
    for point in points:
        at = place[str(point["commit"])]
        # Where other lines have commits and this one has none there is a gap, and the line says so by breaking.
        if previous is not None and at - previous > max(1, width // 60):
            x.append(at - 0.5)
            y.append(None)
            up.append(0.0)
            down.append(0.0)
            texts.append("")
            marks.append(symbol)
            custom.append([number, "", ""])
        previous = at
        value = point["value"]
        x.append(at)
        y.append(value / scale)
        up.append(((point["high"] if point["high"] is not None else value) - value) / scale)
        down.append((value - (point["low"] if point["low"] is not None else value)) / scale)
        texts.append(point_hover(line, point))
        marks.append(symbol if point["judged"] else f"{symbol}-open")
        custom.append([number, str(point["commit"]), "dirty" if point["dirty"] else ""])
    few = len(points) <= 150
    same = set(marks) <= {symbol}
    main: Trace = {
        "type": "scatter", "x": x, "y": y, "mode": "lines+markers", "name": esc(cut(line.name, 70)),
        "connectgaps": False, "customdata": custom, "line": {"color": colour, "width": 1, "dash": dash},
        "marker": {"color": colour, "symbol": symbol if same else marks, "size": 7 if few else 4},
        "hovertext": texts, "hoverinfo": "text", "legendgroup": str(number),
    }  # fmt: skip
    if every:
        main["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": colour,
                           "thickness": 1 if few else 0.6, "width": 2 if few else 0}  # fmt: skip
        return [main]
    main["marker"] |= {"maxdisplayed": SPARSE, "size": 6}
    more: Trace = {"type": "scatter", "legendgroup": str(number), "showlegend": False, "hoverinfo": "skip"}
    ends = [end for v, high, low in zip(y, up, down, strict=True) if v is not None for end in (v - low, v + high, None)]
    bars: Trace = {
        "x": [end for at, v in zip(x, y, strict=True) if v is not None for end in (at, at, None)], "y": ends,
        "mode": "lines", "name": "intervals", "line": {"color": colour, "width": 0.6, "simplify": False},
        "connectgaps": False, **more,
    }  # fmt: skip
    alone = [at for at in range(len(y)) if y[at] is not None and (marks[at] != symbol or _alone(y, at))]
    kept: Trace = {
        "x": [x[at] for at in alone], "y": [y[at] for at in alone], "mode": "markers", "name": "marks",
        "marker": {"color": colour, "symbol": [marks[at] for at in alone], "size": 4}, **more,
    }  # fmt: skip
    return [main, bars, kept] if alone else [main, bars]


def _alone(y: Sequence[float | None], at: int) -> bool:
    """Whether a point has no neighbour that a line would join it with."""
    return all(not 0 <= near < len(y) or y[near] is None for near in (at - 1, at + 1))


def _changes(line: Line, place: Mapping[str, int], scale: float, shown: tuple[int, int]) -> list[Trace]:
    by_commit = {str(point["commit"]): point for point in line.points}
    groups: dict[str, list[tuple[int, float, str]]] = {}
    for event in line.events:
        point = by_commit.get(str(event["commit"]))
        if point is None or not shown[0] <= place[str(event["commit"])] <= shown[1]:
            continue
        kind = "acknowledged" if event.get("acknowledged") else str(event["verdict"])
        text = hover(
            f"{event['kind']}: {event['verdict']} {change(event)}",
            f"accepted: {event['acknowledged']}" if event.get("acknowledged") else None,
            f"{short(event['commit'])} {event['subject'] or ''}",
            f"recovered at {short(event['recovered'])}" if event.get("recovered") else None,
            f"side: {event['side']}" if event.get("side") else None,
            event["reproduce"],
        )
        groups.setdefault(kind, []).append((place[str(event["commit"])], point["value"] / scale, text))
    return [
        {
            "type": "scatter", "x": [x for x, _, _ in found], "y": [y for _, y, _ in found], "mode": "markers",
            "showlegend": False,
            "marker": {"symbol": VERDICTS[kind].symbol, "size": 16, "color": VERDICTS[kind].colour,
                       "line": {"width": 1, "color": "#FFFFFF"}},
            "hovertext": [text for _, _, text in found], "hoverinfo": "text", "name": VERDICTS[kind].title,
        }
        for kind, found in groups.items()
    ]  # fmt: skip


def stack_changes(lines: Sequence[Line], place: Mapping[str, int]) -> list[tuple[int, str]]:
    """Where torch, Triton, CUDA, driver, machine or power limit differ from the point before, in words."""
    found: dict[int, dict[str, None]] = {}
    for line in lines:
        for old, new in zip(line.points, line.points[1:], strict=False):
            for name in STACK:
                if old.get(name) != new.get(name):
                    words = f"{name.removesuffix('_w').replace('_', ' ')} {old.get(name)} → {new.get(name)}"
                    found.setdefault(place[str(new["commit"])], {})[words] = None
    return [(at, "; ".join(words)) for at, words in sorted(found.items())]


def _stack_mark(at: float, words: str) -> Trace:
    """A mark on the axis that carries the words of a stack change."""
    return {
        "type": "scatter", "x": [at], "y": [1.0], "yaxis": "y2", "mode": "markers", "showlegend": False,
        "name": "stack", "marker": {"symbol": "line-ns-open", "size": 12, "color": GREY, "line": {"width": 2}},
        "hovertext": [hover("stack change", words)], "hoverinfo": "text", "customdata": [[-1, "", ""]],
    }  # fmt: skip
