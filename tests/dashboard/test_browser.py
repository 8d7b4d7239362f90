"""As a person would: a real browser, every page, from the overview to a regression, with a download on the way."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dashboard import grid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("overview", "technique", "history", "regressions", "compare", "serving", "scaling", "runs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
#: Opened below a page's name, Streamlit's client asks there for its server before it asks at the root; the answer
#: "not found" is part of that, and the browser reports it.
PROBE = re.compile(rf"/({'|'.join(PAGES)})/_stcore/(health|host-config)$")
WAIT_MS = 60_000


@contextlib.contextmanager
def serving(store: Path, log: Path) -> Iterator[str]:
    """The address of the command's own server over a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "harness", "dashboard", "--store", str(store), "--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=dict(os.environ))
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2).read()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture(scope="module")
def address(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the whole store."""
    with serving(stores["whole"], tmp_path_factory.mktemp("server") / "log") as found:
        yield found


class Watched:
    """A page whose console, failures and requests to elsewhere are kept."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        page.on("request", self._request)
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))

    def _console(self, message: Any) -> None:
        if message.type == "error" and not PROBE.search(str(message.location.get("url", ""))):
            self.faults.append(f"console: {message.text} {message.location}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "file:")):
            self.faults.append(f"request to elsewhere: {request.url}")

    def settle(self, title: str) -> None:
        """Wait until the page of that title is drawn."""
        self.page.get_by_role("heading", name=title, level=1).wait_for(timeout=WAIT_MS)
        self.page.wait_for_function(
            '!document.querySelector(\'[data-testid="stStatusWidget"], [data-testid="stSkeleton"]\')', timeout=WAIT_MS
        )
        assert self.page.locator('[data-testid="stException"]').count() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 720}, accept_downloads=True)
    yield Watched(context.new_page())
    context.close()


def query_of(url: str) -> dict[str, list[str]]:
    return parse_qs(urlsplit(url).query)


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 720, "light"), (390, 844, "dark")])
def test_every_page_opens_without_a_fault(browser: Any, address: str, width: int, height: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    watched = Watched(context.new_page())
    for name in PAGES:
        watched.page.goto(f"{address}/{'' if name == 'overview' else name}")
        watched.settle(name.capitalize())
        wide = watched.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} wide on {width}"
        if name == "compare":  # its bars have the longest names
            watched.page.locator(".js-plotly-plot").first.wait_for(timeout=WAIT_MS)
            share = watched.page.locator(".js-plotly-plot").first.evaluate(
                "plot => plot._fullLayout._size.w / plot.clientWidth"
            )
            assert share > 0.5, f"the bars have {share:.0%} of the figure's width"
    assert watched.faults == []
    context.close()


