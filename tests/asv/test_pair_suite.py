"""What a suite gives asv: finite numbers, better when lower, and for everything else a state with its reason."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from suites import pair_suite
from suites.pair_suite import PairSuite

skip = pytest.importorskip("asv_runner.benchmarks.mark").SkipNotImplemented
WORKLOADS = [
    {"name": "small", "tier": "smoke", "dtype": "float32", "rows": 4},
    {"name": "large", "tier": "quick", "dtype": "bfloat16", "rows": 4096},
    {"name": "huge", "tier": "full", "dtype": "bfloat16", "rows": 65536},
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a suite class in a module of its own, as a checkout has it, with an impl of three variants."""

    def make(tier: str = "smoke", workloads: list[dict[str, Any]] = WORKLOADS) -> type[PairSuite]:
        monkeypatch.setenv("PAIRBENCH_TIER", tier)
        impl = tmp_path / "impls" / "fusion" / "toy.py"
        impl.parent.mkdir(parents=True, exist_ok=True)
        impl.write_text('PAIR = Pair(name="toy", variants={"baseline": a, "optimized": b, "liger": Variant(c)})')
        module = types.ModuleType("suites.fusion.toy")
        module.__file__ = str(tmp_path / "suites" / "fusion" / "toy.py")
        vars(module)["WORKLOADS"] = workloads
        monkeypatch.setitem(sys.modules, "suites.fusion.toy", module)
        return type("Toy", (PairSuite,), {"__module__": module.__name__, "setup_cache": lambda self: self.measure()})

    return make


def answer(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | Exception, file: str = __file__) -> list[Any]:
    """Puts an asv_api in place that gives this answer, and returns the list of its calls."""
    calls: list[Any] = []

    def measure(*args: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append((args, kwargs))
        if isinstance(found, Exception):
            raise found
        return found

    module = types.ModuleType("harness.asv_api")
    module.__file__ = file
    vars(module)["measure"] = measure
    monkeypatch.setitem(sys.modules, "harness.asv_api", module)
    monkeypatch.delenv("ASV_ENV_DIR", raising=False)
    return calls


@pytest.mark.parametrize(("tier", "names"), [("smoke", ["small"]), ("quick", ["large"]), ("full", ["large", "huge"])])
def test_the_tier_decides_the_workloads(made: Any, tier: str, names: list[str]) -> None:
    suite = made(tier)
    assert [p.partition("@")[0] for p in suite.params[0]] == names
    assert suite.params[1] == ["baseline", "optimized", "liger"]
    assert suite.timeout == pair_suite.TIMEOUT_S[tier]


def test_an_unknown_tier_is_named(made: Any) -> None:
    with pytest.raises(ValueError, match="PAIRBENCH_TIER='night' is none of smoke, quick, full"):
        made("night")


def test_a_changed_workload_never_joins_the_series_of_the_old_one() -> None:
    old = pair_suite.label({"name": "a", "tier": "smoke", "dtype": "float32", "rows": 4})
    assert old == pair_suite.label({"dtype": "float32", "tier": "quick", "rows": 4, "name": "a"})
    assert old != pair_suite.label({"name": "a", "tier": "smoke", "dtype": "float32", "rows": 5})
    assert old != pair_suite.label({"name": "a", "tier": "smoke", "dtype": "float64", "rows": 4})
    assert old.startswith("a@")


def test_the_base_is_abstract_and_each_class_must_have_a_set_up_cache_of_its_own() -> None:
    with pytest.raises(TypeError, match="setup_cache"):
        PairSuite()  # type: ignore[abstract]


def test_all_workloads_go_to_the_harness_in_one_call(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, {"method": float(pair_suite.VERSION)})
    suite = made("full")
    assert suite().setup_cache() == {"method": 1.0}
    assert calls == [(("toy", WORKLOADS[1:]), {"api": 1})]


def test_a_tier_without_a_workload_measures_nothing(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, {})
    suite = made("quick", WORKLOADS[:1])
    assert "no workload of tier quick" in suite().setup_cache()["problem"]
    assert not calls


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (NotImplementedError("at this commit: unknown technique 'toy'"), "at this commit: unknown technique"),
        (ModuleNotFoundError("No module named 'harness.asv_api'", name="harness.asv_api"), "no harness.asv_api"),
        ({"method": 2.0, "small/baseline/latency": 1.0}, "measured by method 2"),
    ],
)
def test_what_a_commit_lacks_is_not_available_with_the_reason(
    made: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Any, why: str
) -> None:
    answer(monkeypatch, found)
    suite = made()
    figures = suite().setup_cache()
    with pytest.raises(skip, match=why):
        suite().track_latency(figures, suite.params[0][0], "baseline")
    assert f"n/a: {figures['problem']}" in capsys.readouterr().out


