"""A table of a few rows is text in the page, and stays text whatever a commit's subject says."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from dashboard import parts, short_table


class Read(HTMLParser):
    """The tags and the cells of what was drawn."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(body)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells and self.tags[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(short_table.st, "html", found.append)
    return found


def test_cells_are_the_values_and_nothing_is_run(drawn: list[str]) -> None:
    evil = "\"><script>alert('x')</script> & <b>bold</b>"
    short_table.short_table([{"subject": evil, "size": None}, {"subject": "plain", "size": 3}], evil)
    read = Read(drawn[0])
    assert read.cells == ["subject", "size", evil, "", "plain", "3"]
    assert set(read.tags) == {"style", "div", "table", "thead", "tbody", "tr", "th", "td"}


def test_many_rows_are_a_table_that_sorts(drawn: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sorts: list[Any] = []
    loads: list[Any] = []
    monkeypatch.setattr(parts.st, "dataframe", lambda frame, **_: sorts.append(len(frame)))
    monkeypatch.setattr(parts.st, "download_button", lambda *words, **_: loads.append(words[1]))
    rows = [{"n": at} for at in range(parts.FEW + 1)]
    parts.short(rows[:-1], "few", "numbers")
    assert (len(drawn), sorts) == (1, [])
    parts.short(rows, "many", "numbers")
    assert (len(drawn), sorts) == (1, [parts.FEW + 1])
    assert [text.count("\n") for text in loads] == [parts.FEW + 1, parts.FEW + 2]
