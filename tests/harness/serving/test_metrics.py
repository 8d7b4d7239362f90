"""Serving figures on timelines made by hand, where every value can be worked out on paper."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.errors import UsageError
from harness.serving.metrics import Slo, lag_growth, middle_rate, quantile, summarize, thin, time_mean
from harness.serving.timeline import TimelineError, parse_timeline


def request(arrival: float, *token_times: float, status: str = "finished", **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "arrival": arrival,
        "token_times": list(token_times),
        "finish": token_times[-1] if token_times else arrival,
        "status": status,
        "prompt_tokens": 10,
        "output_tokens": len(token_times),
    }
    if token_times:
        body["first_token"] = token_times[0]
    return {**body, **more}


def value(summary: Any, name: str) -> float:
    return float(summary.metrics[name]["value"])


def test_the_first_wait_is_ttft_and_never_an_inter_token_latency() -> None:
    summary = summarize({"requests": {"a": request(1.0, 6.0, 6.1, 6.2, 6.3)}})
    assert value(summary, "ttft_p50") == pytest.approx(5.0)
    assert value(summary, "itl_p99") == pytest.approx(0.1)
    assert value(summary, "tpot_p50") == pytest.approx(0.1)
    assert value(summary, "e2e_p50") == pytest.approx(5.3)


def test_tokens_that_arrive_at_once_count_one_by_one() -> None:
    # Three messages: one token, then four at once after 0.4 s, then two at once after 0.1 s.
    timeline = parse_timeline({"requests": {"a": request(0.0, 1.0, 1.4, 1.4, 1.4, 1.4, 1.5, 1.5)}})
    gaps = timeline.requests[0].gaps()
    assert gaps == pytest.approx([0.1] * 4 + [0.05] * 2)
    assert sum(gaps) == pytest.approx(0.5)
    tpot = timeline.requests[0].tpot
    assert tpot is not None
    assert sum(gaps) / len(gaps) == pytest.approx(tpot)


def test_tokens_that_come_with_the_first_waited_for_nothing() -> None:
    timeline = parse_timeline({"requests": {"a": request(0.0, 1.0, 1.0, 1.2)}})
    assert timeline.requests[0].gaps() == pytest.approx([0.0, 0.2])


def test_itl_is_pooled_over_tokens_and_tpot_over_requests() -> None:
    quick = request(0.0, *[1.0 + 0.01 * i for i in range(100)])
    slow = request(0.0, 1.0, 2.0)
    summary = summarize({"requests": {"quick": quick, "slow": slow}})
    assert value(summary, "itl_p50") == pytest.approx(0.01)
    assert value(summary, "tpot_p50") == pytest.approx((0.01 + 1.0) / 2)


def test_one_token_has_a_ttft_and_no_tpot() -> None:
    summary = summarize({"requests": {"a": request(0.0, 0.5)}})
    assert value(summary, "ttft_p99") == pytest.approx(0.5)
    assert summary.missing["tpot_p50"] == "no request finished with two tokens"
    assert summary.missing["itl_p50"] == "no request got two tokens"


def test_rates_are_over_the_span_of_the_run() -> None:
    summary = summarize({"requests": {"a": request(2.0, 3.0, 4.0), "b": request(0.0, 1.0, 8.0)}})
    assert value(summary, "output_rate") == pytest.approx(4 / 8.0)
    longer = summarize({"requests": {"a": request(2.0, 3.0, 4.0)}, "start": 0.0, "end": 10.0})
    assert value(longer, "output_rate") == pytest.approx(2 / 10.0)


def test_goodput_counts_requests_that_met_every_bound() -> None:
    requests = {
        "met": request(0.0, 0.5, 0.6, 0.7),
        "late_first": request(0.0, 2.0, 2.1),
        "slow_tokens": request(0.0, 0.5, 1.5),
        "cancelled": request(0.0, 0.5, 0.6, status="cancelled"),
        "refused": request(0.0, status="refused", reason="empty prompt"),
        "said nothing": request(0.0, status="finished"),
    }
    summary = summarize({"requests": requests, "end": 10.0}, slo=Slo(ttft=1.0, tpot=0.2))
    assert value(summary, "goodput") == pytest.approx(1 / 10.0)
    assert summary.serve["slo"] == {"ttft": 1.0, "tpot": 0.2}
    assert "goodput" in summarize({"requests": requests}).missing


def test_failures_show_and_cancelled_requests_are_counted_apart() -> None:
    requests = {
        "ok": request(0.0, 1.0, 2.0),
        "gone": request(0.0, 1.0, status="cancelled"),
        "bad": request(0.0, status="refused", reason="empty prompt"),
        "broke": request(0.0, 1.0, status="failed", reason="engine stopped"),
    }
    summary = summarize({"requests": requests})
    assert value(summary, "failed_requests") == pytest.approx(2 / 4)
    counts = summary.serve["requests"]
    assert (counts["finished"], counts["cancelled"], counts["failed"], counts["refused"]) == (1, 1, 1, 1)
    assert counts["reasons"] == {"empty prompt": 1, "engine stopped": 1}
    assert value(summary, "e2e_p99") == pytest.approx(2.0)


def test_nothing_served_gives_reasons_and_no_zeros() -> None:
    summary = summarize({"requests": {"a": request(0.0, status="refused", reason="too long")}})
    for name in ("ttft_p50", "itl_p99", "tpot_p50", "e2e_p50", "output_rate"):
        assert name not in summary.metrics
        assert summary.missing[name]
    assert value(summary, "failed_requests") == 1.0


def test_cost_per_million_tokens() -> None:
    timeline = {"requests": {"a": request(0.0, *[float(i) for i in range(1, 37)])}}
    summary = summarize(timeline, gpu_hour_price=2.0, gpus=4)
    assert value(summary, "cost_per_mtok") == pytest.approx(2.0 * 4 * 36 / 3600 / 36 * 1e6)
    assert "cost_per_mtok" in summarize(timeline).missing
    assert summarize(timeline, gpu_hour_price=2.0, gpus=0).missing["cost_per_mtok"] == "the run held no GPU"
    for price in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="price"):
            summarize(timeline, gpu_hour_price=price)


def test_cache_waste_preemptions_hits_and_running() -> None:
    summary = summarize(
        {
            "requests": {
                "a": request(0.0, 1.0, 4.0, preemptions=2, cached_tokens=5),
                "b": request(0.0, 1.0, 2.0, preemptions=0, cached_tokens=0),
            },
            "cache_use": [[0.0, 0.25], [2.0, 0.5]],
            "running": [[0.0, 2], [2.0, 1], [4.0, 0]],
            "slots": {"reserved": 200, "held": 150},
        }
    )
    assert value(summary, "cache_waste") == pytest.approx(0.25)
    assert value(summary, "preemptions") == pytest.approx(1.0)
    assert value(summary, "cache_hit_rate") == pytest.approx(5 / 20)
    assert value(summary, "running_requests") == pytest.approx(1.5)
    assert summary.serve["cache_use"] == [[0.0, 0.25], [2.0, 0.5]]


def test_what_a_server_does_not_say_of_its_cache_is_missing_and_not_zero() -> None:
    summary = summarize({"requests": {"a": request(0.0, 1.0, preemptions=0, cached_tokens=5), "b": request(0.0, 1.0)}})
    assert summary.missing["cache_hit_rate"] == "the server does not say what of a prompt was in its cache"
    assert summary.missing["preemptions"] == "the server does not say who was preempted"
    assert not {"cache_hit_rate", "preemptions"} & set(summary.metrics)
    assert summary.serve["requests"]["preemptions"] is None


def test_rates_are_those_of_the_middle_of_a_run() -> None:
    assert middle_rate([i / 4 for i in range(11)]) == pytest.approx(4.0)
    assert middle_rate([*(i / 4 for i in range(40)), 99.0]) == pytest.approx(4.0, rel=0.05)
    assert middle_rate([0.0] * 9) is None
    assert middle_rate([0.0, 1.0]) is None


def test_answers_of_a_server_that_falls_behind_take_longer_by_the_second() -> None:
    # Ten a second are sent and eight are answered: each second of sending adds a quarter of a second of waiting.
    behind = [(i / 10, (i + 1) / 8 - i / 10) for i in range(200)]
    assert lag_growth(behind) == pytest.approx(0.25)
    assert lag_growth([(at, 3.0) for at, _ in behind]) == pytest.approx(0.0)
    assert lag_growth([(0.0, wait) for _, wait in behind]) is None
    assert lag_growth(behind[:5]) is None


def test_quantiles_are_linear_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == pytest.approx(2.5)
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile([1.0], 1.5)


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    curve = [(float(i), float(i % 7)) for i in range(5000)]
    short = thin(curve, 100)
    assert len(short) == 100
    assert short[0] == [0.0, 0.0]
    assert short[-1] == [4999.0, float(4999 % 7)]
    assert all(v == float(int(t) % 7) for t, v in short)


def test_the_mean_of_a_step_curve_weighs_by_time() -> None:
    assert time_mean([(0.0, 4.0), (1.0, 0.0)], 4.0) == pytest.approx(1.0)
    assert time_mean([], 1.0) is None
    assert time_mean([(2.0, 4.0)], 2.0) is None


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (request(5.0, 1.0), "runs backwards"),
        (request(0.0, 2.0, 1.0), "runs backwards"),
        (request(0.0, 1.0, output_tokens=3), "3 output tokens"),
        (request(0.0, 1.0, first_token=0.5), "first_token"),
        (request(0.0, 1.0, status="lost"), "status 'lost'"),
        (request(0.0, math.nan), "finite"),
        (request(math.inf), "finite"),
        (request(0.0, 1.0, status="refused"), "was refused and got 1 tokens"),
        (request(0.0, 1.0, prompt_tokens=5, cached_tokens=6), "5 prompt tokens, 6 of them cached"),
        (request(0.0, 1.0, prompt_tokens=-5, cached_tokens=-6), "-5 prompt tokens"),
        (request(0.0, 1.0, preemptions=-1), "-1 preemptions"),
    ],
)
def test_a_timeline_that_contradicts_itself_is_refused_by_name(body: dict[str, Any], match: str) -> None:
    with pytest.raises(TimelineError, match=match) as caught:
        parse_timeline({"requests": {"r17": body}})
    assert "r17" in str(caught.value)


def test_a_request_answered_twice_is_refused() -> None:
    with pytest.raises(TimelineError, match="twice"):
        parse_timeline({"requests": [{"id": "a", **request(0.0, 1.0)}, {"id": "a", **request(0.0, 1.0)}]})


def test_events_outside_the_span_are_refused() -> None:
    with pytest.raises(TimelineError, match="outside"):
        parse_timeline({"requests": {"a": request(0.0, 5.0)}, "end": 4.0})


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"slots": {"reserved": 8, "held": 9}}, "of 8 cache slots reserved 9 held"),
        ({"slots": {"reserved": -1, "held": -2}}, "of -1 cache slots"),
        ({"cache_use": [[0.0, 0.5], [1.0, 1.01]]}, "cache_use says 1.01"),
        ({"running": [[0.0, -1]]}, "running says -1"),
    ],
    ids=["waste below nothing", "no such slots", "more than the cache", "fewer than none"],
)
def test_what_a_cache_cannot_hold_is_refused(more: dict[str, Any], match: str) -> None:
    with pytest.raises(TimelineError, match=match):
        parse_timeline({"requests": {"a": request(0.0, 1.0)}, **more})


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_an_slo_must_be_positive(bound: float) -> None:
    with pytest.raises(UsageError, match="ttft"):
        Slo(ttft=bound)
