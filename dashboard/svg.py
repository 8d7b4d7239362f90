"""Small line charts as inline SVG, for the page that opens without Python, scripts or a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dashboard.charts.lines import Line, axis, say
from dashboard.text import cut, esc, short
from dashboard.theme import LINES, VERDICTS
from harness.regress.attribution import reproduce
from harness.regress.present import change

WIDTH: Final = 340
HEIGHT: Final = 120
PAD: Final = 8
#: Signs of changes as paths around the origin.
SHAPES: Final = {
    "regressed": "M-6,-5 L6,-5 L0,6 Z",
    "improved": "M-6,5 L6,5 L0,-6 Z",
    "acknowledged": "M0,-7 L2,-2 L7,-2 L3,1 L5,6 L0,3 L-5,6 L-3,1 L-7,-2 L-2,-2 Z",
}
DASHES: Final = ("", "6 3", "2 3")


def chart(lines: Sequence[Line], most: int = 160) -> str:
    """The lines over their newest ``most`` commits, evenly spaced; gaps stay gaps. Hover says commit and command."""
    commits = axis(lines)[-most:]
    place = {str(point["commit"]): at for at, point in enumerate(commits)}
    kept = [[point for point in line.points if str(point["commit"]) in place] for line in lines]
    ends = [value for points in kept for point in points for value in _ends(point)]
    if not ends:
        return "<p class='none'>no point</p>"
    low, high = min(ends), max(ends)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def x(commit: Any) -> float:
        return PAD + place[str(commit)] * (WIDTH - 2 * PAD) / max(1, len(commits) - 1)

    def y(value: float) -> float:
        return HEIGHT - PAD - (value - low) / (high - low) * (HEIGHT - 2 * PAD)

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{esc(_label(lines))}'>"]
    for at, (line, points) in enumerate(zip(lines, kept, strict=True)):
        colour = LINES[at % len(LINES)]
        parts.append(_path(points, x, y, place, colour, DASHES[at % len(DASHES)]))
        parts += [_point(line, point, x, y, colour, at) for point in points]
        parts += [_event(line, event, points, x, y) for event in line.events if str(event["commit"]) in place]
    return "".join([*parts, "</svg>", _legend(lines, kept, low, high)])


def _ends(point: Mapping[str, Any]) -> list[float]:
    return [value for value in (point["value"], point["low"], point["high"]) if value is not None]


def _label(lines: Sequence[Line]) -> str:
    return "; ".join(f"{line.name}: {len(line.points)} points" for line in lines)


def _path(points: Sequence[Mapping[str, Any]], x: Any, y: Any, place: Mapping[str, int], colour: str, dash: str) -> str:
    steps, previous = [], None
    for point in points:
        at = place[str(point["commit"])]
        joined = previous is not None and at - previous <= max(1, len(place) // 40)
        steps.append(f"{'L' if joined else 'M'}{x(point['commit']):.1f},{y(point['value']):.1f}")
        previous = at
    return f"<path d='{''.join(steps)}' fill='none' stroke='{colour}' stroke-dasharray='{dash}'/>"


def _point(line: Line, point: Mapping[str, Any], x: Any, y: Any, colour: str, number: int) -> str:
    left, top = x(point["commit"]), y(point["value"])
    bar = ""
    if point["low"] is not None and point["high"] is not None:
        bar = f"<path d='M{left:.1f},{y(point['low']):.1f}V{y(point['high']):.1f}' stroke='{colour}' opacity='.5'/>"
    fill = colour if point["judged"] else "none"
    words = (
        f"{line.name}: {say(line.metric, point['value'], point['unit'])}, {point['n']} run(s)\n"
        f"{short(point['commit'])} {cut(point['subject'] or '')}\n{reproduce(dict(point))}"
    )
    shape, mark = (
        ("circle", f"cx='{left:.1f}' cy='{top:.1f}' r='2.2'")
        if number % 2 == 0
        else ("rect", f"x='{left - 2:.1f}' y='{top - 2:.1f}' width='4' height='4'")
    )
    return f"{bar}<{shape} {mark} fill='{fill}' stroke='{colour}'><title>{esc(words)}</title></{shape}>"


def _event(line: Line, event: Mapping[str, Any], points: Sequence[Mapping[str, Any]], x: Any, y: Any) -> str:
    point = next((point for point in points if point["commit"] == event["commit"]), None)
    if point is None:
        return ""
    kind = "acknowledged" if event.get("acknowledged") else str(event["verdict"])
    words = f"{kind} {change(event)} at {short(event['commit'])} {cut(event['subject'] or '')}\n{event['reproduce']}"
    return (
        f"<path class='event' d='{SHAPES[kind]}' transform='translate({x(event['commit']):.1f},"
        f"{y(point['value']) - 10:.1f})' fill='{VERDICTS[kind].colour}'><title>{esc(words)}</title></path>"
    )


def _legend(lines: Sequence[Line], kept: Sequence[Sequence[Mapping[str, Any]]], low: float, high: float) -> str:
    items = []
    for at, (line, points) in enumerate(zip(lines, kept, strict=True)):
        if points:
            newest = points[-1]
            sign = "●" if at % 2 == 0 else "■"
            items.append(
                f"<span style='color:{LINES[at % len(LINES)]}'>{sign}</span> {esc(line.name)} "
                f"{esc(say(line.metric, newest['value'], newest['unit']))}"
            )
    scale = f"{say(lines[0].metric, low)} to {say(lines[0].metric, high)}" if lines else ""
    return f"<p class='key'>{' &nbsp; '.join(items)}<br><small>axis from {esc(scale)}</small></p>"
