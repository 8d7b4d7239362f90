"""The frozen call: what it refuses, what it hands back, and where the records go."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import asv_api
from harness.history.store import Store
from suites.fusion.add_rms_norm import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
ODD = next(w for w in WORKLOADS if w["name"] == "smoke_odd")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every measurement asked for, none made."""
    calls: list[Any] = []

    def run(technique: str, raws: Sequence[Mapping[str, Any]], store: str | None) -> list[Any]:
        calls.append((technique, list(raws), store))
        return []

    monkeypatch.setattr(asv_api, "_run", run)
    return calls


def test_the_call_is_frozen() -> None:
    parameters = inspect.signature(asv_api.measure).parameters
    assert list(parameters) == ["technique", "workload", "store", "api"]
    assert parameters["store"].default is None
    assert parameters["api"].default == asv_api.API == 1


def test_one_workload_or_several_are_one_measurement(asked: list[Any]) -> None:
    asv_api.measure("add_rms_norm", ODD)
    asv_api.measure("add_rms_norm", WORKLOADS[:2], store="somewhere", api=1)
    assert asked == [("add_rms_norm", [ODD], None), ("add_rms_norm", list(WORKLOADS[:2]), "somewhere")]


@pytest.mark.parametrize(
    ("technique", "workload", "api", "why"),
    [
        ("add_rms_norm", ODD, 2, "speaks api 1, and the suite asks for 2"),
        ("add_rms_nrom", ODD, 1, "unknown technique 'add_rms_nrom'; did you mean add_rms_norm"),
        ("add_rms_norm", {**ODD, "epsilon": 1e-6}, 1, "add_rms_norm has no dimension 'epsilon'"),
        ("add_rms_norm", {**ODD, "dtype": "float4"}, 1, "unknown dtype 'float4'"),
        ("add_rms_norm", {**ODD, "tier": "weekly"}, 1, "unknown tier 'weekly'"),
        ("add_rms_norm", {"name": "x"}, 1, "needs 'tier'"),
    ],
)
def test_what_this_commit_does_not_know_is_refused_before_anything_runs(
    asked: list[Any], technique: str, workload: dict[str, Any], api: int, why: str
) -> None:
    with pytest.raises(NotImplementedError, match=why):
        asv_api.measure(technique, workload, api=api)
    assert not asked


def test_dimensions_may_stand_in_a_file_that_suites_share(asked: list[Any]) -> None:
    from suites.serving.paged_kv import WORKLOADS as SHARED

    asv_api.measure("paged_kv", SHARED)
    assert len(asked) == 1


def test_figures_are_flat_and_what_has_none_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"workload": "w", "missing": {"mfu": "unknown GPU"}}
    entry = {"value": 0.5, "unit": "s", "better": "lower"}
    records = [
        {**common, "variant": "baseline", "status": "passed", "reason": "", "metrics": {"latency": entry}},
        {**common, "variant": "optimized", "status": "wrong", "reason": "off by one", "metrics": {}},
    ]
    monkeypatch.setattr(asv_api, "_run", lambda *args: records)
    assert asv_api.measure("add_rms_norm", ODD) == {
        "method": 1.0,
        "w/baseline/status": "passed",
        "w/baseline/mfu": "unknown GPU",
        "w/baseline/latency": 0.5,
        "w/optimized/status": "wrong: off by one",
        "w/optimized/mfu": "unknown GPU",
    }


def test_a_quick_measurement_is_real_and_kept_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(asv_api.MODE, "quick")
    monkeypatch.setenv("PAIRBENCH_STORE", str(tmp_path / "history"))
    figures = asv_api.measure("add_rms_norm", ODD)
    assert str(figures["smoke_odd/baseline/status"]).partition(":")[0] in ("passed", "unsettled")
    latency = figures["smoke_odd/baseline/latency"]
    assert isinstance(latency, float)
    assert math.isfinite(latency)
    assert str(figures["smoke_odd/liger/status"]).startswith("skipped")
    assert all(isinstance(v, (float, str)) for v in figures.values())
    assert "sentinel" not in capfd.readouterr().err
    assert not (tmp_path / "history").exists()


def test_the_process_of_a_set_up_cache_loads_no_torch_the_one_that_measures_does(tmp_path: Path) -> None:
    code = """
import sys
from harness import asv_api
from harness.runner import Runner
from suites.fusion.add_rms_norm import WORKLOADS
Runner.run = lambda self, items: self.records
asv_api.measure("add_rms_norm", WORKLOADS[:1])
sys.exit("torch" in sys.modules)
"""
    env = {**os.environ, asv_api.MODE: "quick", "PAIRBENCH_DATA": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_records_go_to_the_store_named_by_the_call_else_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from harness.runner import Runner

    monkeypatch.setattr(Runner, "run", lambda self, items: self.records)
    monkeypatch.setattr("harness.asv_machine.CarriedMachine.begin", lambda self: None)
    monkeypatch.setattr("harness.asv_machine.CarriedMachine.end", lambda self: None)
    monkeypatch.setenv("ASV_COMMIT", "a" * 40)
    monkeypatch.setenv("ASV_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PAIRBENCH_STORE", str(tmp_path / "named"))
    monkeypatch.delenv(asv_api.MODE, raising=False)
    for store, folder in ((None, "named"), (str(tmp_path / "given"), "given")):
        asv_api.measure("add_rms_norm", ODD, store=store)
        run, end = Store(tmp_path / folder).read()
        assert (end["type"], end["spent"]["sampling_s"]) == ("end", 0.0)
        assert (run["type"], run["commit"], run["dirty"]) == ("run", "a" * 40, False)
        assert run["plan"] == [{"technique": "add_rms_norm", "workloads": ["smoke_odd"], "ranks": 1}]
        assert str(tmp_path) not in json.dumps(run)
