"""Rates by their formulas; figures that physics does not allow are named."""

import pytest

from harness.devices import lookup
from harness.metrics import Claimed, algbw, busbw, hfu, implausible, mbu, mfu

H200 = lookup("NVIDIA H200")
UNKNOWN = lookup("NVIDIA H999")


def test_mfu_is_over_the_dense_peak_of_the_dtype_used():
    assert mfu(989.4e12, 2.0, "bfloat16", H200).value == pytest.approx(0.5)
    assert mfu(989.4e12, 2.0, "float8_e4m3fn", H200).value == pytest.approx(0.25, rel=1e-3)
    assert hfu(989.4e12, 989.4e12 / 3, 2.0, "bfloat16", H200).value == pytest.approx(2 / 3)
    assert mbu(2.4e12, 1.0, H200).value == pytest.approx(0.5)


@pytest.mark.parametrize("device", [UNKNOWN, None])
def test_an_unknown_device_has_no_mfu_and_says_why(device):
    for figure in (mfu(1e12, 1.0, "bfloat16", device), mbu(1e9, 1.0, device), hfu(1, 1, 1.0, "bfloat16", device)):
        assert figure.value is None
        assert figure.reason


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_gives_no_rate(seconds):
    assert mfu(1e12, seconds, "bfloat16", H200).value is None
    assert algbw(1e9, seconds).value is None


def test_no_work_gives_no_rate():
    assert "none" in (mfu(0.0, 1.0, "bfloat16", H200).reason or "")


@pytest.mark.parametrize(
    ("collective", "two", "eight"),
    [
        ("all_reduce", 1.0, 1.75),
        ("all_gather", 0.5, 0.875),
        ("reduce_scatter", 0.5, 0.875),
        ("all_to_all", 0.5, 0.875),
        ("gather", 0.5, 0.875),
        ("scatter", 0.5, 0.875),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("send_recv", 1.0, 1.0),
    ],
)
def test_bus_bandwidth_by_the_nccl_tests_formulas(collective, two, eight):
    assert algbw(1e9, 0.5).value == 2e9
    assert busbw(collective, 1e9, 0.5, 2).value == pytest.approx(two * 2e9)
    assert busbw(collective, 1e9, 0.5, 8).value == pytest.approx(eight * 2e9)


def test_a_world_of_one_has_no_bus_and_bad_input_is_refused():
    assert busbw("all_reduce", 1e9, 1.0, 1).value is None
    with pytest.raises(ValueError, match="allreduce"):
        busbw("allreduce", 1e9, 1.0, 2)
    with pytest.raises(ValueError, match="rank"):
        busbw("all_reduce", 1e9, 1.0, 0)


GOOD = {
    "dtype": "bfloat16",
    "flops_rate": 780e12,
    "bandwidth": 4.5e12,
    "collective": "all_gather",
    "busbw": 330e9,
    "absolute_memory": 2e9,
    "input_bytes": 1e9,
    "peak_throughput": 2.0,
    "mean_throughput": 2.0,
}


def test_what_can_be_is_let_through():
    assert implausible(Claimed(**GOOD), H200) == []
    assert implausible(Claimed(), H200) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bandwidth": 5.2e12}, "bandwidth"),
        ({"flops_rate": 1500e12}, "peak"),
        ({"busbw": 500e9}, "bus bandwidth"),
        ({"absolute_memory": 0.9e9}, "inputs"),
        ({"absolute_memory": 200e9}, "above the 141"),
        ({"mean_throughput": 2.1}, "mean"),
        ({"flops_rate": float("nan")}, "flops_rate"),
        ({"bandwidth": float("inf")}, "bandwidth"),
        ({"busbw": -1.0}, "busbw"),
    ],
)
def test_each_impossibility_is_named(change, word):
    found = implausible(Claimed(**{**GOOD, **change}), H200)
    assert len(found) == 1
    assert word in found[0]


def test_several_impossibilities_are_all_named():
    assert len(implausible(Claimed(**{**GOOD, "bandwidth": 9e12, "absolute_memory": 1.0}), H200)) == 2


def test_a_float8_rate_is_judged_by_the_float8_peak():
    claimed = Claimed(**{**GOOD, "flops_rate": 1500e12, "dtype": "float8_e4m3fn"})
    assert implausible(claimed, H200) == []


def test_an_unknown_device_is_judged_by_what_needs_no_datasheet():
    assert implausible(Claimed(**{**GOOD, "bandwidth": 9e15}), UNKNOWN) == []
    assert implausible(Claimed(**{**GOOD, "absolute_memory": 1.0}), None) != []


def test_an_all_reduce_that_adds_up_in_the_switch_may_pass_the_bus_factor():
    claimed = {"collective": "all_reduce", "busbw": 480e9, "algbw": 275e9}
    assert implausible(Claimed(**claimed), H200)
    assert implausible(Claimed(**claimed, reduces_in_switch=True), H200) == []


def test_cards_that_accumulate_in_float16_may_pass_their_float32_accumulate_rate():
    card = lookup("NVIDIA GeForce RTX 4090")
    assert implausible(Claimed(dtype="float16", flops_rate=300e12), card) == []
    assert implausible(Claimed(dtype="float16", flops_rate=400e12), card)