def test_a_harness_from_outside_the_environment_is_not_the_commits(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = answer(monkeypatch, {"method": 1.0}, file=str(tmp_path / "elsewhere" / "harness" / "asv_api.py"))
    monkeypatch.setenv("ASV_ENV_DIR", str(tmp_path / "env"))
    assert made()().setup_cache() == {"problem": "this commit brings no harness of its own"}
    assert not calls


def test_another_missing_module_or_a_fault_is_a_fault(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    with pytest.raises(ModuleNotFoundError, match="torch"):
        made()().setup_cache()
    answer(monkeypatch, RuntimeError("the store is full"))
    with pytest.raises(RuntimeError, match="store is full"):
        made()().setup_cache()


FIGURES = {
    "method": 1.0,
    "small/baseline/status": "passed",
    "small/baseline/latency": 0.5,
    "small/baseline/throughput": 4.0,
    "small/baseline/peak_memory": 0.0,
    "small/baseline/mfu": "no GPU: a CPU has no peak in the table",
    "small/optimized/status": "passed",
    "small/optimized/latency": 0.25,
    "small/optimized/throughput": 8.0,
    "small/optimized/peak_memory": 1024.0,
    "small/optimized/mfu": 0.5,
    "small/optimized/speedup": 2.0,
    "small/optimized/speedup_peer": 0.8,
}


def test_every_number_is_better_when_lower(made: Any) -> None:
    suite = made()()

    def row(variant: str) -> dict[str, float]:
        out = {}
        for name in dir(suite):
            if name.startswith("track_"):
                try:
                    out[name] = getattr(suite, name)(FIGURES, "small@1", variant)
                except skip:
                    continue
        return out

    fast, slow = row("optimized"), row("baseline")
    assert fast == {
        "track_latency": 0.25,
        "track_inverse_throughput": 0.125,
        "track_peak_memory": 1024.0,
        "track_inverse_mfu": 2.0,
        "track_inverse_speedup": 0.5,
        "track_inverse_speedup_peer": 1.25,
    }
    assert slow == {"track_latency": 0.5, "track_inverse_throughput": 0.25, "track_peak_memory": 0.0}


def test_every_number_is_written_down_beside_the_cache_when_asvs_plugin_asks(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer(monkeypatch, {**FIGURES, "small/optimized/status": "error: because", "small/baseline/latency": math.inf})
    monkeypatch.chdir(tmp_path)
    suite = made()
    suite().setup_cache()
    assert not (tmp_path / "numbers.json").exists()
    monkeypatch.setenv(pair_suite.NUMBERS, "numbers.json")
    figures = suite().setup_cache()
    told = json.loads((tmp_path / "numbers.json").read_text())
    assert set(told) == {name for name in vars(PairSuite) if name.startswith("track_")}
    assert {len(metric) for metric in told.values()} == {3}
    assert told["track_inverse_throughput"][0] == {"value": 0.25}
    assert told["track_inverse_throughput"][1] is None  # a fault is met again, by asv
    liger = {"output": "n/a: skipped: this commit has no such workload or variant\n"}
    assert told["track_latency"] == [{"output": "n/a: latency is inf, which asv cannot hold\n"}, None, liger]
    assert suite().track_inverse_throughput(figures, suite.params[0][0], "baseline") == 0.25


@pytest.mark.parametrize("value", [math.inf, math.nan, "fast", {"a": 1}, True])
def test_what_a_metric_of_a_suite_itself_gives_wrong_is_not_written_down(value: Any) -> None:
    assert pair_suite._told(lambda figures: value, FIGURES) is None


def test_names_and_units_of_what_is_inverted_say_so(made: Any) -> None:
    for name, method in vars(PairSuite).items():
        if name.startswith("track_"):
            assert ("inverse" in method.unit) == ("inverse" in name)


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, "fast", {"a": 1}, None, True, [1.0], pytest.param(10**400, id="huge")]
)
def test_nothing_but_a_finite_number_reaches_asv(made: Any, value: Any) -> None:
    figures = {**FIGURES, "small/optimized/latency": value, "small/optimized/mfu": value}
    with pytest.raises(skip):
        made()().track_latency(figures, "small@1", "optimized")
    with pytest.raises(skip):
        made()().track_inverse_mfu(figures, "small@1", "optimized")


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324])
def test_what_has_no_inverse_is_not_available(made: Any, value: float) -> None:
    with pytest.raises(skip, match="no inverse"):
        made()().track_inverse_mfu({**FIGURES, "small/optimized/mfu": value}, "small@1", "optimized")


