"""The client of OpenAI-compatible servers, against a small local one that also misbehaves."""

from __future__ import annotations

from http.server import ThreadingHTTPServer

import pytest

from harness.errors import UsageError
from harness.serving.endpoint import Endpoint, Outgoing, replay, token_times
from harness.serving.metrics import Slo, summarize
from harness.serving.peer import measure_peer, outgoing
from harness.workload import parse_workload


def base(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_stream_becomes_a_timeline(server: ThreadingHTTPServer) -> None:
    requests = [Outgoing("a", [1, 5, 9], 4), Outgoing("b", [1, 5], 3, arrival=0.1)]
    timeline = replay(Endpoint(base(server)), requests)
    summary = summarize(timeline)
    assert summary.serve["requests"]["finished"] == 2
    assert summary.serve["requests"]["output_tokens"] == 7
    assert summary.serve["requests"]["prompt_tokens"] == 5
    a, b = timeline["requests"]["a"], timeline["requests"]["b"]
    assert 0.01 < a["token_times"][0] < 5
    assert b["token_times"][0] >= 0.12
    assert 0.01 < summary.metrics["itl_p50"]["value"] < 2
    sent = server.seen[0]  # type: ignore[attr-defined]
    assert (sent["path"], sent["model"], sent["prompt"]) == ("/v1/completions", "small", [1, 5, 9])
    assert (sent["max_tokens"], sent["stream"], sent["ignore_eos"]) == (4, True, True)


def test_messages_of_several_tokens_are_counted_token_by_token(server: ThreadingHTTPServer) -> None:
    timeline = replay(Endpoint(base(server) + "/v1", ignore_eos=False), [Outgoing("a", [2], 5)])
    times = timeline["requests"]["a"]["token_times"]
    assert len(times) == 5
    assert times[0] == times[1] < times[2] == times[3] < times[4]
    assert "ignore_eos" not in server.seen[0]  # type: ignore[attr-defined]


def test_failures_end_one_request_with_a_reason(server: ThreadingHTTPServer) -> None:
    requests = [Outgoing("ok", [1], 2), Outgoing("gone", [3], 5), Outgoing("died", [4], 5), Outgoing("full", [500], 5)]
    timeline = replay(Endpoint(base(server)), requests)
    got = {key: (entry["status"], entry["reason"]) for key, entry in timeline["requests"].items()}
    assert got == {
        "ok": ("finished", ""),
        "gone": ("failed", "the stream ended before it was done"),
        "died": ("failed", "worker died"),
        "full": ("failed", "HTTP 500: out of blocks"),
    }
    summary = summarize(timeline)
    assert summary.metrics["failed_requests"]["value"] == pytest.approx(3 / 4)


def test_requests_are_sent_on_time_while_others_are_open(server: ThreadingHTTPServer) -> None:
    requests = [Outgoing(f"r{i}", [1], 40, arrival=0.02 * i) for i in range(8)]
    timeline = replay(Endpoint(base(server)), requests)
    events = [timeline["requests"][r.id] for r in requests]
    assert [entry["arrival"] for entry in events] == [r.arrival for r in requests]
    assert events[-1]["token_times"][0] < events[0]["finish"], "the last waited for the first to end"


def test_a_limit_on_open_requests_is_waited_for_on_the_requests_own_time(server: ThreadingHTTPServer) -> None:
    requests = [Outgoing(f"r{i}", [1], 5) for i in range(3)]
    timeline = replay(Endpoint(base(server)), requests, max_concurrency=1)
    firsts = sorted(entry["token_times"][0] for entry in timeline["requests"].values())
    assert firsts[2] > firsts[1] + 0.08 > firsts[0] + 0.16
    assert {entry["arrival"] for entry in timeline["requests"].values()} == {0.0}
    assert sorted(entry["sent"] for entry in timeline["requests"].values())[2] > firsts[1]


def test_what_is_no_such_server_is_said_before_anything_is_sent(server: ThreadingHTTPServer) -> None:
    with pytest.raises(UsageError, match="base URL"):
        Endpoint("localhost:8000")
    with pytest.raises(UsageError, match="serves small, other, not 'large'"):
        replay(Endpoint(base(server), model="large"), [])
    with pytest.raises(UsageError, match="answered 404"):
        replay(Endpoint(base(server) + "/wrong"), [])
    with pytest.raises(UsageError, match="is the server running"):
        replay(Endpoint("http://127.0.0.1:9", timeout=2.0), [])
    with pytest.raises(UsageError, match="share an id"):
        replay(Endpoint(base(server)), [Outgoing("a", [1], 1), Outgoing("a", [1], 1)])
    assert server.seen == []  # type: ignore[attr-defined]


def test_tokens_are_spread_over_messages_by_their_text() -> None:
    assert token_times([(1.0, 4), (2.0, 4)], None) == [1.0, 2.0]
    assert token_times([(1.0, 4), (2.0, 4)], 2) == [1.0, 2.0]
    assert token_times([(1.0, 2), (2.0, 6)], 6) == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert token_times([(1.0, 1), (2.0, 1), (3.0, 1)], 2) == [1.0, 3.0]
    assert token_times([], 3) == []
    for count in range(1, 30):
        times = token_times([(float(i), 1 + i % 3) for i in range(7)], count)
        assert len(times) == count
        assert times == sorted(times)


def test_a_workload_is_measured_as_our_own_engine_would_be(server: ThreadingHTTPServer) -> None:
    raw = {
        "name": "w",
        "tier": "smoke",
        "dtype": "float32",
        "trace": "synthetic",
        "requests": 6,
        "request_rate": 200.0,
        "prompt_median": 8.0,
        "output_median": 3.0,
        "sigma": 0.5,
        "max_prompt": 20,
        "max_output": 6,
    }
    workload = parse_workload("chunked_prefill", raw, "test")
    result = measure_peer(Endpoint(base(server)), workload, slo=Slo(ttft=60.0))
    wanted = [r.output_tokens for r in result.trace.requests]
    assert [len(entry["token_times"]) for entry in result.timeline["requests"].values()] == wanted
    assert result.summary.serve["requests"]["prompt_tokens"] == sum(r.prompt_tokens for r in result.trace.requests)
    assert result.summary.metrics["goodput"]["value"] == pytest.approx(6 / result.seconds)
    assert min(min(body["prompt"]) for body in server.seen) >= 1000  # type: ignore[attr-defined]
    assert outgoing(result.trace, seed=1)[0].prompt != outgoing(result.trace, seed=2)[0].prompt
    with pytest.raises(UsageError, match="give the file with --trace"):
        measure_peer(Endpoint(base(server)), workload.replace(trace="azure.csv"))


def test_a_password_in_a_url_is_shown_to_nobody() -> None:
    assert Endpoint("http://me:secret@host:8000/v1?key=secret").shown == "http://host:8000/v1"
    assert Endpoint("https://host").shown == "https://host"
