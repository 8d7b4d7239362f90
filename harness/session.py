"""One run from its request to its exit code: plan, store, machine, sentinel, techniques, summary. Imports no torch."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.assemble import Facts, how_to_settle
from harness.ceilings import machine_key
from harness.devices import Found, lookup
from harness.errors import StoreError, UsageError
from harness.history.store import Store, default_store, require_writable, stores_to_read
from harness.launch import launch
from harness.link_curve import LEAST_POINTS
from harness.link_store import LinkKey, keep_curves, load_curves
from harness.machine import Machine
from harness.machine_store import require_room
from harness.metric_names import METRICS
from harness.missing import known_cases, lacking
from harness.plan import Item, Request, make_plan
from harness.provenance import provenance
from harness.record import EXIT_CODES, new_run_id
from harness.report import Reporter
from harness.runner import Runner, Settings
from harness.serving.metrics import Slo, checked_price
from harness.serving.peer_runner import Peer, PeerRunner
from harness.serving.sweep import RATE
from harness.serving.workload_trace import SYNTHETIC, trace_for
from harness.spent import describe, spent
from harness.world import Joined, detect_world, join


@dataclass(frozen=True)
class Options:
    """How a run is made, beside what it measures. store: where to; None means the user's own history.

    peer: a server of somebody else to measure in the place of our own variants.
    limit_s, stall_s: seconds a technique may take in all, and without a sign of life; None takes the tier's.
    within_s: seconds from the start after which no further workload begins; what is under way is measured to its end.
    missing: only workloads of which the histories that are read lack an outcome on this GPU type.
    """

    device: str
    store: str | None = None
    keep: bool = True
    timing: bool = True
    samples: int | None = None
    budget_s: float | None = None
    limit_s: float | None = None
    stall_s: float | None = None
    within_s: float | None = None
    missing: bool = False
    seed: int = 0
    share_gpus: bool = False
    slo: tuple[float | None, float | None] = (None, None)
    gpu_hour_price: float | None = None
    csv: Path | None = None
    peer: Peer | None = None
    argv: Sequence[str] = ()


@dataclass
class Result:
    """What a run came to."""

    records: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int = 0
    run: str = ""


class NoSink:
    """Keeps nothing."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Lets the record go."""

    def close(self) -> None:
        """Nothing to close."""


