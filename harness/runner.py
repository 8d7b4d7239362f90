"""Runs a plan: one process per technique, records as they are known, and a crash that costs one record.

The runner imports no torch. It starts workers (:mod:`harness.worker`) through :func:`harness.launch.launch`, follows
what they say, turns it into records (:mod:`harness.assemble`), appends those to the store, and starts again without a
variant that took its worker down.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.assemble import Facts, records_of
from harness.job import EventReader, MeasureJob
from harness.launch import Job, Outcome, launch
from harness.plan import BUDGET_S, Item
from harness.workload import TIERS, Workload

#: Seconds a technique may take in all, and without any sign of life.
LIMIT_S = {"smoke": 300.0, "quick": 1200.0, "full": 3600.0}
STALL_S = {"smoke": 90.0, "quick": 300.0, "full": 900.0}
#: Torch is loaded, ranks meet: no sign of life is expected before.
START_S = 60.0


class Sink(Protocol):
    """Where records go: the store's writer, or nothing."""

    def append(self, record: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Settings:
    """How to run: the device, the tier's time, what to do with records, and how to tell the user.

    until: the time (seconds since 1970) after which no further workload begins.
    learn: gets the records of every technique that is through, before the next one starts.
    share: in a joined world, gives rank 0's text to every supervisor (:meth:`harness.world.Joined.share`).
    """

    device: str
    tier: str = "smoke"
    timing: bool = True
    budget_s: float | None = None
    samples: int | None = None
    seed: int = 0
    limit_s: float | None = None
    stall_s: float | None = None
    model: str | None = None
    trace: str | None = None
    share_gpus: bool = False
    until: float | None = None
    note: Callable[[str], None] = lambda text: None
    show: Callable[[list[dict[str, Any]]], None] = lambda records: None
    done: Callable[[int], None] = lambda workloads: None
    learn: Callable[[list[dict[str, Any]]], None] = lambda records: None
    share: Callable[[str], str] | None = None
    start: Callable[[Job, Callable[[], str | None]], Outcome] = lambda job, poll: launch(job, poll=poll)

    @property
    def over(self) -> bool:
        """Whether the time is over in which a workload may begin."""
        return self.until is not None and time.time() >= self.until


@dataclass
class Progress:
    """What of an item is done: reported variants by workload, and those that took a worker down."""

    reported: dict[str, set[str]] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    skip: dict[str, str] = field(default_factory=dict)
    hand: tuple[str, str, str] = ("", "", "")
    done: bool = False
    heard: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> None:
        """Takes in one event."""
        if event["event"] == "begin":
            self.hand = (event["workload"], event["variant"], event["phase"])
        elif event["event"] == "result":
            if event["variant"] in self.reported.get(event["workload"], set()):
                return  # a second worker says again what is known
            self.reported.setdefault(event["workload"], set()).add(event["variant"])
            self.events.setdefault(event["workload"], []).append(dict(event))
        elif event["event"] == "done":
            self.done = True


class Runner:
    """Runs items one after another and keeps every record that came of them."""

    def __init__(self, facts: Facts, sink: Sink, settings: Settings) -> None:
        self.facts, self.sink, self.settings = facts, sink, settings
        self.records: list[dict[str, Any]] = []
        #: Workloads that were not begun, since the time was over.
        self.left: list[str] = []

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """Every record of the plan, each appended to the store as soon as its workload is through."""
        shares: dict[str, int] = {}
        for item in items:
            shares[item.technique.name] = shares.get(item.technique.name, 0) + len(item.workloads)
        for item in items:
            if self._over():
                self._leave(item, item.workloads)
            else:
                self._item(item, shares[item.technique.name])
        return self.records

    def _over(self) -> bool:
        """Whether no further workload begins; in a joined world all supervisors take rank 0's word."""
        if self.settings.until is None or self.settings.share is None:
            return self.settings.over
        return bool(json.loads(self.settings.share(json.dumps(self.settings.over))))

    def _leave(self, item: Item, workloads: Sequence[Workload]) -> None:
        self.left += [f"{item.technique.name} {workload.name}" for workload in workloads]

    def _item(self, item: Item, share: int) -> None:
        name = item.technique.name
        workloads = ", ".join(w.name for w in item.workloads)
        self.settings.note(f"{name}{f' on {item.ranks} ranks' if item.ranks > 1 else ''}: {workloads}")
        before = len(self.records)
        progress = Progress()
        left = list(item.workloads)
        while left:
            progress.hand, progress.done, progress.heard = ("", "", ""), False, []
            outcome = self._attempt(item, left, progress, share)
            self._flush(item, progress)
            left = [w for w in left if not self._through(w, item, progress)]
            if outcome.status == "passed" and (progress.done or not left):
                self._leave(item, left)
                break
            go_on = self._blame(item, left, progress, outcome)
            self._flush(item, progress)
            if not go_on:
                break
            left = [w for w in left if not self._through(w, item, progress)]
            if left:
                without = f" without {', '.join(sorted(progress.skip))}" if progress.skip else ""
                self.settings.note(f"{name}: starting again{without}")

        self.settings.learn(self.records[before:])

    def _attempt(self, item: Item, left: Sequence[Workload], progress: Progress, share: int) -> Outcome:
        """One worker, from its start to its end."""
        settings = self.settings
        with tempfile.TemporaryDirectory(prefix="pairbench-") as folder:
            out = Path(folder) / "events.jsonl"
            tier = max((settings.tier, *(w.tier for w in left)), key=TIERS.index)
            budget = settings.budget_s if settings.budget_s is not None else BUDGET_S[tier]
            job = MeasureJob(
                technique=item.technique.name,
                workloads=tuple(left),
                variants=item.variants,
                device=settings.device,
                out=str(out),
                timing=settings.timing,
                budget_s=budget / share,
                samples=settings.samples,
                seed=settings.seed,
                model_path=settings.model,
                trace_path=settings.trace,
                skip=dict(progress.skip),
                interpret=settings.device == "cpu" and not settings.timing,
                share_gpus=settings.share_gpus,
                until=settings.until,
            )
            job.write(Path(folder) / "job.json")
            reader = EventReader(out)
            started = time.time()
            stall = settings.stall_s if settings.stall_s is not None else STALL_S[tier]

            def poll() -> str | None:
                self._read(reader, item, progress)
                sign = reader.last_sign()
                quiet = time.time() - max(sign, started)
                allowed = stall if sign else max(stall, START_S)
                return f"no sign of life for {quiet:.0f} s" if quiet > allowed else None

            limit = settings.limit_s if settings.limit_s is not None else LIMIT_S[tier]
            work = Job("harness.worker", (str(Path(folder) / "job.json"),), item.ranks, limit, Path(folder) / "logs")
            try:
                outcome = settings.start(work, poll)
            finally:
                self._read(reader, item, progress)
                self._flush(item, progress)
            self._agree(progress)
            if progress.hand[2] == "time":
                progress.hand = (progress.hand[0], reader.now() or progress.hand[1], "time")
            return outcome

    def _agree(self, progress: Progress) -> None:
        """In a joined world only rank 0's supervisor hears its worker; the others must take the same way on."""
        if self.settings.share is None:
            return
        said = json.loads(self.settings.share(json.dumps([progress.heard, progress.hand])))
        if not progress.heard:
            for event in said[0]:
                progress.take(event)
            progress.hand = (said[1][0], said[1][1], said[1][2])

    def _read(self, reader: EventReader, item: Item, progress: Progress) -> None:
        for event in reader.new():
            progress.take(event)
            progress.heard.append(event)
            if event["event"] == "begin" and event["phase"] in ("check", "time"):
                self.settings.note(f"  {event['workload']}: {event['phase']} {event['variant']}")
        self._flush(item, progress)

    def _flush(self, item: Item, progress: Progress) -> None:
        """Records of every workload whose variants have all been reported."""
        for workload in item.workloads:
            if workload.name in progress.events and self._through(workload, item, progress):
                made = records_of(self.facts, item, workload, progress.events.pop(workload.name))
                for record in made:
                    self.sink.append(record)
                    self.records.append(record)
                self.settings.show(made)
                self.settings.done(1)

    def _through(self, workload: Workload, item: Item, progress: Progress) -> bool:
        return progress.reported.get(workload.name, set()) >= set(item.variants)

    def _blame(self, item: Item, left: Sequence[Workload], progress: Progress, outcome: Outcome) -> bool:
        """Records what a dead worker had in hand; False when the rest cannot be measured either."""
        status = outcome.status if outcome.status != "passed" else "error"
        reason = outcome.reason or "the worker ended before it was done"
        workload, variant, phase = progress.hand
        where = f" (during {phase})" if phase else ""
        failure = {"status": status, "reason": f"{reason}{where}", "traceback": outcome.traceback[-20_000:]}
        known = {w.name for w in left}
        if workload in {w.name for w in item.workloads} - known:  # its figures are there: only its end went wrong
            self.settings.note(f"{item.technique.name}: the worker ended after {workload}: {reason}")
            return True
        if workload not in known or (variant not in item.variants and variant != "oracle"):
            for other in left:
                self._fail(other.name, list(item.variants), progress, failure)
            return False
        if variant == "oracle":
            self._fail(workload, list(item.variants), progress, {**failure, "reason": f"the oracle failed: {reason}"})
            return True
        self._fail(workload, [variant], progress, failure)
        for other in left:
            progress.skip[f"{other.name}/{variant}"] = (
                f"not tried: {variant} took its worker down on {workload}: {reason}"
            )
            if other.name != workload:
                self._fail(
                    other.name,
                    [variant],
                    progress,
                    {"status": "skipped", "reason": progress.skip[f"{other.name}/{variant}"]},
                )
        return True

    def _fail(self, workload: str, variants: Sequence[str], progress: Progress, parts: Mapping[str, Any]) -> None:
        done = progress.reported.get(workload, set())
        for variant in variants:
            if variant not in done:
                progress.take({"event": "result", "workload": workload, "variant": variant, **parts})
