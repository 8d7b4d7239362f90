"""One workload, measured in this process: what each kind of broken variant comes to, and what a good one carries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import memory
from harness.clock import WallClock
from harness.entry import Entry
from harness.job import EventReader, Events, MeasureJob
from harness.measure import Measurement
from harness.opcase import OpCase
from harness.pair import Claim, Context, Inputs, Pair, Variant, Work
from harness.ranked import Agreement
from harness.workload import parse_workload

TOYS = Path(__file__).resolve().parent.parent / "toys"


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(TOYS))
    yield
    for name in [n for n in sys.modules if n.startswith("pairbench_toys")]:
        del sys.modules[name]


def _events(pair: Pair, raw: dict[str, Any], folder: Path, **job: Any) -> dict[str, dict[str, Any]]:
    workload = parse_workload(pair.name, raw, "test")
    out = folder / "events.jsonl"
    names = job.pop("variants", tuple(pair.variants))
    asked = MeasureJob(pair.name, (workload,), names, "cpu", str(out), **{"samples": 3, **job})
    events = Events(out, 0)
    Measurement(pair, workload, asked, Agreement(0, 1), events).run()
    events.close()
    return {e["variant"]: e for e in EventReader(out).new() if e["event"] == "result"}


def test_each_fault_has_its_own_status(toys: None, tmp_path: Path) -> None:
    from pairbench_toys import toy_faults

    found = _events(toy_faults.PAIR, toy_faults.WORKLOADS[0], tmp_path)
    status = {n: e["status"] for n, e in found.items()}
    assert status == {
        "baseline": "passed",
        "optimized": "passed",
        "wrong": "wrong",
        "nan": "wrong",
        "raises": "error",
        "oom": "oom",
        "overwrites": "wrong",
        "hangs": "passed",
        "dies": "passed",
        "one_line": "passed",
        "elsewhere": "skipped",
    }
    assert "RuntimeError: this variant is broken" in found["raises"]["reason"]
    assert "this variant is broken" in found["raises"]["traceback"]
    assert all("samples" not in found[n] for n, s in status.items() if s != "passed")
    assert len(found["optimized"]["samples"]["values"]) == 3
    json.dumps(found, allow_nan=False)


def test_a_serve_run_gives_tokens_and_a_timeline(toys: None, tmp_path: Path) -> None:
    from pairbench_toys import toy_serve

    found = _events(toy_serve.PAIR, toy_serve.WORKLOADS[0], tmp_path)
    assert found["optimized"]["status"] == "passed"
    assert len(found["optimized"]["timeline"]["requests"]) == 8
    assert found["loses"]["status"] == "wrong"
    assert "r2" in found["loses"]["reason"]


def test_a_serve_run_replays_its_trace_no_oftener_than_the_measuring_page_says(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pairbench_toys import toy_serve

    runs: list[str] = []
    once = toy_serve.OneByOne.run
    monkeypatch.setattr(toy_serve.OneByOne, "run", lambda self: (runs.append(type(self).__name__), once(self))[1])
    found = _events(toy_serve.PAIR, toy_serve.WORKLOADS[0], tmp_path, variants=("baseline", "optimized"), budget_s=0.0)
    assert found["optimized"]["status"] == "passed"
    assert runs.count("Batched") == 7


def test_a_serve_records_timeline_is_that_of_its_middle_sample() -> None:
    entry = Entry("optimized", Variant(object))
    for seconds in (9.0, 2.0, 3.0, 1.0):
        entry.case = SimpleNamespace(timeline=lambda s=seconds: {"end": s})
        entry.heard(seconds)
    entry.ask()
    assert entry.parts["timeline"] == {"end": 1.0}  # the last run's, where nothing was sampled
    entry.keep_middle([2.0, 3.0, 1.0])  # 9.0 was the warm-up
    assert entry.parts["timeline"] == {"end": 2.0}


def _pair(**variants: Any) -> Pair:
    return Pair(
        name="inline",
        layer="kernel",
        relieves="memory",
        claim=Claim(),
        inputs=lambda w, ctx: {"x": ctx.randn(8, 4), "y": ctx.randn(4)},
        oracle=lambda x, y: (x * y).sum(),
        variants={"baseline": lambda x, y: (x * y).sum(), **variants},
        work=lambda w: Work(items=1),
    )


RAW = {"name": "w", "tier": "smoke", "dtype": "float32", "direction": "both"}


def test_every_gradient_is_checked(tmp_path: Path) -> None:
    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return (x * y).sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ctx.saved_tensors
            return grad * y.expand_as(x), 0.5 * grad * x.sum(0)

    found = _events(_pair(optimized=HalfGradient.apply), RAW, tmp_path)
    assert found["optimized"]["status"] == "wrong"
    assert "grad:y" in found["optimized"]["reason"]


def test_an_output_that_is_only_right_the_first_time_is_caught_after_timing(tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    def stale(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return kept.setdefault("out", (x * y).sum().clone())

    found = _events(_pair(optimized=stale), {**RAW, "direction": "forward"}, tmp_path)
    assert found["optimized"]["status"] == "wrong"
    assert "after timing" in found["optimized"]["reason"]
    assert found["baseline"]["status"] == "passed"


def test_a_baseline_that_does_not_fit_leaves_the_others_measured(tmp_path: Path) -> None:
    def too_large(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pair = _pair(optimized=lambda x, y: (x * y).sum())
    pair = Pair(**{**vars(pair), "variants": {"baseline": too_large, "optimized": pair.variants["optimized"]}})
    found = _events(pair, {**RAW, "direction": "forward"}, tmp_path)
    assert (found["baseline"]["status"], found["optimized"]["status"]) == ("oom", "passed")
    assert "samples" in found["optimized"]


def test_a_disturbed_machine_is_measured_again_and_then_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.conditions import Conditions

    class Busy:
        starts = 0

        def start(self) -> None:
            Busy.starts += 1

        def poke(self) -> None: ...

        def stop(self) -> Conditions:
            return Conditions(True, contended=True, why=("a stranger runs here",))

    monkeypatch.setattr("harness.timed.watch_device", lambda device: Busy())
    found = _events(_pair(optimized=lambda x, y: (x * y).sum()), {**RAW, "direction": "forward"}, tmp_path)
    assert Busy.starts == 2
    assert found["optimized"]["conditions"]["unfit"] == "a stranger runs here"


def test_memory_is_counted_above_the_start_and_not_from_an_earlier_peak() -> None:
    big = torch.ones(60_000_000)  # 240 MB, gone before the call
    del big
    memory.trim()
    found = memory.measure(lambda: torch.ones(10_000_000).sum().item(), torch.device("cpu"), 0)
    if found.peak is None:
        pytest.skip(found.reason)
    assert 36e6 < found.peak < 80e6


def test_backward_runs_alone_on_saved_tensors_and_oracle_sees_the_same_gradients() -> None:
    workload = parse_workload("t", {**RAW, "direction": "backward"}, "test")
    calls = {"forward": 0}

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls["forward"] += 1
        return x * y

    ctx = Context(torch.device("cpu"), torch.float32, 3)
    inputs = Inputs({"x": ctx.randn(5, 4), "y": ctx.randn(4)}, 3)
    low, high = (OpCase(fn, workload, ctx, None, upcast=u) for u in (False, True))
    for case in (low, high):
        case.load(inputs)
    assert calls["forward"] == 2
    for case in (low, high):
        case.run()
        case.run()
    assert calls["forward"] == 2
    assert high.result()["grad:y"].dtype == torch.float64
    torch.testing.assert_close(low.result()["grad:y"].double(), high.result()["grad:y"], rtol=1e-5, atol=1e-5)


def test_poison_overwrites_what_an_earlier_run_left() -> None:
    workload = parse_workload("t", {**RAW, "direction": "forward"}, "test")
    out = torch.empty(3)

    def keeps(x: torch.Tensor) -> torch.Tensor:
        return out

    ctx = Context(torch.device("cpu"), torch.float32, 0)
    case = OpCase(keeps, workload, ctx, None, upcast=False)
    case.load(Inputs({"x": torch.ones(3)}, 0))
    case.run()
    case.poison()
    assert bool(out.isnan().all())


def test_a_variant_that_says_it_changes_its_input_gets_it_afresh(tmp_path: Path) -> None:
    def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.mul_(y).sum()

    pair = _pair(optimized=Variant(in_place, changes=("x",)))
    assert _events(pair, {**RAW, "direction": "forward"}, tmp_path)["optimized"]["status"] == "passed"


def test_a_clock_that_looks_again_gets_changed_inputs_afresh_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Again(WallClock):
        def verify(self, call: Callable[[], None], worst: Callable[[float], float] = float) -> None:
            for _ in range(3):
                call()

    def once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any(), "run twice on the same inputs"
        out = (x * y).sum()
        x.fill_(float("nan"))
        return out

    monkeypatch.setattr("harness.timed.clock_for", lambda kind, device: Again(device))
    pair = _pair(optimized=Variant(once, changes=("x",)))
    assert _events(pair, {**RAW, "direction": "forward"}, tmp_path)["optimized"]["status"] == "passed"


class _Told:
    """A case that tells of its last run, and forgets when it is closed."""

    asked = 0

    def __init__(self) -> None:
        self.open, self.runs = True, 0

    def load(self, inputs: Inputs) -> None:
        self.x = inputs["x"].clone()

    def run(self) -> None:
        self.out, self.runs = self.x * 2, self.runs + 1

    def result(self) -> dict[str, torch.Tensor]:
        return {"out": self.out}

    def counters(self) -> dict[str, float]:
        assert self.open
        _Told.asked += 1
        return {"runs": float(self.runs)}

    def close(self) -> None:
        self.open = False


def test_a_variant_that_is_alone_in_memory_still_tells_of_its_run(tmp_path: Path) -> None:
    def build(workload: Any, ctx: Context) -> _Told:
        return _Told()

    _Told.asked = 0
    pair = replace(_pair(baseline=build, optimized=Variant(build, exclusive=True)), kind="step", oracle=build)
    found = _events(pair, RAW, tmp_path)
    assert {n: e["status"] for n, e in found.items()} == {"baseline": "passed", "optimized": "passed"}
    assert found["optimized"]["counters"]["runs"] > 0
    assert _Told.asked == 2  # each once, not after every block: it may run several steps to tell
    assert len(found["optimized"]["samples"]["values"]) == 3


def _plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _held_by_others(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where measurements will say how many bytes they were told are held by others, on a device that holds 1000."""
    others: list[int] = []

    def measure(call: Any, device: torch.device, held: int) -> memory.Memory:
        others.append(held)
        return memory.Memory(1, 2)

    monkeypatch.setattr(memory, "allocated", lambda device: 1000)
    monkeypatch.setattr(memory, "measure", measure)
    return others


