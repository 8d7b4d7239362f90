"""A table of a few rows, drawn with the page: the browser needs no script for it, and a screen reader has it at once.

Streamlit's own takes a quarter of a second to stand and as long again until its text is there for a screen reader,
each time that a filter brings it back. It is worth that where rows are many, sorted or selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import streamlit as st

from dashboard.text import cut, esc

STYLE: Final = (
    "<style>"
    ".short {overflow-x: auto; font-size: 0.85rem; margin: 0.2rem 0 0.6rem;}"
    ".short table {border-collapse: collapse; width: max-content; min-width: 100%;}"
    ".short th, .short td {text-align: left; vertical-align: top; padding: 0.25rem 0.6rem; max-width: 26em;"
    " overflow-wrap: anywhere; border-bottom: 1px solid rgba(128, 128, 128, 0.3);}"
    ".short th {font-weight: 600;}"
    "</style>"
)


def short_table(rows: Sequence[Mapping[str, Any]], label: str) -> None:
    """Draw rows of the same columns as text; ``label`` says to a screen reader what they are. Long text is on several
    lines: a phone and a keyboard have no pointer to ask for the rest of it with."""
    names = list(rows[0])
    head = "".join(f'<th scope="col">{esc(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>" for row in rows)
    table = f'<table aria-label="{esc(label)}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    st.html(f'{STYLE}<div class="short" tabindex="0">{table}</div>')


def _cell(value: Any) -> str:
    return f"<td>{esc(cut('' if value is None else value, 400))}</td>"
