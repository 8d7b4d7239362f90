"""Scripts of Streamlit's own client, fetched and compiled before the element comes that needs them.

The client asks for Plotly's 4.7 MB of script only when a first figure has arrived. A page that will draw one says so
with its title, and the overview, which draws none, once it stands still, for the page that comes next.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import streamlit as st

#: How the names of files begin; a digest that differs between versions follows.
PLOTLY: Final = "PlotlyChart."
TABLE: Final = "DataFrame."
CODE: Final = "StreamlitSyntaxHighlighter."
#: Page → what it draws at once.
NEEDS: Final = {
    "overview": (TABLE,),
    "technique": (PLOTLY, TABLE),
    "history": (PLOTLY, CODE),
    "regressions": (TABLE,),
    "compare": (PLOTLY, TABLE),
    "serving": (PLOTLY, TABLE),
    "scaling": (PLOTLY, TABLE),
    "runs": (TABLE, CODE),
}
#: The scripts stand beside those that the client was loaded with, whatever the address of the page.
JS: Final = """
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
    const later = setTimeout(() => requestIdleCallback(() => ask(data.later)), 3000);
    return () => clearTimeout(later);
}
"""


@cache
def script(beginning: str) -> str | None:
    """The name of the client's file that begins so; None where this version of Streamlit has none."""
    folder = Path(st.__file__).parent / "static" / "static" / "js"
    return next((path.name for path in sorted(folder.glob(f"{beginning}*.js"))), None)


def ahead(page: str) -> None:
    """Ask for what a page draws now, and for what others draw later."""
    now = [name for name in map(script, NEEDS[page]) if name]
    later = [name for name in map(script, (PLOTLY, TABLE, CODE)) if name and name not in now]
    st.components.v2.component("pairbench_ahead", js=JS)(data={"now": now, "later": later}, key="ahead", height=1)
