"""The asv class over the workloads of a technique: measured once, in ``setup_cache``, and read once a metric.

A suite file ends with::

    class AddRmsNorm(PairSuite):
        def setup_cache(self) -> object:
            return self.measure()

asv tells set-up caches apart by module and line, so that an inherited ``setup_cache`` would be run once for all
techniques; therefore each class has its own, and this base is abstract (which also keeps asv from running it).

asv imports suites from the working tree, and harness, impls and kernels from the commit under test. So this module
imports nothing of those when it is loaded, and what a commit does not have yet is n/a there, with the reason.

asv judges every number as if less were better. What is better when higher is therefore given to it inverted, and its
name and unit say so; see docs/asv.md.
"""

from __future__ import annotations

import abc
import ast
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

#: The method version (:data:`harness.record.METHOD`) whose numbers these benchmarks hold; a new one starts new series.
VERSION = 1
#: What a tier measures, as :mod:`harness.plan` has it.
TIER_HOLDS = {"smoke": ("smoke",), "quick": ("quick",), "full": ("quick", "full"), "all": ("smoke", "quick", "full")}
#: Seconds that asv grants a technique; the harness has limits of its own within these.
TIMEOUT_S = {"smoke": 1800.0, "quick": 2 * 3600.0, "full": 6 * 3600.0, "all": 8 * 3600.0}
#: States that are faults: asv shows them as failed. Any other state without a number is n/a.
FAULTS = ("wrong", "error", "timeout", "implausible")
NO_WORKLOAD = "(no workload of this tier)"
#: Names the file beside asv's cache that holds every number already, so that asv's plugin need not fork for each.
NUMBERS = "PAIRBENCH_ASV_NUMBERS"

Figures = Mapping[str, float | str]
F = TypeVar("F", bound=Callable[..., float])


def tier() -> str:
    """The tier to measure: ``PAIRBENCH_TIER``, or quick where there is a GPU and smoke where there is none.

    Raises:
        ValueError: the variable names no tier.
    """
    named = os.environ.get("PAIRBENCH_TIER") or ("quick" if os.path.exists("/dev/nvidiactl") else "smoke")
    if named not in TIER_HOLDS:
        raise ValueError(f"PAIRBENCH_TIER={named!r} is none of {', '.join(TIER_HOLDS)}")
    return named


def label(workload: Mapping[str, Any]) -> str:
    """``name@digest``: a workload of changed dimensions gets another label, and so never joins the old one's series."""
    dims = {key: value for key, value in workload.items() if key not in ("name", "tier")}
    return f"{workload['name']}@{hashlib.sha256(json.dumps(dims, sort_keys=True).encode()).hexdigest()[:6]}"


def variant_names(path: Path) -> list[str]:
    """The variants that ``PAIR = Pair(...)`` lists in a file of impls, in order, read without importing it.

    A file that is not there yet, or does not parse, gives the two that every pair has.
    """
    if path.exists():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:
            return ["baseline", "optimized"]
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
                shown = [k.value for k in node.value.keywords if k.arg == "variants"]
                if "PAIR" in targets and shown and isinstance(shown[0], ast.Dict):
                    return [k.value for k in shown[0].keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]
    return ["baseline", "optimized"]


def in_unit(unit: str) -> Callable[[F], F]:
    """Gives a ``track_`` method its unit (and no ``pretty_name``: asv's page would show it without the technique)."""

    def mark(method: F) -> F:
        vars(method)["unit"] = unit
        return method

    return mark


def not_available(reason: str) -> NoReturn:
    """Ends a ``track_`` method without a number; ``asv run --show-stderr`` shows the reason."""
    from asv_runner.benchmarks.mark import SkipNotImplemented

    print(f"n/a: {reason}")
    raise SkipNotImplemented(reason)


