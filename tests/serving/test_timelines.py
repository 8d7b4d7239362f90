"""Timelines of several engines become one: on one clock, each request whole, and nothing counted twice."""

from __future__ import annotations

import pytest

from harness.serving.metrics import summarize
from impls.serving.recorder import Recorder
from impls.serving.request import Request
from impls.serving.timelines import Part, added, merge, second_token_waits


def recorded(events: list[tuple[str, float, list[float], str]], use: list[tuple[float, float, int]]) -> dict:
    recorder = Recorder()
    for key, arrival, tokens, status in events:
        recorder.arrived(Request(key, [1, 2, 3], arrival=arrival))
        for at in tokens:
            recorder.token(key, at)
        if status:
            recorder.ended(key, max([arrival, *tokens]), status)
    for at, share, running in use:
        recorder.sample(at, share, running)
    recorder.slots = (8, 5)
    return recorder.timeline()


def test_a_request_of_two_engines_is_whole_and_on_the_first_ones_clock():
    # The second engine's time 0 is 10 s after the first one's.
    prefill = recorded([("a", 1.0, [2.0], ""), ("b", 3.0, [4.0], "finished")], [(2.0, 0.5, 1), (4.0, 0.0, 0)])
    decode = recorded([("a", 1.0, [1.0, 1.5, 2.0], "finished")], [(1.0, 1.0, 2), (2.0, 0.25, 0)])
    whole = merge([Part(100.0, prefill), Part(110.0, decode)])
    assert whole["requests"]["a"]["token_times"] == [2.0, 11.0, 11.5, 12.0]
    assert whole["requests"]["a"]["first_token"] == 2.0
    assert (whole["start"], whole["end"]) == (0.0, 12.0)
    assert whole["cache_use"] == [[2.0, 0.25], [4.0, 0.0], [11.0, 0.5], [12.0, 0.125]]
    assert whole["running"] == [[2.0, 1.0], [4.0, 0.0], [11.0, 2.0], [12.0, 0.0]]
    assert whole["slots"] == {"reserved": 16, "held": 10}
    assert second_token_waits(whole) == [9.0]
    summary = summarize(whole)
    assert summary.serve["requests"]["finished"] == 2
    assert summary.metrics["ttft_p50"]["value"] == pytest.approx(1.0)
    assert summary.metrics["e2e_p99"]["value"] == pytest.approx(1.0 + 0.99 * 10.0)
    assert summary.metrics["output_rate"]["value"] == pytest.approx(5 / 12)


def test_an_engine_that_began_first_sets_the_clock_wherever_it_stands():
    late = recorded([("a", 0.0, [1.0], "finished")], [])
    early = recorded([("b", 0.0, [1.0], "finished")], [])
    whole = merge([Part(5.0, late), Part(3.0, early)])
    assert whole["requests"]["a"]["arrival"] == 2.0
    assert whole["requests"]["a"]["finish"] == 3.0
    assert whole["requests"]["b"]["token_times"] == [1.0]


def test_what_the_second_engine_never_had_ends_as_the_first_one_says():
    prefill = recorded([("a", 0.0, [], "refused"), ("b", 0.0, [1.0], "cancelled")], [])
    whole = merge([Part(0.0, prefill), Part(0.0, recorded([], []))])
    assert [whole["requests"][key]["status"] for key in "ab"] == ["refused", "cancelled"]


def test_curves_add_up_and_none_counts_before_it_begins():
    assert added([[[0.0, 1.0], [2.0, 3.0]], [[1.0, 5.0], [2.0, 0.0]]]) == [[0.0, 1.0], [1.0, 6.0], [2.0, 3.0]]
    assert added([[], []]) == []
