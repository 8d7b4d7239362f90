"""Text of the store as text: escaped for HTML, for Plotly's hover, for CSV; never markup, whatever a commit says.

Streamlit's Markdown finds emoji, links and formulas in plain text even where it is escaped, so store text never goes
through it: pages use ``st.html`` with :func:`esc`, ``st.code``, ``st.text`` and tables.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

LONGEST: Final = 100
#: Between words of a line that belong to different things: Markdown makes one of several plain spaces.
WIDE: Final = "\u2003"
#: Spreadsheets run a cell that begins so.
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def esc(value: Any) -> str:
    """A value as HTML text; Plotly reads the same few tags, so the same escape serves it."""
    return html.escape("–" if value is None else str(value), quote=True)


def cut(value: Any, longest: int = LONGEST) -> str:
    """One line of at most so many characters; not escaped."""
    text = " ".join(str("" if value is None else value).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def hover(*lines: Any) -> str:
    """Lines for a Plotly hover box, each cut and escaped; empty ones are left out."""
    return "<br>".join(esc(cut(line)) for line in lines if line not in (None, ""))


def short(commit: Any) -> str:
    """The first twelve digits of a commit."""
    return str(commit)[:12] if commit else "no commit"


def ago(seconds: float) -> str:
    """A span of time as a person says it."""
    for size, word in ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {word}{'s' if count != 1 else ''}"
    return "a moment"


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as CSV; text that a spreadsheet would run as a formula gets an apostrophe before it."""
    names = list(columns) if columns is not None else list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return "" if value is None else value
