"""Text to copy, as it stands. Streamlit's code block loads a highlighter of 1.6 MB before it shows any text."""

from __future__ import annotations

from typing import Final

import streamlit as st

CSS: Final = """
.copy {display: flex; align-items: flex-start; background: var(--st-code-background-color,
    var(--st-secondary-background-color)); color: var(--st-code-text-color, var(--st-text-color));
    border-radius: 0.5rem; padding: 1rem;}
.copy pre {flex: 1; margin: 0; overflow: auto; max-height: 30rem; font-size: 0.875rem; line-height: 1.5;
    font-family: var(--st-code-font, monospace);}
.copy button {all: unset; flex: none; cursor: pointer; font: 0.75rem var(--st-font); padding: 0.1rem 0.4rem;}
.copy button:hover, .copy button:focus-visible {outline: 2px solid var(--st-primary-color); border-radius: 0.25rem;}
"""
HTML: Final = '<div class="copy"><pre tabindex="0"></pre><button type="button">Copy</button></div>'
#: Without HTTPS a browser has a clipboard for its own machine's addresses only; a text field serves elsewhere.
JS: Final = """
const byField = text => {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.appendChild(field).select();
    document.execCommand("copy");
    field.remove();
};
export default function ({data, parentElement}) {
    const button = parentElement.querySelector("button"), words = parentElement.querySelector("pre");
    if (words.textContent !== data.text) words.textContent = data.text;
    button.onclick = async () => {
        await (navigator.clipboard?.writeText(data.copied) ?? Promise.reject()).catch(() => byField(data.copied));
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
}
"""


def copyable(text: str, key: str, copied: str | None = None) -> None:
    """Show text in a box that scrolls, with a button that copies it, or ``copied`` in its place."""
    data = {"text": text, "copied": text if copied is None else copied}
    st.components.v2.component("pairbench_copy", html=HTML, css=CSS, js=JS)(data=data, key=key)
