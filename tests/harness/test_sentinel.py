"""A fixed product and copy tell a machine that moved from a technique that did."""

import json
from dataclasses import replace

import pytest

from harness import sentinel
from harness.sentinel import CPU_TOLERANCE, GPU_TOLERANCE, Reading, moved, read_sentinel

START = Reading("cuda", "bfloat16", 4096, 1 << 30, 200e-6, 500e-6)


def later(matmul=1.0, copy=1.0, **changes):
    return replace(START, matmul_s=START.matmul_s * matmul, copy_s=START.copy_s * copy, **changes)


@pytest.mark.parametrize(
    ("matmul", "copy", "expected", "words"),
    [
        (1.04, 0.98, False, []),
        (1.08, 1.0, True, ["product", "1.08× slower; 1.05× is allowed"]),
        (1.0, 1.10, True, ["copy", "1.1× slower; 1.03×"]),
        (0.9, 1.0, True, ["product", "1.11× faster"]),
        (1.2, 1.2, True, ["product", "copy"]),
    ],
)
def test_either_time_moving_either_way_is_told_with_the_numbers(matmul, copy, expected, words):
    verdict = moved(START, later(matmul, copy))
    assert verdict.moved is expected
    assert verdict.product == pytest.approx(matmul)
    assert verdict.copy == pytest.approx(copy)
    assert (verdict.reason is None) is not expected
    for word in words:
        assert word in (verdict.reason or "")


def test_the_tolerance_is_the_devices_own_or_the_callers():
    assert moved(START, later(1.05)).tolerance == GPU_TOLERANCE
    assert moved(START, later(1.08), tolerance=0.1).moved is False
    cpu = replace(START, device="cpu")
    assert moved(cpu, replace(cpu, matmul_s=cpu.matmul_s * 1.9)).moved is False
    assert moved(cpu, replace(cpu, matmul_s=cpu.matmul_s * (1.1 + CPU_TOLERANCE["product"]))).moved is True


@pytest.mark.parametrize("change", [{"size": 512}, {"dtype": "float16"}, {"method": 99}, {"copy_bytes": 1}])
def test_unlike_readings_are_not_compared(change):
    verdict = moved(START, later(**change))
    assert verdict.moved is True
    assert next(iter(change)) in (verdict.reason or "")
    assert verdict.product is None


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_not_compared(seconds):
    verdict = moved(START, replace(START, copy_s=seconds))
    assert verdict.moved is True
    json.dumps(verdict.as_record(), allow_nan=False)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sentinel, "CPU_SIZE", 32)
    monkeypatch.setattr(sentinel, "CPU_COPY_BYTES", 1 << 16)


def test_a_cpu_reading_comes_back_from_its_record(small):
    reading = read_sentinel("cpu", budget_s=0.01)
    assert (reading.device, reading.dtype, reading.size) == ("cpu", "float32", 32)
    assert 0 < reading.matmul_s < 1
    assert 0 < reading.copy_s < 1
    record = json.loads(json.dumps({**reading.as_record(), "when": "start"}))
    assert Reading.from_record(record) == reading


def test_a_slower_machine_is_noticed_end_to_end(small, monkeypatch):
    """The same code on a machine made four times slower is told, whatever the technique did."""
    start = read_sentinel("cpu", budget_s=0.01)
    real = sentinel.steady
    monkeypatch.setattr(sentinel, "steady", lambda samples, cuda: 50 * real(samples, cuda))
    assert moved(start, read_sentinel("cpu", budget_s=0.01), tolerance=1.0).moved is True
