"""What all pages are made of: head with help, notes on the store's state, tables that download, links, figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pandas as pd
import streamlit as st

from dashboard import address, glossary
from dashboard.ahead import ahead
from dashboard.copyable import copyable
from dashboard.plot import Figure, Selected, plot
from dashboard.short_table import short_table
from dashboard.source import Judged, Source
from dashboard.text import cut, to_csv
from dashboard.theme import CONFIG
from harness.history.engine import History

TITLES: Mapping[str, tuple[str, str]] = {
    "overview": ("Overview", "What pays, what broke, and when each GPU type was last measured."),
    "technique": ("Technique", "What it promises, what was measured, and what limits it."),
    "history": ("History", "Any series over the commits, with its changes."),
    "regressions": ("Regressions", "What changed, by how much, since when, and whose doing it was."),
    "compare": ("Compare", "Two commits, branches, GPU types or versions side by side."),
    "serving": ("Serving", "Throughput against latency, waiting times, and goodput under your own SLO."),
    "scaling": ("Scaling", "Speed and memory by number of ranks, beside the ideal."),
    "runs": ("Runs", "Each run with its conditions, its failures and its machine."),
}
ANOTHER = "pairbench dashboard --store FOLDER_OR_URL"
#: Rows that nobody needs to sort or search.
FEW = 20
ICONS: Mapping[str, str] = {
    "overview": ":material/grid_view:",
    "technique": ":material/science:",
    "history": ":material/timeline:",
    "regressions": ":material/trending_down:",
    "compare": ":material/compare_arrows:",
    "serving": ":material/forum:",
    "scaling": ":material/hub:",
    "runs": ":material/list_alt:",
}


@dataclass
class View:
    """What a page is given: its name, the history, and the other pages to link to."""

    name: str
    source: Source
    pages: Mapping[str, Any]

    @property
    def history(self) -> History:
        """The open history."""
        assert self.source.history is not None, "a page is drawn only over an open history"
        return self.source.history


def head(view: View) -> None:
    """Title, one line on what the page is for, and help a click away."""
    title, line = TITLES[view.name]
    st.title(title, anchor=False)
    st.caption(line)
    with st.sidebar:
        ahead(view.name)
    with st.container(horizontal=True):
        with st.popover("How to read this", icon=":material/help:"):
            st.markdown(glossary.READING[view.name])
        with st.popover("Glossary", icon=":material/menu_book:"):
            st.markdown(glossary.markdown())


def link(view: View, page: str, label: str, **changes: Any) -> None:
    """A link to another page with the shared filters; ``label`` is ours, never text of the store."""
    st.page_link(view.pages[page], label=label, icon=ICONS[page], query_params=address.query_for(page, **changes))


def plain(text: Any) -> None:
    """Text of the store, as text."""
    st.text(str(text))


def nothing(what: str, why: str, do: str, command: str | None = None, view: View | None = None) -> None:
    """An empty place says what is not there, why, and what to do. All but the command are our own words. With ``view``
    what the command measures is kept where the page reads it."""
    st.info(f"**{what}** {why} {do}", icon=":material/inbox:")
    if not command:
        return
    lines = [(line, line) for line in command.split("\n")]
    if view is not None:
        lines = [view.source.over(line) if line.startswith("pairbench run") else (line, line) for line, _ in lines]
    shown, copied = ("\n".join(words) for words in zip(*lines, strict=True))
    copyable(shown, f"copy {what}", copied)


def empty_store(view: View) -> None:
    """The whole history has no measurement, or none that can be read."""
    if view.history.damage:
        nothing(
            "Nothing here can be shown.",
            "The stores hold something, and no measurement in it could be read: the reasons stand above.",
            "What helps is said there; nothing was changed. To look at another store:",
            ANOTHER,
        )
    else:
        nothing(
            "The history is empty.",
            "No record was found in the stores that are read.",
            "Measure something, or name another store with `--store`:",
            f"pairbench run\n{ANOTHER}",
            view,
        )
    copyable("\n".join(view.source.urls()), "copy stores")


def damage(view: View) -> None:
    """What of the stores could not be read, and what to do about it."""
    found = view.history.damage
    if not found:
        return
    newer = [item for item in found if "newer than" in item.reason]
    other = len(found) - len(newer)
    if newer:
        st.warning(
            f"{len(newer)} record(s) were written by a newer pairbench and are not shown. Upgrade the one that serves "
            "this page: `git pull` in its checkout, then `make bench` or `pip install -e .` again.",
            icon=":material/update:",
        )
    if other:
        st.warning(
            f"{other} part(s) of the store could not be read and are not shown; everything else is. "
            "What they are stands below; nothing is deleted by looking.",
            icon=":material/broken_image:",
        )
    with st.expander("What could not be read"):
        rows = [{"file": item.file, "line": item.line or None, "reason": item.reason} for item in found]
        table(rows, "damage", height=240)
        st.caption("To look through all of it again:")
        command_over(view, "pairbench history verify", "verify")


def figure(fig: Figure, key: str, of: str = "", selects: bool = False) -> Selected:
    """A figure over the whole width; what was selected in it, of the same ``of`` (:func:`dashboard.plot.plot`).
    ``selects``: a stretch can be drawn over it."""
    hidden = [name for name in CONFIG["modeBarButtonsToRemove"] if not (selects and name == "select2d")]
    return plot(fig, f"plot {key}", {**CONFIG, "modeBarButtonsToRemove": hidden}, of)


def newly(key: str, value: Any) -> bool:
    """Whether a selection is another one than when this was asked last: an old one must not act again. Ask also where
    nothing is selected: the same may be selected again after that."""
    before = st.session_state.get(f"seen {key}")
    st.session_state[f"seen {key}"] = value
    return value != before and bool(value)


def opens(view: View, key: str, value: Any, page: str, **changes: Any) -> None:
    """Open another page with the shared filters where something is selected that was not when this was asked last."""
    query = address.query_for(page, **changes)
    if newly(key, value):
        st.switch_page(view.pages[page], query_params=query)


def table(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    columns: Mapping[str, Any] | None = None,
    height: int | None = None,
    select: Sequence[str] = (),
    label: str = "Download as CSV",
    order: Sequence[str] | None = None,
) -> int | None:
    """A table that sorts, searches and downloads. With ``select``, the columns that name a row, the place of the row
    that is selected: where other rows come, none is, since the browser keeps a place and not what stood there."""
    shown = list(order) if order is not None else list(dict.fromkeys(key for row in rows for key in row))
    frame = pd.DataFrame([{key: _cell(row.get(key)) for key in shown} for row in rows], columns=shown)
    more: dict[str, Any] = {"on_select": "rerun", "selection_mode": "single-row"} if select else {}
    settings = dict(columns or {})
    for key in frame.columns[[kind.kind == "f" for kind in frame.dtypes]]:
        settings.setdefault(key, st.column_config.NumberColumn(format="%.4g"))
    event = st.dataframe(
        frame,
        hide_index=True,
        placeholder="",
        column_config={key: value for key, value in settings.items() if key in shown},
        height=height if height is not None else min(36 * (len(rows) + 1) + 3, 420),
        key=f"table {name}" + (f" {_names(rows, select)}" if select else ""),
        **more,
    )
    _download(rows, name, shown, label)
    if not select:
        return None
    picked = list(getattr(event, "selection", {}).get("rows") or [])
    return picked[0] if picked and picked[0] < len(rows) else None


def short(rows: Sequence[Mapping[str, Any]], name: str, what: str) -> None:
    """A table that downloads, as text where its rows are few; ``what`` says to a screen reader what they are."""
    if len(rows) > FEW:
        table(rows, name)
        return
    short_table(rows, what)
    _download(rows, name, list(rows[0]), "Download as CSV")


def _download(rows: Sequence[Mapping[str, Any]], name: str, columns: Sequence[str], label: str) -> None:
    st.download_button(
        label,
        to_csv(rows, columns),
        f"pairbench-{name}.csv",
        "text/csv",
        key=f"download {name}",
        icon=":material/download:",
        on_click="ignore",
    )


def _names(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A short word that is another one where other rows, or the same in another order, are shown."""
    return f"{crc32(repr([[row.get(column) for column in columns] for row in rows]).encode()):08x}"


@contextmanager
def unfolded(label: str, key: str) -> Iterator[bool]:
    """A fold, and whether it is open: what nobody looks at need not be drawn, and the page is there sooner."""
    with st.expander(label, key=f"unfold {key}", on_change="rerun") as fold:
        yield bool(fold.open)


def _cell(value: Any) -> Any:
    return cut(value, 400) if isinstance(value, str) else value


def command(text: str | None, name: str = "command") -> None:
    """A command to copy; ``name`` is its own on the page."""
    if text:
        copyable(text, f"copy {name}")


def command_over(view: View, text: str, name: str) -> None:
    """A command that reads the history, over the same stores as this page."""
    shown, copied = view.source.over(text)
    copyable(shown, f"copy {name}", copied)


def verdicts(view: View) -> Judged:
    """The verdicts so far, with a word on those that still wait."""
    found = view.source.judge()
    if found.problem:
        st.warning("The history could not be judged:", icon=":material/error:")
        plain(found.problem)
    return found