class PairSuite(abc.ABC):
    """One technique: its workloads and variants are the parameters, each ``track_`` method a metric."""

    version: ClassVar[str] = str(VERSION)
    timeout: ClassVar[float] = TIMEOUT_S["smoke"]
    param_names: ClassVar[list[str]] = ["workload", "variant"]
    params: ClassVar[list[list[str]]] = [[], []]
    technique: ClassVar[str] = ""
    workloads: ClassVar[list[dict[str, Any]]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        module = sys.modules[cls.__module__]
        family, cls.technique = cls.__module__.split(".")[-2:]
        everything: Sequence[Mapping[str, Any]] = module.WORKLOADS
        cls.workloads = [dict(w) for w in everything if w["tier"] in TIER_HOLDS[tier()]]
        cls.timeout = TIMEOUT_S[tier()]
        impl = Path(str(module.__file__)).resolve().parents[2] / "impls" / family / f"{cls.technique}.py"
        cls.params = [[label(w) for w in cls.workloads] or [NO_WORKLOAD], variant_names(impl)]

    @abc.abstractmethod
    def setup_cache(self) -> object:
        """Returns ``self.measure()``; each class needs this method in its own body."""

    def measure(self) -> Figures:
        """Every figure of the technique at the commit under test; ``{"problem": why}`` where it cannot be measured.

        asv keeps the figures; where its plugin asks for them, the numbers of all metrics are written down beside it.
        """
        figures = self._measure()
        if name := os.environ.get(NUMBERS):
            Path(name).write_text(json.dumps(self._numbers(figures), allow_nan=False), encoding="utf-8")
        return figures

    def _numbers(self, figures: Figures) -> dict[str, list[dict[str, Any] | None]]:
        """By metric, in the order of the parameters: a number, n/a with what it printed, or None for a fault."""
        metrics = [name for name in dir(self) if name.startswith("track_")]
        places = list(itertools.product(*self.params))
        told = {name: [_told(getattr(self, name), figures, *place) for place in places] for name in metrics}
        for place, *entries in zip(places, *told.values(), strict=True):
            if status(figures, *place).startswith("unsettled"):
                for entry in entries:
                    if entry and "value" in entry:
                        entry["settled"] = False  # it shall not replace one that is
        return told

    def _measure(self) -> Figures:
        if not self.workloads:
            return {"problem": f"{self.technique} has no workload of tier {tier()}"}
        try:
            api: Any = importlib.import_module("harness.asv_api")
            installed = os.environ.get("ASV_ENV_DIR")
            if installed and not Path(api.__file__).resolve().is_relative_to(Path(installed).resolve()):
                return {"problem": "this commit brings no harness of its own"}
            figures: Figures = api.measure(self.technique, self.workloads, api=1)
        except ModuleNotFoundError as err:
            if err.name is None or not err.name.startswith("harness"):
                raise
            return {"problem": f"this commit has no {err.name}"}
        except NotImplementedError as err:
            return {"problem": str(err)}
        if figures["method"] != VERSION:
            return {"problem": f"measured by method {figures['method']}, and these series hold method {VERSION}"}
        return figures

    @in_unit("seconds")
    def track_latency(self, figures: Figures, workload: str, variant: str) -> float:
        """Median time of one run."""
        return number(figures, workload, variant, "latency")

    @in_unit("s/item (inverse throughput)")
    def track_inverse_throughput(self, figures: Figures, workload: str, variant: str) -> float:
        """Latency over items: the inverse of throughput."""
        return inverse(figures, workload, variant, "throughput")

    @in_unit("bytes")
    def track_peak_memory(self, figures: Figures, workload: str, variant: str) -> float:
        """Peak allocated above what was allocated before the call."""
        return number(figures, workload, variant, "peak_memory")

    @in_unit("x the time at peak FLOP/s (inverse MFU)")
    def track_inverse_mfu(self, figures: Figures, workload: str, variant: str) -> float:
        """How many times longer than at the dense peak: the inverse of MFU."""
        return inverse(figures, workload, variant, "mfu")

    @in_unit("x the baseline's time (inverse speedup)")
    def track_inverse_speedup(self, figures: Figures, workload: str, variant: str) -> float:
        """The inverse of the speedup over the baseline."""
        return inverse(figures, workload, variant, "speedup")

    @in_unit("x the best peer's time (inverse speedup)")
    def track_inverse_speedup_peer(self, figures: Figures, workload: str, variant: str) -> float:
        """The inverse of the speedup over the best one-line peer."""
        return inverse(figures, workload, variant, "speedup_peer")


def _told(metric: Callable[..., float], *arguments: Any) -> dict[str, Any] | None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            value = metric(*arguments)
        except NotImplementedError:
            return {"output": printed.getvalue()}
        except Exception:  # asv shall meet it itself, and show where it was raised
            return None
    return {"value": value} if type(value) is float and math.isfinite(value) else None


def status(figures: Figures, workload: str, variant: str) -> str:
    """The state of a place, with its reason behind a colon."""
    place = f"{workload.partition('@')[0]}/{variant}"
    return str(figures.get(f"{place}/status", "skipped: this commit has no such workload or variant"))


def number(figures: Figures, workload: str, variant: str, metric: str) -> float:
    """A figure that asv may have: a finite number of a measurement that counts.

    Raises:
        SkipNotImplemented: there is none, and that is no fault.
        RuntimeError: the variant failed.
    """
    if "problem" in figures:
        not_available(str(figures["problem"]))
    place, said = f"{workload.partition('@')[0]}/{variant}", status(figures, workload, variant)
    state = said.partition(":")[0]
    if state in FAULTS or (state == "oom" and variant != "baseline"):
        raise RuntimeError(f"{place}: {said}")
    if state != "passed" and not (state == "unsettled" and os.environ.get("PAIRBENCH_ASV_UNSETTLED")):
        not_available(said)
    value = figures.get(f"{place}/{metric}", f"{metric} was not measured")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        not_available(str(value))
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        not_available(f"{metric} is {found}, which asv cannot hold")
    return found


def inverse(figures: Figures, workload: str, variant: str, metric: str) -> float:
    """One over a figure that is better when higher; n/a for one that is not above zero."""
    value = number(figures, workload, variant, metric)
    if value <= 0 or not math.isfinite(1 / value):
        not_available(f"{metric} is {value}, which has no inverse")
    return 1 / value
