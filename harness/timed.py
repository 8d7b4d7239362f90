"""Times the variants of one workload that passed their check, and holds what a measurement knows meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from harness import ahead, holding, opcase
from harness.clock import WallClock, clock_for, inner_calls
from harness.conditions import Conditions, watch_device
from harness.energy import energy_per_run
from harness.entry import Entry, tensor_bytes
from harness.job import Events, MeasureJob
from harness.pair import Context, Inputs, Pair
from harness.ranked import Agreement, RankedClock
from harness.sampling import MIN_SAMPLES, Lane, Plan, Series, sample_all
from harness.workload import Workload

#: Seconds between two looks at the machine while it is being measured.
POKE_S = 0.25
#: A disturbed measurement is taken again unless it took longer than this: then the user is better served by its record.
AGAIN_WITHIN_S = 120.0


class Timed:
    """The cases of one workload in this process (and its ranks): built, timed, let go."""

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
        self.room = agreement.least(holding.capacity(self.device))
        self._inputs: Inputs | None = None
        self._shared: Sequence[Any] = ()

    def _build(self, entry: Entry) -> Any:
        make = opcase.op_builder(self.pair, entry.variant) if self.pair.kind == "op" else entry.variant.fn
        return make(self.workload, self.ctx)

    def _fence(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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

    def _time_all(self) -> None:
        entries = [e for e in self.entries if e.alive]
        if self.agreement.world > 1 and not self._fit_together(entries):
            self._sample_apart(entries)
            return
        try:
            self._sample(entries, apart=False)
            return
        except torch.OutOfMemoryError:
            if self.agreement.world > 1:
                raise  # the other ranks are still inside a round: another way on would leave them waiting
        self._sample_apart(entries)  # out here: the error refers to the frames that it left, and they hold tensors

    def _sample_apart(self, entries: list[Entry]) -> None:
        """Together they do not fit: each has the memory to itself, in alternating blocks."""
        for entry in entries:
            self.events.now(entry.name)
            self._rest(entry, close=True)
        self._sample(entries, apart=True)

    def _fit_together(self, entries: Sequence[Entry]) -> bool:
        """Whether they do by what was counted: ranks cannot try, since one that fails leaves the others waiting."""
        peaks = [e.memory.peak or 0 for e in entries if e.memory is not None]
        inputs = self.agreement.most(tensor_bytes(self._inputs)) or 0
        return holding.fit_together(inputs, [e.held for e in entries], peaks, self.room)

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
        changes = entry.variant.changes
        sampled = False  # whether the last sample came to its end: after a failure other ranks are not where this is

        def afresh() -> None:
            if changes:
                entry.case.load(inputs)  # what it overwrote must be there again before it runs once more
            entry.case.run()

        def enter() -> None:
            nonlocal sampled
            sampled = False
            self.events.now(entry.name)
            if entry.case is None:
                entry.case = self._build(entry)
            entry.case.load(inputs)
            if self.pair.kind == "serve":
                return  # a trace takes long, and the warm-up that follows runs it once more anyhow
            afresh()
            self._fence()
            clock.verify(afresh)
            if isinstance(clock.clock, WallClock) and not changes and self.pair.kind == "op":
                first = min(clock.time(entry.case.run).seconds for _ in range(3))
                clock.clock.inner = int(self.agreement.tell(inner_calls(first)))

        def sample() -> Any:
            nonlocal sampled
            sampled = False
            if changes:
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
                if sampled:
                    self.agreement.align()  # a rank that fails here does so while rank 0 has this one in hand

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
        self.events.begin(self.workload.name, entry.name, "reading")  # what was sampled last is another one
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
        self.agreement.align()  # a rank that fails to tell does so while rank 0 has this one in hand
        entry.keep_middle(series.values)
