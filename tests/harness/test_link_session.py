"""What a run learns of the link: kept at once, used for what follows in it, and by the next run of the same world."""

from types import SimpleNamespace

import pytest

from harness.assemble import Facts
from harness.plan import Request
from harness.report import Reporter
from harness.session import Options, Session

WHERE = {
    "gpu": "nvidia-h200",
    "machine": "node7",
    "stack": {"torch": "2.11.0", "driver": "580"},
    "host": {"device": "cuda", "gpu_count": 8},
}


def records(seconds):
    for payload in (1024, 2048, 4096):
        yield {
            "dims": {"op": "all_reduce"},
            "ranks": 2,
            "status": "passed",
            "metrics": {"latency": {"value": payload * seconds}},
            "counters": {"payload_bytes": float(payload), "messages": 1.0},
        }


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a session; gives its facts and what tells it of records."""
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path))

    def start(place=None, **options):
        session = Session(Request(), Options("cuda", **options), Reporter(quiet_table=True))
        session.world = None if place is None else SimpleNamespace(place=SimpleNamespace(**place))
        facts = Facts(run="r", provenance=WHERE)
        return facts, session._curves(facts)

    return start


def test_a_curve_is_used_from_when_it_was_measured_and_by_the_next_run(started):
    facts, learn = started()
    assert facts.curves == {}
    learn(list(records(1e-9)))
    assert facts.curves["all_reduce", 2].seconds(2048) == pytest.approx(2048e-9)
    again, learn_again = started()
    assert again.curves == facts.curves
    learn_again(list(records(2e-9)))
    assert started()[0].curves["all_reduce", 2].seconds(2048) == pytest.approx(4096e-9)


def test_ranks_of_two_hosts_have_a_link_of_their_own(started):
    one, learn = started()
    learn(list(records(1e-9)))
    two, learn = started({"rank": 0, "world": 2, "local_world": 1})
    assert two.curves == {}
    learn(list(records(5e-9)))
    assert started()[0].curves == one.curves
    assert started({"rank": 0, "world": 2, "local_world": 2})[0].curves == one.curves


@pytest.mark.parametrize("options", [{"share_gpus": True}, {"timing": False}])
def test_shared_gpus_and_checks_neither_keep_nor_use_a_curve(started, tmp_path, options):
    facts, learn = started(**options)
    learn(list(records(1e-9)))
    assert facts.curves == {}
    assert not list(tmp_path.rglob("*.json"))


def test_only_the_first_of_joined_supervisors_keeps_curves(started, tmp_path):
    _, learn = started({"rank": 1, "world": 2, "local_world": 2})
    learn(list(records(1e-9)))
    assert not list(tmp_path.rglob("*.json"))