def test_the_absolute_peak_holds_no_copy_of_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was held before a case was built, and the copy of its result that is being checked, are not the case's."""
    others = _held_by_others(monkeypatch)
    _events(replace(_pair(baseline=_plain, optimized=_plain), oracle=_plain), {**RAW, "direction": "forward"}, tmp_path)
    assert others == [1000 + 8 * 4 * 4] * 2


def test_weights_that_all_variants_share_count_in_the_absolute_peak_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was loaded before the first variant was built was counted in none of them: 16 GB of 24."""
    others = _held_by_others(monkeypatch)
    model = torch.nn.Linear(10, 10, bias=False)
    pair = replace(_pair(baseline=_plain, optimized=_plain), oracle=_plain, shared=lambda workload, ctx: [model, model])
    _events(pair, {**RAW, "direction": "forward"}, tmp_path)
    assert others == [1000 + 8 * 4 * 4 - 400] * 2


def test_no_variant_pays_for_the_result_of_the_one_before(tmp_path: Path) -> None:
    """The third one was once counted above the second one's result, which was gone by then: below its own inputs."""
    size = 64 << 20

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.mul(2)

    in_place = Variant(lambda x: x.mul_(2), changes=("x",))
    pair = replace(
        _pair(baseline=plain, optimized=plain, third=in_place, fourth=in_place),
        inputs=lambda w, ctx: {"x": torch.ones(size // 4)},
        oracle=plain,
    )
    found = _events(pair, {**RAW, "direction": "forward"}, tmp_path)
    assert {e["status"] for e in found.values()} == {"passed"}
    assert all(0.9 * size < found[n]["memory"]["absolute"] < 1.5 * size for n in ("third", "fourth")), found


def test_what_was_loaded_to_be_timed_is_gone_before_the_second_check(tmp_path: Path) -> None:
    """Four variants that hold a billion optimizer states each do not fit beside an oracle in float64."""
    alive: list[OpCase] = []
    held: list[int] = []

    class Counted(OpCase):
        def load(self, inputs: Inputs) -> None:
            super().load(inputs)
            held.append(sum(bool(c.buffers) for c in alive))

    def build(workload: Any, ctx: Context) -> OpCase:
        case = Counted(lambda x, y: x + y, workload, ctx, None, False)
        alive.append(case)
        return case

    pair = replace(_pair(baseline=build, optimized=build, third=build), kind="step", oracle=build)
    pair = replace(pair, work=lambda w: Work(items=1))
    found = _events(pair, {**RAW, "direction": "forward"}, tmp_path)
    assert {e["status"] for e in found.values()} == {"passed"}
    checked = held[-3:]  # the last loads of all are those of the second check, one variant at a time
    assert max(held) == 3
    assert checked == [1] * 3, held  # itself: of the oracle only the result is left


@pytest.mark.parametrize(("dtype", "status"), [("bfloat16", "skipped"), ("float16", "passed")])
def test_a_kernel_that_the_interpreter_would_truncate_is_skipped_and_no_other(
    tmp_path: Path, dtype: str, status: str
) -> None:
    pair = _pair(optimized=Variant(lambda x, y: (x * y).sum(), requires=("triton",)))
    found = _events(
        pair, {"name": "w", "tier": "smoke", "dtype": dtype, "direction": "forward"}, tmp_path, timing=False
    )
    assert found["baseline"]["status"] == "passed"
    assert found["optimized"]["status"] == status
    assert ("truncates bfloat16" in (found["optimized"]["reason"] or "")) == (status == "skipped")
