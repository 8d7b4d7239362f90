"""What a workload on real weights lacks is told before anything is read."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from harness import discover
from impls.model import resolve

WORKLOADS = {w.name: w for w in discover.workloads_of(discover.find("kv_cache"))}
BROUGHT = replace(WORKLOADS["real"], digests={"model": "0" * 16})


@pytest.mark.parametrize(
    ("model", "missing", "word"),
    [
        (None, set(), None),
        (None, {"gguf"}, "gguf to read"),
        (None, {"gguf", "tokenizers"}, "gguf and tokenizers to read"),
        (None, {"safetensors"}, None),
        ("mine.gguf", {"gguf"}, "gguf to read"),
        ("folder", {"gguf"}, None),
        ("folder", {"safetensors"}, "safetensors to read"),
    ],
)
def test_the_packages_that_read_the_weights_are_named_with_their_extra(
    monkeypatch: pytest.MonkeyPatch, model: str | None, missing: set[str], word: str | None
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(resolve, "default_model_path", lambda: Path("/weights.gguf"))
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda name: None if name in missing else found("json"))
    workload = WORKLOADS["real"] if model is None else replace(BROUGHT, dims={**BROUGHT.dims, "model": model})
    reason = resolve.not_here(workload)
    assert (reason is None) == (word is None)
    if word is not None:
        assert word in str(reason)
        assert "pairbench[models]" in str(reason)


def test_weights_that_are_not_here_are_named_with_the_command_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "default_model_path", lambda: None)
    assert "pairbench models fetch" in str(resolve.not_here(WORKLOADS["real"]))
    assert resolve.not_here(WORKLOADS["tiny"]) is None