class Session:
    """Carries one request out."""

    def __init__(self, request: Request, options: Options, reporter: Reporter, watch: type[Machine] = Machine) -> None:
        """watch: what reads the machine before and after."""
        self.request, self.options, self.reporter, self.watch = request, options, reporter, watch
        self.world: Joined | None = None

    def run(self) -> Result:
        """Measures and records.

        Raises:
            UsageError: the request cannot be met (before anything is measured).
            StoreError: the store cannot be written (before anything is measured).
        """
        options = self.options
        until = None if options.within_s is None else time.time() + options.within_s
        self._join()
        items = self._items()
        if options.csv is not None:
            _refuse_csv(options.csv)
        where = provenance(options.device)
        if options.missing:
            items = self._lacking(items, where["gpu"])
            if not items:
                return Result()
        run = new_run_id()
        keep = options.keep and self.leads
        if keep and options.store is None:
            require_writable(default_store(), "your records")
        if options.timing and self.leads:
            require_room(machine_key(where), always=any(i.ranks > 1 for i in items))  # ranks: curves of their link
        store = Store(options.store or default_store()) if keep else None
        sink: Any = store.open_run(where["gpu"], run) if store is not None else NoSink()
        where_kept = store.label(sink.name) if store is not None else ""
        machine = self.watch(options.device, where, self.reporter)
        facts = Facts(
            run=run,
            provenance=where,
            found=_device_row(where["host"]),
            slo=Slo(*options.slo) if options.slo != (None, None) else None,
            gpu_hour_price=checked_price(options.gpu_hour_price),
        )
        result = Result(run=run)
        started = time.monotonic()
        self.reporter.begin(sum(len(i.workloads) for i in items))
        try:
            sink.append(self._header(facts, items))
            before = machine.begin() if options.timing and self.leads else None
            facts.ceilings = machine.ceilings
            if before is not None:
                sink.append({**facts.header("sentinel"), "when": "start", **before})
            settings = replace(self._settings(), learn=self._curves(facts), until=until)
            runner: Runner | PeerRunner = (
                Runner(facts, sink, settings)
                if options.peer is None
                else PeerRunner(facts, sink, settings, options.peer)
            )
            result.records = runner.records
            runner.run(items)
            verdict = machine.end() if options.timing else None
            parts = spent(result.records, time.monotonic() - started)
            left = {"left": runner.left} if runner.left else {}
            if verdict is None:
                sink.append({**facts.header("end"), "spent": parts, **left})
            else:
                sink.append({**facts.header("sentinel"), "when": "end", **verdict, "spent": parts, **left})
                if verdict["moved"]:
                    self.reporter.warn(f"the machine moved during this run: {verdict['reason']}")
                    result.exit_code = 3
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_left(sink, where_kept, len(result.records))) from None
        finally:
            self.reporter.end()
            refused = _close(sink)
        self._summary(result, parts)
        if runner.left:
            self.reporter.warn(
                f"not begun within {options.within_s:g} s: {', '.join(runner.left)}; `--missing` measures what is left"
            )
        if refused is not None:
            raise refused
        return result

    @property
    def leads(self) -> bool:
        """Whether this process records and prints: every one but the other supervisors of a joined world."""
        return self.world is None or self.world.place.rank == 0

    def _join(self) -> None:
        """Joins the world that torchrun or srun has made around this process, if any."""
        place = detect_world(os.environ)
        if place is None:
            return
        self.world = join(place)
        self.request = replace(self.request, ranks=place.world)
        if not self.leads:
            self.reporter.silence()

    def _items(self) -> list[Item]:
        items = with_real_digests(make_plan(self.request), self.request)
        self._look_at_traces(items)
        if self.world is None:
            return items
        size = self.world.place.world
        fitting = [i for i in items if i.ranks == size]
        if not fitting:
            raise UsageError(
                f"nothing to measure on {size} ranks: what was chosen runs on one; start it without a world"
            )
        for item in items:
            if item not in fitting:
                self.reporter.note(f"{item.technique.name} runs on {item.ranks} rank: not measured in this world")
        return fitting

    def _lacking(self, items: list[Item], gpu: str) -> list[Item]:
        """What of the plan no history has yet: neither those that are always read nor the one that is written."""
        if self.options.peer is not None:
            raise UsageError("--missing tells what of our own variants is missing; leave it out with --peer-endpoint")
        stores = [*stores_to_read(), *([Store(self.options.store)] if self.options.store else [])]
        known = known_cases(stores, gpu) if self.leads else set()
        if self.world is not None:  # another host may hold other histories, and all must take the same way
            said = json.loads(self.world.share(json.dumps(sorted(known))))
            known = {(name, workload, ranks, variant) for name, workload, ranks, variant in said}
        left = lacking(items, known)
        planned, missing = (sum(len(item.workloads) for item in found) for found in (items, left))
        self.reporter.note(f"{missing} of {planned} workloads are missing for {gpu}")
        return left

    def _curves(self, facts: Facts) -> Callable[[list[dict[str, Any]]], None]:
        """Gives the run the kept curves of this machine's link; what is returned adds those that the run measures.

        Ranks that share a GPU have no link: their curves are neither kept nor used.
        """
        if not (self.options.timing and self.leads) or self.options.share_gpus:
            return lambda records: None
        hosts = 1 if self.world is None else -(-self.world.place.world // self.world.place.local_world)
        key = LinkKey(machine_key(facts.provenance), hosts)
        kept, problems = load_curves(key)
        for problem in problems:
            self.reporter.warn(problem)
        facts.curves = {which: found.curve for which, found in kept.items()}

        def learn(records: list[dict[str, Any]]) -> None:
            curves, short = keep_curves(key, records, facts.run)
            facts.curves = {**facts.curves, **curves}
            for (op, ranks), curve in curves.items():
                self.reporter.note(f"link: kept the curve of {op} on {ranks} ranks, {len(curve.points)} sizes")
            if short:
                few = f"link: fewer than {LEAST_POINTS} settled sizes, so no curve, of {', '.join(short)}"
                self.reporter.note(few)

        return learn

    def _look_at_traces(self, items: Sequence[Item]) -> None:
        """Says what a trace file holds and how many of its rows were refused, before anything is measured.

        Raises:
            UsageError: a file that cannot be replayed, a synthetic load of lengths or rates that make none, or what is
                asked of requests where none are sent.
        """
        serving = [w for i in items for w in i.workloads if "trace" in w.dims and RATE in w.dims]
        if not serving and self.request.names:
            bounds = dict(zip(("--slo-ttft", "--slo-tpot"), self.options.slo, strict=True))
            asked = {"--trace": self.request.trace, **bounds, "--gpu-hour-price": self.options.gpu_hour_price}
            for option, value in asked.items():
                if value is not None:
                    raise UsageError(f"{option} {value}: nothing that was chosen sends requests")
        if self.request.trace is None:
            for workload in serving:
                if workload.trace == SYNTHETIC:
                    trace_for(workload)
            return
        said = {trace.describe(): bool(trace.refused) for trace in (trace_for(w, self.request.trace) for w in serving)}
        for text, refused in said.items():
            (self.reporter.warn if refused else self.reporter.note)(text)

    def _settings(self) -> Settings:
        o, world = self.options, self.world
        joined: dict[str, Any] = {}
        if world is not None:
            hears = self.leads
            joined["share"] = world.share
            joined["start"] = lambda job, poll: launch(job, world, poll if hears else None)
        return Settings(
            device=o.device,
            tier=self.request.tier,
            timing=o.timing,
            budget_s=o.budget_s,
            samples=o.samples,
            seed=o.seed,
            limit_s=o.limit_s,
            stall_s=o.stall_s,
            model=self.request.model,
            trace=self.request.trace,
            share_gpus=o.share_gpus,
            note=self.reporter.note,
            show=self.reporter.show,
            done=self.reporter.done,
            **joined,
        )

    def _header(self, facts: Facts, items: Sequence[Item]) -> dict[str, Any]:
        p = facts.provenance
        asked = {"argv": list(self.options.argv), "tier": self.request.tier, "device": self.options.device}
        plan = [
            {"technique": i.technique.name, "workloads": [w.name for w in i.workloads], "ranks": i.ranks} for i in items
        ]
        return {
            **facts.header("run"),
            "asked": asked,
            "plan": plan,
            "commit_subject": p.get("commit_subject"),
            "commit_source": p.get("commit_source"),
            "commit_reason": p.get("commit_reason"),
            "changed": p.get("changed"),
            "stack": p["stack"],
            "host": p["host"],
            "env": p["env"],
            "ci": p["ci"],
        }

    def _summary(self, result: Result, parts: Mapping[str, float]) -> None:
        worst = max((EXIT_CODES[r["status"]] for r in result.records if not _unfitting_baseline(r)), default=0)
        result.exit_code = max(worst, result.exit_code) if worst != 1 else 1
        counts: dict[str, int] = {}
        for record in result.records:
            counts[record["status"]] = counts.get(record["status"], 0) + 1
        said = ", ".join(f"{n} {status}" for status, n in counts.items()) or "nothing measured"
        outside = f"; {describe(parts)}" if self.options.timing else ""
        self.reporter.note(f"run {result.run}: {said}{outside}")
        unsettled = [str(record["reason"]) for record in result.records if record["status"] == "unsettled"]
        if unsettled:
            self.reporter.warn(f"unsettled figures are no one's baseline: {how_to_settle(unsettled)}")
        if self.options.csv is not None:
            write_csv(self.options.csv, result.records)


def _left(sink: Any, place: str, records: int) -> str:
    """What an interrupted run leaves behind, in one line."""
    if not place:
        return "interrupted; nothing is kept, as was asked"
    refused = _close(sink)
    if refused is not None:
        return f"interrupted; {refused}"
    what = f"the {records} records measured until then are" if records != 1 else "the one record measured until then is"
    return f"interrupted; {what if records else 'no record was complete; the beginning of the run is'} kept in {place}"


def _close(sink: Any) -> StoreError | None:
    """Closes the store's file; what it refused is told after the figures were printed, not instead of them."""
    try:
        sink.close()
    except StoreError as err:
        return err
    return None


def with_real_digests(items: list[Item], request: Request) -> list[Item]:
    """Sets the digests of the model, trace and text that workloads name, so that a changed file is a new series."""
    from harness.digests import set_digests

    return [set_digests(item, request.model, request.trace) for item in items]


def _refuse_csv(path: Path) -> None:
    """Says before anything is measured that the file cannot be written."""
    if path.exists():
        raise UsageError(f"--csv {path}: the file exists; name a new one, nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"--csv {path}: {path.parent} is no folder; make it, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--csv {path}: {path.parent} cannot be written; name another file")


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One row a record, one column a metric; refuses to overwrite."""
    plain = ["technique", "workload", "variant", "dtype", "ranks", "gpu", "commit", "dirty", "run", "status", "reason"]
    names = [m for m in METRICS if any(m in r["metrics"] for r in records)]
    with open(path, "x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*plain, *(f"{m} [{METRICS[m].unit}]" for m in names)])
        for record in records:
            values = [record["metrics"].get(m, {}).get("value", "") for m in names]
            writer.writerow([*(record.get(k, "") for k in plain), *values])


def _device_row(host: Mapping[str, Any]) -> Found | None:
    if host.get("device") != "cuda":
        return None
    name = host.get("gpu_name")
    return (
        lookup(name, host.get("gpu_memory_bytes"))
        if name
        else Found(None, str(host.get("gpu_reason") or "unknown GPU"))
    )


def _unfitting_baseline(record: Mapping[str, Any]) -> bool:
    return bool(record["status"] == "oom" and record["variant"] == "baseline")
