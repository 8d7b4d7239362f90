"""The plugin's rules and its environment, in processes of their own: they change asv for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

util = pytest.importorskip("asv.util")
pytest.importorskip("virtualenv")
asv_rules = pytest.importorskip("harness.asv_rules")
ROOT = Path(__file__).resolve().parents[2]


def asv(code: str, home: Path, **more: str) -> Any:
    """What the code prints as JSON, with asv's plugin loaded in the way of asv."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PAIRBENCH_", "ASV_", "PYTHON"))}
    load = """
import json, os, sys
from asv.config import Config
from asv.plugin_manager import plugin_manager
conf = Config.load("asv.conf.json")
for plugin in conf.plugins:
    plugin_manager.import_plugin(plugin)
"""
    done = subprocess.run(
        [sys.executable, "-c", load + code],
        cwd=ROOT,
        env={**kept, "HOME": str(home), "PAIRBENCH_TIER": "smoke", **more},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_machine_is_named_after_its_type_and_nobody_is_asked(tmp_path: Path) -> None:
    code = """
from asv.machine import Machine
from harness.provenance import provenance
own, other = Machine.load(machine_name=None, interactive=True), Machine.load(machine_name="h200", interactive=True)
again = Machine.load(machine_name=None, interactive=True)
print(json.dumps([own.machine == again.machine == provenance("cpu")["gpu"], other.machine, own.os, own.num_cpu]))
"""
    same, other, system, cores = asv(code, tmp_path)
    assert same
    assert other == "h200"
    assert system == "Linux"
    assert int(cores) == os.cpu_count()
    assert set(json.loads((tmp_path / ".asv-machine.json").read_text())) >= {"h200"}


def test_environments_are_named_after_python_and_tier_and_never_after_a_path(tmp_path: Path) -> None:
    code = """
from asv.environment import get_environments
own = [(e.name, e.python) for e in get_environments(conf, [])]
existing = [(e.name, e.python) for e in get_environments(conf, ["existing", "existing:" + sys.executable])]
print(json.dumps([own, existing]))
"""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    own, existing = asv(code, tmp_path, PAIRBENCH_TIER="full")
    assert own == [[f"pairbench-py{here}-full", here]]
    assert existing == [[f"existing-py{here}-full", here]] * 2


def test_another_python_is_not_available_since_the_packages_are_this_ones(tmp_path: Path) -> None:
    code = """
from asv.environment import EnvironmentUnavailable
from harness.asv_environment import LendingVirtualenv
try:
    LendingVirtualenv(conf, "3.99", {}, {})
except EnvironmentUnavailable as err:
    print(json.dumps(str(err)))
"""
    assert "3.99" in asv(code, tmp_path)


def test_lent_folders_are_this_pythons_and_those_on_pythonpath_but_no_checkout(tmp_path: Path) -> None:
    extra, checkout = tmp_path / "site", tmp_path / "checkout"
    extra.mkdir()
    (checkout / "harness").mkdir(parents=True)
    (checkout / "harness" / "record.py").touch()
    code = "from harness.asv_environment import lent_folders\nprint(json.dumps(lent_folders()))"
    path = os.pathsep.join([str(extra), str(checkout), str(tmp_path / "missing")])
    folders = asv(code, tmp_path, PYTHONPATH=path)
    assert folders[0] == str(extra)
    assert any(Path(f, "asv").is_dir() for f in folders)
    assert str(checkout) not in folders
    assert len(set(folders)) == len(folders)


def test_a_quick_run_is_kept_apart_and_one_that_saves_nothing_leaves_the_history_alone(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace
from harness import asv_rules
def told(**args):
    os.environ.pop("PAIRBENCH_ASV_MODE", None)
    own = Config.load("asv.conf.json")
    asv_rules._before_measuring(own, SimpleNamespace(env_spec=[], **args))
    return [own.results_dir, os.environ.get("PAIRBENCH_ASV_MODE")]
asv_rules._uncommitted = lambda suites: ""
clean = [told(quick=True), told(quick=False, dry_run=True), told(skip_save=True), told(quick=False)]
asv_rules._uncommitted = lambda suites: "not committed: suites/fusion/rope.py"
print(json.dumps([clean, [told(quick=True), told(quick=False)]]))
"""
    kept = "results/asv"
    clean, uncommitted = asv(code, tmp_path)
    assert clean == [[".asv/quick", "quick"], [kept, "dry"], [kept, "dry"], [kept, None]]
    assert uncommitted == [[".asv/quick", "quick"], [".asv/dirty", None]]


def test_new_is_what_came_after_the_results_of_this_machine_kept_or_apart(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace
import asv.commands.run
from harness import asv_rules
def seen(folder, machine, commit):
    where = os.path.join(os.environ["HOME"], folder, machine)
    os.makedirs(where)
    facts = {"machine": machine, "arch": "", "cpu": "", "num_cpu": "", "os": "", "ram": "", "version": 1}
    with open(os.path.join(where, "machine.json"), "w") as file:
        json.dump(facts, file)
    Results = asv.commands.run.Results
    Results(facts, {}, commit * 40, 0, "3", "e", {}).save(os.path.join(os.environ["HOME"], folder))
seen("kept", "here", "a"), seen("kept", "there", "b"), seen("quick", "here", "c")
original, found = asv.commands.run.get_existing_hashes, []
for machine, words in (("here", "NEW"), ("elsewhere", "NEW"), ("here", "EXISTING"), ("here", "HEAD^!")):
    args = SimpleNamespace(machine=machine, range=words)
    asv_rules._know_commits(os.path.join(os.environ["HOME"], "kept"), args)
    hashes = asv.commands.run.get_existing_hashes(os.path.join(os.environ["HOME"], "quick"))
    found.append("".join(sorted(h[0] for h in hashes)))
    asv.commands.run.get_existing_hashes = original
print(json.dumps(found))
"""
    assert asv(code, tmp_path) == ["ac", "abc", "abc", "abc"]


def test_suites_are_those_of_a_commit_or_the_reason_is_told(tmp_path: Path, git: Any) -> None:
    suites = tmp_path / "suites"
    for room in ("suites", "impls", "harness"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "rope.py").touch()
    (tmp_path / "asv.conf.json").touch()
    assert asv_rules._uncommitted(suites) == "suites is in no git repository"
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    assert asv_rules._uncommitted(suites) == ""
    (tmp_path / "impls" / "rope.py").write_text("# measured from the commit's wheel, and not from here")
    assert asv_rules._uncommitted(suites) == ""
    (tmp_path / "suites" / "new.py").touch()
    (tmp_path / "asv.conf.json").write_text("{}")
    assert asv_rules._uncommitted(suites) == "not committed: asv.conf.json, suites/new.py"


def test_an_existing_environment_is_asked_from_where_its_benchmarks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for checkout in ("here", "named"):
        package = tmp_path / checkout / "harness"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "gitfacts.py").write_text(f"""
from types import SimpleNamespace
def git_facts():
    return SimpleNamespace(commit="{checkout}", dirty=False, changed=(), reason=None)
def package_root():
    return "{checkout}"
""")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ASV_PYTHONPATH", str(tmp_path / "named"))
    assert asv_rules._facts_of(Bare())["commit"] == "named"
    monkeypatch.delenv("ASV_PYTHONPATH")
    with pytest.raises(util.UserError, match="bare has no harness: put the checkout on PYTHONPATH"):
        asv_rules._facts_of(Bare())


class Bare:
    """An existing environment whose Python has no packages."""

    name = "bare"

    def run(self, args: list[str], **kwargs: Any) -> str:
        """Standard output."""
        return str(util.check_output([sys.executable, "-S", *args], display_error=False, **kwargs))


def test_numbers_are_read_from_the_cache_and_only_what_is_missing_there_is_run(tmp_path: Path) -> None:
    code = """
import asv.runner
from asv.runner import run_benchmark
def forked(benchmark, spawner, param_idx, profile, extra_params, cwd):
    value, said = [None, {"a": 1}, float("inf"), float("nan"), 5.0][param_idx], "fault" if param_idx == 0 else ""
    return asv.runner.BenchmarkResult([value], [None], [None], 1 - bool(param_idx), said, None)
asv.runner._run_benchmark_single_param = forked
from harness import asv_rules
asv_rules._read_numbers()
cache = os.environ["HOME"]
with open(os.path.join(cache, os.environ[asv_rules.NUMBERS]), "w") as file:
    json.dump({"track_a": [None, {"value": 0.5}, {"output": "n/a: busy"}]}, file)
def told(metric, places, **more):
    benchmark = {"name": "f.t.T." + metric, "params": [["'w'"], places]}
    found = run_benchmark(benchmark, None, **{"profile": False, "cwd": cache, **more})
    return [[v if v == v else "n/a" for v in found.result], found.stderr, found.errcode]
short, places = ["'x'", "'y'", "'z'"], ["'x'", "'y'", "'z'", "'u'", "'v'"]
print(json.dumps([told("track_a", short), told("track_b", places), told("track_a", short, profile=True)]))
"""
    written, run, profiled = asv(code, tmp_path)
    assert written == [[None, 0.5, "n/a"], "fault\n\nFor parameters: 'w', 'z'\nn/a: busy", 1]
    assert run[0] == [None, "n/a", "n/a", "n/a", 5.0]
    assert "n/a: {'a': 1} is no finite number" in run[1]
    assert "n/a: inf is no finite number" in run[1]
    assert profiled[0] == [None, "n/a", "n/a"]


def test_a_number_stays_when_its_workload_or_variant_is_no_more(tmp_path: Path) -> None:
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


def test_not_available_never_takes_the_place_of_a_number(tmp_path: Path) -> None:
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


def test_the_store_is_found_from_the_folder_where_asv_was_called(tmp_path: Path) -> None:
    code = """print(json.dumps(os.environ["PAIRBENCH_STORE"]))"""
    assert asv(code, tmp_path, PAIRBENCH_STORE="results/history") == str(ROOT / "results" / "history")
    assert asv(code, tmp_path, PAIRBENCH_STORE="s3://bucket/history") == "s3://bucket/history"


def test_readings_are_carried_in_a_file_that_goes_with_the_command(tmp_path: Path) -> None:
    path = Path(asv("""print(json.dumps(os.environ["PAIRBENCH_ASV_STATE"]))""", tmp_path))
    assert not path.exists()
