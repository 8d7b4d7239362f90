"""Scripts, fetched and compiled before the element comes that needs them.

Streamlit's client asks for the script of an element only when a first one has arrived, and figures for Plotly's. A page
that will draw one says so with its title, and so Plotly is evaluated while the server still works on the page; the
overview, which draws none, says so once it stands still, for the page that comes next, and has it fetched only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import streamlit as st

from dashboard.plot import LIBRARY, SCRIPT, serve_script

#: How the names of files begin; a digest that differs between versions follows.
TABLE: Final = "DataFrame."
#: Plotly's own script, which is no part of the client.
PLOTLY: Final = "Plotly"
#: Page → what it draws at once.
NEEDS: Final = {
    "overview": (TABLE,),
    "technique": (PLOTLY, TABLE),
    "history": (PLOTLY, TABLE),
    "regressions": (TABLE,),
    "compare": (PLOTLY, TABLE),
    "serving": (PLOTLY, TABLE),
    "scaling": (PLOTLY, TABLE),
    "runs": (TABLE,),
}
#: The scripts stand beside those that the client was loaded with, whatever the address of the page.
JS: Final = (
    LIBRARY
    + """
const ask = names => {
    const own = document.querySelector('script[type="module"][src*="/static/js/"]');
    for (const name of own ? names : []) {
        const link = document.createElement("link");
        link.rel = "modulepreload";
        link.crossOrigin = "";
        link.href = new URL(name, own.src).href;
        if (!document.head.querySelector(`link[href="${link.href}"]`)) document.head.appendChild(link);
    }
};
export default function ({data}) {
    ask(data.now);
    if (data.plotly) library(data.script).catch(() => {});
    const later = setTimeout(() => requestIdleCallback(() => {
        ask(data.later);
        const link = document.createElement("link");
        link.rel = "prefetch";
        link.href = new URL(data.script, base());
        if (!window.pairbenchPlotly) document.head.appendChild(link);
    }), 3000);
    return () => clearTimeout(later);
}
"""
)


@cache
def script(beginning: str) -> str | None:
    """The name of the client's file that begins so; None where this version of Streamlit has none."""
    folder = Path(st.__file__).parent / "static" / "static" / "js"
    return next((path.name for path in sorted(folder.glob(f"{beginning}*.js"))), None)


def ahead(page: str) -> None:
    """Ask for what a page draws now, and for what others draw later."""
    now = [name for name in map(script, set(NEEDS[page]) - {PLOTLY}) if name]
    later = [name for name in map(script, (TABLE,)) if name and name not in now]
    serve_script()
    st.components.v2.component("pairbench_ahead", js=JS)(
        data={"now": now, "later": later, "plotly": PLOTLY in NEEDS[page], "script": SCRIPT}, key="ahead", height=1
    )
