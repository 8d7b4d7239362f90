"""What pages say of what they show: of which GPU type it is, what is left out, and why there is nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboard.charts import serving
from dashboard.queries import keys_of
from dashboard.seriesview import lines_of
from dashboard.source import Judged, Source, open_source
from dashboard.views import serving as serving_page
from harness.cli import make_app
from harness.record import to_line

Draw = Callable[..., Any]
Stores = dict[str, Path]


def texts(page: Any) -> str:
    return "\n".join(element.value for kind in ("text", "caption", "info") for element in page.get(kind))


def test_a_technique_says_of_which_gpu_type_its_figures_are(draw: Draw, stores: Stores, judged: Any) -> None:
    said = texts(draw("technique", stores["whole"], technique="add_rms_norm"))
    assert "Measured on cpu, the newest; choose above for h200, l40s" in said
    said = texts(draw("technique", stores["whole"], technique="add_rms_norm", gpu="l40s"))
    assert "Measured on l40s\n" in said


def test_a_technique_opens_where_it_has_a_result(draw: Draw, maker: Any) -> None:
    def run(at: int, gpu: str, **more: Any) -> None:
        common = maker.common(at, gpu)
        records = maker.pair(common, "t")
        records[1] |= more
        folder = maker.root / gpu
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{common['run']}.jsonl").write_text("".join(map(to_line, records)), encoding="utf-8")

    run(0, "h200")
    run(1, "cpu", status="skipped", metrics={}, reason="no GPU")
    said = [one.value for one in draw("technique", maker.root).text]
    assert "Measured on h200, the newest with a result; choose above for cpu" in said
    run(2, "l40s", status="error", metrics={}, reason="it broke")
    said = [one.value for one in draw("technique", maker.root).text]
    assert "Measured on l40s, the newest with a result; choose above for cpu, h200" not in said
    assert "Measured on l40s, the newest; choose above for cpu, h200" in said


def test_no_change_is_said_of_what_the_filters_show_only(draw: Draw, stores: Stores, judged: Any) -> None:
    for filters in ({"gpu": "h200", "family": "no such"}, {"gpu": "cpu"}):
        assert "Nothing here was judged" in texts(draw("overview", stores["whole"], **filters))
    said = texts(draw("overview", stores["whole"], gpu="l40s"))
    assert "No change was found.** Every series that can be judged is within its noise" in said
    assert "No change was found" not in texts(draw("overview", stores["whole"], gpu="h200"))


def test_what_was_never_judged_is_not_blamed_on_too_few_runs(draw: Draw, stores: Stores, judged: Any) -> None:
    said = texts(draw("regressions", stores["whole"], gpu="b300"))
    assert "There is no series of this technique, GPU type and metric." in said
    assert "Choose *unchanged*" not in said
    open_source(str(stores["one"])).judge_now()
    assert "too few runs in every series" in texts(draw("regressions", stores["one"], gpu="h200"))


def test_serve_runs_that_did_not_pass_are_not_said_to_keep_no_quantiles(draw: Draw, maker: Any) -> None:
    path = maker.run(0, "h200")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in lines:
        if record.get("kind") == "serve":
            record |= {"status": "unsettled", "reason": "the machine was busy"}
    path.write_text("".join(json.dumps(record) + "\n" for record in lines), encoding="utf-8")
    said = texts(draw("serving", maker.root))
    assert "Only what passed is drawn, and nothing here did." in said
    assert "no quantiles" not in said


def test_serve_runs_that_are_left_out_are_counted(
    draw: Draw, stores: Stores, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_page, "MOST", 5)
    assert "the first 5 of 12 serve runs" in texts(draw("serving", stores["whole"]))
    assert "serve runs are shown" not in texts(draw("serving", stores["one"], variant="baseline", gpu="none"))


def record(gpu: str, **serve: Any) -> dict[str, Any]:
    return {"variant": "baseline", "workload": "load1", "technique": "t", "gpu": gpu, "dtype": "f", "ranks": 1,
            "serve": serve, "reproduce": ""}  # fmt: skip


def test_lines_of_two_gpu_types_have_two_names() -> None:
    grid = [[0.5, 1.0], [0.9, 2.0]]
    names = [
        trace.name
        for trace in serving.distributions([record("a", ttft=grid), record("b", ttft=grid)], "ttft", None).data
    ]
    assert names == ["baseline, load1, a", "baseline, load1, b"]
    assert [trace.name for trace in serving.distributions([record("a", ttft=grid)], "ttft", None).data] == [
        "baseline, load1"
    ]


def test_a_workload_that_was_defined_anew_is_another_line(maker: Any) -> None:
    for at, workload_id in enumerate(("first", "second")):
        common = maker.common(at, "h200")
        folder = maker.root / "h200"
        folder.mkdir(parents=True, exist_ok=True)
        records = maker.pair(common, "t", workload_id=workload_id)
        (folder / f"{common['run']}.jsonl").write_text("".join(map(to_line, records)), encoding="utf-8")
    source = Source(str(maker.root))
    source.refresh()
    assert source.history is not None
    chosen = keys_of(source.history, {"variant": "baseline"}, "latency")
    assert [line.name for line in lines_of(source.history, Judged(), chosen)] == ["baseline, w first",
                                                                                  "baseline, w second"]  # fmt: skip
    source.close()


def test_the_bound_stands_where_its_words_do_and_is_one_that_can_be_drawn(draw: Draw, stores: Stores) -> None:
    figure = serving.distributions([record("a", ttft=[[0.5, 0.1], [0.9, 2.0]])], "ttft", 0.5)
    assert figure.layout.shapes[0].x0 == 0.5
    assert 10 ** figure.layout.annotations[0].x == pytest.approx(0.5), "a logarithmic axis places words by logarithm"
    for word in ("-5", "0", "nan", "inf", "soon"):
        page = draw("serving", stores["one"], ttft_ms=word)
        assert not page.exception
        bounds = [
            shape["x0"] for data in given(page) for shape in json.loads(data["figure"])["layout"].get("shapes", [])
        ]
        assert bounds == [0.5], word


def load(variant: str, rate: float, output: float, wait: float, **dims: Any) -> dict[str, Any]:
    return {"technique": "t", "variant": variant, "gpu": "g", "dtype": "f", "ranks": 1, "reproduce": "",
            "workload": f"{dims.get('model', 'm')}[request_rate={rate}]", "m_output_rate": output, "m_ttft_p99": wait,
            "dims": {"model": "m", **dims, "request_rate": rate}}  # fmt: skip


def test_a_line_and_a_front_join_loads_of_one_service_only() -> None:
    rows = [load("optimized", rate, 10 * rate, rate) for rate in (1.0, 2.0)]
    rows += [load("baseline", rate, 5 * rate, 2 * rate) for rate in (1.0, 2.0)]
    rows += [load("optimized", rate, 100 * rate, rate / 10, model="small") for rate in (1.0, 2.0)]
    *lines, front = serving.curves(rows, "ttft_p99").data
    assert {line.name: line.y for line in lines} == {
        "t optimized, m, g": (10.0, 20.0),
        "t baseline, m, g": (5.0, 10.0),
        "t optimized, small, g": (100.0, 200.0),
    }
    assert front.y == (10.0, 20.0, None, 100.0, 200.0, None), "one model is no rival of another"
    assert "request rate 2" in lines[0].hovertext[1]
    assert serving.several_loads(rows)
    assert not serving.several_loads([rows[0], rows[4]])


def test_a_curve_holds_its_last_value_until_the_run_ends() -> None:
    curve = [[0.0, 1.0], [5.0, 4.0]]
    drawn = serving.over_time([record("a", running=curve, span=10.0)], "running", "requests", share=False).data[0]
    assert (drawn.x, drawn.y) == ((0.0, 5.0, 10.0), (1.0, 4.0, 4.0))
    assert curve == [[0.0, 1.0], [5.0, 4.0]], "the record was changed"


def test_memory_has_its_ideal_beside_it(draw: Draw, stores: Stores, judged: Any) -> None:
    page = draw("scaling", stores["whole"], technique="pipeline", gpu="h200")
    assert "Ideal memory falls with the ranks, since the technique promises less of it." in texts(page)
    figures = [json.loads(data["figure"]) for data in given(page)]
    memory = next(figure for figure in figures if figure["layout"]["yaxis"]["title"]["text"] == "B")
    ideal = next(trace for trace in memory["data"] if trace["name"] == "ideal")
    assert ideal["y"][2] == ideal["y"][0] / 4


def given(page: Any, component: str = "pairbench_plot") -> list[Any]:
    protos = [element.proto for element in page.get("bidi_component")]
    return [json.loads(proto.json or proto.mixed.json) for proto in protos if proto.component_name == component]


def test_a_command_reads_the_store_that_the_page_reads(draw: Draw, stores: Stores, maker: Any) -> None:
    (maker.root / "of mine").mkdir(parents=True)
    for name, store, command in (
        ("runs", stores["damaged"], "pairbench show"),
        ("runs", stores["damaged"], "pairbench history verify"),
        ("overview", maker.root / "of mine", "pairbench run"),
    ):
        copies = given(draw(name, store), "pairbench_copy")
        found = next(data for data in copies if data["text"].startswith(command))
        assert shlex.split(found["text"].splitlines()[0])[-2:] == ["--store", store.name], "no path of the machine"
        words = shlex.split(found["copied"].splitlines()[0])
        assert words[-2:] == ["--store", str(store)]
        if command != "pairbench run":
            done = CliRunner().invoke(make_app(), words[1:])
            assert "newer" in done.output + str(done.exception), "what this very store holds is not said"


@pytest.mark.parametrize(
    ("name", "command"),
    [("scaling", "pairbench run data_parallel --ranks 2"), ("serving", "pairbench run continuous_batching")],
)
def test_what_a_page_says_to_measure_is_kept_where_the_page_reads(
    name: str, command: str, draw: Draw, maker: Any
) -> None:
    common = maker.common(0, "h200")
    folder = maker.root / "h200"
    folder.mkdir(parents=True)
    (folder / f"{common['run']}.jsonl").write_text("".join(map(to_line, maker.pair(common, "t"))), encoding="utf-8")
    page = draw(name, maker.root)
    protos = [element.proto for element in page.get("bidi_component")]
    boxes = [json.loads(p.json or p.mixed.json) for p in protos if p.component_name == "pairbench_copy"]
    (box,) = [box for box in boxes if command in box["text"]]
    assert box["copied"].splitlines()[-1] == f"{command} --store {shlex.quote(str(maker.root.resolve()))}"
    assert str(maker.root) not in box["text"]
