"""What is printed of a record holds its names whole: a reader copies them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from harness import report
from harness.report import Reporter
from harness.tables import amount, seconds, size

TENSOR = "model.layers.1.mlp.up_proj.weight"
REASON = f"/models/llama/model-00002-of-00009.safetensors: the tensor {TENSOR!r} of shape (14336, 4096) is missing"


def record(status: str, reason: str | None, **more: Any) -> dict[str, Any]:
    plain = {"technique": "kv_cache", "workload": "tiny", "variant": "optimized", "dtype": "float32", "ranks": 1}
    return {**plain, "metrics": {}, "status": status, "reason": reason, **more}


def printed(width: int, records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    out = Console(width=width, record=True, highlight=False, file=io.StringIO())
    monkeypatch.setattr(report, "console", lambda stderr=False: out)
    Reporter().show(records)
    return out.export_text()


@pytest.mark.parametrize("width", [80, 220])
def test_the_reason_of_a_failure_is_printed_whole_under_the_table(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(width, [record("error", REASON), record("wrong", "out is nan at [7]")], monkeypatch)
    assert f"error: kv_cache tiny optimized: {REASON}\n" in text
    assert text.count("is missing") == 1
    assert "…" not in text


def test_a_long_workload_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(
        220, [record("skipped", "needs a CUDA GPU", workload="smoke_fwd[width=1,dtype=bfloat16]")], monkeypatch
    )
    assert "…" not in text
    assert "needs a CUDA GPU" in " ".join(text.split())


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (amount(1.28e15, "FLOP/s"), "1280 TFLOP/s"),
        (amount(999.7, "tokens/s"), "1000 tokens/s"),
        (amount(4.294e12, "B/s"), "4.29 TB/s"),
        (amount(0.0123, "items/s"), "0.0123 items/s"),
        (seconds(4321.0), "4321 s"),
        (seconds(999.7e-6), "1000 µs"),
        (seconds(1.23e-7), "123 ns"),
        (size(1023 * 2**20), "1023 MiB"),
        (size(1.5 * 2**30), "1.5 GiB"),
    ],
)
def test_a_quantity_is_never_written_with_an_exponent(printed: str, words: str) -> None:
    assert printed == words


def served(variant: str, speedup: float | None = None, **metrics: float) -> dict[str, Any]:
    values = {**metrics, **({} if speedup is None else {"speedup": speedup})}
    made = record("passed", "", serve={"span": 1.0}, counters={"allowed_speedup": 2.0})
    return {**made, "variant": variant, "metrics": {name: {"value": value} for name, value in values.items()}}


def requests_saw(width: int, records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the end of a run adds."""
    out = Console(width=width, record=True, highlight=False, file=io.StringIO())
    monkeypatch.setattr(report, "console", lambda stderr=False: out)
    reporter = Reporter()
    for one in records:
        reporter.show([one])
    assert "TTFT" not in out.export_text()
    reporter.end()
    return [line for line in out.export_text().splitlines() if line.strip()]


WAITS = {"ttft_p50": 0.25, "ttft_p99": 1.5, "itl_p50": 0.002, "itl_p99": 0.0125}
SHARES = {"failed_requests": 0.125, "preemptions": 0.0}
SERVED = [
    served("baseline", **WAITS, **SHARES, goodput=3.0, cost_per_mtok=12.5),
    served("optimized", speedup=1.7, **WAITS, **SHARES),
    record("error", "it broke"),
]


def test_what_requests_saw_stands_under_the_table_with_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _, first, second = requests_saw(200, SERVED, monkeypatch)
    assert head.split("  ")[-1].strip() == "of allowed"
    for words in ("250 ms · 1.5 s", "2 ms · 12.5 ms", "3 requests/s", "12.5%", "12.5 "):
        assert words in first
    assert second.rstrip().endswith("85% of 2.00×")
    assert "preemptions" not in head  # nobody was preempted


@pytest.mark.parametrize("width", [40, 80])
def test_what_requests_saw_is_not_cut_on_a_narrow_screen(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = requests_saw(width, SERVED, monkeypatch)
    waits = "TTFT p50 · p99 250 ms · 1.5 s, ITL p50 · p99 2 ms · 12.5 ms"
    assert first.startswith(f"kv_cache tiny baseline: {waits}, goodput 3 requests/s, failed 12.5%, cost")
    assert second == f"kv_cache tiny optimized: {waits}, failed 12.5%, of allowed 85% of 2.00×"


def test_nothing_is_said_of_requests_where_none_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests_saw(200, [record("passed", ""), record("error", "", serve={"span": 1.0})], monkeypatch) == []
