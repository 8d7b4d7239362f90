"""Turns what workers say into records: adds where it was measured, derives the metrics, refuses what cannot be.

Imports no torch. All variants of a workload are assembled together, since a speedup needs two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness import stats
from harness.devices import Found
from harness.discover import Technique
from harness.limits import floor
from harness.link_curve import Curves
from harness.machine_store import Ceilings
from harness.metric_names import METRICS
from harness.metrics import BUS_FACTORS, Claimed, algbw, busbw, implausible, mbu, mfu
from harness.pair import Work
from harness.plan import Item
from harness.record import METHOD, SCHEMA, metric, utc_now
from harness.serving.metrics import Slo, summarize
from harness.serving.timeline import FINISHED, TimelineError
from harness.workload import Workload, split_name

#: Above this relative half width a median is a guess: the record says so instead of giving it.
LOOSE = 0.25
#: Below this many samples an interval says nothing, however narrow it looks (one sample's is a point).
FEWEST = 3
TOO_FEW = "too few samples"


@dataclass
class Facts:
    """What all records of a run share: where it ran, with what, and what the machine can do."""

    run: str
    provenance: Mapping[str, Any]
    found: Found | None = None
    ceilings: Ceilings | None = None
    curves: Curves = field(default_factory=dict)
    slo: Slo | None = None
    gpu_hour_price: float | None = None
    works: dict[str, Work] = field(default_factory=dict)
    count: int = 0

    def header(self, type_: str) -> dict[str, Any]:
        """The keys that every line of the run carries."""
        self.count += 1
        p = self.provenance
        return {
            "schema": SCHEMA,
            "method": METHOD,
            "type": type_,
            "id": f"{self.run}-{self.count:05d}",
            "run": self.run,
            "time": utc_now(),
            "commit": p.get("commit"),
            "branch": p.get("branch"),
            "dirty": bool(p.get("dirty")),
            "commit_date": p.get("commit_date"),
            "declared": bool(p.get("declared")),
            "gpu": p["gpu"],
            "machine": p["machine"],
        }


def records_of(
    facts: Facts, item: Item, workload: Workload, events: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The records of one workload, in the order of the pair's variants."""
    by_name = {str(e["variant"]): e for e in events}
    made = {name: _record(facts, item, workload, by_name[name]) for name in item.variants if name in by_name}
    peers = [v.name for v in item.technique.variants if v.peer == "torch"]
    _add_speedups(made, peers)
    return list(made.values())


def _record(facts: Facts, item: Item, workload: Workload, event: Mapping[str, Any]) -> dict[str, Any]:
    technique = item.technique
    info = next(v for v in technique.variants if v.name == event["variant"])
    p = facts.provenance
    work = _work(event)
    record: dict[str, Any] = {
        **facts.header("measurement"),
        "technique": technique.name,
        "family": technique.family,
        "kind": technique.kind,
        "layer": technique.layer,
        "variant": info.name,
        "peer": info.peer,
        "workload": workload.name,
        "workload_id": workload.workload_id,
        "dtype": workload.dtype,
        "tier": workload.tier,
        "ranks": workload.ranks,
        "status": event["status"],
        "reason": event["reason"],
        "dims": dict(workload.dims),
        "digests": dict(workload.digests),
        "relieves": technique.relieves,
        "claim": dict(technique.claim),
        "compute_dtype": event.get("compute_dtype") or workload.dtype,
        "metrics": {},
        "missing": {},
        "reproduce": reproduce(technique, workload, facts),
        "stack": p["stack"],
        "host": p["host"],
        "env": p["env"],
        "ci": p["ci"],
    }
    for key in ("check", "samples", "costs", "counters", "tuned", "conditions", "memory", "traceback", "input_bytes"):
        if event.get(key) not in (None, {}):
            record[key] = event[key]
    if work is not None:
        record["work"] = {**vars(work), "reasons": dict(work.reasons)}
        if info.name == "optimized" and event.get("predicted") is not None:
            record["predicted"] = {"speedup": event["predicted"]}
    if record["status"] in ("passed", "unsettled") and "samples" in record:
        _add_metrics(record, work, facts, event)
    return record


