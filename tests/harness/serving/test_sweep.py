"""Rate sweeps and the curve that their records draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.errors import UsageError
from harness.serving.metrics import summarize
from harness.serving.sweep import curve, parse_rates, sweep
from harness.workload import parse_workload


def test_rates_are_read_in_order_and_once() -> None:
    assert parse_rates("4,1, 2.5,4") == [1.0, 2.5, 4.0]
    for bad in ("", "1,x", "0", "-1", "nan", "inf"):
        with pytest.raises(UsageError, match="request-rate"):
            parse_rates(bad)


def test_a_sweep_is_the_workload_at_each_rate() -> None:
    raw = {"name": "w", "tier": "quick", "dtype": "float32", "request_rate": 0.0, "slots": 4}
    workload = parse_workload("chunked_prefill", raw, "test")
    points = sweep(workload, [1.0, 2.0])
    assert [(p.name, p.request_rate, p.slots) for p in points] == [
        ("w[request_rate=1.0]", 1.0, 4),
        ("w[request_rate=2.0]", 2.0, 4),
    ]
    assert len({p.workload_id for p in points}) == 2
    del raw["request_rate"]
    with pytest.raises(UsageError, match="no rate"):
        sweep(parse_workload("t", raw, "test"), [1.0])


def record(rate: float, variant: str = "optimized", status: str = "passed", **metrics: float) -> dict[str, Any]:
    return {
        "technique": "chunked_prefill",
        "variant": variant,
        "workload": f"w[request_rate={rate}]",
        "status": status,
        "dims": {"request_rate": rate},
        "metrics": {name: {"value": value} for name, value in metrics.items()},
        "serve": {
            "requests": {"finished": 40, "total": 40},
            "finished_rate": min(rate, 4.0),
            "lag_growth": max(rate / 4.0, 1.0) - 1,
        },
    }


def test_the_curve_says_where_a_server_no_longer_keeps_up() -> None:
    rows = curve(
        [
            record(8.0, output_rate=80.0, ttft_p99=9.0),
            record(4.0, output_rate=40.0, ttft_p99=0.5),
            record(4.0, status="unsettled", output_rate=1.0),
            record(0.0, output_rate=10.0),
            {"technique": "x", "dims": {}, "metrics": {}},
        ]
    )
    assert [(r["workload"], r["rate"], r["keeps_up"], r["ttft_p99"]) for r in rows] == [
        ("w", 4.0, True, 0.5),
        ("w", 8.0, False, 9.0),
    ]
    assert rows[0]["finished_rate"] == pytest.approx(4.0)
    assert "goodput" not in rows[0]


def test_a_short_run_of_a_server_that_keeps_up_is_not_held_against_its_last_answers() -> None:
    # 64 requests in two seconds, each answered within half a second: over the whole span only 26 of 32 a second.
    def points(seconds_of: Callable[[int], float]) -> dict[str, Any]:
        requests = {
            str(i): {"arrival": i / 32, "token_times": [i / 32 + seconds_of(i)], "status": "finished"}
            for i in range(64)
        }
        return {**record(32.0, output_rate=1.0), "serve": summarize({"requests": requests}).serve}

    (steady,) = curve([points(lambda i: 0.5)])
    assert steady["finished_rate"] == pytest.approx(32.0)
    assert steady["keeps_up"]
    (queueing,) = curve([points(lambda i: 0.5 + i / 64)])  # every answer takes longer than the one before
    assert queueing["finished_rate"] == pytest.approx(32.0 / 1.5)
    assert not queueing["keeps_up"]
    (straggling,) = curve([points(lambda i: 20.0 if i == 63 else 0.5)])
    assert straggling["keeps_up"]
    # Answers of very different lengths, most of them longer than all the sending takes.
    (uneven,) = curve([points(lambda i: (0.1, 5.0, 2.0, 9.0, 3.0)[i % 5])])
    assert uneven["keeps_up"]


def test_a_server_that_fails_its_requests_does_not_keep_up_with_them() -> None:
    losing = record(4.0, output_rate=1.0)
    losing["serve"]["requests"] = {"finished": 30, "total": 40}
    untold = record(4.0, output_rate=1.0)
    untold["serve"]["lag_growth"] = None
    assert [row["keeps_up"] for row in curve([losing, untold])] == [False, None]


def test_other_settings_are_other_curves() -> None:
    swept = [{**record(4.0, output_rate=1.0), "workload": name} for name in ("w[slots=4,request_rate=4.0]", "w")]
    assert [row["workload"] for row in curve(swept)] == ["w", "w[slots=4]"]
