"""What is printed of a record holds its names whole: a reader copies them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from harness import report
from harness.report import Reporter

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