def reproduce(technique: Technique, workload: Workload, facts: Facts) -> str:
    """The command that measures this workload again; a user's own shape, files, bounds and price are spelled out.

    Files are given by their names: where they lie is the business of whoever runs the command.
    """
    name, changed = split_name(workload.name)
    files = ("model", "trace")
    settings = [f"--set {key}={value}" for key, value in changed.items() if key not in files]
    settings += [f"--{key} {workload.dims[key]}" for key in files if key in workload.digests]
    if technique.kind == "serve":
        bounds = facts.slo.as_dict() if facts.slo is not None else {}
        settings += [f"--slo-{part} {bound:g}" for part, bound in bounds.items()]
        settings += [f"--gpu-hour-price {facts.gpu_hour_price:g}"] if facts.gpu_hour_price is not None else []
    return " ".join(["pairbench run", technique.name, f"--workload {name}", *settings])


def _work(event: Mapping[str, Any]) -> Work | None:
    """What was to be done; of a serve run, as many requests or tokens as were served: a trace may have fewer."""
    raw = event.get("work")
    if not raw:
        return None
    work = Work(**raw)
    served = _served(event["timeline"]) if event.get("timeline") else {}
    return replace(work, items=float(served.get(work.unit, work.items)))


def _served(timeline: Mapping[str, Any]) -> dict[str, int]:
    requests = timeline["requests"]
    entries = list(requests.values()) if isinstance(requests, Mapping) else requests
    return {
        "requests": sum(entry["status"] == FINISHED for entry in entries),
        "tokens": sum(len(entry["token_times"]) for entry in entries),
    }


def _add_metrics(record: dict[str, Any], work: Work | None, facts: Facts, event: Mapping[str, Any]) -> None:
    metrics, missing = record["metrics"], record["missing"]
    latency = stats.median(record["samples"]["values"])
    metrics["latency"] = metric("latency", latency.value, latency.low, latency.high)
    ranks = record["ranks"]
    claimed = Claimed(dtype=record["compute_dtype"])
    if work is not None and latency.value > 0:
        claimed = _add_rates(record, work, facts, latency, claimed)
    claimed = _add_link_rates(record, latency.value, claimed)
    memory = record.get("memory") or {}
    for name in ("peak_memory", "absolute_memory", "reserved_memory", "device_memory"):
        key = name.removesuffix("_memory")
        if memory.get(key) is not None:
            metrics[name] = metric(name, memory[key])
        elif memory.get("reason"):
            missing[name] = memory["reason"]
    on_gpu = record["host"].get("device") == "cuda"
    if memory.get("absolute") is not None and on_gpu and record["kind"] == "op":
        claimed = replace(claimed, absolute_memory=memory["absolute"], input_bytes=event.get("input_bytes"))
    if "compile_s" in (record.get("costs") or {}):
        metrics["compile_s"] = metric("compile_s", record["costs"]["compile_s"])
    if ranks > 1 and record["samples"].get("skew"):
        skew = stats.median(record["samples"]["skew"])
        metrics["skew"] = metric("skew", skew.value, skew.low, skew.high)
    for name, value in (record.get("counters") or {}).items():
        if name in METRICS:
            metrics[name] = metric(name, value)
    if event.get("timeline") is not None:
        # The GPUs that the run held, not those that the host has; a server elsewhere says so itself.
        gpus = int(event.get("gpus", ranks if on_gpu else 0))
        try:
            summary = summarize(event["timeline"], facts.slo, facts.gpu_hour_price, gpus)
        except TimelineError as err:
            record.update(status="implausible", reason=str(err), metrics={}, missing={})
            return
        metrics.update(summary.metrics)
        missing.update(summary.missing)
        record["serve"] = summary.serve
    _judge_plausible(record, claimed, latency, facts)


def _add_rates(record: dict[str, Any], work: Work, facts: Facts, latency: stats.Estimate, claimed: Claimed) -> Claimed:
    metrics, missing = record["metrics"], record["missing"]
    seconds, ranks = latency.value, record["ranks"]
    unit = f"{work.unit}/s"
    high, low = work.items / max(latency.low, 1e-12), work.items / max(latency.high, 1e-12)
    metrics["throughput"] = metric("throughput", work.items / seconds, low, high, unit=unit)
    if work.flops:
        metrics["flops_rate"] = metric("flops_rate", work.flops / seconds)
        claimed = replace(claimed, flops_rate=work.flops / seconds / ranks)
        figure = mfu(work.flops / ranks, seconds, record["compute_dtype"], facts.found)
        _put(metrics, missing, "mfu", figure.value, figure.reason)
    if work.bytes:
        metrics["bandwidth"] = metric("bandwidth", work.bytes / seconds)
        claimed = replace(claimed, bandwidth=work.bytes / seconds / ranks)
        figure = mbu(work.bytes / ranks, seconds, facts.found)
        _put(metrics, missing, "mbu", figure.value, figure.reason)
    share = replace(work, flops=work.flops / ranks, bytes=work.bytes / ranks)
    curve = facts.curves.get((work.collective, ranks))
    least = floor(share, record["compute_dtype"], facts.ceilings, facts.found, curve)
    record["floor"] = least.as_record(seconds)
    counted = work.flops or work.bytes or work.link_bytes or work.launches
    why = "no ceiling of this machine is known" if counted else "nothing was counted that takes time"
    _put(metrics, missing, "floor_share", least.share(seconds), why)
    return claimed