@pytest.mark.parametrize("state", ["wrong", "error", "timeout", "implausible", "oom"])
def test_a_fault_is_failed_and_not_not_available(made: Any, state: str) -> None:
    figures = {**FIGURES, "small/optimized/status": f"{state}: because"}
    with pytest.raises(RuntimeError, match=f"small/optimized: {state}: because"):
        made()().track_latency(figures, "small@1", "optimized")


def test_a_baseline_that_does_not_fit_is_no_fault(made: Any) -> None:
    with pytest.raises(skip, match="oom"):
        made()().track_latency({**FIGURES, "small/baseline/status": "oom: 2 GiB too many"}, "small@1", "baseline")


@pytest.mark.parametrize("state", ["skipped: needs a CUDA GPU", "unsettled: other processes used 1.4 of 2 cores"])
def test_what_was_skipped_or_unsettled_has_no_number(made: Any, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.delenv("PAIRBENCH_ASV_UNSETTLED", raising=False)
    with pytest.raises(skip, match=state.partition(":")[0]):
        made()().track_latency({**FIGURES, "small/optimized/status": state}, "small@1", "optimized")


def test_unsettled_numbers_are_given_only_to_who_asks_for_them(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PAIRBENCH_ASV_UNSETTLED", "1")
    figures = {**FIGURES, "small/optimized/status": "unsettled: busy"}
    assert made()().track_latency(figures, "small@1", "optimized") == 0.25


def test_numbers_of_a_busy_machine_are_written_down_as_such(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PAIRBENCH_ASV_UNSETTLED", "1")
    told = made()()._numbers({**FIGURES, "small/optimized/status": "unsettled: busy"})
    assert told["track_latency"][:2] == [{"value": 0.5}, {"value": 0.25, "settled": False}]
    assert told["track_inverse_mfu"][0] == {"output": f"n/a: {FIGURES['small/baseline/mfu']}\n"}


def test_a_variant_or_workload_that_the_commit_lacks_is_not_available(made: Any) -> None:
    with pytest.raises(skip, match="no such workload or variant"):
        made()().track_latency(FIGURES, "small@1", "liger")


def test_a_technique_without_its_file_or_with_a_broken_one_has_the_two_variants_of_every_pair(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("PAIR = Pair(")
    assert pair_suite.variant_names(broken) == pair_suite.variant_names(tmp_path / "no.py") == ["baseline", "optimized"]
