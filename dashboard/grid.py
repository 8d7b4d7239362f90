"""The heat map as a table that the browser draws at once: text stays text, a click or Enter on a cell is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import streamlit as st

CSS: Final = """
.frame {overflow-x: auto; position: relative; font-family: var(--st-font); color: var(--st-text-color);}
table {border-collapse: separate; border-spacing: 3px; width: 100%; font-size: 12px; table-layout: fixed;}
th {font-weight: 400; padding: 0 4px; overflow-wrap: anywhere; opacity: 0.75;}
th.name {text-align: right; width: 11em;}
td {padding: 0; height: 31px; min-width: 4.5em;}
button {all: unset; box-sizing: border-box; position: relative; display: block; width: 100%; height: 31px;
    cursor: pointer; text-align: center; line-height: 1.15; padding-top: 2px;}
button:hover, button:focus-visible {outline: 2px solid var(--st-primary-color);}
b {display: block;} small {display: block; font-size: 9px;}
.sign {font-size: 16px; line-height: 27px;}
.corner {position: absolute; top: 0; line-height: 29px; font-size: 18px; font-weight: 700;}
.right {right: 4%;} .left {left: 4%;}
.box {position: absolute; z-index: 9; pointer-events: none; display: none; max-width: 26em; padding: 4px 8px;
    font-size: 12px; overflow-wrap: anywhere; white-space: pre-line; background: var(--st-background-color);
    border: 1px solid var(--st-text-color);}
"""
HTML: Final = '<div class="frame"><table></table><div class="box" role="tooltip"></div></div>'
JS: Final = """
const add = (parent, kind, text, style) => {
    const made = document.createElement(kind);
    made.className = style ?? "";
    made.textContent = text ?? "";
    return parent.appendChild(made);
};
const sign = (button, [text, colour], style) => { add(button, "span", text, style).style.color = colour; };
const draw = (button, cell) => {
    if (cell.value) {
        button.style.background = cell.colour;
        button.style.color = cell.ink;
        add(button, "b", cell.value);
        add(button, "small", cell.interval);
    }
    if (cell.sign) sign(button, cell.sign, cell.value ? "corner right" : "sign");
    if (cell.stale) sign(button, cell.stale, "corner left");
};
const make = (frame, data) => {
    const box = frame.querySelector(".box");
    const table = document.createElement("table"), head = add(table, "tr");
    add(head, "th", "", "name");
    for (const name of data.columns) add(head, "th", name).scope = "col";
    for (const row of data.rows) {
        const line = add(table, "tr");
        add(line, "th", row.name, "name").scope = "row";
        for (const cell of row.cells) {
            const place = add(line, "td");
            if (!cell) continue;
            const button = add(place, "button");
            button.type = "button";
            draw(button, cell);
            button.onclick = () => frame.tell("picked", {at: cell.at, when: Date.now()});
            const show = () => {
                box.textContent = button.getAttribute("aria-label");
                box.style.display = "block";
                const left = place.offsetLeft, below = place.offsetTop + place.offsetHeight + 2;
                box.style.left = `${Math.max(0, Math.min(left, frame.clientWidth - box.offsetWidth - 4))}px`;
                const fits = below + box.offsetHeight < frame.clientHeight;
                box.style.top = `${fits ? below : place.offsetTop - box.offsetHeight - 2}px`;
            };
            button.onpointerenter = button.onfocus = show;
            button.onpointerleave = button.onblur = () => { box.style.display = "none"; };
        }
    }
    frame.querySelector("table").replaceWith(table);
};
export default function ({data, parentElement, setStateValue}) {
    const frame = parentElement.querySelector(".frame");
    const looks = JSON.stringify(data, (key, value) => key === "words" ? undefined : value);
    // Under a pointer that is down, or where the focus is, a cell must stay the same one: a click ends where it began.
    if (frame.looks !== looks) make(frame, data);
    Object.assign(frame, {looks, tell: setStateValue});
    const cells = data.rows.flatMap(row => row.cells).filter(Boolean);
    frame.querySelectorAll("button").forEach((button, at) => {
        button.setAttribute("aria-label", cells[at].words.join("\\n"));
    });
}
"""


def _nothing() -> None:
    """A pick is read from what the table gives."""


def grid(data: Mapping[str, Any], key: str) -> tuple[list[str], float]:
    """Draw :func:`dashboard.charts.heatmap.coverage`; technique and GPU type of the cell that was clicked last, or
    nothing, and when that was, which tells a click from the one before.

    A click is a state that stays, not an event of one run: a run that is cut short by another would lose the event.
    The table is declared anew each time: a server that starts later knows nothing of what was declared before.
    """
    table = st.components.v2.component("pairbench_grid", html=HTML, css=CSS, js=JS)
    picked = table(data=dict(data), key=key, on_picked_change=_nothing).get("picked") or {}
    return [str(word) for word in picked.get("at") or []], float(picked.get("when") or 0.0)
