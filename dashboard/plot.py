"""Figures as the browser's own Plotly draws them: once each, and only when they come into view.

Streamlit's chart is a new one whenever its figure is another, and draws itself two or three times until it has its
theme, its width and its modes; a page draws all of its charts at once. Here one element stays in its place and takes
new figures in. It is drawn when it comes near the window, at its width, with the colours of the theme.

Plotly's script is the one that the Python package brings, 4.8 MB, which the server hands out as files of a component.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

import plotly
import plotly.graph_objects as go
import streamlit as st
from plotly.io.json import to_json_plotly

#: A figure of Plotly's, or the same as plain values, which nothing checks and nothing copies.
Figure: TypeAlias = go.Figure | Mapping[str, Any]
#: Where a browser finds the script, below the server's own address.
SCRIPT: Final = "component/dashboard.plot.plotly/plotly.min.js"
FOLDER: Final = Path(plotly.__file__).with_name("package_data")
CSS: Final = """
.plot {width: 100%; overflow: hidden;}
.plot:fullscreen {background: var(--st-background-color); padding: 1rem;}
"""
HTML: Final = '<div class="plot"></div>'
#: The axes and words of every figure; colours are the theme's, which only the browser knows.
TEMPLATE: Final = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": ["#0072B2"],
        "xaxis": {
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "title": {"font": {"size": 14}, "standoff": 12},
        },
        "yaxis": {"automargin": True, "zeroline": False, "title": {"font": {"size": 14}, "standoff": 24}},
        "hoverlabel": {"font": {"size": 12}},
        "legend": {"font": {"size": 12}},
    }
}
#: Asks for Plotly once, whoever needs it first.
LIBRARY: Final = """
const base = () => {
    const own = document.querySelector('script[type="module"][src*="/static/js/"]');
    return own ? new URL("../../", own.src) : new URL("/", location.href);
};
const library = name => window.pairbenchPlotly ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = new URL(name, base());
    script.onload = () => done(window.Plotly);
    script.onerror = () => { window.pairbenchPlotly = undefined; failed(new Error("Plotly's script did not load")); };
    document.head.appendChild(script);
});
"""
JS: Final = (
    LIBRARY
    + """
const NARROW = 400, SHORT = 20;
const WIDEN = "M0 0H180V50H50V180H0ZM268 0H448V180H398V50H268ZM0 268H50V398H180V448H0ZM398 268H448V448H268V398H398Z";
const wide = {name: "Fullscreen", title: "Fullscreen", icon: {width: 448, height: 448, path: WIDEN},
    click: plot => document.fullscreenElement ? document.exitFullscreen() : plot.requestFullscreen()};
