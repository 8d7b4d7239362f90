"""Looks: Okabe and Ito's colours, which all kinds of colour-blind eyes tell apart, and a shape beside each of them.

Sources: M. Okabe and K. Ito, "Color Universal Design", 2008. Text on a colour is black or white, whichever has the
larger contrast (WCAG 2.1, section 1.4.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY: Final = "#7F7F7F"
#: For lines, in the order of use: yellow cannot be seen on white, nor black on a dark page.
LINES: Final = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, GREY)
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon", "hexagon")
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Look:
    """How a state looks: a Plotly symbol, the like in text, a colour, the words, and what it means."""

    symbol: str
    sign: str
    colour: str
    title: str
    means: str


LOOKS: Final = {
    "passed": Look("circle", "●", GREEN, "passed", "right, and measured"),
    "unsettled": Look("diamond-open", "◇", ORANGE, "unsettled", "right, but the machine was busy: no one's baseline"),
    "skipped": Look("circle-open", "○", GREY, "skipped", "not tried here, with a reason"),
    "not run": Look("line-ew-open", "–", GREY, "not run", "no record at all; a gap, never a zero"),
    "wrong": Look("x", "✖", VERMILLION, "wrong", "the result is outside its bound; no timing counts"),
    "failed": Look("triangle-down", "▼", PURPLE, "failed", "error, out of memory, timeout or implausible"),
    "stale": Look("square-open", "□", ORANGE, "stale", "newer commits were measured on this GPU type without it"),
}
FAILURES: Final = ("error", "oom", "timeout", "implausible")

VERDICTS: Final = {
    "regressed": Look("triangle-down", "▼", VERMILLION, "regressed", "worse, beyond noise"),
    "improved": Look("triangle-up", "▲", BLUE, "improved", "better, beyond noise"),
    "inconclusive": Look("diamond-open", "◇", ORANGE, "inconclusive", "may have moved: run it again"),
    "unchanged": Look("circle-open", "○", GREY, "unchanged", "within its noise"),
    "too few runs": Look("line-ew-open", "–", GREY, "too few runs", "not enough runs to judge"),
    "acknowledged": Look("star", "★", PURPLE, "acknowledged", "accepted, with a reason"),
}


def look(status: str | None) -> Look:
    """The look of a record's status."""
    if status in FAILURES:
        return LOOKS["failed"]
    return LOOKS.get(status or "not run", LOOKS["not run"])


def signed(status: str | None) -> str:
    """A status as text with its sign, for tables."""
    return f"{look(status).sign} {status or 'not run'}"


def verdict_signed(verdict: str, acknowledged: bool = False) -> str:
    """A verdict as text with its sign."""
    return f"{VERDICTS[verdict].sign} {verdict}" + (f" {VERDICTS['acknowledged'].sign}" if acknowledged else "")


#: Slower to faster: vermillion through near-white to blue, told apart by lightness alone as well.
SPEED_SCALE: Final = ((0.0, "#A63F00"), (0.25, "#E8905A"), (0.5, "#F2F2F2"), (0.75, "#7DB4DC"), (1.0, "#004E7C"))
#: Speedups of a quarter and of four take the ends of the scale.
SCALE_END: Final = 2.0


def speed_colour(speedup: float) -> str:
    """The colour of a speedup on :data:`SPEED_SCALE`."""
    place = min(1.0, max(0.0, (math.log2(speedup) / SCALE_END + 1) / 2))
    for (left, low), (right, high) in pairwise(SPEED_SCALE):
        if place <= right:
            share = (place - left) / (right - left)
            parts = [round(a + (b - a) * share) for a, b in zip(_rgb(low), _rgb(high), strict=True)]
            return "#" + "".join(f"{part:02x}" for part in parts)
    return SPEED_SCALE[-1][1]


def on_colour(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    channels = [c / 255 for c in _rgb(colour)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#FFFFFF"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def layout(**more: Any) -> dict[str, Any]:
    """What all figures share: room for a phone, the legend below, hover on the nearest point."""
    return {
        "margin": {"l": 10, "r": 10, "t": 30, "b": 10},
        "legend": {"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0.0, "x": 0, "title": None},
        "hovermode": "closest",
        "font": {"size": 12},
        "hoverlabel": {"align": "left"},
        **more,
    }


#: Plotly's own buttons that make sense here; nothing that sends data anywhere.
CONFIG: Final[dict[str, Any]] = {
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["sendDataToCloud", "select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}
