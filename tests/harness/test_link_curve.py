"""The link's curve is what was measured: exact at its points, joined in pieces, never one line, of one op and ranks."""

import itertools

import pytest

from harness import limits
from harness.devices import lookup
from harness.link_curve import LinkCurve, curves_of, points_of
from harness.machine_store import Ceilings
from harness.pair import Work

KIB, MIB = 1 << 10, 1 << 20
#: A latency to 32 KiB, a jump where the protocol changes, and a bandwidth from there on.
POINTS = ((KIB, 30e-6), (32 * KIB, 34e-6), (33 * KIB, 60e-6), (MIB, 70e-6), (1024 * MIB, 6.5e-3))
CURVE = LinkCurve("all_reduce", 2, POINTS)
H200 = lookup("NVIDIA H200")
RATE = Ceilings(gpu="g", machine="m", torch="t", driver=None, time="t", link=300e9)


def record(op="all_reduce", payload=KIB, seconds=1e-5, ranks=2, status="passed", messages=1.0, **more):
    metrics = {"latency": {"value": seconds}} if seconds else {}
    counters = {"payload_bytes": float(payload), "messages": messages}
    return {"dims": {"op": op}, "ranks": ranks, "status": status, "metrics": metrics, "counters": counters, **more}


def test_a_size_that_was_measured_costs_what_was_measured():
    assert [CURVE.seconds(size) for size, _ in POINTS] == [seconds for _, seconds in POINTS]


@pytest.mark.parametrize(("size", "between"), [(16 * KIB, (30e-6, 34e-6)), (512 * MIB, (70e-6, 6.5e-3))])
def test_between_two_points_the_time_rises_from_one_to_the_other(size, between):
    low, high = between
    found = [CURVE.seconds(size * share) for share in (0.9, 1.0, 1.1)]
    assert low < found[0] < found[1] < found[2] < high


def test_halfway_between_two_points_lies_halfway_between_their_times():
    assert CURVE.seconds((MIB + 1024 * MIB) / 2) == pytest.approx((70e-6 + 6.5e-3) / 2)


def test_a_change_of_protocol_stays_a_jump_and_no_line_runs_through_all():
    assert CURVE.seconds(33 * KIB) - CURVE.seconds(32 * KIB) == pytest.approx(26e-6)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(POINTS)]
    assert max(slopes) > 100 * min(slopes)
    # The one line through the ends would put a message of 1 MiB at half of what it takes.
    line = POINTS[0][1] + (MIB - KIB) * (POINTS[-1][1] - POINTS[0][1]) / (POINTS[-1][0] - POINTS[0][0])
    assert CURVE.seconds(MIB) > 1.5 * line


def test_a_dip_that_was_measured_is_kept():
    dip = LinkCurve("all_gather", 4, ((KIB, 30e-6), (2 * KIB, 20e-6), (4 * KIB, 40e-6)))
    assert dip.seconds(2 * KIB) == 20e-6
    assert dip.seconds(1.5 * KIB) == pytest.approx(25e-6)


def test_beyond_the_range_the_nearest_time_holds_below_and_the_nearest_rate_above():
    assert CURVE.seconds(1) == 30e-6
    assert CURVE.seconds(4096 * MIB) == pytest.approx(4 * 6.5e-3)


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (8, 1.75)])
def test_link_bytes_become_payload_by_the_factor_of_the_collective(ranks, factor):
    curve = LinkCurve("all_reduce", ranks, POINTS)
    assert curve.carrying(factor * MIB, 1) == pytest.approx(70e-6)
    assert curve.carrying(factor * MIB, 32) == pytest.approx(32 * 34e-6)
    assert curve.rates()[3] == (MIB, 70e-6, pytest.approx(factor * MIB / 70e-6))


@pytest.mark.parametrize(
    ("op", "ranks", "points", "words"),
    [
        ("gossip", 2, POINTS, "'gossip' is none of"),
        ("all_reduce", 1, POINTS, "2 ranks at least, not 1"),
        ("all_reduce", 2, POINTS[:2], "2 sizes are no curve"),
        ("all_reduce", 2, POINTS[::-1], "not positive and ascending"),
        ("all_reduce", 2, (*POINTS, POINTS[-1]), "not positive and ascending"),
        ("all_reduce", 2, (*POINTS, (2048 * MIB, float("nan"))), "not a positive number"),
    ],
)
def test_what_is_no_curve_is_refused(op, ranks, points, words):
    with pytest.raises(ValueError, match=words):
        LinkCurve(op, ranks, points)


def test_records_of_one_message_are_points_by_op_and_ranks():
    records = [
        *(record(payload=size, seconds=seconds) for size, seconds in reversed(POINTS)),
        record(payload=KIB, seconds=90e-6),
        record("send_recv", seconds=2e-5),
        record(payload=2 * KIB, ranks=8),
    ]
    points = points_of(records)
    assert points == {
        ("all_reduce", 2): POINTS,
        ("send_recv", 2): ((KIB, 2e-5),),
        ("all_reduce", 8): ((2 * KIB, 1e-5),),
    }
    assert curves_of(points) == {("all_reduce", 2): CURVE}


@pytest.mark.parametrize(
    "change",
    [
        {"messages": 16.0},
        {"status": "unsettled"},
        {"status": "implausible"},
        {"seconds": None},
        {"ranks": 1},
        {"op": "gelu"},
        {"counters": {}},
    ],
)
def test_what_is_no_settled_single_message_is_no_point(change):
    assert (
        points_of([{**record(**{k: v for k, v in change.items() if k != "counters"}), **_only(change, "counters")}])
        == {}
    )


def _only(change, name):
    return {name: change[name]} if name in change else {}


def test_a_curve_changes_the_floor_and_its_limit():
    work = Work(bytes=4.8e12 * 2e-5, link_bytes=64 * 32 * KIB, messages=64)
    plain = limits.floor(work, "bfloat16", RATE, H200)
    found = limits.floor(work, "bfloat16", RATE, H200, CURVE)
    assert plain.source["link"] == "measured"
    assert plain.terms["link"] == pytest.approx(64 * 32 * KIB / 300e9)
    assert plain.limit == "memory"
    assert found.source["link"] == "measured curve"
    assert found.terms["link"] == pytest.approx(64 * 34e-6)
    assert (found.limit, found.seconds) == ("link", found.terms["link"])


def test_a_curve_names_the_limit_where_no_rate_of_a_link_is_known():
    work = Work(link_bytes=float(MIB), launches=0)
    assert limits.floor(work, "float32").missing["link"]
    assert limits.floor(work, "float32", curve=CURVE).limit == "link"


def test_work_without_link_bytes_has_no_link_term():
    assert "link" not in limits.floor(Work(bytes=1.0), "float32", RATE, None, CURVE).terms


def test_bytes_in_no_message_are_refused():
    with pytest.raises(ValueError, match=r"work\.messages must be at least 1, got 0"):
        limits.floor(Work(link_bytes=1.0, messages=0), "float32")
