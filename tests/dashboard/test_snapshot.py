"""The page that opens from disk, the summary for a pull request, and the commands that make them."""

from __future__ import annotations

import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboard import serve, snapshot
from dashboard.source import open_source
from harness.cli import make_app
from harness.errors import DamagedStore, PairbenchError, StoreError, UsageError
from harness.regress.present import escape

Stores = dict[str, Path]


class Tags(HTMLParser):
    """Collects what could run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        if tag in ("script", "img", "link", "iframe", "object", "base", "form"):
            self.loads.append(tag)
        for name, value in attributes:
            outside = name in ("href", "src") and not (value or "").startswith("#")
            if name.startswith("on") or outside:
                self.loads.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def dead_links(text: str) -> set[str]:
    """Links to places that the page does not have."""
    return set(re.findall(r"href='#(\w+)'", text)) - set(re.findall(r"id='(\w+)'", text))


def page_of(store: Path) -> tuple[str, Tags]:
    text = snapshot.html_page(snapshot.take(open_source(str(store))))
    tags = Tags()
    tags.feed(text)
    return text, tags


def test_the_page_has_overview_regressions_and_series_and_loads_nothing(stores: Stores, evil: str) -> None:
    text, tags = page_of(stores["whole"])
    assert tags.loads == []
    said = "".join(tags.text)
    assert evil.split(" [")[0] in said
    assert "What pays where" in said
    assert "▼ regressed" in said
    assert tags.charts >= 3
    assert "pairbench run add_rms_norm" in said
    assert "default-src 'none'" in text
    assert len(text) < 2_000_000
    assert str(stores["whole"].parent) not in text, "the page tells of the machine that made it"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("empty", "The history is empty"),
        ("one", "too few runs"),
        ("damaged", "could not be read"),
        ("newer", "nothing to show"),
    ],
)
def test_the_page_stands_every_state(state: str, words: str, stores: Stores) -> None:
    text, tags = page_of(stores[state])
    assert words in "".join(tags.text)
    assert dead_links(text) == set()
    assert tags.loads == []


def test_a_summary_of_what_cannot_be_read_calls_it_by_its_name(stores: Stores) -> None:
    text = snapshot.markdown_summary(snapshot.take(open_source(str(stores["newer"]))))
    assert "nothing could be read" in text
    assert "is empty" not in text


def test_the_summary_names_what_regressed_and_its_command_and_no_markup(stores: Stores, judged: Any) -> None:
    text = snapshot.markdown_summary(snapshot.take(judged))
    assert "regressed" in text
    assert "pairbench run add_rms_norm" in text
    assert "<img" not in text.replace("\\<img", "")
    assert "[x](" not in text


def test_a_file_that_exists_is_left_alone_without_force(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        snapshot.write(path, "new")
    assert path.read_text() == "mine"
    snapshot.write(path, "new", force=True)
    assert path.read_text() == "new"


def test_the_command_writes_a_page_prints_a_summary_and_keeps_what_is_there(stores: Stores, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ["report", "--store", str(stores["one"]), "--html", str(page), "--markdown"]
    done = CliRunner().invoke(make_app(), arguments)
    assert done.exit_code == 0, done.output
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "**pairbench**" in done.output
    again = CliRunner().invoke(make_app(), arguments)
    assert isinstance(again.exception, UsageError)
    assert "--force" in str(again.exception)


def test_the_command_exits_1_on_damage_and_writes_all_the_same(stores: Stores, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(make_app(), ["report", "--store", str(stores["damaged"]), "--html", str(page)])
    assert isinstance(done.exception, DamagedStore)
    assert page.exists()


def test_a_report_that_says_nothing_is_refused() -> None:
    done = CliRunner().invoke(make_app(), ["report"])
    assert isinstance(done.exception, PairbenchError)
    assert "--html" in str(done.exception)


def test_a_port_that_is_taken_is_named(stores: Stores) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)):
            serve.serve(str(stores["one"]), port)


def test_a_store_that_is_not_there_is_named_before_a_server_starts(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        serve.serve(str(tmp_path / "nowhere"), 8999)


def test_telemetry_is_off() -> None:
    assert serve.SETTINGS["browser_gatherUsageStats"] is False


def test_text_of_the_store_mentions_nobody_and_opens_no_formula_in_a_pull_request() -> None:
    made = escape("@octocat <b> $x^2$ |")
    assert "@octocat" not in made
    assert made == "@\u200boctocat \\<b\\> <span>$</span>x^2<span>$</span> \\|"