def test_from_the_overview_to_a_regression_with_the_filters_in_the_address(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    watched.settle("Overview")
    page.get_by_text("The same as a table").click()
    page.goto(f"{address}/?gpu=h200")
    watched.settle("Overview")
    _click_cell(watched, "add_rms_norm")
    watched.settle("Technique")
    assert query_of(page.url) == {"technique": ["add_rms_norm"], "gpu": ["h200"]}
    page.get_by_role("link", name="Its history").click()
    watched.settle("History")
    assert query_of(page.url) == {"technique": ["add_rms_norm"], "gpu": ["h200"]}
    assert "/history" in page.url
    page.locator(".js-plotly-plot").first.wait_for(timeout=WAIT_MS)
    page.get_by_test_id("stSidebar").get_by_role("link", name="Regressions").click()
    watched.settle("Regressions")
    assert query_of(page.url)["technique"] == ["add_rms_norm"]
    page.get_by_test_id("stDataFrame").first.wait_for(timeout=WAIT_MS)
    with page.expect_download(timeout=WAIT_MS) as download:
        page.get_by_test_id("stDownloadButton").first.get_by_role("button").click()
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert download.value.suggested_filename == "pairbench-regressions.csv"
    assert "regressed" in text
    assert "add_rms_norm" in text
    _select_row(watched, 0)
    page.get_by_role("link", name="Open its series").click(timeout=WAIT_MS)
    watched.settle("History")
    assert query_of(page.url)["series"][0].startswith("add_rms_norm/optimized/")
    page.locator(".js-plotly-plot").first.wait_for(timeout=WAIT_MS)
    assert watched.faults == []


def _click_cell(watched: Watched, technique: str) -> None:
    """Click a technique's first cell in the heat map."""
    row = watched.page.get_by_role("row").filter(has=watched.page.get_by_role("rowheader", name=technique))
    cell = row.get_by_role("button").first
    cell.hover()
    watched.page.get_by_role("tooltip").filter(has_text=f"pairbench run {technique}").wait_for(timeout=WAIT_MS)
    cell.click()


def test_a_cell_stays_the_same_one_while_what_it_says_of_ages_changes(watched: Watched) -> None:
    page = watched.page
    page.set_content(f"<div id='parent'>{grid.HTML}</div>")
    page.evaluate("async text => { window.part = await import('data:text/javascript,' + encodeURIComponent(text)); }",
                  grid.JS)  # fmt: skip
    draw = """([ago, sign]) => {
        const cell = {at: ["t", "g"], words: ["t on g", ago], sign};
        part.default({data: {columns: ["g"], rows: [{name: "t", cells: [null, cell]}]},
                      parentElement: document.getElementById("parent"),
                      setStateValue: (name, value) => { window.said = [name, value.at, value.when > 0]; }});
    }"""
    page.evaluate(draw, ["1 minute ago", ["●", "green"]])
    button = page.get_by_role("button")
    button.hover()
    page.mouse.down()
    page.evaluate(draw, ["2 minutes ago", ["●", "green"]])
    page.mouse.up()
    assert page.evaluate("window.said") == ["picked", ["t", "g"], True]
    assert button.get_attribute("aria-label") == "t on g\n2 minutes ago"
    page.evaluate(draw, ["2 minutes ago", ["✖", "red"]])
    assert page.get_by_role("button").inner_text() == "✖"


def test_a_cell_opens_its_technique_each_time_that_it_is_clicked(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}/?gpu=h200")
    for _ in range(2):
        watched.settle("Overview")
        page.wait_for_timeout(1000)
        assert page.get_by_role("heading", name="Overview", level=1).is_visible(), "an old click acts again"
        _click_cell(watched, "add_rms_norm")
        watched.settle("Technique")
        assert query_of(page.url) == {"technique": ["add_rms_norm"], "gpu": ["h200"]}
        page.go_back()
    assert watched.faults == []


def test_the_same_row_opens_its_page_again(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}/?gpu=h200")
    watched.settle("Overview")
    for _ in range(2):
        page.get_by_test_id("stDataFrame").first.scroll_into_view_if_needed(timeout=WAIT_MS)
        page.wait_for_timeout(4000)  # until the verdicts are in, after which the page draws itself once more
        _select_row(watched, 0)
        watched.settle("Regressions")
        page.go_back()
        watched.settle("Overview")
        page.wait_for_timeout(1000)
        assert page.get_by_role("heading", name="Overview", level=1).is_visible(), "an old selection acts again"
    assert watched.faults == []


def test_a_row_that_is_selected_stays_the_one_that_was_whatever_the_filters_show(
    watched: Watched, address: str
) -> None:
    page = watched.page
    page.goto(f"{address}/runs")
    watched.settle("Runs")
    page.wait_for_timeout(4000)  # until the verdicts are in, after which the page draws itself once more
    _select_row(watched, 3)
    page.wait_for_url("**/runs?run=*", timeout=WAIT_MS)
    run = query_of(page.url)["run"]
    page.get_by_test_id("stMain").get_by_test_id("stSelectbox").first.get_by_role("combobox").click()
    page.get_by_role("option", name="l40s").click()
    page.wait_for_url("**gpu=l40s", timeout=WAIT_MS)
    watched.settle("Runs")
    page.wait_for_timeout(2000)
    assert query_of(page.url) == {"run": run, "gpu": ["l40s"]}
    assert watched.faults == []


def test_a_long_subject_can_be_read_whole_without_a_pointer(browser: Any, address: str, evil: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    watched = Watched(context.new_page())
    watched.page.goto(f"{address}/history?technique=add_rms_norm&gpu=h200")
    watched.settle("History")
    cell = watched.page.get_by_role("table", name="changes of these series").get_by_role("cell", name=evil, exact=True)
    cell.wait_for(timeout=WAIT_MS)
    hidden = cell.evaluate("c => [c.scrollWidth > c.clientWidth, c.scrollHeight > c.clientHeight, c.offsetWidth > 390]")
    assert hidden == [False, False, False]
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.faults == []
    context.close()


def test_the_stretch_of_commits_is_moved_with_keys_and_stands_in_the_address(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}/history?technique=add_rms_norm&gpu=h200")
    watched.settle("History")
    ends = page.get_by_role("slider")
    ends.first.focus(timeout=WAIT_MS)
    for at in ("01", "02"):  # the focus stays, so that the next key moves it on
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**&from={at * 6}", timeout=WAIT_MS)
    ends.last.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(f"**&from={'02' * 6}&to={'16' * 6}", timeout=WAIT_MS)
    page.wait_for_function(
        "document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range[0] == 1.3", timeout=WAIT_MS
    )
    assert watched.faults == []


def test_the_list_of_pages_leaves_a_phone_to_the_page(browser: Any, address: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    watched = Watched(context.new_page())
    watched.page.goto(f"{address}/?gpu=h200")
    watched.settle("Overview")
    for name in ("Runs", "History"):
        watched.page.get_by_test_id("stExpandSidebarButton").tap(timeout=WAIT_MS)
        watched.page.get_by_test_id("stSidebar").get_by_role("link", name=name).tap(timeout=WAIT_MS)
        watched.settle(name)
        watched.page.wait_for_function(
            "document.querySelector('[data-testid=\"stSidebar\"]').getBoundingClientRect().right <= 0", timeout=WAIT_MS
        )
        assert query_of(watched.page.url)["gpu"] == ["h200"]
    assert watched.faults == []
    context.close()


def _select_row(watched: Watched, number: int) -> None:
    """Tick a row of the first table; it is a canvas, so by its place."""
    box = watched.page.get_by_test_id("stDataFrame").first.bounding_box()
    watched.page.mouse.click(box["x"] + 20, box["y"] + 35 * (number + 1) + 17)


def test_an_address_shows_another_person_the_same(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}/history?technique=add_rms_norm&gpu=h200&metric=speedup&from={'05' * 6}&to={'12' * 6}")
    watched.settle("History")
    page.locator(".js-plotly-plot").first.wait_for(timeout=WAIT_MS)
    shown = page.locator(".js-plotly-plot").first.evaluate("plot => plot._fullLayout.xaxis.range")
    assert shown == [4.3, 12.7]
    assert page.get_by_text("Speedup over baseline").first.is_visible()
    assert watched.faults == []


def test_a_point_gives_its_command_and_a_stretch_that_is_drawn_stands_in_the_address(
    watched: Watched, address: str
) -> None:
    page = watched.page
    page.goto(f"{address}/history?technique=add_rms_norm&gpu=h200&variant=optimized")
    watched.settle("History")
    plot = page.locator(".js-plotly-plot").first
    plot.locator(".point").first.wait_for(timeout=WAIT_MS)
    page.wait_for_timeout(4000)  # until the verdicts are in, after which the page draws itself once more
    plot.scroll_into_view_if_needed()
    _click_point(watched, 3)
    page.get_by_text("at 030303030303").wait_for(timeout=WAIT_MS)
    assert page.locator("pre").filter(has_text="pairbench run add_rms_norm").count() >= 1
    page.mouse.move(*_point(watched, 6))
    page.locator('[data-title="Box Select"]').first.click()
    left, right = _point(watched, 5), _point(watched, 12)
    page.mouse.move(left[0] - 10, left[1] - 30)
    page.mouse.down()
    page.mouse.move(right[0] - 30, right[1] + 10, steps=4)
    page.mouse.move(right[0] + 10, right[1] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=050505050505&to=121212121212", timeout=WAIT_MS)
    page.go_back()
    page.wait_for_function("!location.search.includes('from')", timeout=WAIT_MS)
    assert watched.faults == []


def _point(watched: Watched, number: int) -> list[float]:
    """Where the point of a number stands on the screen."""
    found: list[float] = watched.page.locator(".js-plotly-plot").first.evaluate(
        """(plot, number) => {
            const trace = plot._fullData.find(trace => trace.mode == 'lines+markers'), layout = plot._fullLayout;
            const box = plot.getBoundingClientRect(), at = trace.x.indexOf(number);
            return [box.x + layout.xaxis._offset + layout.xaxis.d2p(trace.x[at]),
                    box.y + layout.yaxis._offset + layout.yaxis.d2p(trace.y[at])];
        }""",
        number,
    )
    return found


def _click_point(watched: Watched, number: int) -> None:
    place = _point(watched, number)
    watched.page.mouse.move(*place)
    watched.page.wait_for_timeout(300)
    watched.page.mouse.click(*place)


def test_new_records_appear_in_a_page_that_nobody_touches(watched: Watched, maker: Any, tmp_path: Path) -> None:
    maker.run(0, "h200", everything=False)
    with serving(maker.root, tmp_path / "log") as address:
        watched.page.goto(address)
        watched.settle("Overview")
        heads = watched.page.get_by_role("columnheader")
        heads.filter(has_text="h200").wait_for(timeout=WAIT_MS)
        assert heads.filter(has_text="l40s").count() == 0
        maker.run(1, "l40s", everything=False)
        heads.filter(has_text="l40s").wait_for(timeout=WAIT_MS)
    assert watched.faults == []


def test_help_and_glossary_are_a_key_press_away(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}/serving")
    watched.settle("Serving")
    button = page.get_by_role("button", name="How to read this")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_text("Up and to the left is better").wait_for(timeout=WAIT_MS)
    page.keyboard.press("Escape")
    glossary = page.get_by_role("button", name="Glossary")
    glossary.focus()
    page.keyboard.press("Enter")
    page.get_by_text("Pareto front").first.wait_for(timeout=WAIT_MS)
    assert watched.faults == []


def test_a_filter_that_is_moved_stands_in_the_address_and_follows(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}/runs")
    watched.settle("Runs")
    page.get_by_test_id("stSelectbox").first.get_by_role("combobox").click()
    page.get_by_role("option", name="l40s").click()
    page.wait_for_url("**/runs?gpu=l40s", timeout=WAIT_MS)
    link = page.get_by_test_id("stSidebar").get_by_role("link", name="Technique")
    link.and_(page.locator("[href*='gpu=l40s']")).click(timeout=WAIT_MS)
    watched.settle("Technique")
    assert query_of(page.url)["gpu"] == ["l40s"]
    assert watched.faults == []


def test_the_snapshot_opens_from_disk(watched: Watched, stores: dict[str, Path], tmp_path: Path) -> None:
    from dashboard import snapshot
    from dashboard.source import open_source

    path = tmp_path / "page.html"
    path.write_text(snapshot.html_page(snapshot.take(open_source(str(stores["whole"])))), encoding="utf-8")
    for scheme in ("light", "dark"):
        watched.page.emulate_media(color_scheme=scheme)
        watched.page.goto(path.as_uri())
        assert watched.page.get_by_text("What pays where").is_visible()
        assert watched.page.locator("svg").count() >= 3
    watched.page.set_viewport_size({"width": 390, "height": 844})
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.faults == []