const dressed = (figure, node) => {
    const style = getComputedStyle(node), of = name => style.getPropertyValue(name).trim();
    const text = style.color, faded = part => text.replace("rgb(", "rgba(").replace(")", `, ${part})`);
    const paper = of("--st-background-color") || "#fff";
    const layout = structuredClone(figure.layout), whole = layout.template.layout;
    whole.font = {family: of("--st-font") || style.fontFamily, color: text, size: 12};
    whole.hoverlabel = {...whole.hoverlabel, bgcolor: paper, bordercolor: text, font: {...whole.font}};
    for (const axis of [whole.xaxis, whole.yaxis]) {
        Object.assign(axis, {gridcolor: faded(0.1), zerolinecolor: faded(0.1), tickfont: {color: faded(0.6)}});
        axis.title = {...axis.title, font: {size: 14, color: faded(0.6)}};
    }
    const named = [...new Set(figure.data.flatMap(trace => trace.y ?? []).filter(y => typeof y == "string"))];
    if (named.length && node.clientWidth < NARROW) {
        const short = text => (text.match(/&[^;]+;|./gu) ?? []).slice(0, SHORT);
        layout.yaxis = {...layout.yaxis, tickvals: named, ticktext: named.map(
            text => short(text).length < SHORT ? text : short(text).join("") + "…")};
        layout.xaxis = {...layout.xaxis, nticks: 4, tickangle: 0};
    }
    if (document.fullscreenElement === node) return {...layout, width: innerWidth - 32, height: innerHeight - 32};
    return {...layout, width: node.clientWidth};
};
const draw = async node => {
    const own = node.own;
    if (!own.due || !own.seen || own.busy || !node.clientWidth) return;
    own.busy = true;
    try {
        const plotly = await library(own.data.script);
        while (own.due && node.isConnected) {
            own.due = false;
            const figure = own.figure;
            own.width = node.clientWidth;
            await plotly.react(node, figure.data, dressed(figure, node),
                {...own.data.config, responsive: false, modeBarButtonsToAdd: [wide]});
            if (!own.heard) listen(node, plotly);
            own.heard = true;
        }
        node.dataset.drawn = own.data.of;
    } catch (error) {
        node.textContent = String(error);
    } finally {
        own.busy = false;
    }
};
const listen = (node, plotly) => {
    node.on("plotly_click", found => {
        const point = found.points[0]?.customdata;
        if (point) node.own.tell("point", {of: node.own.data.of, point});
    });
    node.on("plotly_selected", found => {
        const range = found?.range?.x;
        if (range) node.own.tell("stretch", {of: node.own.data.of, ends: range});
    });
};
const again = node => { node.own.due = true; draw(node); };
export default function ({data, parentElement, setStateValue}) {
    const node = parentElement.querySelector(".plot");
    const first = !node.own, own = node.own ??= {};
    const style = getComputedStyle(node);
    const text = JSON.stringify([data, ...["text", "background", "border"].map(
        name => style.getPropertyValue(`--st-${name}-color`))]);
    own.tell = setStateValue;
    if (own.text !== text) {
        Object.assign(own, {text, data, figure: JSON.parse(data.figure), due: true});
        delete node.dataset.drawn;
        node.style.minHeight = `${own.figure.layout.height}px`;
        library(data.script).catch(() => {});
    }
    if (first) {
        const near = new IntersectionObserver(found => {
            own.seen = found.at(-1).isIntersecting;
            node.dataset.seen = own.seen ? "yes" : "no";
            draw(node);
        }, {rootMargin: "120px 0px"});
        near.observe(node);
        const size = new ResizeObserver(() => { if (own.width && own.width !== node.clientWidth) again(node); });
        size.observe(node);
        node.addEventListener("fullscreenchange", () => again(node));
        own.end = () => { near.disconnect(); size.disconnect(); };
    }
    draw(node);
    return () => {
        if (node.isConnected) return;
        own.end();
        window.Plotly?.purge(node);
    };
}
"""
)


class Selected(TypedDict):
    """What was selected in a figure."""

    point: list[Any]
    stretch: list[float]


def _nothing() -> None:
    """A selection is read from what the figure gives."""


def serve_script() -> None:
    """Have the server hand out the script of the Python package, under the name of this module."""
    st.components.v1.declare_component("plotly", path=FOLDER)


def as_json(fig: Figure) -> str:
    """A figure as Plotly's script reads it, with the words and axes of :data:`TEMPLATE`; what is no number is null."""
    if isinstance(fig, go.Figure):
        fig.layout.template = go.layout.Template(TEMPLATE)
        return str(fig.to_json(validate=False))
    whole = {**fig, "layout": {**fig["layout"], "template": TEMPLATE}}
    try:
        return json.dumps(whole, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return str(to_json_plotly(whole))


def plot(fig: Figure, key: str, config: Mapping[str, Any], of: str = "") -> Selected:
    """Draw a figure over the whole width. ``of`` says of what it is.

    Returns:
        ``point``, the custom data of the point that was clicked, and ``stretch``, the ends of the stretch that was
        drawn over the horizontal axis: both only where they were of this same figure.
    """
    serve_script()
    drawn = st.components.v2.component("pairbench_plot", html=HTML, css=CSS, js=JS, isolate_styles=False)
    said = drawn(
        data={"figure": as_json(fig), "config": dict(config), "script": SCRIPT, "of": of},
        key=key,
        on_point_change=_nothing,
        on_stretch_change=_nothing,
    )
    point, stretch = said.get("point") or {}, said.get("stretch") or {}
    return {
        "point": list(point.get("point") or []) if point.get("of") == of else [],
        "stretch": list(stretch.get("ends") or []) if stretch.get("of") == of else [],
    }
