"""The first visitor finds everything ready, and what was asked once is not asked again while the store stays as it is.

Queries are counted, not seconds: a lost warm-up or a lost cache fails on any machine, however busy it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard import ahead, plot, serve
from dashboard.source import close_sources, open_source
from harness.history.engine import History

PAGES = ("overview", "technique", "history", "regressions", "compare", "serving", "scaling", "runs")
Draw = Callable[..., Any]
Stores = dict[str, Path]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The queries of pages, as they are asked; nothing is judged meanwhile."""
    from dashboard.source import Source

    found: list[str] = []
    plain = History.rows

    def counted(self: History, sql: str, parameters: Any = ()) -> Any:
        found.append(sql)
        return plain(self, sql, parameters)

    close_sources()
    # A commit of this checkout while the tests run would be something new, and rightly be looked at.
    monkeypatch.setattr("dashboard.source.find_order_repository", lambda: None)
    monkeypatch.setattr(Source, "judge", lambda self, apart=True: self.judged)
    monkeypatch.setattr(History, "rows", counted)
    yield found
    close_sources()


def test_the_first_visit_of_a_warm_server_asks_nothing(asked: list[str], draw: Draw, stores: Stores) -> None:
    serve._warm(str(stores["whole"]), "HEAD")
    assert asked, "nothing was asked ahead"
    asked.clear()
    page = draw("overview", stores["whole"])
    assert not page.exception
    assert asked == []
    draw("overview", stores["whole"], gpu="h200")
    assert asked == [], "a filter of the overview asks anew"


def test_pages_ask_nothing_twice_until_the_store_changes(asked: list[str], draw: Draw, maker: Any) -> None:
    maker.run(0, "h200")
    maker.run(1, "h200")
    for name in PAGES:
        draw(name, maker.root)
    again: dict[str, list[str]] = {}
    for name in PAGES:
        asked.clear()
        assert not draw(name, maker.root).exception
        again[name] = list(asked)
    assert again == {name: [] for name in PAGES}
    maker.run(2, "h200")
    draw("overview", maker.root)
    assert asked, "a new record was not looked at"
    assert not open_source(str(maker.root)).is_new()


def test_the_scripts_that_are_asked_for_ahead_are_there() -> None:
    assert set(ahead.NEEDS) == set(PAGES)
    for beginning in {one for needs in ahead.NEEDS.values() for one in needs} - {ahead.PLOTLY}:
        name = ahead.script(beginning)
        assert name is not None, f"this version of Streamlit has no script {beginning}"
        assert name.endswith(".js")
    assert ahead.script("No such script.") is None


def test_the_server_hands_out_the_script_of_plotly(draw: Draw, stores: Stores) -> None:
    import plotly

    draw("history", stores["whole"])
    name, _, file = plot.SCRIPT.removeprefix("component/").partition("/")
    assert name == f"{plot.__name__}.plotly", "a component is named after its module"
    assert (plot.FOLDER / file).is_file()
    assert plot.FOLDER.is_relative_to(Path(plotly.__file__).parent)


def test_the_overview_asks_for_figures_only_when_it_stands_still() -> None:
    assert ahead.PLOTLY not in ahead.NEEDS["overview"]
