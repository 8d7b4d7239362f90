"""The survey of attention kernels: what it does without a GPU, and that it tells right from wrong and dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from impls.attention import survey
from impls.attention.candidates import candidates

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024

# Configurations that flash_attention picks by itself on Hopper, and the Hopper kernel's own.
COMPILE = """
import json
from impls.attention.candidates import candidates, launches
found = []
for dim, causal, direction in [(128, False, "forward"), (128, True, "forward"), (64, True, "forward"),
                               (128, False, "backward"), (64, False, "backward")]:
    every = candidates(dim, causal, direction, (9, 0))
    chosen = [every[0]] + [c for c in every if c.group == "hopper" and causal][:1]
    for candidate in chosen:
        for launch in launches(candidate, causal):
            r, name = launch.compile(), f"{candidate.name} {direction} d{dim}"
            found.append([name, r.registers, r.spills, r.shared, r.warpgroup_products])
print(json.dumps(found))
"""


def run(code: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "OUT")}
    return subprocess.run(
        [sys.executable, *code], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_to_warpgroup_products_in_registers() -> None:
    done = run(["-c", COMPILE])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8  # Triton's backward at D=128 is two passes
    assert sum("out of step" in name for name, *_ in found) == 1, "full, at D=128"
    for name, registers, spills, shared, products in found:
        assert products > 0, f"{name}: no warpgroup matrix instruction"
        assert registers <= 255, name
        assert shared <= SHARED_LIMIT, name
        assert spills <= 8, f"{name}: {spills} spills"  # a few before and after the loop; the loop would show dozens


def test_the_tiny_survey_checks_every_candidate_and_times_none(tmp_path: Path) -> None:
    command = ["-m", "impls.attention.survey", "--tiny", "--dims", "64", "--directions", "backward"]
    done = run([*command, "--out", str(tmp_path)], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "survey.json").read_text())
    assert made["gpu"] == "interpreter"
    rows = made["rows"]
    assert len(rows) == 2 * 2
    assert all(row["check"] == "right" and row["tflops"] is None for row in rows)


def test_without_a_gpu_it_says_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert survey.main([]) == 2
    assert "--compile" in capsys.readouterr().err


def test_a_kernel_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = candidates(64, True, "forward", None)[0]
    cpu = torch.device("cpu")
    assert survey.checked(candidate, True, cpu, (1, 1, 9, 13)) == "right"
    right = survey.flash_attention
    monkeypatch.setattr(survey, "flash_attention", lambda *a, **k: right(*a, **k) * 1.02)
    assert survey.checked(candidate, True, cpu, (1, 1, 9, 13)).startswith("wrong: out off by")
    monkeypatch.setattr(survey, "flash_attention", lambda *a, **k: right(*a, **k) * float("nan"))
    assert survey.checked(candidate, True, cpu, (1, 1, 9, 13)).startswith("wrong")


def test_a_group_that_hangs_or_dies_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    done = json.dumps(asdict(survey.Row("hopper", "first", "forward", 64, False, 4096, check="right"))).encode() + b"\n"

    def hang(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("survey", 1, output=done + b'{"group": "hop')

    monkeypatch.setattr(subprocess, "run", hang)
    first, rest = survey.in_child("hopper", [], 1.0)
    assert (first.name, first.check) == ("first", "right"), "what was measured before the hang is kept"
    assert "killed" in rest.check
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, -11, done))
    first, rest = survey.in_child("hopper", [], 1.0)
    assert first.name == "first"
    assert "-11" in rest.check


def test_the_table_gives_each_share_of_its_peer_on_the_same_shape() -> None:
    rows = [
        survey.Row("triton", "ours", "forward", 128, True, 4096, tflops=450.0, check="right"),
        survey.Row("torch", "sdpa_cudnn", "forward", 128, True, 4096, tflops=500.0),
        survey.Row("torch", "sdpa_flash", "forward", 128, True, 4096, tflops=300.0),
        survey.Row("triton", "ours", "forward", 128, True, 8192, tflops=450.0, check="right"),
    ]
    lines = survey.table(rows).splitlines()
    assert "0.90" in lines[1]
    assert "1.50" in lines[1]
    assert "0.90" not in lines[4], "no peer was measured on that shape"


def test_what_is_not_reached_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "checked", lambda *_: "right")
    namespace = survey.argparse.Namespace(
        tiny=True, inspect=False, limit=-1.0, dims=[64], directions=["forward"], seqs=[], rounds=1, only=[]
    )
    rows: list[survey.Row] = []
    survey.survey_group("triton", namespace, rows.append)
    assert rows
    assert {row.check for row in rows} == {"not reached in time"}


def test_only_the_candidates_asked_for_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "checked", lambda *_: "right")
    namespace = survey.argparse.Namespace(
        tiny=True, inspect=False, limit=60.0, dims=[64], directions=["forward"], seqs=[], rounds=1, only=["described"]
    )
    rows: list[survey.Row] = []
    survey.survey_group("triton", namespace, rows.append)
    assert len(rows) == 2
    assert all("described" in row.name for row in rows)


def test_only_the_candidates_asked_for_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "compiled", lambda *_: None)
    namespace = survey.argparse.Namespace(dims=[64], directions=["forward"], only=["w8"])
    names = [row.name for row in survey.compile_rows(namespace)]
    assert names
    assert all("w8" in name for name in names)
    namespace.only = []
    assert len(survey.compile_rows(namespace)) > len(names)


def test_a_check_on_a_gpu_gives_every_persistent_program_more_than_one_tile() -> None:
    batch, heads, queries, keys = survey.CHECKED["cuda"]
    assert batch * heads * -(-queries // 128) > 2 * 132
    assert queries % 64
    assert keys % 64


def test_memory_is_poisoned_before_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves an element unwritten is wrong even where the memory held the right value before."""
    seen: list[bool] = []
    monkeypatch.setattr(survey, "poison", lambda like: seen.append(True))
    survey.checked(candidates(64, False, "forward", None)[0], False, torch.device("cpu"), (1, 1, 5, 5))
    assert seen == [True]


