"""What assembling adds to a measured collective: bandwidths by the factors of nccl-tests, a floor by its curve."""

import pytest

from harness.assemble import Facts, how_to_settle, records_of
from harness.discover import Technique, VariantInfo
from harness.link_curve import LinkCurve
from harness.plan import Item
from harness.workload import parse_workload

PAYLOAD = 1 << 20
SECONDS = 1e-3


def measured(op, ranks, curves=None, counters=None, work=None, count=10):
    """The one record of a collective that took a millisecond."""
    where = {"gpu": "cpu-x", "machine": "m", "stack": {}, "host": {"device": "cpu"}, "env": {}, "ci": {}}
    raw = {"name": "w", "tier": "smoke", "dtype": "float32", "ranks": ranks, "op": op, "payload": PAYLOAD}
    workload = parse_workload("fake", raw, "test")
    variants = (VariantInfo("baseline"), VariantInfo("optimized"))
    technique = Technique("fake", "parallel", "impls.parallel.fake", None, kind="step", variants=variants)
    event = {
        "variant": "optimized",
        "status": "passed",
        "reason": "",
        "samples": {"values": [SECONDS] * count, "clock": "wall", "cache": "warm"},
        "counters": {"payload_bytes": float(PAYLOAD)} if counters is None else counters,
        "work": work,
    }
    facts = Facts(run="r", provenance=where, curves=curves or {})
    (record,) = records_of(facts, Item(technique, (workload,), ("optimized",), ranks), workload, [event])
    return record


@pytest.mark.parametrize(
    ("op", "at_two", "at_eight"),
    [
        ("all_reduce", 1.0, 1.75),
        ("all_gather", 0.5, 0.875),
        ("reduce_scatter", 0.5, 0.875),
        ("all_to_all", 0.5, 0.875),
        ("send_recv", 1.0, 1.0),
    ],
)
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor_once(op, at_two, at_eight):
    for ranks, factor in ((2, at_two), (8, at_eight)):
        metrics = measured(op, ranks)["metrics"]
        assert metrics["algbw"]["value"] == pytest.approx(PAYLOAD / SECONDS)
        assert metrics["busbw"]["value"] == pytest.approx(factor * PAYLOAD / SECONDS)
        assert metrics["busbw"]["unit"] == metrics["algbw"]["unit"] == "B/s"


def test_without_a_counted_payload_or_a_known_collective_there_is_no_such_bandwidth():
    for record in (measured("all_reduce", 2, counters={}), measured("gelu", 2)):
        assert not {"algbw", "busbw"} & set(record["metrics"])


def test_the_floor_takes_the_curve_of_the_works_collective_on_its_ranks():
    work = {"link_bytes": 2.0 * PAYLOAD, "messages": 2, "collective": "all_reduce", "launches": 0}
    curve = LinkCurve("all_reduce", 2, ((1 << 10, 1e-5), (PAYLOAD, 2e-4), (1 << 30, 1e-1)))
    for curves, source in (({("all_reduce", 2): curve}, "measured curve"), ({("all_reduce", 4): curve}, None)):
        assert measured("all_reduce", 2, curves, work=work)["floor"]["source"].get("link") == source
    record = measured("all_reduce", 2, {("all_reduce", 2): curve}, work=work)
    assert (record["floor"]["limit"], record["floor"]["seconds"]) == ("link", pytest.approx(4e-4))
    assert record["metrics"]["floor_share"]["value"] == pytest.approx(0.4)
    other = measured("all_reduce", 2, {("all_reduce", 2): curve}, work={**work, "collective": "all_gather"})
    assert "link" in other["floor"]["missing"]


@pytest.mark.parametrize(("count", "status"), [(1, "unsettled"), (2, "unsettled"), (3, "passed")])
def test_one_sample_is_no_figure_however_narrow_its_interval(count, status):
    record = measured("all_reduce", 2, count=count)
    assert record["status"] == status
    assert ("too few samples" in record["reason"]) == (status == "unsettled")


def test_too_few_samples_are_not_laid_on_the_machine():
    few = measured("all_reduce", 2, count=1)["reason"]
    assert how_to_settle([few, few]) == "take more samples"
    assert "quiet" in how_to_settle([few, "other processes used 1.5 of 2 cores"])
