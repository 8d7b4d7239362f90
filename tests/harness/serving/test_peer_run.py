"""``pairbench run --peer-endpoint``: records of the same form, from a server that is not ours."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.plan import Request, make_plan
from harness.sampling import MIN_SAMPLES
from harness.serving.sweep import curve

ROOT = Path(__file__).parents[3]


def pairbench(*arguments: str) -> tuple[int, str, str]:
    process = subprocess.run(
        [sys.executable, "-m", "harness", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    return process.returncode, process.stdout, process.stderr


def run(server: ThreadingHTTPServer, *more: str) -> tuple[int, list[dict[str, Any]], str]:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    code, out, err = pairbench("run", "--peer-endpoint", url, "--device", "cpu", "--json", *more)
    return code, json.loads(out) if out.strip() else [], err


def test_a_server_gets_records_of_its_own_point_by_point(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    shape = ("--workload", "tiny", "--set", "requests=5", "--set", "max_output=3", "--slo-ttft", "60")
    where = ("--request-rate", "50,100", "--max-concurrency", "3", "--store", str(tmp_path / "history"))
    code, records, err = run(server, "chunked_prefill", *shape, *where)
    assert code in (0, 3), err  # 3 where the sentinel saw a busy machine; a neighbour fails no test
    assert [(r["variant"], r["peer"]) for r in records] == [("endpoint", "library")] * 2
    assert {r["status"] for r in records} <= {"passed", "unsettled"}
    assert [r["dims"]["request_rate"] for r in records] == [50.0, 100.0]
    assert {r["dims"]["slots"] for r in records} == {3}
    for record in records:
        assert record["serve"]["requests"]["finished"] == 5
        assert record["metrics"]["ttft_p99"]["value"] > 0
        assert record["metrics"]["goodput"]["value"] > 0
        assert record["tuned"] == {"model": "small"}
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert record["reproduce"].endswith(f" --slo-ttft 60 --peer-endpoint {url} --max-concurrency 3")
    assert [row["rate"] for row in curve(records)] == [50.0, 100.0]
    (kept,) = (tmp_path / "history").glob("*/*.jsonl")
    assert sum(json.loads(line)["type"] == "measurement" for line in kept.read_text().splitlines()) == 2


def test_a_server_that_answers_nothing_is_an_error_and_its_reason(server: ThreadingHTTPServer) -> None:
    server.broken = True  # type: ignore[attr-defined]
    code, records, _ = run(server, "paged_kv", "--workload", "tiny", "--set", "requests=2", "--no-store")
    assert code == 1
    assert [(r["status"], r["reason"]) for r in records] == [("error", "no request finished: HTTP 500: out of blocks")]


def test_failures_among_answers_are_said_beside_the_figures(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    sent = "\n".join(f'{{"timestamp": {i}, "input_length": 1, "output_length": 4}}' for i in range(5))
    (tmp_path / "m.jsonl").write_text(sent)
    # Every second request finds a server that hangs up in the middle of its answer.
    server.some_fail = True  # type: ignore[attr-defined]
    trace = ("--trace", str(tmp_path / "m.jsonl"), "--samples", "3", "--no-store")
    code, (record,), _ = run(server, "paged_kv", "--workload", "tiny", *trace)
    assert code in (0, 3)
    assert record["status"] in ("passed", "unsettled")
    assert record["serve"]["requests"]["failed"] == 2
    assert record["metrics"]["failed_requests"]["value"] == pytest.approx(2 / 5)
    if record["status"] == "passed":
        assert record["reason"] == "2 of 5 requests failed, one of them: the stream ended before it was done"


def test_nobody_there_or_nothing_to_send_is_bad_use(server: ThreadingHTTPServer) -> None:
    code, records, err = run(server, "add_rms_norm", "--no-store")
    assert (code, records) == (2, [])
    assert "sends no requests" in err
    code, _, err = pairbench("run", "paged_kv", "--peer-endpoint", "http://127.0.0.1:9", "--no-store", "--json")
    assert code == 2
    assert "is the server running" in err


def test_what_goes_to_a_server_ends_in_time_too_and_is_never_missing(server: ThreadingHTTPServer) -> None:
    shape = ("paged_kv", "--workload", "tiny", "--no-store")
    code, records, err = run(server, *shape, "--within", "0.01")
    assert code in (0, 3)
    assert records == []
    assert "not begun within 0.01 s: paged_kv tiny" in " ".join(err.split())
    code, records, err = run(server, *shape, "--missing")
    assert (code, records) == (2, [])
    assert "leave it out with --peer-endpoint" in " ".join(err.split())


def test_a_rate_makes_points_of_the_workloads_that_send_requests() -> None:
    plan = make_plan(Request(names=("chunked_prefill",), tier="smoke", rates=(1.0, 2.0)))
    assert [w.request_rate for item in plan for w in item.workloads] == [1.0, 2.0]
    assert {item.technique.kind for item in make_plan(Request(tier="smoke", rates=(1.0,)))} == {"serve"}
    with pytest.raises(UsageError, match="sends no requests"):
        make_plan(Request(names=("add_rms_norm",), tier="smoke", rates=(1.0,)))


def test_a_trace_is_looked_at_before_anything_is_sent(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    good = "2023-11-16 18:15:46.68,7,2\n2023-11-16 18:15:46.70,5,1\n"
    trace = tmp_path / "mine.csv"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{good}2023-11-16 18:15:46.71,x,1\n")
    code, records, err = run(server, "paged_kv", "--workload", "tiny", "--no-store", "--trace", str(trace))
    assert code == 0, err
    assert "mine.csv: 2 requests over 0.0 s, 1 rows refused (mine.csv:4: ContextTokens is 'x'" in err.replace("\n", " ")
    (record,) = records
    assert record["dims"]["trace"] == "mine.csv"
    assert 0 <= record["counters"].pop("sent_late_s") < 5
    assert record["counters"] == {
        "trace_rows_refused": 1.0,
        "trace_requests_clipped": 0.0,
        "answers_cut_short": 0.0,
    }
    assert record["serve"]["requests"]["output_tokens"] == 3
    trace.write_text("nothing of the kind\n")
    code, records, err = run(server, "paged_kv", "--workload", "tiny", "--no-store", "--trace", str(trace))
    assert (code, records) == (2, [])
    assert "begins with 'nothing of the kind'" in err.replace("\n", " ")
    assert len(server.seen) == 2 * MIN_SAMPLES["serve"]  # type: ignore[attr-defined]