def test_timing_interleaves_the_candidates_with_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return False

        def elapsed_time(self, other: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(survey, "TOKENS", 48)
    monkeypatch.setattr(survey, "WIDTH", 128)
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        candidate = candidates(64, True, direction, None)[0]
        ours = survey.Row("triton", candidate.name, direction, 64, True, 24, check="right")
        peer = survey.Row("torch", "sdpa_flash", direction, 64, True, 24, check="peer")
        broken = survey.Row("torch", "no_such_peer", direction, 64, True, 24, check="peer")
        survey.timed([(ours, candidate), (peer, None), (broken, None)], 2, torch.device("cpu"))
        assert ours.samples_ms == peer.samples_ms == [2.0, 2.0]
        assert ours.tflops == pytest.approx(factor * 4 * 64 * (24 * 25 // 2) * 2 * 2 / 2e-3 / 1e12)
        assert broken.check.startswith("error: AttributeError")
        assert broken.tflops is None


def test_a_sample_that_the_host_held_up_is_taken_again_behind_a_longer_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reaches the start event once it has spun; a call takes the host longer than the first two spins."""
    spins: list[int] = []
    needed = 3_000_000

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return spins[-1] < needed

        def elapsed_time(self, other: Event) -> float:
            return 100.0 if self.query() else 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    clock = survey.DeviceClock()
    assert [clock.ms(lambda: None) for _ in range(2)] == [7.0, 7.0]
    assert spins == [1_000_000, 2_000_000, 4_000_000, 4_000_000]
    needed = 10**9
    with pytest.raises(RuntimeError, match="the host takes longer"):
        clock.ms(lambda: None)
