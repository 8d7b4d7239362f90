"""A run of collectives on real ranks leaves a curve of this machine's link, and later records are judged by it."""

import json
import os
import subprocess
import sys

import pytest

from harness import assemble
from harness.plan import Request
from harness.report import Reporter
from harness.session import Options, Session

SIZES = (1 << 12, 1 << 18, 1 << 22)
WORKLOADS = ("smoke_all_reduce", "smoke_all_reduce_4KiB", "smoke_all_reduce_4MiB")


class NoMachine:
    """Neither ceilings nor a sentinel: the link's curve is all that is known."""

    ceilings = None

    def __init__(self, *where):
        pass

    def begin(self):
        return None

    end = begin


def run(technique, workloads, **options):
    request = Request(names=[technique], workloads=workloads, variants=["optimized"])
    asked = Options("cpu", keep=False, samples=10, **options)
    return Session(request, asked, Reporter(quiet_table=True), watch=NoMachine).run().records


@pytest.mark.slow
def test_a_run_of_collectives_leaves_a_curve_that_bounds_later_records(tmp_path, monkeypatch):
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path))
    # A busy machine makes figures unsettled, and those are no points; how settled they are is not what is tested here.
    monkeypatch.setattr(assemble, "_judge_plausible", lambda *_: None)
    before = run("overlap", ["smoke"])[0]
    assert "link" in before["floor"]["missing"]

    measured = {r["dims"]["payload"]: r["metrics"]["latency"]["value"] for r in run("collectives", WORKLOADS)}
    (kept,) = (tmp_path / "machines").glob("*/links/*.json")
    raw = json.loads(kept.read_text())
    assert (raw["collective"], raw["ranks"]) == ("all_reduce", 2)
    assert raw["points"] == [[size, measured[size]] for size in SIZES]

    after = run("overlap", ["smoke"])[0]
    message = after["work"]["link_bytes"]
    assert message == SIZES[1]
    assert after["floor"]["source"]["link"] == "measured curve"
    assert after["floor"]["terms"]["link"] == pytest.approx(measured[SIZES[1]])

    command = [sys.executable, "-m", "harness", "machine", "--device", "cpu"]
    told = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    assert "link, all_reduce on 2 ranks" in told.stdout
    assert "4 MiB" in told.stdout


@pytest.mark.slow
def test_a_single_size_is_no_curve(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path))
    monkeypatch.setattr(assemble, "_judge_plausible", lambda *_: None)
    run("collectives", WORKLOADS[:1])
    assert not list(tmp_path.glob("machines/*/links/*"))
    assert "no curve, of all_reduce on 2 ranks (1)" in " ".join(capfd.readouterr().err.split())
