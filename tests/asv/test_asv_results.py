"""What asv's files keep and join, in processes of their own: the plugin changes asv for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asv.util")
pytest.importorskip("virtualenv")
asv_results = pytest.importorskip("harness.asv_results")
ROOT = Path(__file__).resolve().parents[2]


def test_a_number_stays_when_its_workload_or_variant_is_no_more(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.results import Results
from asv.runner import BenchmarkResult
results = Results({"machine": "m"}, {}, "c" * 40, 0, "3", "e", {})
def add(axes, values, selected=None):
    none = [None] * len(values)
    benchmark = {"name": "b", "version": "1", "params": axes}
    results.add_result(benchmark, BenchmarkResult(values, none, none, 0, "", None), selected_idx=selected)
add([["w@1"], ["x", "y"]], [1.0, 2.0])
add([["w@2"], ["x", "z"]], [3.0, float("nan")])
add([["w@2"], ["x", "z"]], [float("nan"), 4.0], selected=[1])
results.save(os.environ["HOME"])
kept = Results.load(os.path.join(os.environ["HOME"], results._filename))
axes = kept.get_result_params("b")
print(json.dumps([axes, [v if v == v else None for v in kept.get_result_value("b", axes)]]))
"""
    axes, values = asv(code, tmp_path)
    assert axes == [["w@2", "w@1"], ["x", "z", "y"]]
    assert values == [3.0, 4.0, None, 1.0, None, 2.0]