def _add_link_rates(record: dict[str, Any], seconds: float, claimed: Claimed) -> Claimed:
    """algbw and busbw of a case that counts its ``payload_bytes`` in a collective named by the dimension ``op``."""
    payload = (record.get("counters") or {}).get("payload_bytes")
    op = str(record["dims"].get("op", ""))
    if not payload or op not in BUS_FACTORS:
        return claimed
    algorithm, bus = algbw(payload, seconds), busbw(op, payload, seconds, record["ranks"])
    for name, figure in (("algbw", algorithm), ("busbw", bus)):
        _put(record["metrics"], record["missing"], name, figure.value, figure.reason)
    return replace(claimed, collective=op, algbw=algorithm.value, busbw=bus.value)


def _judge_plausible(record: dict[str, Any], claimed: Claimed, latency: stats.Estimate, facts: Facts) -> None:
    found = implausible(claimed, facts.found)
    conditions = record.get("conditions") or {}
    if found:
        record["status"], record["reason"] = "implausible", "; ".join(found)
    elif record["status"] == "passed" and conditions.get("unfit"):
        record["status"], record["reason"] = "unsettled", str(conditions["unfit"])
    elif record["status"] == "passed" and latency.n < FEWEST:
        record["status"] = "unsettled"
        record["reason"] = f"{TOO_FEW}: {latency.n}, and fewer than {FEWEST} show no noise"
    elif record["status"] == "passed" and latency.relative_half_width > LOOSE:
        wide = f"the interval of the median is ±{latency.relative_half_width:.0%} after {latency.n} samples"
        record["status"], record["reason"] = "unsettled", wide


def how_to_settle(reasons: Sequence[str]) -> str:
    """What to do about unsettled records, by their reasons."""
    few = all(reason.startswith(TOO_FEW) for reason in reasons)
    return "take more samples" if few else "the machine was busy; run again on a quiet one"


def _add_speedups(made: Mapping[str, dict[str, Any]], peers: Sequence[str]) -> None:
    timed = {n: r for n, r in made.items() if "latency" in r["metrics"] and r["status"] in ("passed", "unsettled")}
    base = timed.get("baseline")
    latencies = {n: timed[n]["metrics"]["latency"]["value"] for n in peers if n in timed}
    best = min(latencies, key=lambda n: latencies[n]) if latencies else None
    for name, record in timed.items():
        if name != "baseline":
            _speedup(record, "speedup", base, "the baseline was not timed")
        if name not in peers:
            _speedup(record, "speedup_peer", timed[best] if best else None, "no one-line peer was timed")
            if best:
                record["best_peer"] = best


def _speedup(record: dict[str, Any], name: str, other: dict[str, Any] | None, why_not: str) -> None:
    if other is None:
        record["missing"][name] = why_not
        return
    mine, theirs = record["samples"], other["samples"]
    if (mine["clock"], mine["cache"]) != (theirs["clock"], theirs["cache"]):
        record["missing"][name] = "the two were timed by different clocks"
        return
    if record["status"] == "passed" and other["status"] != "passed":
        record["missing"][name] = (
            f"{other['variant']} is {other['status']} and can be no one's measure: {other['reason']}"
        )
        return
    value = stats.ratio(theirs["values"], mine["values"])
    record["metrics"][name] = metric(name, value.value, value.low, value.high)


def _put(metrics: dict[str, Any], missing: dict[str, str], name: str, value: float | None, reason: str | None) -> None:
    if value is None:
        missing[name] = reason or "not known"
    else:
        metrics[name] = metric(name, value)
