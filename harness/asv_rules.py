"""asv plugin: what asv 0.6.6 leaves to its user and must not go wrong here.

asv has no hooks for these, so :func:`setup` (which asv calls when it loads the plugin) wraps the methods in question:

* the machine's name is the GPU type, and needs no questions asked;
* a quick run keeps its results apart, under .asv/quick, and a run that saves nothing leaves the history alone too;
* suites that no commit holds do so as well, under .asv/dirty, and their records are marked dirty;
* with ``--set-commit-hash``, the environment must be an existing one, and the code that is measured that commit, with
  a clean tree;
* what is kept of results is what :mod:`harness.asv_results` says;
* numbers that a set-up cache has written down are read from there, not by a process for each, and nothing but finite
  numbers is taken from any benchmark;
* results of existing environments hold no path of this machine, and what is on PYTHONPATH is found there too;
* a command that is told to end (SIGTERM) ends what it started, as with Ctrl-C.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asv.commands.run
import asv.runner
from asv import util
from asv.commands.compare import Compare
from asv.commands.continuous import Continuous
from asv.commands.find import Find
from asv.commands.run import Run
from asv.commands.show import Show
from asv.console import log
from asv.environment import ExistingEnvironment, get_environments
from asv.machine import Machine, MachineCollection
from asv.repo import get_repo

from harness.asv_api import MODE
from harness.asv_environment import tier
from harness.asv_machine import STATE
from harness.asv_results import Unsettled, in_gib, is_nan, keep_results
from harness.commands.options import device
from harness.gitfacts import GitUnavailable, changed_paths, find_repository
from harness.provenance import provenance

#: As suites/pair_suite.py has it.
NUMBERS = "PAIRBENCH_ASV_NUMBERS"
ASK = """
import json
from harness.gitfacts import git_facts, package_root
facts = git_facts()
told = {"commit": facts.commit, "dirty": facts.dirty, "changed": facts.changed, "reason": facts.reason}
print(json.dumps({**told, "folder": str(package_root())}))
"""
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def setup() -> None:
    """Puts the rules in place; asv calls it once a command."""
    tier()
    # asv's processes run in folders of their own.
    store = os.environ.get("PAIRBENCH_STORE")
    if store and "://" not in store:
        os.environ["PAIRBENCH_STORE"] = str(Path(store).expanduser().resolve())
    for name in ("PYTHONPATH", "ASV_PYTHONPATH"):
        if folders := os.environ.get(name):
            os.environ[name] = os.pathsep.join(str(Path(folder).resolve()) for folder in folders.split(os.pathsep))
    if STATE not in os.environ:
        handle, path = tempfile.mkstemp(prefix="pairbench-asv-")
        os.close(handle)
        os.environ[STATE] = path
        atexit.register(Path(path).unlink, missing_ok=True)
    gpu = str(provenance(device("auto"))["gpu"])
    _name_the_machine(gpu)
    for command in (Run, Continuous, Find):
        _wrap(command, _before_measuring)
    for command in (Compare, Show):
        _wrap(command, lambda conf, args: _prefer_machine(gpu, conf, args))
    keep_results()
    _read_numbers()
    _name_existing()


def _wrap(command: Any, before: Callable[[Any, Any], None]) -> None:
    original = command.run_from_conf_args.__func__

    def run_from_conf_args(cls: Any, /, conf: Any, args: Any, **kwargs: Any) -> Any:
        before(conf, args)
        return original(cls, conf, args, **kwargs)

    command.run_from_conf_args = classmethod(run_from_conf_args)


def _before_measuring(conf: Any, args: Any) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    environments = list(get_environments(conf, args.env_spec, verbose=False))
    existing = [environment for environment in environments if isinstance(environment, ExistingEnvironment)]
    if existing and os.environ.get("PYTHONPATH"):
        os.environ.setdefault("ASV_PYTHONPATH", os.environ["PYTHONPATH"])  # asv takes PYTHONPATH away from benchmarks
    for environment in existing:
        _ask(environment, "import harness")
    if getattr(args, "set_commit_hash", None):
        if len(existing) < len(environments):
            raise util.UserError(
                "--set-commit-hash is for existing environments (-E existing): a built one measures the commit that it"
                " installs, and asv would keep its numbers under another"
            )
        _refuse_other_code(conf, args, existing)
    kept = conf.results_dir
    if getattr(args, "dry_run", False) or getattr(args, "skip_save", False):
        os.environ[MODE] = "dry"
    if getattr(args, "quick", False):
        os.environ[MODE] = "quick"
        conf.results_dir = str(Path(conf.env_dir).parent / "quick")
        log.info(f"A quick run: results in {conf.results_dir}, nothing in the history")
    elif why := _uncommitted(Path(conf.benchmark_dir).resolve()):
        os.environ["PAIRBENCH_DIRTY"] = "1"
        conf.results_dir = str(Path(conf.env_dir).parent / "dirty")
        log.warning(
            f"{why}: results in {conf.results_dir}, so that those of committed suites stay as they are; the history's"
            " are marked dirty"
        )
    _know_commits(kept, args)


def _know_commits(kept: str, args: Any) -> None:
    """EXISTING is what any machine has results of, kept here or apart; NEW what came after the newest of this machine.

    asv itself takes any machine's for NEW too, and that is what a machine without results gets.
    """
    machine = (args.machine or Machine.hardcoded_machine_name) if getattr(args, "range", None) == "NEW" else ""
    hashes = asv.commands.run.get_existing_hashes

    def known(results: str, of: str = machine) -> list[str]:
        found = list({commit for folder in (kept, results) for commit in hashes(str(Path(folder, of)))})
        return found if found or not of else known(results, "")

    asv.commands.run.get_existing_hashes = known


def _uncommitted(suites: Path) -> str:
    """What keeps these suites from being those of a commit; empty when nothing does."""
    root = suites.parent
    top = find_repository(root)
    if top is None:
        return f"{suites.name} is in no git repository"
    try:
        changed = changed_paths(root, top)
    except GitUnavailable as err:
        return f"whether {suites.name} is committed cannot be told ({err})"
    ours = [p for p in changed if p.startswith((f"{suites.name}/", "harness/asv_")) or p == "asv.conf.json"]
    return f"not committed: {', '.join(ours[:5])}{' …' if len(ours) > 5 else ''}" if ours else ""


def _refuse_other_code(conf: Any, args: Any, environments: Sequence[Any]) -> None:
    """Raises UserError: what would be measured is not, or not only, the commit that it would be stored under."""
    wanted = get_repo(conf).get_hash_from_name(args.set_commit_hash)
    for environment in environments:
        facts = _facts_of(environment)
        if facts["commit"] != wanted:
            found = facts["commit"] or f"no commit ({facts['reason']})"
            raise util.UserError(
                f"{environment.name} measures {found} in {facts['folder']}, not {wanted}: check that commit out there,"
                " or put a checkout of it on PYTHONPATH"
            )
        why = ", ".join(facts["changed"]) or facts["reason"] if facts["dirty"] else ""
        if why := why or _uncommitted(Path(conf.benchmark_dir).resolve()):
            raise util.UserError(
                f"the tree differs from {wanted[:8]} ({why}): commit first, or run without --set-commit-hash,"
                " which keeps asv's results of that commit as they are"
            )


def _facts_of(environment: Any) -> dict[str, Any]:
    """The commit of the harness that benchmarks will import."""
    facts: dict[str, Any] = json.loads(_ask(environment, ASK))
    return facts


def _ask(environment: Any, code: str) -> str:
    """What the code prints where benchmarks are run: far from any checkout."""
    seen = {**os.environ, "PYTHONPATH": os.environ.get("ASV_PYTHONPATH", "")}
    with tempfile.TemporaryDirectory(prefix="pairbench-") as elsewhere:
        try:
            return str(environment.run(["-c", code], cwd=elsewhere, env=seen))
        except util.ProcessError as err:
            raise util.UserError(f"{environment.name} has no harness: put the checkout on PYTHONPATH") from err


def _name_existing() -> None:
    original = ExistingEnvironment.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._python = util.check_output([self._executable, "-c", VERSION]).strip()

    ExistingEnvironment.__init__ = init
    ExistingEnvironment.name = property(lambda env: f"existing-py{env.python}-{tier()}")


def _name_the_machine(gpu: str) -> None:
    Machine.hardcoded_machine_name = gpu
    original = Machine.load.__func__

    def load(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        name, path = kwargs.get("machine_name") or gpu, kwargs.get("_path")
        try:
            MachineCollection.load(name, _path=path)
        except util.UserError:
            # Each of these may be a parameter of a series to asv: a kernel's release would end all of them.
            facts = {**Machine.get_defaults(), "machine": name, "os": platform.system()}
            MachineCollection.save(name, facts, _path=path)
        found = original(cls, *args, **{**kwargs, "machine_name": name})
        found.ram = in_gib(str(getattr(found, "ram", "")))
        return found

    Machine.load = classmethod(load)


def _prefer_machine(gpu: str, conf: Any, args: Any) -> None:
    if args.machine is None and Path(conf.results_dir, gpu, "machine.json").exists():
        args.machine = gpu


def _read_numbers() -> None:
    """Suites say in ``PAIRBENCH_ASV_NUMBERS`` what each metric gives; a process for each would give the same."""
    os.environ[NUMBERS] = "numbers.json"
    original = asv.runner._run_benchmark_single_param

    def single(
        benchmark: Any, spawner: Any, param_idx: int | None, profile: bool, extra_params: Any, cwd: str | None
    ) -> Any:
        told = None
        if cwd and param_idx is not None and not profile:
            told = _written(cwd, benchmark["name"], param_idx)
        if told is None or param_idx is None:
            return _only_numbers(original(benchmark, spawner, param_idx, profile, extra_params, cwd))
        place = list(itertools.product(*benchmark["params"]))[param_idx]
        said = f"For parameters: {', '.join(place)}\n{told['output']}".strip() if told.get("output") else ""
        value = (float if told.get("settled", True) else Unsettled)(told.get("value", math.nan))
        return asv.runner.BenchmarkResult([value], [None], [None], 0, said, None)

    asv.runner._run_benchmark_single_param = single


def _only_numbers(result: Any) -> Any:
    """What asv would store and break on later (inf, text, mappings) is n/a, with the reason; a fault stays one."""
    (value,), (samples,) = result.result, result.samples
    # A timed benchmark has samples, and asv puts True in the place of the number that it will make of them.
    if value is None or is_nan(value) or all(map(_is_finite, [value] if samples is None else samples)):
        return result
    said = f"{result.stderr}\nn/a: {value!r:.200} is no finite number, which asv cannot hold".strip()
    return result._replace(result=[math.nan], samples=[None], number=[None], stderr=said)


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def _written(cache: str, name: str, index: int) -> dict[str, Any] | None:
    """The number or n/a of that place; None where there is none: a fault, or a suite that writes nothing down."""
    metric: list[dict[str, Any] | None] = _numbers(Path(cache, os.environ[NUMBERS])).get(name.rpartition(".")[2], [])
    return metric[index] if index < len(metric) else None


@functools.lru_cache(maxsize=1)
def _numbers(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
