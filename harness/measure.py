"""Measures one workload of one pair: check, memory, time, check again. Knows cases, and nothing of techniques.

Order of events, every step announced so that a death belongs to it:

1. the oracle and the baseline on the first inputs; then each variant is built, run once (first-run cost), checked, and
   its memory read while only it is loaded;
2. the variants that passed are timed in interleaved rounds (:mod:`harness.sampling`);
3. on fresh inputs, with the outputs poisoned, all that were timed are checked again, in the opposite order.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from harness import ahead, holding, memory, opcase
from harness.check import Verdict, judge, judge_scored
from harness.clock import WallClock, clock_for, inner_calls
from harness.conditions import Conditions, watch_device
from harness.energy import energy_per_run
from harness.entry import Entry, UndeclaredChange, first_line, here_of, module_bytes, tensor_bytes
from harness.errors import PairbenchError
from harness.job import Events, MeasureJob
from harness.pair import Context, Inputs, Pair
from harness.ranked import Agreement, RankedClock
from harness.requires import why_not
from harness.sampling import MIN_SAMPLES, Lane, Plan, Series, sample_all
from harness.workload import Workload

LOW_PRECISION = ("bfloat16", "float16")
#: Seconds between two looks at the machine while it is being measured.
POKE_S = 0.25
#: A disturbed measurement is taken again unless it took longer than this: then the user is better served by its record.
AGAIN_WITHIN_S = 120.0


class Measurement:
    """One workload of one pair in this process (and its ranks)."""

    def __init__(self, pair: Pair, workload: Workload, job: MeasureJob, agreement: Agreement, events: Events) -> None:
        self.pair, self.workload, self.job = pair, workload, job
        self.agreement, self.events = agreement, events
        self.device = torch.device(job.device)
        self.ctx = Context(
            device=self.device,
            dtype=getattr(torch, workload.dtype),
            seed=job.seed,
            rank=agreement.rank,
            world=agreement.world,
            model_path=job.model_path,
            trace_path=job.trace_path,
        )
        self.entries = [Entry(name, pair.variant(name)) for name in job.variants]
        self.room = holding.capacity(self.device)
        self._inputs: Inputs | None = None
        self._shared: Sequence[Any] = ()

    def run(self, mesh: Any = None) -> None:
        """Measures everything and reports every variant, whatever happens to one of them."""
        self.ctx.mesh = mesh
        self._sort_out()
        if not any(entry.alive for entry in self.entries):  # what inputs and work are made of may be what is not here
            for entry in self.entries:
                self.events.result(self.workload.name, entry.name, entry.status, entry.reason)
            return
        if self._check_all(self._draw(0), first=True) and self.job.timing:
            self._time_all()
            self._let_go()
            self._check_all(self._draw(1), first=False)
        for entry in self.entries:
            self._report(entry)
        self._close()

    # -- what can run here ------------------------------------------------------------------------------------------

    def _sort_out(self) -> None:
        here = here_of(self.device, self.agreement.world)
        for entry in self.entries:
            skip = self.job.skip.get(f"{self.workload.name}/{entry.name}")
            reason = skip or why_not(entry.variant, self.workload, here, self.job.timing)
            if reason is not None:
                entry.end("skipped", reason)

    # -- inputs, oracle, check --------------------------------------------------------------------------------------

    def _draw(self, round_: int) -> Inputs:
        seed = self.job.seed * 1000 + round_ + 1
        values = self.pair.inputs(self.workload, replace(self.ctx, seed=seed))
        return Inputs(values, seed)

    def _build(self, entry: Entry) -> Any:
        make = opcase.op_builder(self.pair, entry.variant) if self.pair.kind == "op" else entry.variant.fn
        return make(self.workload, self.ctx)

    def _truth(self, inputs: Inputs) -> tuple[Mapping[str, Any] | None, Any, str]:
        """The oracle's result (rank 0 only), its case where that scores what others emit, and why there is none."""
        if self.agreement.rank != 0:
            return None, None, ""
        self.events.begin(self.workload.name, "oracle", "check")
        alone = replace(self.ctx, rank=0, world=1, mesh=None)
        make = opcase.op_oracle(self.pair) if self.pair.kind == "op" else self.pair.oracle
        try:
            case = make(self.workload, alone)
            case.load(inputs)
            for _ in range(self.pair.check_runs):
                case.run()
            if hasattr(case, "score"):
                return case.result(), case, ""
            truth = holding.truth_of(case.result(), self.room)
            _end(case)
            return truth, None, ""  # its model, gradients and moments are gone: only what it found is compared
        except torch.OutOfMemoryError as err:
            return None, None, f"the oracle does not fit in memory here: {first_line(err)}"

    def _check_all(self, inputs: Inputs, first: bool) -> bool:
        """Checks every variant that is still alive; True when any is left. The second time order is reversed."""
        self._inputs = inputs
        alive = [e for e in self.entries if e.alive]
        if not alive:
            return False
        started = time.perf_counter()
        truth, oracle_case, why = self._truth(inputs)
        alive[0].costs["check_s"] = alive[0].costs.get("check_s", 0.0) + time.perf_counter() - started
        why = self.agreement.tell(why)
        if why:
            for entry in alive:
                entry.end("oom" if entry.name == "baseline" else "error", why)
            return False
        baseline: Mapping[str, Any] | None = None
        rest = [e for e in alive if e.name != "baseline"]
        for entry in [*(e for e in alive if e.name == "baseline"), *(rest if first else reversed(rest))]:
            result = None  # the last variant's: the next one's memory is counted above what is held when it is built
            self.events.begin(self.workload.name, entry.name, "check" if first else "recheck")
            result = self._guarded(entry, lambda e=entry: self._result(e, inputs, first))
            if result is None:
                continue
            if self.agreement.rank == 0 and truth is not None:
                started = time.perf_counter()
                verdict = self._guarded(
                    entry, lambda e=entry, r=result, b=baseline: self._judge(e, truth, oracle_case, r, b)
                )
                entry.costs["check_s"] = entry.costs.get("check_s", 0.0) + time.perf_counter() - started
                self._settle_check(entry, verdict, first)
            entry.status, entry.reason = self.agreement.tell((entry.status, entry.reason))
            if entry.name == "baseline" and entry.alive:
                # Only by the rule of same precision its values are asked for: its own error bounds the others'.
                same = self.pair.tolerance.rule == "same_precision"
                baseline = result if same else holding.form_of(result)
            if first and entry.alive and self.job.timing:
                self._guarded(entry, lambda e=entry, r=result: self._memory(e, inputs, r))
            self._rest(entry)
        _end(oracle_case)
        return any(e.alive for e in self.entries)

    def _settle_check(self, entry: Entry, verdict: Verdict | None, first: bool) -> None:
        if verdict is None:
            return
        entry.check = verdict
        if not verdict.passed:
            when = "" if first else "after timing, on fresh inputs: "
            entry.end("wrong", when + verdict.reason)

    def _judge(
        self,
        entry: Entry,
        truth: Mapping[str, Any],
        oracle_case: Any,
        result: Mapping[str, Any],
        baseline: Mapping[str, Any] | None,
    ) -> Verdict:
        scored = self.pair.tolerance.rule == "tokens" and self.workload.dtype in LOW_PRECISION
        if scored and hasattr(oracle_case, "score"):
            return judge_scored(oracle_case.score(result))
        tensors = [v for v in (self._inputs or {}).values() if isinstance(v, torch.Tensor)]
        gathered = max((t.numel() for t in tensors), default=0)
        is_baseline = entry.name == "baseline"
        return judge(self.pair.tolerance, self.workload.dtype, truth, result, baseline, is_baseline, gathered)

    def _result(self, entry: Entry, inputs: Inputs, first: bool) -> Mapping[str, Any]:
        """Builds the case when it is not there, runs it on these inputs and gives a copy of what it found."""
        if entry.case is None:
            self._shared = self.pair.shared(self.workload, self.ctx) if self.pair.shared is not None else ()
            memory.trim()
            entry.before = memory.allocated(self.device)
            started = time.perf_counter()
            entry.case = self._build(entry)
            entry.costs["build_s"] = time.perf_counter() - started
        case = entry.case
        if hasattr(case, "poison"):
            case.poison()
        case.load(inputs)
        started = time.perf_counter()
        case.run()
        self._fence()
        if first:
            entry.costs["compile_s"] = entry.costs["build_s"] + time.perf_counter() - started
        for _ in range(self.pair.check_runs - 1):
            case.run()
        result = holding.own_copy(case.result())
        if self.agreement.rank != 0:
            result = {}  # rank 0 judges
        held = holding.held_now(self.device) - entry.before - tensor_bytes(result)
        entry.held = self.agreement.most(max(0, held)) or 0
        if isinstance(case, opcase.OpCase) and self.agreement.rank == 0:
            changed = set(case.changed_inputs(inputs)) - set(entry.variant.changes)
            if changed:
                raise UndeclaredChange(f"it overwrites its inputs {sorted(changed)} and does not say so")
        return result

    def _memory(self, entry: Entry, inputs: Inputs, result: Mapping[str, Any]) -> None:
        """Peaks of one run. The copy of the result that was checked is alive here and is none of the case's own."""
        self.events.begin(self.workload.name, entry.name, "memory")
        started = time.perf_counter()
        case = entry.case
        case.load(inputs)
        if hasattr(case, "release"):
            case.release()
        watch = watch_device(self._watched()) if self.device.type == "cuda" else None
        if watch is not None:
            watch.start()
        others = entry.before + tensor_bytes(result) - module_bytes([*inputs.values(), *self._shared])
        found = memory.measure(case.run, self.device, others)
        seen = watch.stop().device_memory_bytes if watch is not None else None
        figures = (found.peak, found.absolute, found.reserved, seen)
        peak, absolute, reserved, device = (self.agreement.most(v) for v in figures)
        entry.memory = memory.Memory(peak, absolute, reserved, device, found.reason)
        entry.costs["memory_s"] = time.perf_counter() - started

    # -- time -------------------------------------------------------------------------------------------------------

    def _time_all(self) -> None:
        entries = [e for e in self.entries if e.alive]
        apart = self.agreement.world > 1 and not self._fit_together(entries)
        try:
            self._sample(entries, apart)
        except torch.OutOfMemoryError:
            if self.agreement.world > 1:
                raise  # the other ranks are still inside a round: another way on would leave them waiting
            # Together they do not fit: each then has the memory to itself, in alternating blocks.
            for entry in entries:
                self._rest(entry, close=True)
            self._sample(entries, apart=True)

    def _fit_together(self, entries: Sequence[Entry]) -> bool:
        """Whether they do by what was counted: ranks cannot try, since one that fails leaves the others waiting."""
        peaks = [e.memory.peak or 0 for e in entries if e.memory is not None]
        return holding.fit_together(tensor_bytes(self._inputs), [e.held for e in entries], peaks, self.room)

    def _sample(self, entries: list[Entry], apart: bool) -> None:
        inputs = self._inputs
        assert inputs is not None
        clocks: dict[str, RankedClock] = {}
        lanes = []
        for entry in entries:
            self.events.begin(self.workload.name, entry.name, "time")
            clocks[entry.name] = RankedClock(clock_for(self.pair.kind, self.device), self.agreement)
            lanes.append(self._lane(entry, clocks[entry.name], inputs, apart or entry.variant.exclusive))
        watch = watch_device(self._watched())
        looked = 0.0

        def decide(more: bool) -> bool:
            nonlocal looked
            if time.perf_counter() - looked > POKE_S:
                watch.poke()
                looked = time.perf_counter()
            return self.agreement.decide(more)

        plan = Plan(
            budget=self.job.budget_s,
            least=MIN_SAMPLES[self.pair.kind],
            exactly=self.job.samples,
            seed=self.job.seed,
            decide=decide,
            shuffle=self.agreement.tell,
            settle=self.pair.kind != "serve",  # a trace replays too long, and measuring says how often it does
        )
        for again in (True, False):
            watch.start()
            started = time.perf_counter()
            series = sample_all(lanes, plan)
            span = time.perf_counter() - started
            conditions = watch.stop()
            worth_it = again and conditions.disturbed and span < AGAIN_WITHIN_S
            if not self.agreement.tell(worth_it):
                break
        for entry in entries:
            self._keep(entry, series[entry.name], clocks[entry.name], conditions, span)
            self._energy(entry, series[entry.name])

    def _energy(self, entry: Entry, series: Series) -> None:
        """Joules of one run, where a full measurement has the device to itself and NVML counts."""
        wanted = self.workload.tier == "full" and self.device.type == "cuda" and self.agreement.world == 1
        if not wanted or entry.case is None or entry.variant.changes or self.pair.kind == "serve":
            return
        self.events.begin(self.workload.name, entry.name, "energy")
        started = time.perf_counter()
        watch = watch_device(self._watched())
        joules = energy_per_run(entry.case.run, self._fence, watch, sorted(series.values)[len(series.values) // 2])
        entry.costs["energy_s"] = time.perf_counter() - started
        if joules is not None:
            entry.parts["counters"] = {**entry.parts.get("counters", {}), "energy": joules}

    def _watched(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self.device.type == "cuda" else "cpu"

    def _lane(self, entry: Entry, clock: RankedClock, inputs: Inputs, exclusive: bool) -> Lane:
        sampled = False  # whether the last sample came to its end: after a failure other ranks are not where this is

        def enter() -> None:
            nonlocal sampled
            sampled = False
            self.events.now(entry.name)
            if entry.case is None:
                entry.case = self._build(entry)
            entry.case.load(inputs)
            if self.pair.kind == "serve":
                return  # a trace takes long, and the warm-up that follows runs it once more anyhow
            entry.case.run()
            self._fence()
            if entry.variant.changes:
                entry.case.load(inputs)  # what it overwrote must be there again before it runs once more
            clock.verify(entry.case.run)
            if isinstance(clock.clock, WallClock) and not entry.variant.changes and self.pair.kind == "op":
                first = min(clock.time(entry.case.run).seconds for _ in range(3))
                clock.clock.inner = int(self.agreement.tell(inner_calls(first)))

        def sample() -> Any:
            nonlocal sampled
            sampled = False
            if entry.variant.changes:
                entry.case.load(inputs)
            self.events.now(entry.name)
            tick = clock.time(entry.case.run)
            if self.pair.kind == "serve":
                entry.heard(tick.seconds)
            sampled = True
            return tick

        def leave() -> None:
            if exclusive:
                told = self.pair.kind == "step" and "counters" in entry.parts  # what counts a step runs several more
                if sampled:
                    self._ahead(entry, clock)
                if sampled and not told:
                    entry.ask()
                self._rest(entry, close=True)

        return Lane(entry.name, sample, exclusive, enter, leave)

    def _ahead(self, entry: Entry, clock: RankedClock) -> None:
        """What a step takes on the device when the host is ahead: on the slowest rank, in its shortest block."""
        case = entry.case
        if case is None or not ahead.looks_at(self.pair.kind, self.device, 0.0) or entry.variant.changes:
            return
        seconds = clock.time(case.run).seconds  # of the slowest rank, so that all take the same way
        if not ahead.looks_at(self.pair.kind, self.device, seconds):
            return
        self.agreement.align()
        found = max(self.agreement.gather(ahead.device_seconds(case.run, self.device, seconds)))
        entry.device_s = found if entry.device_s is None else min(found, entry.device_s)

    def _keep(self, entry: Entry, series: Series, clock: RankedClock, conditions: Conditions, span: float) -> None:
        base = clock.clock
        self._ahead(entry, clock)
        if ahead.host_bound(entry.device_s, sorted(series.values)[len(series.values) // 2]):
            series.host_bound = len(series.values)
        entry.parts["samples"] = {
            "values": series.values,
            "clock": clock.name,
            "cache": clock.cache,
            "rounds": len(series.values),
            "warmup": series.warmup,
            "settled": series.settled,
            "host_bound": series.host_bound,
            "inner": base.inner if isinstance(base, WallClock) else 1,
        }
        if entry.device_s is not None:
            entry.parts["samples"]["device_s"] = entry.device_s
        entry.costs["warmup_s"] = series.warmup_s
        entry.costs["sampling_s"] = span
        if series.skews:
            entry.parts["samples"]["skew"] = series.skews
        entry.parts["conditions"] = conditions.as_record()
        if conditions.disturbed:
            entry.parts["conditions"]["unfit"] = "; ".join(conditions.why) or "the machine was disturbed"
        entry.ask()
        entry.keep_middle(series.values)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _guarded(self, entry: Entry, step: Any) -> Any:
        """Runs a step of one variant. Alone, an error ends that variant; among ranks it ends the worker."""
        try:
            return step()
        except torch.OutOfMemoryError as err:
            if self.agreement.world > 1:
                raise
            entry.end("oom", first_line(err))
        except UndeclaredChange as err:
            entry.end("wrong", str(err))
        except PairbenchError as err:
            entry.end("error", str(err))
        except Exception as err:
            if self.agreement.world > 1:
                raise
            entry.end("error", f"{type(err).__name__}: {first_line(err)}", traceback=traceback.format_exc())
        self._rest(entry, close=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a broken context raises here and ends the worker: it cannot go on
            torch.cuda.empty_cache()
        return None

    def _rest(self, entry: Entry, close: bool = False) -> None:
        """Frees what a case holds; one that cannot unload stays, unless it is exclusive, crowds out the others or is
        closed for good."""
        case = entry.case
        if case is None:
            return
        if hasattr(case, "unload") and not close:
            case.unload()
        elif close or entry.variant.exclusive or holding.crowds(entry.held, len(self.entries), self.room):
            if hasattr(case, "close"):
                case.close()
            entry.case = None
        gc.collect()

    def _let_go(self) -> None:
        """Frees the inputs and what the cases hold: all variants were loaded side by side to be timed."""
        for entry in self.entries:
            self._rest(entry)
        self._inputs = None

    def _report(self, entry: Entry) -> None:
        status, reason = entry.status or "passed", entry.reason
        parts: dict[str, Any] = dict(entry.parts)
        parts["costs"] = {k: round(v, 6) for k, v in entry.costs.items()}
        if entry.check is not None:
            parts["check"] = entry.check.as_record()
        if entry.memory is not None:
            m = entry.memory
            parts["memory"] = asdict(m)
        parts["input_bytes"] = tensor_bytes(self._inputs)
        parts["work"] = asdict(self.pair.work(self.workload))
        parts["compute_dtype"] = entry.variant.compute_dtype
        if self.pair.predict is not None:
            parts["predicted"] = self.pair.predict(self.workload)
        self.events.result(self.workload.name, entry.name, status, reason, **parts)

    def _fence(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _close(self) -> None:
        for entry in self.entries:
            self._rest(entry, close=True)
        self._inputs = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _end(case: Any) -> None:
    """Frees what a case holds that is used no more."""
    for end in ("unload", "close"):
        if hasattr(case, end):
            getattr(case, end)()
