"""Every page in every state: it draws, says what is there and what is not, and shows the store's text as text."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.record import to_line
from harness.regress.acknowledge import Acknowledged

Draw = Callable[..., Any]
Stores = dict[str, Path]
PAGES = ("overview", "technique", "history", "regressions", "compare", "serving", "scaling", "runs")
#: What Streamlit reads as Markdown; the store's text may stand in none of it.
MARKDOWN = ("markdown", "caption", "info", "warning", "error", "success", "title", "header", "subheader")


def said(page: Any) -> str:
    return "\n".join(str(element.value) for kind in MARKDOWN for element in page.get(kind))


def given(page: Any, component: str) -> list[Any]:
    """What the page gives to each of our components of a name."""
    protos = [element.proto for element in page.get("bidi_component")]
    return [json.loads(proto.json or proto.mixed.json) for proto in protos if proto.component_name == component]


def codes(page: Any) -> list[str]:
    return [*(element.value for element in page.code), *(data["text"] for data in given(page, "pairbench_copy"))]


def short_tables(page: Any) -> list[str]:
    return [body for body in (element.proto.body for element in page.get("html")) if 'class="short"' in body]


def figures(page: Any) -> list[Any]:
    return [json.loads(data["figure"]) for data in given(page, "pairbench_plot")]


def heat_map(page: Any) -> Any:
    return given(page, "pairbench_grid")[0]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_over_a_whole_history(name: str, draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw(name, stores["whole"], unfold="points")
    assert not page.exception, page.exception[0].message
    assert [element.value.lower() for element in page.title] == [name]
    assert not page.error
    assert len(page.dataframe) >= 1
    assert len(page.get("download_button")) == len(page.dataframe) + len(short_tables(page))
    assert {"How to read this", "Glossary"} <= {block.proto.popover.label for block in page.get("popover")}


@pytest.mark.parametrize("name", PAGES)
def test_an_empty_store_says_what_to_do(name: str, draw: Draw, stores: Stores) -> None:
    page = draw(name, stores["empty"])
    assert not page.exception
    assert "The history is empty" in said(page)
    assert any("pairbench run" in code for code in codes(page))
    assert any(str(stores["empty"]) in code for code in codes(page))


@pytest.mark.parametrize("name", PAGES)
def test_damage_and_a_newer_schema_are_named_and_the_rest_is_shown(name: str, draw: Draw, stores: Stores) -> None:
    page = draw(name, stores["damaged"], unfold="points")
    assert not page.exception
    text = said(page)
    assert "written by a newer pairbench" in text
    assert "`git pull` in its checkout" in text
    assert "2 part(s) of the store could not be read" in text
    reasons = " ".join(page.dataframe[0].value["reason"])
    assert "newer" in reasons
    assert "torn" in reasons
    if name in ("overview", "technique", "history", "runs"):
        assert len(page.dataframe) >= 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("overview", "There are too few runs"),
        ("technique", "One commit so far"),
        ("history", "One commit so far"),
        ("regressions", "too few runs in every series"),
        ("compare", "Two different selections are needed"),
        ("serving", "Failed and refused requests meet nothing"),
        ("scaling", "Ideal throughput"),
        ("runs", "Conditions of each measurement"),
    ],
)
def test_a_single_run_says_what_cannot_be_seen_yet(name: str, words: str, draw: Draw, stores: Stores) -> None:
    from dashboard.source import open_source

    open_source(str(stores["one"])).judge_now()
    page = draw(name, stores["one"])
    assert not page.exception
    assert words in said(page)


@pytest.mark.parametrize("name", ["overview", "technique", "history", "serving", "scaling", "runs", "regressions"])
def test_a_gpu_type_that_is_missing_is_said_to_be(name: str, draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw(name, stores["whole"], gpu="b300")
    assert not page.exception
    assert page.info, "nothing says that there is nothing of this GPU type"
    assert page.query_params["gpu"] in (["b300"], "b300")  # as it was asked for: the address is not mended


def test_a_store_that_cannot_be_opened_says_why(draw: Draw, tmp_path: Path) -> None:
    page = draw("overview", tmp_path / "nowhere")
    assert not page.exception
    assert "cannot be read now" in said(page)
    assert any("no such folder" in element.value for element in page.text)


@pytest.mark.parametrize("name", PAGES)
def test_text_of_the_store_is_never_markup(name: str, draw: Draw, stores: Stores, judged: Any, evil: str) -> None:
    page = draw(name, stores["whole"], **({"technique": evil} if name == "technique" else {}))
    assert not page.exception
    assert "onerror" not in said(page)
    assert "javascript:" not in said(page)
    for figure in figures(page):
        assert "<img" not in json.dumps(figure)
    for element in page.get("html"):
        assert "onerror" not in element.proto.body


def test_a_figure_shows_markup_as_its_characters(draw: Draw, stores: Stores, judged: Any, evil: str) -> None:
    page = draw("history", stores["whole"], technique=evil, gpu="h200")
    texts = [t for trace in figures(page)[0]["data"] for t in trace["hovertext"]]
    assert any(html.escape("<img src=x onerror=alert(1)>") in text for text in texts)


def test_filters_of_the_address_are_those_of_the_page(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("history", stores["whole"], technique="add_rms_norm", gpu="h200", metric="speedup")
    chosen = {box.label: box.value for box in page.selectbox}
    assert chosen["Technique"] == "add_rms_norm"
    assert chosen["Metric"] == "speedup"
    assert page.multiselect[0].value == ["h200"]


def test_moving_a_filter_writes_it_into_the_address_and_links_carry_it(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("overview", stores["whole"])
    box = next(box for box in page.selectbox if box.label == "GPU type")
    box.select("l40s").run()
    assert page.query_params["gpu"] == "l40s"
    links = {element.proto.page: element.proto.query_string for element in page.get("page_link")}
    assert "gpu=l40s" in links["technique"]
    assert "gpu=l40s" in links["regressions"]


def test_a_stretch_of_commits_stands_in_the_address(draw: Draw, stores: Stores, judged: Any) -> None:
    query = {"technique": "add_rms_norm", "gpu": "h200", "from": "05" * 6, "to": "08" * 6}
    page = draw("history", stores["whole"], **query)
    spec = figures(page)[0]
    assert spec["layout"]["xaxis"]["range"] == [4.3, 8.7]


def test_a_planted_step_is_marked_and_opens_from_its_verdict(draw: Draw, stores: Stores, judged: Any) -> None:
    found = [v for v in judged.judged.verdicts if v.verdict == "regressed" and v.key.metric == "latency"]
    assert [v.key.gpu for v in found] == ["h200"]
    assert found[0].body["commit"] == "10" * 20
    page = draw("regressions", stores["whole"], series=found[0].key.text)
    assert any("git checkout" in code or "pairbench run" in code for code in codes(page))
    history = draw("history", stores["whole"], series=found[0].key.text)
    marks = [trace.get("name") for trace in figures(history)[0]["data"]]
    assert "regressed" in marks
    (table,) = short_tables(history)
    assert re.findall(r'<th scope="col">(.*?)</th>', table)[3] == "commit"
    assert f"<td>{'10' * 6}</td>" in table


def test_every_point_has_a_command(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("history", stores["whole"], unfold="points", technique="add_rms_norm", gpu="h200")
    traces = [t for t in figures(page)[0]["data"] if t.get("mode") == "lines+markers"]
    assert traces
    for trace in traces:
        points = [text for text, y in zip(trace["hovertext"], trace["y"], strict=True) if y is not None]
        assert points
        assert all("pairbench run add_rms_norm" in text for text in points)
    table = page.dataframe[-1].value
    assert table["reproduce"].str.contains("pairbench run add_rms_norm").all()
    assert any("pairbench run add_rms_norm" in code for code in codes(page))


@pytest.mark.parametrize(("name", "fold"), [("overview", "coverage"), ("history", "points"), ("technique", "code")])
def test_what_is_folded_is_drawn_when_it_is_unfolded(
    name: str, fold: str, draw: Draw, stores: Stores, judged: Any
) -> None:
    query = {"technique": "add_rms_norm"} if name != "overview" else {}
    closed, opened = draw(name, stores["whole"], **query), draw(name, stores["whole"], unfold=fold, **query)
    assert not opened.exception
    count = [len(page.code) + len(page.dataframe) for page in (closed, opened)]
    assert count[1] == count[0] + 1


def test_what_was_not_run_is_a_gap_and_a_sign_never_a_zero(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("overview", stores["whole"])
    cells = [cell for row in heat_map(page)["rows"] for cell in row["cells"]]
    assert None not in cells, "a technique that was not run on a GPU type has a cell that says so"
    assert any("value" not in cell for cell in cells)
    assert not any(cell.get("value", "").startswith("0.00") for cell in cells)
    signs = {cell[name][0] for cell in cells for name in ("sign", "stale") if name in cell}
    assert {"✖", "▼", "○", "–", "□"} <= signs


def test_new_records_appear_without_a_restart(draw: Draw, maker: Any) -> None:
    maker.run(0, "h200", everything=False)
    page = draw("runs", maker.root)
    assert len(page.dataframe[0].value) == 1
    maker.run(1, "h200", everything=False)
    page.run()
    assert len(page.dataframe[0].value) == 2


def test_the_watch_sees_a_new_file_by_the_stores_state(maker: Any) -> None:
    from dashboard.source import open_source

    maker.run(0, "h200", everything=False)
    source = open_source(str(maker.root))
    assert not source.is_new()
    maker.run(1, "h200", everything=False)
    assert source.is_new()
    source.refresh()
    assert not source.is_new()


def test_serving_shows_goodput_between_two_ends_and_moves_with_the_slo(draw: Draw, stores: Stores) -> None:
    loose = draw("serving", stores["whole"], gpu="h200", ttft_ms="10000", tpot_ms="10000")
    tight = draw("serving", stores["whole"], gpu="h200", ttft_ms="40", tpot_ms="10000")
    tables = [next(t.value for t in page.dataframe if "TTFT met" in t.value) for page in (loose, tight)]
    assert (tables[0]["low"] == tables[0]["rate"]).all()
    assert tables[1]["high"].sum() < tables[0]["high"].sum()


def test_a_run_shows_clocks_throttling_sentinel_and_ceilings(draw: Draw, stores: Stores) -> None:
    page = draw("runs", stores["whole"], run=f"202603{6:02d}T000000Z-h200{5:04d}")
    tables = [table.value for table in page.dataframe]
    conditions = next(table for table in tables if "SM clock, MHz" in table)
    assert set(conditions["SM clock, MHz"]) == {"1755 to 1980"}
    assert set(conditions["throttled"]) == {"● no"}
    assert set(conditions["power capped"]) == {"▼ yes"}
    assert any("▼ moved" in list(table.get("moved", ())) for table in tables)
    ceilings = next(table for table in tables if "ceiling" in table)
    assert "4.2 TB/s" in set(ceilings["measured"])


def test_a_log_is_shown_as_it_was_written(draw: Draw, stores: Stores, evil: str) -> None:
    page = draw("runs", stores["whole"], run=f"202603{17:02d}T000000Z-h200{16:04d}")
    assert f"Traceback\n{evil}\n".strip() in [code.strip() for code in codes(page)]


def test_a_broken_file_of_accepted_changes_is_said_to_be(
    draw: Draw, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard import source

    def broken(root: Path | None) -> list[Any]:
        raise UsageError("acknowledged.toml is not TOML: <b>line 1</b>")

    monkeypatch.setattr(source, "find_acknowledged", broken)
    maker.run(0, "h200", everything=False)
    source.open_source(str(maker.root)).judge_now()
    page = draw("regressions", maker.root)
    assert not page.exception
    assert "could not be judged" in said(page)
    assert any("acknowledged.toml is not TOML: <b>" in element.value for element in page.text)


def test_an_accepted_change_stays_visible_with_its_reason(
    draw: Draw, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: str
) -> None:
    from dashboard import source

    shutil.copytree(stores["whole"], tmp_path / "copy")
    entry = Acknowledged((("technique", "add_rms_norm"),), "10" * 20, evil)
    monkeypatch.setattr(source, "find_acknowledged", lambda root: [entry])
    source.open_source(str(tmp_path / "copy")).judge_now()
    page = draw("regressions", tmp_path / "copy", accepted="only", technique="add_rms_norm")
    rows = page.dataframe[0].value
    assert rows["verdict"].str.contains("★").all()
    assert set(rows["accepted"]) == {evil}
    assert "onerror" not in said(page)
    hidden = draw("regressions", tmp_path / "copy", accepted="hide", technique="add_rms_norm")
    assert "No verdict fits" in said(hidden)


@pytest.mark.parametrize("name", ["overview", "runs"])
def test_a_page_names_its_store_without_the_path_of_a_machine(
    name: str, draw: Draw, stores: Stores, judged: Any
) -> None:
    page = draw(name, stores["whole"])
    shown = [element.proto.body for element in page.sidebar.get("html")]
    assert any(">whole<" in body for body in shown)
    visible = " ".join([said(page), *codes(page), *(text.value for text in page.text)])
    assert str(stores["whole"].parent) not in visible + re.sub(r"title='[^']*'", "", " ".join(shown))


def test_a_store_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dashboard.source import store_name
    from harness.history.store import checkout_store

    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path / "data"))
    assert store_name(str(tmp_path / "data" / "history")) == "your own history"
    assert store_name(str(checkout_store())) == "results/history"
    assert store_name(str(tmp_path / "nightly")) == "nightly"
    assert store_name("s3://bucket/history") == "s3://bucket/history"
    assert store_name("https://key:secret@host/history") == "https://host/history"


def test_the_first_page_loads_neither_highlighter_nor_plotly(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("overview", stores["whole"])
    assert not page.code
    assert not figures(page)


def test_a_dirty_tree_is_compared_and_opened_only_when_it_is_asked_for(draw: Draw, maker: Any) -> None:
    for at in range(3):
        maker.run(at, "h200", everything=False)
    maker.run(3, "l40s", everything=False)  # newer and clean, with nothing in common
    maker.run(4, "h200", dirty=True, everything=False)
    page = draw("compare", maker.root)
    assert [page.selectbox[at].value for at in (0, 1)] == ["01" * 6, "02" * 6]
    assert len(page.dataframe[0].value) >= 1
    runs = draw("runs", maker.root)
    assert any("l40s0003" in text.value for text in runs.text), [text.value for text in runs.text]
    assert any("h2000004" in code for code in codes(draw("runs", maker.root, run="20260305T000000Z-h2000004")))


def test_only_dirty_trees_are_better_than_nothing(draw: Draw, maker: Any) -> None:
    for at in range(2):
        maker.run(at, "h200", dirty=True, everything=False)
    assert not draw("compare", maker.root).exception
    runs = draw("runs", maker.root)
    assert any("h2000001" in text.value for text in runs.text)


def test_what_one_side_lacks_has_a_unit(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("compare", stores["whole"], a="17" * 6, b="10" * 6, metric="throughput")
    missing = next(table.value for table in page.dataframe if "on the other side" in table.value)
    assert "rows/s" in set(missing["unit"])
    assert missing["unit"].str.endswith("/s").all()


@pytest.mark.parametrize("name", PAGES)
def test_a_store_of_which_nothing_can_be_read_is_not_called_empty(name: str, draw: Draw, stores: Stores) -> None:
    page = draw(name, stores["newer"])
    assert not page.exception
    assert "5 record(s) were written by a newer pairbench" in said(page)
    assert "Nothing here can be shown" in said(page)
    assert "The history is empty" not in said(page)
    assert not any("pairbench run" in code for code in codes(page))


def test_what_a_rank_keeps_for_backward_stands_beside_its_memory(draw: Draw, stores: Stores) -> None:
    figures = draw("scaling", stores["whole"], technique="pipeline").dataframe[-1].value
    assert {"2 MiB", "1 MiB", "512 KiB"} == set(figures["kept for backward"])


def test_the_error_is_drawn_over_the_newest_commits_and_older_failures_are_counted(
    draw: Draw, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard.views import technique

    monkeypatch.setattr(technique, "NEWEST", 3)
    for at in range(5):
        maker.run(at, "h200", everything=False)
    page = draw("technique", maker.root, technique="add_rms_norm")
    assert "The newest 3 of 5 commits are drawn; before them 0 check(s) failed." in said(page)
    assert any("03" * 6 in text and "00" * 6 not in text for text in map(json.dumps, figures(page)))


@pytest.mark.parametrize("name", ["history", "technique"])
def test_a_page_opens_on_a_technique_that_was_measured(name: str, draw: Draw, maker: Any) -> None:
    path = maker.run(0, "h200", everything=False)
    record = maker.measurement(maker.common(0, "h200"), "aaa", "optimized", None, status="skipped", reason="no GPU")
    path.write_text(path.read_text(encoding="utf-8") + to_line(record), encoding="utf-8")
    page = draw(name, maker.root)
    assert {box.label: box.value for box in page.selectbox}["Technique"] == "add_rms_norm"
