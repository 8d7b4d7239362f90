"""The floor is the largest term, over the ceiling that was measured, else over the datasheet's."""

import json

import pytest

from harness.devices import lookup
from harness.limits import floor
from harness.machine_store import Ceilings
from harness.pair import Work

H200 = lookup("NVIDIA H200")
MEASURED = Ceilings(
    gpu="nvidia-h200",
    machine="m",
    torch="2.11.0",
    driver="580",
    time="2026-01-01T00:00:00Z",
    copy=4.0e12,
    matmul={"bfloat16": 700e12},
    launch_eager=10e-6,
    launch_graph=1e-6,
    link=300e9,
)


@pytest.mark.parametrize(
    ("work", "limit", "seconds"),
    [
        (Work(flops=7e12, bytes=4e9), "compute", 1e-2),
        (Work(flops=7e9, bytes=4e9), "memory", 1e-3),
        (Work(flops=7e9, bytes=4e6, link_bytes=3e9), "link", 1e-2),
        (Work(flops=7e3, bytes=4e3, launches=50), "launch", 5e-5),
    ],
)
def test_the_largest_term_names_the_limit(work, limit, seconds):
    found = floor(work, "bfloat16", MEASURED, H200)
    assert found.limit == limit
    assert found.seconds == pytest.approx(seconds)
    assert set(found.source.values()) == {"measured"}
    assert found.share(2 * seconds) == pytest.approx(0.5)


def test_the_dtype_chooses_the_compute_ceiling_and_the_datasheet_fills_the_gap():
    work = Work(flops=1e15, bytes=1.0)
    assert floor(work, "bfloat16", MEASURED, H200).seconds == pytest.approx(1 / 0.7)
    fp8 = floor(work, "float8_e4m3fn", MEASURED, H200)
    assert fp8.seconds == pytest.approx(1e15 / 1978.9e12)
    assert fp8.source["compute"] == "datasheet"
    assert fp8.source["memory"] == "measured"


def test_without_measuring_the_datasheet_bounds_and_launch_cost_is_unknown():
    found = floor(Work(flops=1e9, bytes=4.8e9), "bfloat16", None, H200)
    assert (found.limit, found.seconds) == ("memory", pytest.approx(1e-3))
    assert set(found.missing) == {"launch"}


def test_no_limit_is_named_while_a_term_that_may_be_larger_is_unknown():
    only_copy = Ceilings(gpu="c", machine="m", torch="t", driver=None, time="t", copy=1e10)
    found = floor(Work(flops=1e12, bytes=1e10), "float32", only_copy, None)
    assert found.seconds == pytest.approx(1.0)
    assert found.limit is None
    assert "compute" in found.missing
    assert floor(Work(flops=0, bytes=1e10), "float32", only_copy).limit == "memory"


def test_nothing_known_gives_no_floor_and_the_reasons():
    found = floor(Work(flops=1.0, bytes=1.0, link_bytes=1.0), "float32")
    assert (found.seconds, found.limit, found.share(1.0)) == (None, None, None)
    assert set(found.missing) == {"compute", "memory", "link", "launch"}


def test_a_measured_ceiling_may_be_beaten():
    assert (floor(Work(bytes=4e9), "bfloat16", MEASURED).share(0.9e-3) or 0) > 1


def test_eager_launches_bound_where_graphs_were_not_measured():
    eager = Ceilings(gpu="c", machine="m", torch="t", driver=None, time="t", launch_eager=1e-5)
    assert floor(Work(launches=3), "float32", eager).seconds == pytest.approx(3e-5)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_work_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=r"work\.bytes"):
        floor(Work(bytes=bad), "float32", MEASURED)


def test_what_goes_into_the_record_is_plain():
    found = floor(Work(flops=1e12, bytes=1e9), "bfloat16", MEASURED, H200).as_record(1.0)
    assert set(found) == {"seconds", "limit", "terms", "source", "missing", "share"}
    json.dumps(found, allow_nan=False)
    assert "share" not in floor(Work(bytes=1.0), "int8").as_record()
