"""Trace loaders on small files with planted faults, and on the real traces where they are at hand."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from harness.assemble import Facts, reproduce
from harness.digests import set_digests
from harness.errors import UsageError
from harness.plan import Request, make_plan
from harness.serving.synthetic import bursty_arrivals, lognormal_lengths, poisson_arrivals, prompt_ids, synthetic_trace
from harness.serving.trace import Shape, Trace, TraceRequest, fit
from harness.serving.traces import load_trace
from harness.serving.workload_trace import SYNTHETIC

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"
AZURE = SHARED / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = SHARED / "mooncake_conversation_trace.jsonl"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8", newline="")
    return file


def test_azure_rows_and_the_refusal_of_bad_ones(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,-3,109\r\n"
        "yesterday,10,10\r\n"
        "2023-11-16 18:15:51.2224670,879\r\n"
        "2023-11-16 18:15:52.0000000,nan,5\r\n"
        "2023-11-16 18:15:52.6805901,879,55",
    )
    trace = load_trace(file)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (879, 55)]
    assert trace.requests[1].arrival == pytest.approx(6.0000001, abs=1e-6)
    assert len(trace.refused) == 4
    assert trace.refused[0] == "a.csv:3: ContextTokens is -3, less than 1"
    assert trace.refused[1] == "a.csv:4: TIMESTAMP is 'yesterday', not a time"
    assert trace.refused[2] == "a.csv:5: 3 columns expected"
    assert "4 rows refused" in trace.describe()


def test_mooncake_keeps_prefixes_and_names_bad_lines(tmp_path: Path) -> None:
    good = {"timestamp": 500, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}
    lines = [
        json.dumps(good),
        "{broken",
        json.dumps({**good, "hash_ids": [1, 2, 3]}),
        json.dumps({**good, "output_length": 1.5}),
        json.dumps({**good, "timestamp": 2500, "hash_ids": [3, 9]}),
        json.dumps([1]),
    ]
    trace = load_trace(write(tmp_path, "m.jsonl", "\n".join(lines) + "\n"))
    assert [r.arrival for r in trace.requests] == [0.0, 2.0]
    assert trace.requests[0].prefix_blocks == (3, 4)
    assert trace.prefix_block_tokens == 512
    assert [message.split(":")[1] for message in trace.refused] == ["2", "3", "4", "6"]
    assert "not JSON" in trace.refused[0]
    assert "exceed input_length" in trace.refused[1]


def test_burstgpt_refuses_calls_that_got_no_answer(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "b.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,GPT-4,1087,0,1087,Conversation log\n"
        "118,ChatGPT,417,276,693,API log\n",
    )
    trace = load_trace(file)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(0, 472, 18), (113, 417, 276)]
    assert trace.refused == ("b.csv:3: Response tokens is 0, less than 1",)


def test_sharegpt_takes_the_first_exchange_and_counts_with_the_given_tokenizer(tmp_path: Path) -> None:
    items = [
        {"conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"id": "x"},
        {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "y"}]},
    ]
    file = write(tmp_path, "s.json", json.dumps(items))
    trace = load_trace(file, count_tokens=lambda text: len(text.split()))
    assert [(r.prompt_tokens, r.output_tokens, r.text) for r in trace.requests] == [(3, 2, "one two three")]
    assert len(trace.refused) == 3
    assert trace.refused[0] == "s.json:1 (item 1): has fewer than two turns"
    assert trace.note == ""
    assert "four characters" in load_trace(file).note


def test_a_sharegpt_list_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    good = json.dumps({"conversations": [{"value": "one two"}, {"value": "three"}]})
    for damage, why in (
        ('{"conversations": [', "Expecting value"),
        ("[" * 100_000, "recursion"),
        (f'{{"n": {"9" * 5000}}}', "digits"),
        (f"{good} {good}", "a comma or the list's end is missing"),
    ):
        trace = load_trace(write(tmp_path, "s.json", f"[\n{good},\n5,\n{good},\n{damage}"))
        assert [r.text for r in trace.requests] == ["one two"] * 2
        assert trace.refused[0] == "s.json:3 (item 1): has no list of conversations"
        assert trace.refused[1].startswith("s.json:5 (item 3): not JSON from here on: ")
        assert why in trace.refused[1]
    latin = tmp_path / "latin.json"
    latin.write_bytes(f"[{good.replace('one', 'öne')}]".encode("latin-1"))
    assert len(load_trace(latin).requests) == 1


def test_a_text_is_cut_with_its_length(tmp_path: Path) -> None:
    turn = [{"from": "human", "value": "abcd" * 10}, {"from": "gpt", "value": "hi"}]
    file = write(tmp_path, "s.json", json.dumps([{"conversations": turn}]))
    for shape, tokens, text in (
        (Shape(max_prompt=3), 3, "abcd" * 3),
        (Shape(length_scale=0.5), 5, "abcd" * 5),
        (Shape(length_scale=1.5), 15, "abcd" * 15),
    ):
        (request,) = load_trace(file, shape).requests
        assert (request.prompt_tokens, request.text) == (tokens, text)


def test_sharegpt_has_no_times_until_a_rate_is_asked_for(tmp_path: Path) -> None:
    turn = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]
    file = write(tmp_path, "s.json", json.dumps([{"conversations": turn}] * 200))
    assert {r.arrival for r in load_trace(file).requests} == {0.0}
    assert load_trace(file, Shape(request_rate=10.0)).rate == pytest.approx(10.0)


def test_scales_and_limits() -> None:
    trace = Trace("t", (TraceRequest(10.0, 100, 50), TraceRequest(12.0, 900, 3), TraceRequest(20.0, 5, 1)))
    shaped = fit(trace, Shape(time_scale=0.5, length_scale=0.1, limit=2, max_prompt=50, max_output=4))
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in shaped.requests] == [(0, 10, 4), (1, 50, 1)]
    assert shaped.clipped == 2
    assert "2 clipped" in shaped.describe()
    assert fit(trace, Shape()).digest != shaped.digest
    assert fit(trace, Shape()).digest == fit(trace, Shape()).digest


def test_a_request_rate_stretches_time_and_keeps_the_bursts() -> None:
    trace = Trace("t", tuple(TraceRequest(t, 1, 1) for t in (0.0, 1.0, 1.0, 8.0, 10.0)))
    shaped = fit(trace, Shape(request_rate=8.0))
    assert [r.arrival for r in shaped.requests] == pytest.approx([0.0, 0.05, 0.05, 0.4, 0.5])
    assert shaped.rate == pytest.approx(8.0)


def test_a_rate_that_nothing_can_be_stretched_to_is_refused() -> None:
    trace = Trace("t", tuple(TraceRequest(5.0, 1, 1) for _ in range(3)))
    with pytest.raises(UsageError, match="3 requests of one and the same time"):
        fit(trace, Shape(request_rate=8.0))
    assert len(fit(trace, Shape(request_rate=8.0, limit=1)).requests) == 1


HEADS = {"a": "TIMESTAMP,ContextTokens,GeneratedTokens", "m": "", "b": "Timestamp,Model,Request tokens,Response tokens"}
GOOD = {
    "a": "2023-11-16 18:15:46.6805900,374,44",
    "m": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
    "b": "5,ChatGPT,472,18",
}
DAMAGED = [
    ("a", "2023-11-16 18:15:46,1e308,44", "ContextTokens is '1e308', more than"),
    ("a", "2023-11-16 18:15:46.1e300,5,44", "TIMESTAMP is"),
    ("a", '"2023-11-16 18:15:46,5,44', "not CSV"),
    ("a", "x" * 200_000 + ",5,5", "not CSV: field larger"),
    ("a", "2023\0,5,5", "TIMESTAMP is"),
    ("b", "1e300,GPT,5,5", "Timestamp is '1e300', not a time"),
    ("m", '{"timestamp": 1, "input_length": %s, "output_length": 5}' % ("9" * 400), "input_length is 9999"),
    ("m", '{"timestamp": %s, "input_length": 5, "output_length": 5}' % ("9" * 400), "timestamp is 9999"),
    ("m", '{"timestamp": 1e308, "input_length": 5, "output_length": 5}', "timestamp is 1e"),
    ("m", '{"timestamp": %s, "input_length": 5, "output_length": 5}' % ("9" * 5000), "digits"),
    ("m", '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [-3]}', "hash_ids is not a list"),
    ("m", '{"timestamp": ' + "[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("form", "row", "why"), DAMAGED, ids=[f"{form}{i}" for i, (form, _, _) in enumerate(DAMAGED)])
def test_a_damaged_row_is_named_by_its_line_and_costs_no_other(tmp_path: Path, form: str, row: str, why: str) -> None:
    lines = [line for line in (HEADS[form], GOOD[form], row, GOOD[form], GOOD[form]) if line]
    trace = load_trace(write(tmp_path, "t.txt", "\n".join(lines)), Shape(length_scale=3.0))
    assert len(trace.requests) == 3
    (refusal,) = trace.refused
    assert refusal.startswith(f"t.txt:{lines.index(row) + 1}: ")
    assert why in refusal
    assert len(refusal) < 300


def test_azure_times_of_any_zone_and_columns_of_any_order_and_spacing(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "t.csv",
        "\ufeffGeneratedTokens, TIMESTAMP , ContextTokens\r\n"
        "1,2024-05-10 02:00:00.25+02:00,10\r\n"
        "2,2024-05-10 00:00:01+00:00,10\r\n"
        "3,2024-05-10T00:00:02Z,10\r\n"
        "4,2024-05-10 00:00:03.5000000,10\r\n",
    )
    trace = load_trace(file)
    assert trace.refused == ()
    assert [(r.arrival, r.output_tokens) for r in trace.requests] == [(0.0, 1), (0.75, 2), (1.75, 3), (3.25, 4)]


def test_a_limit_stops_reading_early(tmp_path: Path) -> None:
    rows = [json.dumps({"timestamp": i, "input_length": 5, "output_length": 5}) for i in range(10)]
    file = write(tmp_path, "m.jsonl", "\n".join([*rows[:3], "{broken", *rows[3:]]))
    assert load_trace(file, Shape(limit=3)).refused == ()
    assert len(load_trace(file, Shape(limit=3)).requests) == 3


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "begins with ''"),
        ("a,b,c\n1,2,3\n", "expected TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no row .* it is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n", "t.txt:2: TIMESTAMP"),
        ("[{]", "not JSON"),
    ],
)
def test_a_file_without_a_usable_row_is_an_error(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        load_trace(write(tmp_path, "t.txt", text))


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_trace(tmp_path / "gone.csv")
    file = write(tmp_path, "t.csv", "x")
    with pytest.raises(UsageError, match="unknown trace format 'azur'; did you mean azure"):
        load_trace(file, form="azur")


@pytest.mark.parametrize(
    "bad", [{"time_scale": 0.0}, {"length_scale": -1.0}, {"limit": -1}, {"request_rate": math.nan}]
)
def test_a_shape_out_of_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Shape(**bad)  # type: ignore[arg-type]


def test_arrivals_are_seeded_and_as_bursty_as_asked() -> None:
    assert poisson_arrivals(50, 4.0, 7) == poisson_arrivals(50, 4.0, 7)
    assert poisson_arrivals(50, 4.0, 7) != poisson_arrivals(50, 4.0, 8)
    for cv in (0.5, 1.0, 3.0):
        times = bursty_arrivals(20_000, 5.0, cv, 1)
        gaps = [b - a for a, b in pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(0.2)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)
    with pytest.raises(UsageError, match="rate"):
        poisson_arrivals(5, 0.0, 1)


@pytest.mark.parametrize("count", [2, 24, 256])
@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_a_point_of_a_sweep_is_sent_at_its_rate_however_few_its_requests(count: int, cv: float) -> None:
    slow, fast = (synthetic_trace(count, rate, 0, cv=cv) for rate in (4.0, 16.0))
    assert (slow.rate, fast.rate) == (pytest.approx(4.0), pytest.approx(16.0))
    assert [r.arrival for r in slow.requests] == pytest.approx([4 * r.arrival for r in fast.requests])
    assert bursty_arrivals(1, 4.0, cv, 0) == [0.0]
    with pytest.raises(UsageError, match="one burst"):
        bursty_arrivals(3, 4.0, 1e6, 0)


def test_arrivals_that_are_drawn_are_part_of_what_a_series_keys_on(monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = make_plan(Request(["chunked_prefill"], workloads=["tiny", "8b_azure"], rates=[4.0]))
    before = {w.trace: w for w in set_digests(item, None, None).workloads}
    monkeypatch.setattr("harness.serving.workload_trace.LENGTHS_SEED", 1)
    after = {w.trace: w for w in set_digests(item, None, None).workloads}
    assert before[SYNTHETIC].workload_id != after[SYNTHETIC].workload_id
    assert reproduce(item.technique, after[SYNTHETIC], Facts("r", {})).endswith(
        "--workload tiny --set request_rate=4.0"
    )
    (file,) = set(before) - {SYNTHETIC}
    assert before[file] == after[file]


def test_lengths_are_lognormal_within_their_range() -> None:
    lengths = lognormal_lengths(20_000, 200, 0.8, 8, 4096, 3)
    assert min(lengths) >= 8
    assert max(lengths) <= 4096
    assert statistics.median(lengths) == pytest.approx(200, rel=0.05)
    assert statistics.stdev([math.log(n) for n in lengths]) == pytest.approx(0.8, rel=0.1)


def test_a_synthetic_trace_can_queue_everything_at_once() -> None:
    trace = synthetic_trace(32, math.inf, seed=5)
    assert {r.arrival for r in trace.requests} == {0.0}
    assert trace.rate == math.inf
    assert trace.digest == synthetic_trace(32, math.inf, seed=5).digest


def test_prompts_share_exactly_the_blocks_that_the_trace_says() -> None:
    one = prompt_ids(TraceRequest(0, 25, 1, (7, 8)), 0, 1000, seed=0, block_tokens=10)
    two = prompt_ids(TraceRequest(0, 25, 1, (7, 9)), 1, 1000, seed=0, block_tokens=10)
    assert len(one) == len(two) == 25
    assert one[:10] == two[:10]
    assert one[10:20] != two[10:20]
    assert one[20:] != two[20:]
    assert all(0 <= token < 1000 for token in one)


@pytest.mark.skipif(not AZURE.is_file(), reason=f"the Azure trace is not at {AZURE}")
def test_the_real_azure_trace() -> None:
    trace = load_trace(AZURE)
    assert len(trace.requests) == 19_366
    assert trace.refused == ()
    assert trace.requests[0] == TraceRequest(0.0, 374, 44)
    assert trace.duration == pytest.approx(3501.722, abs=0.01)


@pytest.mark.skipif(not MOONCAKE.is_file(), reason=f"the Mooncake trace is not at {MOONCAKE}")
def test_the_real_mooncake_trace() -> None:
    trace = load_trace(MOONCAKE)
    assert len(trace.requests) == 12_031
    assert trace.refused == ()
    assert trace.requests[0].prefix_blocks == tuple(range(14))
    assert trace.duration == pytest.approx(3536.999, abs=0.01)
