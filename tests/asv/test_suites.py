"""The suites as asv meets them: imported without torch, one set-up cache a technique, names read from the source."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.discover import techniques
from harness.plan import TIER_HOLDS
from harness.record import METHOD
from harness.workload import parse_workloads
from suites import pair_suite

ROOT = Path(__file__).resolve().parents[2]
OWN = {name: t for name, t in techniques().items() if t.module.startswith("impls.") and t.problem is None}
LOOK = """
import json, sys
from asv_runner.discovery import list_benchmarks
with open(sys.argv[2], "w") as file:
    list_benchmarks(sys.argv[1], file)
print(json.dumps(sorted(m for m in ("torch", "triton", "harness", "impls", "kernels") if m in sys.modules)))
"""


@pytest.fixture(scope="module")
def discovered(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    """What asv's own discovery lists, and the packages of ours (and torch) that it had to import."""
    pytest.importorskip("asv_runner")
    out = tmp_path_factory.mktemp("discovered") / "benchmarks.json"
    env = {"PAIRBENCH_TIER": "smoke", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LOOK, str(ROOT / "suites"), str(out)]
    done = subprocess.run(command, env=env, cwd=out.parent, capture_output=True, text=True, check=True)
    return json.loads(out.read_text()), json.loads(done.stdout)


def test_asv_imports_the_suites_without_torch_or_anything_of_a_commit(discovered: Any) -> None:
    assert discovered[1] == []


def test_each_technique_is_measured_once_by_a_set_up_cache_of_its_own(discovered: Any) -> None:
    keys: dict[str, set[str]] = {}
    for benchmark in discovered[0]:
        keys.setdefault(benchmark["name"].split(".")[1], set()).add(benchmark["setup_cache_key"])
    assert set(keys) == set(OWN), "each technique needs its suite, with a class as docs/asv.md shows"
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == len(keys), "two techniques share a set-up cache"


def test_nothing_but_the_metrics_of_the_classes_is_a_benchmark(discovered: Any) -> None:
    metrics = {name for name in vars(pair_suite.PairSuite) if name.startswith("track_")}
    assert {b["name"].rpartition(".")[2] for b in discovered[0]} == metrics
    assert len(discovered[0]) == len(metrics) * len(OWN)


def test_benchmarks_carry_the_method_version_a_unit_and_a_time_limit(discovered: Any) -> None:
    for benchmark in discovered[0]:
        assert benchmark["version"] == str(METHOD)
        assert benchmark["unit"] != "unit"
        assert not benchmark.get("pretty_name"), "asv's page would show it in place of the technique's name"
        assert benchmark["timeout"] == pair_suite.TIMEOUT_S["smoke"]


@pytest.mark.parametrize("name", OWN)
def test_variants_and_workloads_are_those_of_the_harness(name: str) -> None:
    technique = OWN[name]
    assert pair_suite.variant_names(technique.path) == [v.name for v in technique.variants]
    module = importlib.import_module(f"suites.{technique.family}.{name}")
    (suite,) = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, pair_suite.PairSuite)][-1:]
    assert suite.technique == name
    held = [w for w in parse_workloads(name, module.WORKLOADS, name) if w.tier in TIER_HOLDS[pair_suite.tier()]]
    assert [w["name"] for w in suite.workloads] == [w.name for w in held]
    assert suite.params[0] == [pair_suite.label(w) for w in suite.workloads] or suite.params[0] == [
        pair_suite.NO_WORKLOAD
    ]


def test_tiers_hold_what_the_harness_says() -> None:
    assert {k: v for k, v in pair_suite.TIER_HOLDS.items() if k != "all"} == TIER_HOLDS
