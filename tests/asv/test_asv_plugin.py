"""The plugin's rules and its environment, in processes of their own: they change asv for good."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

util = pytest.importorskip("asv.util")
pytest.importorskip("virtualenv")
asv_rules = pytest.importorskip("harness.asv_rules")
ROOT = Path(__file__).resolve().parents[2]


def test_the_machine_is_named_after_its_type_and_nobody_is_asked(tmp_path: Path, asv: Any) -> None:
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


def test_environments_are_named_after_python_and_tier_and_never_after_a_path(tmp_path: Path, asv: Any) -> None:
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


def test_two_commands_never_install_commits_into_one_environment(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.environment import Environment
from asv.util import UserError
from harness.asv_environment import LendingVirtualenv
conf.env_dir = os.path.join(os.environ["HOME"], "env")
Environment.create = lambda self: None
def made():
    environment = LendingVirtualenv(conf, "%d.%d" % sys.version_info[:2], {}, {})
    try:
        environment.create()
    except UserError as err:
        return str(err)
    return environment._path
print(json.dumps([made(), made()]))
"""
    path, again = asv(code, tmp_path)
    assert path == again, "one command may ask for it twice"
    with open(f"{path}.lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert f"another asv command measures in {path}" in asv(code, tmp_path)[0]
    assert asv(code, tmp_path)[0] == path


def test_another_python_is_not_available_since_the_packages_are_this_ones(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.environment import EnvironmentUnavailable
from harness.asv_environment import LendingVirtualenv
try:
    LendingVirtualenv(conf, "3.99", {}, {})
except EnvironmentUnavailable as err:
    print(json.dumps(str(err)))
"""
    assert "3.99" in asv(code, tmp_path)


def test_lent_folders_are_this_pythons_and_those_on_pythonpath_but_no_checkout(tmp_path: Path, asv: Any) -> None:
    extra, checkout = tmp_path / "site", tmp_path / "checkout"
    extra.mkdir()
    (checkout / "harness").mkdir(parents=True)
    (checkout / "harness" / "record.py").touch()
    installed = tmp_path / "installed"  # this project among the packages, as pip puts it
    (installed / "harness").mkdir(parents=True)
    (installed / "harness" / "record.py").touch()
    (installed / "pairbench-0.1.0.dist-info").mkdir()
    (installed / "pairbench-0.1.0.dist-info" / "METADATA").write_text("Name: pairbench\nVersion: 0.1.0\n")
    code = "from harness.asv_environment import lent_folders\nprint(json.dumps(lent_folders()))"
    path = os.pathsep.join([str(extra), str(checkout), str(installed), str(tmp_path / "missing")])
    folders = asv(code, tmp_path, PYTHONPATH=path)
    assert folders[:2] == [str(extra), str(installed)]
    assert any(Path(f, "asv").is_dir() for f in folders)
    assert str(checkout) not in folders
    assert len(set(folders)) == len(folders)


def test_a_quick_run_is_kept_apart_and_one_that_saves_nothing_leaves_the_history_alone(
    tmp_path: Path, asv: Any
) -> None:
    code = """
from types import SimpleNamespace
from harness import asv_rules
def told(**args):
    os.environ.pop("PAIRBENCH_ASV_MODE", None)
    own = Config.load("asv.conf.json")
    asv_rules._before_measuring(own, SimpleNamespace(env_spec=[], **args))
    return [own.results_dir, os.environ.get("PAIRBENCH_ASV_MODE")]
asv_rules._uncommitted = lambda suites: ""
def all():
    return [told(quick=True), told(quick=False, dry_run=True), told(skip_save=True), told(quick=False)]
clean = all()
asv_rules._uncommitted = lambda suites: "not committed: suites/fusion/rope.py"
before = os.environ.get("PAIRBENCH_DIRTY")
print(json.dumps([clean, all(), [before, os.environ.get("PAIRBENCH_DIRTY")]]))
"""
    kept = "results/asv"
    clean, uncommitted, dirty = asv(code, tmp_path)
    assert dirty == [None, "1"], "records of uncommitted suites are marked"
    assert clean == [[".asv/quick", "quick"], [kept, "dry"], [kept, "dry"], [kept, None]]
    apart = ".asv/dirty"
    assert uncommitted == [[".asv/quick", "quick"], [apart, "dry"], [apart, "dry"], [apart, None]]


def test_new_is_what_came_after_the_results_of_this_machine_kept_or_apart(tmp_path: Path, asv: Any) -> None:
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


def test_a_built_environment_stores_its_numbers_under_no_other_commit(tmp_path: Path, asv: Any) -> None:
    code = """
from types import SimpleNamespace
from asv.util import UserError
from harness import asv_rules
found = []
for spec in ([], ["existing", "pairbench"]):
    try:
        asv_rules._before_measuring(conf, SimpleNamespace(env_spec=spec, set_commit_hash="HEAD"))
    except UserError as err:
        found.append(str(err))
print(json.dumps(found))
"""
    found = asv(code, tmp_path)
    assert len(found) == 2
    assert all("--set-commit-hash is for existing environments" in why for why in found)


def test_an_existing_environment_has_a_harness_wherever_pythonpath_is_read_from(tmp_path: Path, asv: Any) -> None:
    code = """
from types import SimpleNamespace
from asv.environment import ExistingEnvironment
from asv.util import ProcessError, UserError
from harness import asv_rules
args = SimpleNamespace(env_spec=["existing"], quick=True)
asv_rules._before_measuring(conf, args)
def run(self, *args, **kwargs):
    raise ProcessError(["python"], 1, "", "no module")
ExistingEnvironment.run = run
try:
    asv_rules._before_measuring(conf, args)
except UserError as err:
    print(json.dumps([os.environ[name].split(os.pathsep) for name in ("PYTHONPATH", "ASV_PYTHONPATH")] + [str(err)]))
"""
    *folders, why = asv(code, tmp_path, PYTHONPATH=os.pathsep.join([".", str(tmp_path)]))
    assert folders == [[str(ROOT), str(tmp_path)]] * 2
    assert "has no harness: put the checkout on PYTHONPATH" in why


class Bare:
    """An existing environment whose Python has no packages."""

    name = "bare"

    def run(self, args: list[str], **kwargs: Any) -> str:
        """Standard output."""
        return str(util.check_output([sys.executable, "-S", *args], display_error=False, **kwargs))


def test_numbers_are_read_from_the_cache_and_only_what_is_missing_there_is_run(tmp_path: Path, asv: Any) -> None:
    code = """
import asv.runner
from asv.runner import run_benchmark
def forked(benchmark, spawner, param_idx, profile, extra_params, cwd):
    value = [None, {"a": 1}, float("inf"), float("nan"), 5.0, 10**400][param_idx]
    said = "fault" if param_idx == 0 else ""
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
short, places = ["'x'", "'y'", "'z'"], ["'x'", "'y'", "'z'", "'u'", "'v'", "'t'"]
print(json.dumps([told("track_a", short), told("track_b", places), told("track_a", short, profile=True)]))
"""
    written, run, profiled = asv(code, tmp_path)
    assert written == [[None, 0.5, "n/a"], "fault\n\nFor parameters: 'w', 'z'\nn/a: busy", 1]
    assert run[0] == [None, "n/a", "n/a", "n/a", 5.0, "n/a"]
    assert len(run[1]) < 500
    assert "n/a: {'a': 1} is no finite number" in run[1]
    assert "n/a: inf is no finite number" in run[1]
    assert profiled[0] == [None, "n/a", "n/a"]


def test_a_timed_benchmark_is_judged_by_its_samples(tmp_path: Path, asv: Any) -> None:
    code = """
from asv.runner import BenchmarkResult
from harness.asv_rules import _only_numbers
def told(value, samples):
    return _only_numbers(BenchmarkResult([value], [samples], [1], 0, "", None)).result[0]
print(json.dumps([str(told(*given)) for given in ((True, [0.1, 0.2]), (True, [0.1, float("inf")]), (True, None))]))
"""
    assert asv(code, tmp_path) == ["True", "nan", "nan"]


def test_a_number_of_a_busy_machine_is_marked_on_its_way(tmp_path: Path, asv: Any) -> None:
    code = """
import asv.runner
from harness import asv_rules
with open(os.path.join(os.environ["HOME"], os.environ[asv_rules.NUMBERS]), "w") as file:
    json.dump({"track_a": [{"value": 0.5}, {"value": 0.5, "settled": False}]}, file)
benchmark = {"name": "f.t.T.track_a", "params": [["'x'", "'y'"]]}
found = asv.runner.run_benchmark(benchmark, None, profile=False, cwd=os.environ["HOME"])
print(json.dumps([[type(v).__name__, v] for v in found.result]))
"""
    assert asv(code, tmp_path) == [["float", 0.5], ["Unsettled", 0.5]]


def test_a_command_that_is_told_to_end_ends_as_with_ctrl_c(tmp_path: Path, asv: Any) -> None:
    code = """
import os, signal
from types import SimpleNamespace
from harness import asv_rules
asv_rules._before_measuring(conf, SimpleNamespace(env_spec=[], quick=True))
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except KeyboardInterrupt:
    print(json.dumps("ended"))
"""
    assert asv(code, tmp_path) == "ended"


def test_an_environment_that_lends_what_another_python_had_is_made_anew(tmp_path: Path, asv: Any) -> None:
    code = """
from pathlib import Path
from asv.environment import Environment
from harness.asv_environment import LENT, LendingVirtualenv
conf.env_dir = os.environ["HOME"]
environment = LendingVirtualenv(conf, "%d.%d" % sys.version_info[:2], {}, {})
Environment.check_presence = lambda self: True
found = [environment.check_presence()]
lent = Path(environment._path, "lib", "python3", "site-packages", LENT)
lent.parent.mkdir(parents=True)
for text in (environment._lends(), "/gone" + chr(10), environment._lends().replace("# for", "# for another")):
    lent.write_text(text)
    found.append(environment.check_presence())
print(json.dumps(found))
"""
    assert asv(code, tmp_path) == [False, True, False, False]


def test_the_store_is_found_from_the_folder_where_asv_was_called(tmp_path: Path, asv: Any) -> None:
    code = """print(json.dumps(os.environ["PAIRBENCH_STORE"]))"""
    assert asv(code, tmp_path, PAIRBENCH_STORE="results/history") == str(ROOT / "results" / "history")
    assert asv(code, tmp_path, PAIRBENCH_STORE="s3://bucket/history") == "s3://bucket/history"


def test_readings_are_carried_in_a_file_that_goes_with_the_command(tmp_path: Path, asv: Any) -> None:
    path = Path(asv("""print(json.dumps(os.environ["PAIRBENCH_ASV_STATE"]))""", tmp_path))
    assert not path.exists()
