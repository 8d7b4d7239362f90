"""What asv 0.6.6 keeps in its files, as :mod:`harness.asv_rules` has it kept.

* n/a never takes the place of a number that the same commit has already, an unsettled number never that of any other,
  and a number of a workload or variant that is not measured now stays;
* what was never measured is n/a and has not failed, and a search between commits passes over both;
* a series hangs on what is measured: of a GPU's host neither the CPU, the cores nor the memory begin another one, and a
  CPU's memory does not either;
* the list of benchmarks holds the workloads of every tier, whichever was measured last.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asv.commands.find
from asv import util
from asv.benchmarks import Benchmarks
from asv.results import Results
from asv.runner import BENCHMARK_RUN_SCRIPT

from harness.devices import gpu_slug

Place = tuple[str, ...]
GIB = 1 << 30


class Unsettled(float):
    """A number of a busy machine: it may stand where there is none."""


def is_nan(value: Any) -> bool:
    """Whether asv would show this as n/a."""
    return isinstance(value, float) and value != value


def keep_results() -> None:
    """Puts the rules in place."""
    _keep_numbers()
    _never_measured()
    _search_over_numbers()
    _join_hosts()
    _list_every_tier()


def _keep_numbers() -> None:
    original = Results.add_result

    def add_result(self: Any, benchmark: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        name, params = benchmark["name"], benchmark["params"]
        if name in self.get_all_result_keys() and self.benchmark_version.get(name) == benchmark["version"]:
            axes = self.get_result_params(name)
            before = dict(zip(itertools.product(*axes), self.get_result_value(name, axes), strict=True))
            kept = [
                _kept(before.get(at), new) for at, new in zip(itertools.product(*params), result.result, strict=True)
            ]
            original(self, benchmark, result._replace(result=kept), *args, **kwargs)
            _add_back(self, name, before)
        else:
            original(self, benchmark, result, *args, **kwargs)

    Results.add_result = add_result


def _kept(before: Any, new: Any) -> Any:
    stands = before is not None and not is_nan(before)
    return before if stands and (is_nan(new) or isinstance(new, Unsettled)) else new


def _add_back(results: Any, name: str, before: Mapping[Place, Any]) -> None:
    """Adds numbers of workloads and variants that the benchmark has no more; statistics of those are dropped."""
    axes = results.get_result_params(name)
    now = dict(zip(itertools.product(*axes), results.get_result_value(name, axes), strict=True))
    gone = [at for at, v in before.items() if at not in now and len(at) == len(axes) and v is not None and v == v]
    if not gone:
        return
    wider = [list(dict.fromkeys([*axis, *(at[i] for at in gone)])) for i, axis in enumerate(axes)]
    for held in (results._stats, results._samples):
        if held.get(name) is not None:
            by_place = dict(zip(itertools.product(*axes), held[name], strict=True))
            held[name] = [by_place.get(at) for at in itertools.product(*wider)]
    now.update({at: before[at] for at in gone})
    results._results[name] = [now.get(at, math.nan) for at in itertools.product(*wider)]
    results._benchmark_params[name] = wider


def _never_measured() -> None:
    original = Results.get_result_value

    def get_result_value(self: Any, key: str, params: Any) -> list[Any]:
        values = original(self, key, params)
        measured = set(itertools.product(*(self.get_result_params(key) or [])))
        places = itertools.product(*params)
        return [value if at in measured else math.nan for at, value in zip(places, values, strict=True)]

    Results.get_result_value = get_result_value


def _search_over_numbers() -> None:
    """``asv find`` takes n/a for a measurement that is neither better nor worse, and so searches the wrong half."""
    measure = asv.commands.find.run_benchmarks

    def run_benchmarks(*args: Any, **kwargs: Any) -> Any:
        results = measure(*args, **kwargs)
        every = results.get_result_value
        results.get_result_value = lambda *which: [None if is_nan(value) else value for value in every(*which)]
        return results

    asv.commands.find.run_benchmarks = run_benchmarks


def _join_hosts() -> None:
    original = Results.__init__

    def init(self: Any, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        original(self, of_series(params), *args, **kwargs)

    Results.__init__ = init


def of_series(params: Mapping[str, Any]) -> dict[str, Any]:
    """What asv tells series apart by, of all that it knows about a machine.

    A host has some kilobytes more or fewer after each boot. Its CPU and cores count only when they are what is
    measured, which a machine's name shows: it is the type of the GPU, else of the CPU.
    """
    cpu = params.get("cpu")
    beside = ("ram",) if cpu and gpu_slug(str(cpu)) == params.get("machine") else ("ram", "cpu", "num_cpu")
    return {key: value for key, value in params.items() if key not in beside}


def in_gib(size: str) -> str:
    """Bytes as whole GiB, upwards: what the kernel keeps for itself moves from boot to boot."""
    return f"{math.ceil(int(size) / GIB)} GiB" if size.isdigit() else size


def _list_every_tier() -> None:
    def save(self: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="pairbench-") as elsewhere:
            path = Path(elsewhere, "benchmarks.json")
            command = [sys.executable, BENCHMARK_RUN_SCRIPT, "discover", str(Path(self.benchmark_dir).resolve())]
            util.check_call([*command, str(path)], cwd=elsewhere, env={**os.environ, "PAIRBENCH_TIER": "all"})
            listed = {benchmark["name"]: benchmark for benchmark in json.loads(path.read_text(encoding="utf-8"))}
        util.write_json(self.get_benchmark_file_path(self._conf.results_dir), listed, self.api_version)

    Benchmarks.save = save
