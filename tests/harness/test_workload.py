"""Workloads are plain data; their identity is what they are, not what they are called."""

from __future__ import annotations

from typing import Any

import pytest

from harness.assemble import Facts, reproduce
from harness.errors import UsageError
from harness.plan import Request, make_plan
from harness.regress.rerun import run_command
from harness.serving.metrics import Slo
from harness.workload import apply_settings, parse_workload, parse_workloads, split_name

RAW: dict[str, Any] = {"name": "a", "tier": "smoke", "dtype": "float32", "rows": 4, "eps": 0.5, "causal": True}


def _w(**more: Any) -> Any:
    return parse_workload("t", {**RAW, **more}, "here")


def test_a_renamed_workload_keeps_its_id_and_a_changed_one_does_not() -> None:
    assert _w().workload_id == _w(name="b", tier="full").workload_id
    ids = {_w().workload_id, _w(rows=5).workload_id, _w(dtype="bfloat16").workload_id, _w(causal=False).workload_id}
    assert len(ids) == 4


def test_the_order_of_dimensions_does_not_matter() -> None:
    assert parse_workload("t", dict(reversed(list(RAW.items()))), "x").workload_id == _w().workload_id


def test_dimensions_read_as_attributes_and_a_missing_one_says_what_there_is() -> None:
    assert _w().rows == 4
    with pytest.raises(AttributeError, match=r"'cols'.*rows"):
        _ = _w().cols


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"tier": "hourly"}, "tier"),
        ({"dtype": "bf16"}, "dtype"),
        ({"direction": "backwards"}, "backward"),
        ({"rows": [1]}, "rows"),
        ({"eps": float("nan")}, "eps"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"name": 3}, "name"),
    ],
)
def test_a_malformed_workload_is_named_with_its_place(more: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        _w(**more)
    assert "here" in str(caught.value)


def test_two_workloads_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two workloads"):
        parse_workloads("t", [RAW, RAW], "here")


def test_settings_take_the_type_of_the_dimension() -> None:
    changed = apply_settings(_w(), {"rows": "1_000", "eps": "1e-3", "causal": "no", "dtype": "float16"})
    assert (changed.rows, changed.eps, changed.causal, changed.dtype) == (1000, 1e-3, False, "float16")
    assert changed.workload_id == _w(rows=1000, eps=1e-3, causal=False, dtype="float16").workload_id
    assert "rows=1000" in changed.name


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("row", "3", "rows"),
        ("rows", "3.5", "whole"),
        ("rows", "-1", "negative"),
        ("eps", "inf", "finite"),
        ("causal", "maybe", "true or false"),
        ("dtype", "f8", "dtype"),
    ],
)
def test_a_bad_setting_names_what_was_expected(name: str, value: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        apply_settings(_w(), {name: value})


def test_a_digest_replaces_the_name_of_a_file_in_the_id() -> None:
    from dataclasses import replace

    here = replace(_w(model="mine.gguf"), digests={"model": "abc"})
    there = replace(_w(model="renamed.gguf"), digests={"model": "abc"})
    other = replace(_w(model="mine.gguf"), digests={"model": "def"})
    assert here.workload_id == there.workload_id != other.workload_id


def test_the_command_of_a_point_of_a_sweep_sets_what_was_set_and_the_rate() -> None:
    (item,) = make_plan(Request(["paged_kv"], workloads=["tiny"], settings={"slots": "4"}, rates=[2.0]))
    (point,) = item.workloads
    wanted = "pairbench run paged_kv --workload tiny --set slots=4 --set request_rate=2.0"
    assert reproduce(item.technique, point, Facts("r", {})) == wanted
    priced = Facts("r", {}, slo=Slo(ttft=0.5, tpot=0.05), gpu_hour_price=2.5)
    told = reproduce(item.technique, point, priced)
    assert told == f"{wanted} --slo-ttft 0.5 --slo-tpot 0.05 --gpu-hour-price 2.5"
    assert run_command("paged_kv", point.name)[3:] == wanted.split()[1:]


def test_what_was_set_in_steps_is_named_in_one_bracket_and_read_back() -> None:
    changed = apply_settings(_w(), {"rows": "5", "eps": "1e-3"}).replace(rows=8, causal=False)
    assert changed.name == f"{_w().name}[rows=8,eps=0.001,causal=False]"
    assert split_name(changed.name) == (_w().name, {"rows": "8", "eps": "0.001", "causal": "False"})
    assert split_name("w[trace=a,b.csv][request_rate=2.0]") == ("w", {"trace": "a,b.csv", "request_rate": "2.0"})
    assert split_name("w") == ("w", {})
