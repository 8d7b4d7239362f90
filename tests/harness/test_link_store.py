"""Curves are kept one a file, never overwritten; the newest sound one of this machine, op and ranks is used."""

import json
from dataclasses import replace

import pytest

from harness.link_curve import LinkCurve
from harness.link_store import KeptCurve, LinkKey, keep_curves, load_curves, save_curve
from harness.machine_store import Ceilings, MachineKey, load_ceilings, save_ceilings

MACHINE = MachineKey("nvidia-h200", "node/7", "2.11.0", "580.1")
KEY = LinkKey(MACHINE)
POINTS = ((1024, 1e-5), (2048, 2e-5), (4096, 3e-5))
KEPT = KeptCurve(LinkCurve("all_reduce", 2, POINTS), "2026-01-01T00:00:00Z", "run1")


def test_what_was_saved_comes_back(tmp_path):
    path = save_curve(KEY, KEPT, tmp_path)
    assert path.parent == tmp_path / "nvidia-h200" / "links"
    assert load_curves(KEY, tmp_path) == ({("all_reduce", 2): KEPT}, [])


def test_each_calibration_is_a_new_file_and_the_newest_is_used(tmp_path):
    newer = KeptCurve(LinkCurve("all_reduce", 2, (*POINTS, (8192, 4e-5))), "2026-02-01T00:00:00Z", "run2")
    assert len({save_curve(KEY, kept, tmp_path) for kept in (newer, KEPT, KEPT)}) == 3
    assert load_curves(KEY, tmp_path)[0] == {("all_reduce", 2): newer}


def test_collectives_and_ranks_are_kept_apart(tmp_path):
    others = [
        KEPT,
        replace(KEPT, curve=LinkCurve("all_reduce", 8, POINTS)),
        replace(KEPT, curve=LinkCurve("send_recv", 2, POINTS)),
    ]
    for kept in others:
        save_curve(KEY, kept, tmp_path)
    found, _ = load_curves(KEY, tmp_path)
    assert set(found) == {("all_reduce", 2), ("all_reduce", 8), ("send_recv", 2)}


@pytest.mark.parametrize(
    "other",
    [
        LinkKey(replace(MACHINE, machine="other")),
        LinkKey(replace(MACHINE, torch="2.12.0")),
        LinkKey(replace(MACHINE, driver=None)),
        LinkKey(replace(MACHINE, cores=2)),
        LinkKey(MACHINE, hosts=2),
    ],
)
def test_another_machine_stack_or_number_of_hosts_is_not_this_one(tmp_path, other):
    save_curve(other, KEPT, tmp_path)
    assert load_curves(KEY, tmp_path) == ({}, [])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"points": [[1024, 1e-5]]}, "1 sizes are no curve"),
        ({"points": [[1024, 1e-5], [2048, -1.0], [4096, 1e-5]]}, "not a positive number"),
        ({"points": [[1024, "fast"], [2048, 1e-5], [4096, 1e-5]]}, "no pair of bytes and seconds"),
        ({"collective": "gossip"}, "gossip"),
        ({"run": None}, "lacks run"),
    ],
)
def test_a_damaged_file_is_named_and_passed_over(tmp_path, change, word):
    path = save_curve(KEY, KEPT, tmp_path)
    raw = json.loads(path.read_text())
    (path.parent / "zzz.json").write_text(json.dumps({**raw, **change}))
    (path.parent / "torn.json").write_text(path.read_text()[:40])
    found, problems = load_curves(KEY, tmp_path)
    assert found == {("all_reduce", 2): KEPT}
    assert len(problems) == 2
    assert "torn.json" in problems[0]
    assert "zzz.json" in problems[1]
    assert word in problems[1]


def test_a_curve_of_another_method_is_let_be(tmp_path):
    path = save_curve(KEY, KEPT, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "method": 0}))
    assert load_curves(KEY, tmp_path) == ({}, [])


def test_curves_do_not_disturb_the_ceilings_beside_them(tmp_path):
    ceilings = Ceilings("nvidia-h200", "node/7", "2.11.0", "580.1", "2026-01-01T00:00:00Z", copy=4e12)
    save_ceilings(ceilings, tmp_path)
    save_curve(KEY, KEPT, tmp_path)
    assert load_ceilings(MACHINE, tmp_path) == (ceilings, [])


def test_of_a_run_the_curves_are_kept_and_single_sizes_are_not(tmp_path):
    def record(op, payload, seconds):
        counters = {"payload_bytes": float(payload), "messages": 1.0}
        latency = {"latency": {"value": seconds}}
        return {"dims": {"op": op}, "ranks": 2, "status": "passed", "metrics": latency, "counters": counters}

    records = [*(record("all_reduce", *point) for point in POINTS), record("send_recv", 1024, 1e-5)]
    curves, short = keep_curves(KEY, records, "run9", tmp_path)
    assert curves == {("all_reduce", 2): KEPT.curve}
    assert short == ["send_recv on 2 ranks (1)"]
    found, _ = load_curves(KEY, tmp_path)
    assert found["all_reduce", 2].run == "run9"
    assert keep_curves(KEY, records[:1], "run10", tmp_path)[0] == {}
    assert load_curves(KEY, tmp_path)[0] == found
