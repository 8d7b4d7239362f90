"""The plugin's rules and its environment, in processes of their own: they change asv for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asv")
pytest.importorskip("virtualenv")
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
print(json.dumps([told(quick=True), told(quick=False, dry_run=True), told(skip_save=True), told(quick=False)]))
"""
    kept = "results/asv"
    assert asv(code, tmp_path) == [[".asv/quick", "quick"], [kept, "dry"], [kept, "dry"], [kept, None]]


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