def test_not_available_never_takes_the_place_of_a_number(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.results import Results
from asv.runner import BenchmarkResult
benchmark = {"name": "b", "version": "1", "params": [["x", "y", "z"]]}
results = Results({"machine": "m"}, {}, "c" * 40, 0, "3", "e", {})
def add(values, version="1"):
    none = [None] * 3
    results.add_result({**benchmark, "version": version}, BenchmarkResult(values, none, none, 0, "", None))
    return results.get_result_value("b", benchmark["params"])
nan = float("nan")
add([1.0, 2.0, None])
print(json.dumps([add([nan, 3.0, nan]), add([None, nan, 4.0]), add([nan, nan, nan], "2")]))
"""
    first, second, other = asv(code, tmp_path)
    assert first[:2] == [1.0, 3.0]
    assert second == [None, 3.0, 4.0]  # a fault is told, whatever was there
    assert all(v != v for v in other)  # another version is another series


def test_an_unsettled_number_stands_only_where_there_is_none(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.results import Results
from asv.runner import BenchmarkResult
from harness.asv_results import Unsettled
benchmark = {"name": "b", "version": "1", "params": [["x", "y", "z"]]}
results = Results({"machine": "m"}, {}, "c" * 40, 0, "3", "e", {})
def add(values):
    none = [None] * 3
    results.add_result(benchmark, BenchmarkResult(values, none, none, 0, "", None))
    return results.get_result_value("b", benchmark["params"])
add([1.0, float("nan"), None])
print(json.dumps([add([Unsettled(5.0), Unsettled(6.0), Unsettled(7.0)]), add([8.0, 9.0, 10.0])]))
"""
    assert asv(code, tmp_path) == [[1.0, 6.0, 7.0], [8.0, 9.0, 10.0]]


def test_statistics_stay_beside_their_numbers_when_a_workload_is_no_more(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.results import Results
from asv.runner import BenchmarkResult
results = Results({"machine": "m"}, {}, "c" * 40, 0, "3", "e", {})
for axes, low in (([["w@1"], ["x", "y"]], 1.0), ([["w@2", "w@3"], ["x"]], 5.0)):
    samples = [[low + i, low + i, low + i] for i in range(2)]
    benchmark = {"name": "time_b", "version": "1", "params": axes}
    results.add_result(benchmark, BenchmarkResult([True, True], samples, [1, 1], 0, "", None))
params = [["w@1", "w@2", "w@3"], ["x", "y"]]
stats = [s and s["q_25"] for s in results.get_result_stats("time_b", params)]
print(json.dumps([[v if v == v else "n/a" for v in results.get_result_value("time_b", params)], stats]))
"""
    assert asv(code, tmp_path) == [[1.0, 2.0, 5.0, "n/a", 6.0, "n/a"], [None, None, 5.0, None, 6.0, None]]


def test_what_was_never_measured_is_not_available_and_has_not_failed(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.results import Results
from asv.runner import BenchmarkResult
results = Results({"machine": "m"}, {}, "c" * 40, 0, "3", "e", {})
def told(params):
    return [v if v == v else "n/a" for v in results.get_result_value("b", params)]
def add(axes, values, selected=None):
    none = [None] * len(values)
    benchmark = {"name": "b", "version": "1", "params": axes}
    results.add_result(benchmark, BenchmarkResult(values, none, none, 0, "", None), selected_idx=selected)
add([["w@1", "w@2"]], [1.0, None])
first = told([["w@1", "w@2", "w@3"]])
add([["w@1", "w@2", "w@3"]], [2.0, float("nan"), float("nan")], selected=[0])
print(json.dumps([first, told([["w@1", "w@2", "w@3"]])]))
"""
    assert asv(code, tmp_path) == [[1.0, None, "n/a"], [2.0, None, "n/a"]]


def test_find_passes_over_a_commit_without_a_number(tmp_path: Path, asv: Any) -> None:
    code = """
import contextlib
from types import SimpleNamespace
import asv.commands.find as find
from asv.machine import Machine
from asv.runner import BenchmarkResult
from harness import asv_results
numbers = {"a": 1.0, "b": float("nan"), "c": 1.0, "d": 5.0}
benchmark = {"name": "b", "version": "1", "params": [["x"]], "type": "track"}
def measured(benchmarks, env, results, **kwargs):
    value = numbers[results.commit_hash[0]]
    results.add_result(benchmark, BenchmarkResult([value], [None], [None], 0, "", None))
    return results
find.run_benchmarks = measured
asv_results._search_over_numbers()
nothing, said = lambda *args, **kwargs: None, []
environment = SimpleNamespace(name="e", python="3", requirements={}, env_vars={}, install_project=nothing)
repo = SimpleNamespace(pull=nothing, get_date=lambda commit: 0, get_decorated_hash=lambda commit, length: commit[0])
repo.get_hashes_from_range = lambda words: [commit * 40 for commit in "dcba"]
find.get_repo = lambda conf: repo
find.Setup = SimpleNamespace(run=lambda **kwargs: [environment])
find.Benchmarks = SimpleNamespace(discover=lambda *args, **kwargs: {"b": benchmark})
find.log = SimpleNamespace(info=said.append, error=said.append, indent=contextlib.nullcontext)
Machine.save = nothing
find.Find.run(conf, "a..d", "b", skip_save=True)
print(json.dumps(said[-1]))
"""
    assert asv(code, tmp_path) == "Greatest regression found: d"


@pytest.mark.parametrize(
    ("machine", "counts"),
    [
        ("amd-epyc", ["arch", "cpu", "machine", "num_cpu"]),
        ("nvidia-h200", ["arch", "machine"]),
        ("m", ["arch", "machine"]),
    ],
)
def test_a_hosts_memory_begins_no_series_nor_its_cpu_where_a_gpu_is_measured(machine: str, counts: list[str]) -> None:
    facts = {"arch": "x86_64", "cpu": "AMD EPYC", "machine": machine, "num_cpu": "2", "ram": "25276514304"}
    assert sorted(asv_results.of_series(facts)) == counts
    assert asv_results.of_series({}) == {}


def test_results_of_every_boot_are_one_series_those_of_long_ago_too(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.results import Results
from asv.util import load_json, write_json
home = os.environ["HOME"]
facts = {"machine": "nvidia-h200", "arch": "x86_64", "cpu": "Xeon", "num_cpu": "16", "os": "Linux"}
results = Results({**facts, "ram": "135148564480"}, {}, "c" * 40, 0, "3", "e", {})
results.save(home)
path = os.path.join(home, results._filename)
written = load_json(path)
write_json(path, {**written, "params": {**facts, "ram": "135148564480"}}, Results.api_version)
print(json.dumps([written["params"], Results.load(path).params]))
"""
    kept = {"machine": "nvidia-h200", "arch": "x86_64", "os": "Linux"}
    assert asv(code, tmp_path) == [kept, kept]


def test_a_machines_memory_is_told_in_gib_whatever_was_noted_before(tmp_path: Path, asv: Any) -> None:
    noted = {"machine": "amd", "ram": "25276514304", "cpu": "AMD EPYC", "num_cpu": "2", "os": "Linux", "arch": "x86_64"}
    (tmp_path / ".asv-machine.json").write_text(json.dumps({"amd": noted, "bare": {"machine": "bare"}, "version": 1}))
    code = """
from asv.machine import Machine
print(json.dumps([Machine.load(machine_name=name).ram for name in ("amd", "bare", "new")]))
"""
    noted_before, bare, new = asv(code, tmp_path)
    assert (noted_before, bare) == ("24 GiB", "")
    assert new.endswith(" GiB")
    assert asv_results.in_gib("") == ""


def test_the_list_of_benchmarks_has_every_tier_whichever_is_measured(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.benchmarks import Benchmarks
conf.results_dir = os.environ["HOME"]
Benchmarks(conf, []).save()
from suites.fusion.softmax import WORKLOADS, Softmax
listed = Benchmarks.load(conf)["fusion.softmax.Softmax.track_latency"]
tiers = {w["tier"] for w in WORKLOADS}
print(json.dumps([len(Softmax.workloads), len(WORKLOADS), len(listed["params"][0]), len(tiers)]))
"""
    measured, declared, listed, tiers = asv(code, tmp_path)
    assert measured < declared == listed
    assert tiers > 1
