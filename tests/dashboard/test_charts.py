"""What figures hold before a browser draws them: gaps, signs, intervals, commands."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.basedatatypes import BaseFigure, BasePlotlyType

from dashboard import plot, serve
from dashboard.charts import diverging, lines, pair
from harness.errors import UsageError


def point(at: int, value: float, **more: Any) -> dict[str, Any]:
    return {
        "commit": f"{at:040d}", "rank": at, "value": value, "low": value * 0.99, "high": value * 1.01, "n": 3,
        "unit": "s", "subject": "s", "date": None, "first": "2026", "dirty": False, "judged": True,
        "standing": "declared", "reproduce": "pairbench run t --workload w", "torch": "1",
    } | more  # fmt: skip


def test_a_figure_of_plain_values_is_one_that_plotly_takes() -> None:
    event = {"kind": "step", "verdict": "improved", "ratio": 0.5, "low": 0.4, "high": 0.6, "commit": f"{3:040d}",
             "subject": "", "recovered": None, "side": None, "reproduce": ""}  # fmt: skip
    line = lines.Line("x", [point(at, 1.0, torch=str(at // 4), judged=at != 2) for at in range(8)], [event])
    for most in (1, 500):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lines, "MOST_MARKED", most)
            figure = lines.history([line], False)
        go.Figure(figure)  # raises for a name or a value that Plotly does not know
        assert json.loads(plot.as_json(figure))["layout"]["template"] == plot.TEMPLATE


def test_many_points_are_neither_checked_nor_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = lines.history([lines.Line("x", [point(at, 1.0) for at in range(3)])], False)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("each value of a figure is checked by Plotly again")

    monkeypatch.setattr(BasePlotlyType, "__init__", refused)
    monkeypatch.setattr(BaseFigure, "__init__", refused)
    assert json.loads(plot.as_json(figure))["data"][0]["y"] == [1.0] * 3


def test_what_is_no_number_is_a_gap_in_json() -> None:
    said = json.loads(plot.as_json({"data": [{"type": "scatter", "y": [1.0, math.nan]}], "layout": {}}))
    assert said["data"][0]["y"] == [1.0, None]


def test_a_line_breaks_where_it_was_not_measured() -> None:
    every = lines.Line("all", [point(at, 1.0) for at in range(6)])
    gap = lines.Line("gap", [point(at, 2.0) for at in (0, 1, 4, 5)])
    traces = [trace for trace in lines.history([every, gap], False)["data"] if trace["mode"] == "lines+markers"]
    assert traces[0]["y"] == [1.0] * 6
    assert traces[1]["y"] == [2.0, 2.0, None, 2.0, 2.0]
    assert traces[1]["connectgaps"] is False


def test_intervals_and_hollow_points_are_drawn() -> None:
    line = lines.Line("x", [point(0, 1.0), point(1, 1.0, judged=False, dirty=True, low=None, high=None)])
    trace = lines.history([line], False)["data"][0]
    assert trace["error_y"]["array"] == pytest.approx([0.01, 0.0])
    assert trace["marker"]["symbol"] == ["circle", "circle-open"]
    assert "not judged: dirty tree" in trace["hovertext"][1]


def test_lines_of_many_points_have_few_marks_and_lose_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_MARKED", 10)
    points = [point(at, 1.0, judged=at != 5, dirty=at == 5) for at in (*range(30), 60)]
    every = [point(at, 2.0) for at in range(61)]
    main, bars, kept = lines.history([lines.Line("x", points), lines.Line("all", every)], False)["data"][:3]
    assert main["marker"]["maxdisplayed"] == lines.SPARSE
    drawn = [at for at, y in enumerate(main["y"]) if y is not None]
    assert [main["x"][at] for at in drawn] == [*range(30), 60]
    assert all("pairbench run" in main["hovertext"][at] for at in drawn)
    assert bars["x"][:3] == [0, 0, None]
    assert bars["y"][:2] == pytest.approx([0.99, 1.01])
    assert kept["x"] == [5, 60], "not judged, and without a neighbour"
    assert kept["marker"]["symbol"] == ["circle-open", "circle"]
    assert {trace["legendgroup"] for trace in (main, bars, kept)} == {"0"}


def test_a_failed_check_is_marked_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "MOST_MARKED", 10)
    rows = [{"variant": "v", "workload": "w", "commit": f"{at:040d}", "error": 1.0 + (at == 7), "bound": 1.5,
             "passed": at != 7, "rule": "r", "subject": ""} for at in range(20)]  # fmt: skip
    main, wrong = pair.correctness(rows).data
    assert main.marker.maxdisplayed == lines.SPARSE
    assert (wrong.x, wrong.marker.symbol) == ((7,), "x")


def test_the_axis_says_its_unit_at_each_tick() -> None:
    ticks = {}
    for metric, normalised in (("latency", False), ("latency", True), ("speedup", False)):
        axis = lines.history([lines.Line("x", [point(0, 1e-4)], metric=metric)], normalised)["layout"]["yaxis"]
        ticks[metric, normalised] = axis.get("tickformat", "") + axis.get("ticksuffix", "")
    assert ticks == {("latency", False): "~ss", ("latency", True): "", ("speedup", False): ""}


def test_relative_lines_begin_at_one() -> None:
    line = lines.Line("x", [point(at, 4.0) for at in range(5)] + [point(5, 6.0)])
    assert lines.history([line], True)["data"][0]["y"] == [1.0] * 5 + [1.5]


def test_changes_have_their_own_signs_and_an_accepted_one_is_a_star() -> None:
    event = {
        "kind": "step", "verdict": "regressed", "ratio": 1.5, "low": 1.4, "high": 1.6, "commit": f"{3:040d}",
        "subject": "why", "recovered": None, "side": "optimized", "reproduce": "git checkout x && pairbench run t",
    }  # fmt: skip
    for accepted, symbol in ((None, "triangle-down"), ("<b>right</b>", "star")):
        line = lines.Line("x", [point(at, 1.0) for at in range(6)], [{**event, "acknowledged": accepted}])
        mark = lines.history([line], False)["data"][-1]
        assert mark["marker"]["symbol"] == symbol
        assert mark["x"] == [3]
        assert "+50.0 % [+40.0, +60.0]" in mark["hovertext"][0]
        assert "<b>" not in mark["hovertext"][0]


def test_a_new_stack_is_marked_where_it_begins() -> None:
    line = lines.Line("x", [point(0, 1.0), point(1, 1.0, torch="2"), point(2, 1.0, torch="2")])
    assert lines.stack_changes([line], {f"{at:040d}": at for at in range(3)}) == [(1, "torch 1 → 2")]


def test_bars_of_equal_names_are_not_added_up() -> None:
    row = {
        "technique": "t", "variant": "v", "workload": "w", "metric": "latency", "gpu": "g", "ratio": 1.2,
        "ratio_low": 1.1, "ratio_high": 1.3, "verdict": "regressed", "reason": "", "unit": "s",
        "a": {"value": 1.0, "n": 1}, "b": {"value": 1.2, "n": 1},
    }  # fmt: skip
    bars = diverging.diverging([row, row, {**row, "ratio": None}], 10).data[0]
    assert len(set(bars.y)) == 2
    assert bars.x == pytest.approx((20.0, 20.0))
    assert bars.marker.pattern.shape == "/"


def test_a_memory_that_was_not_measured_has_no_bar() -> None:
    rows = [{"variant": v, "workload": "w", "dtype": "f", "ranks": 1, "m_peak_memory": m, "reproduce": ""}
            for v, m in (("baseline", 2.0**20), ("optimized", None))]  # fmt: skip
    assert [(bar.name, bar.x) for bar in pair.bars(rows, "m_peak_memory", "MiB", bytes_=True).data] == [
        ("baseline", (1.0,))
    ]


def test_the_roof_turns_where_bandwidth_and_peak_meet() -> None:
    row = {
        "variant": "optimized", "workload": "w", "dtype": "bfloat16", "compute_dtype": "bfloat16", "ranks": 1,
        "work_flops": 1e9, "work_bytes": 1e8, "m_latency": 1e-3, "limit_by": "memory", "floor_share": 0.5,
        "reproduce": "",
    }  # fmt: skip
    figure = pair.roofline([row], {"copy": 1e12, "matmul": {"bfloat16": 1e14, "float32": 1e13}})
    roofs = [trace for trace in figure.data if trace.mode == "lines"]
    assert [roof.name for roof in roofs] == ["roof bfloat16"]
    assert (roofs[0].x[1], roofs[0].y[1]) == (100.0, 1e14)
    spot = next(trace for trace in figure.data if trace.mode == "markers")
    assert (spot.x, spot.y) == ((10.0,), (1e12,))


def test_without_streamlit_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streamlit.web.bootstrap", None)
    with pytest.raises(UsageError, match=r"pairbench\[dashboard\]"):
        serve.serve(None, 8999)
