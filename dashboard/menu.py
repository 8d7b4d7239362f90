"""On a phone the list of pages lies over the page, and goes when one is chosen: Streamlit closes its own list only."""

from __future__ import annotations

from typing import Final

import streamlit as st

#: Narrower windows have the list over the page; the width is Streamlit's own.
JS: Final = """
const NARROW = 768;
export default function () {
    const menu = document.querySelector('[data-testid="stSidebar"]');
    if (!menu || menu.dataset.closes) return;
    menu.dataset.closes = "yes";
    menu.addEventListener("click", event => {
        if (innerWidth >= NARROW || !event.target.closest("a[href]")) return;
        setTimeout(() => menu.querySelector('[data-testid="stSidebarCollapseButton"] button')?.click());
    });
}
"""


def closes_itself() -> None:
    """Have the sidebar closed by the page that is chosen in it."""
    st.components.v2.component("pairbench_menu", js=JS)(key="menu", height=1)
