"""The dashboard's script, which ``pairbench dashboard`` serves with telemetry off. A page a file, in ``views``.

``PAIRBENCH_DASHBOARD_STORE`` names a store and ``PAIRBENCH_DASHBOARD_BRANCH`` a branch; the command sets both.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import streamlit as st
from PIL import Image

sys.path[:0] = [] if str(Path(__file__).parents[1]) in sys.path else [str(Path(__file__).parents[1])]

from dashboard import address, menu, parts, queries  # noqa: E402
from dashboard.source import Source, open_source  # noqa: E402
from dashboard.text import esc  # noqa: E402
from dashboard.theme import BLUE, ORANGE, SKY  # noqa: E402
from dashboard.views import (  # noqa: E402
    compare,
    history,
    overview,
    regressions,
    runs,
    scaling,
    serving,
    technique,
)
from harness.errors import PairbenchError, StoreError  # noqa: E402

VIEWS: dict[str, ModuleType] = {
    "overview": overview,
    "technique": technique,
    "history": history,
    "regressions": regressions,
    "compare": compare,
    "serving": serving,
    "scaling": scaling,
    "runs": runs,
}
#: Seconds between looks at the stores' fingerprint; a page is drawn anew only when it changed.
LOCAL_S, REMOTE_S = 3.0, 20.0

STYLE = """
<style>
.block-container {padding: 4rem 2rem 2rem; max-width: 1500px;}
@media (max-width: 640px) {.block-container {padding-left: 0.8rem; padding-right: 0.8rem;}}
.store {font-family: monospace; font-size: 0.85rem; overflow-wrap: anywhere;}
h1 {font-size: 1.9rem !important; padding: 0 !important;}
</style>
"""


def main() -> None:
    """Draw the page that the URL names."""
    st.set_page_config(page_title="pairbench", page_icon=icon(), layout="wide")
    st.html(STYLE)
    source = open_source(
        os.environ.get("PAIRBENCH_DASHBOARD_STORE") or None, os.environ.get("PAIRBENCH_DASHBOARD_BRANCH") or "HEAD"
    )
    pages: dict[str, st.Page] = {}
    for name, module in VIEWS.items():
        view = parts.View(name, source, pages)
        run = partial(draw, view, module)
        pages[name] = st.Page(run, title=parts.TITLES[name][0], url_path=name, default=name == "overview")
    chosen = st.navigation(list(pages.values()), position="hidden")
    current = next(name for name, page in pages.items() if page is chosen)
    address.remember(current)
    with st.sidebar:
        st.html("<b style='font-size:1.2rem'>pairbench</b>")
        for name in VIEWS:
            st.page_link(
                pages[name],
                label=parts.TITLES[name][0],
                icon=parts.ICONS[name],
                query_params=address.query_for(name) if name != current else dict(address.everything()),
            )
        follow(source)
        menu.closes_itself()
    with source.drawing():
        chosen.run()


def icon() -> Image.Image:
    """The page's icon, drawn here: named ones are fetched from the network."""
    picture = Image.new("RGB", (32, 32), BLUE)
    picture.paste(ORANGE, (6, 16, 14, 28))
    picture.paste(SKY, (18, 6, 26, 28))
    return picture


def draw(view: parts.View, module: ModuleType) -> None:
    """One page: its head, what is wrong with the store, and then itself."""
    parts.head(view)
    source = view.source
    if source.problem:
        st.error("The history cannot be read now:", icon=":material/error:")
        parts.plain(source.problem)
    if source.history is None:
        parts.nothing("There is nothing to show.", "The store could not be opened.", "Name one that can be:",
                      parts.ANOTHER)  # fmt: skip
        return
    if not source.state:
        return
    parts.damage(view)
    if not source.once("any", queries.any_measurement):
        parts.empty_store(view)
        if view.name != "runs":
            return
    try:
        module.render(view)
    except StoreError as err:  # a file went away under a query: what is there now is another state
        source.state = ""
        st.warning("The store changed while it was read; reload the page.", icon=":material/sync:")
        parts.plain(err)
    except PairbenchError as err:
        st.error("This cannot be shown:", icon=":material/error:")
        parts.plain(err)


def follow(source: Source) -> None:
    """Look at the stores' fingerprint now and then, and draw the page anew when there is something new."""
    remote = any("://" in url for url in source.urls())
    with_page = [True]

    def watch() -> None:
        judged = source.judge() if source.history is not None else source.judged
        seen = st.session_state.get("judged seen")
        now = (judged.state, judged.whole)
        st.session_state["judged seen"] = now
        if judged.running:
            st.caption(
                f"Judging the series: {len(judged.verdicts)} done, {judged.waiting} technique × GPU pairs to go…"
                if judged.waiting
                else "Judging the series…"
            )
        # With a whole page, which shows what is new anyway, this comes before the page: to begin anew here would take
        # from the page what was just clicked.
        if not with_page and (source.is_new() or (seen is not None and seen != now and judged.whole)):
            st.rerun(scope="app")

    st.fragment(watch, run_every=REMOTE_S if remote else LOCAL_S)()
    with_page.clear()
    st.caption("Reading, and following what is added:")
    # No st.code: it would load the highlighter of every language before a page is drawn.
    lines = zip(source.names(), source.urls(), strict=True)
    st.html("".join(f"<div class='store' title='{esc(url)}'>{esc(name)}</div>" for name, url in lines))


main()
