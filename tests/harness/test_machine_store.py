"""Calibrations are kept, never overwritten, and only a sound one of this very machine is used."""

import json
from dataclasses import replace

import pytest

from harness.errors import StoreError
from harness.machine_store import Ceilings, MachineKey, load_ceilings, save_ceilings

KEY = MachineKey("nvidia-h200", "node/7", "2.11.0", "580.1")
BASE = Ceilings(
    gpu=KEY.gpu,
    machine=KEY.machine,
    torch=KEY.torch,
    driver=KEY.driver,
    time="2026-01-01T00:00:00Z",
    copy=4e12,
    matmul={"bfloat16": 7e14},
    refused={"matmul.float8": "above the datasheet"},
)


def test_what_was_saved_comes_back(tmp_path):
    path = save_ceilings(BASE, tmp_path)
    assert path.parent == tmp_path / "nvidia-h200"
    assert load_ceilings(KEY, tmp_path) == (BASE, [])
    assert [p.suffix for p in path.parent.iterdir()] == [".json"]


def test_each_calibration_is_a_new_file_and_the_newest_is_used(tmp_path):
    newer = replace(BASE, time="2026-02-01T00:00:00Z", copy=4.1e12)
    paths = {save_ceilings(c, tmp_path) for c in (newer, BASE, BASE)}
    assert len(paths) == 3
    assert load_ceilings(KEY, tmp_path)[0] == newer


@pytest.mark.parametrize(
    "change", [{"machine": "other"}, {"torch": "2.12.0"}, {"driver": None}, {"gpu": "nvidia-l4"}, {"method": 0}]
)
def test_another_machine_stack_or_method_is_not_this_one(tmp_path, change):
    save_ceilings(replace(BASE, **change), tmp_path)
    assert load_ceilings(KEY, tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"gpu": "nvid', "Unterminated"),
        ("[]", "object"),
        ("{}", "lacks"),
        (json.dumps({**BASE.as_dict(), "copy": -1}), "copy"),
        (json.dumps({**BASE.as_dict(), "copy": float("nan")}), "copy"),
        (json.dumps({**BASE.as_dict(), "matmul": {"bfloat16": "fast"}}), "matmul.bfloat16"),
        (json.dumps({**BASE.as_dict(), "matmul": 3}), "matmul"),
    ],
)
def test_a_damaged_file_is_named_and_passed_over(tmp_path, text, word):
    save_ceilings(BASE, tmp_path)
    (tmp_path / "nvidia-h200" / "zzz.json").write_text(text)
    found, problems = load_ceilings(KEY, tmp_path)
    assert found == BASE
    assert len(problems) == 1
    assert "zzz.json" in problems[0]
    assert word in problems[0]


def test_keys_of_a_later_version_are_let_be(tmp_path):
    path = save_ceilings(BASE, tmp_path)
    path.write_text(json.dumps({**BASE.as_dict(), "novelty": 1}))
    assert load_ceilings(KEY, tmp_path) == (BASE, [])


def test_a_figure_that_is_not_finite_is_never_written(tmp_path):
    with pytest.raises(StoreError, match="refused"):
        save_ceilings(replace(BASE, copy=float("inf")), tmp_path)
    assert load_ceilings(KEY, tmp_path) == (None, [])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="PAIRBENCH_DATA"):
        save_ceilings(BASE, tmp_path / "file")


def test_without_a_folder_the_users_data_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path))
    assert save_ceilings(BASE).parent == tmp_path / "machines" / "nvidia-h200"
    assert load_ceilings(KEY)[0] == BASE
