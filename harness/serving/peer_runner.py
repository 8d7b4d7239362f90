"""Measures somebody else's server in the place of our own variants, and keeps records of the same form.

The variant is called ``endpoint``. Its series is the workload's: whoever replays the same trace with the same limits
against our engine and against a server can set the two beside each other. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from harness.assemble import Facts, records_of
from harness.discover import VariantInfo
from harness.errors import UsageError
from harness.plan import Item
from harness.runner import Settings
from harness.sampling import MIN_SAMPLES
from harness.serving.endpoint import Endpoint
from harness.serving.peer import PeerResult, measure_peer
from harness.serving.timeline import FINISHED
from harness.serving.workload_trace import needs_trace
from harness.workload import Workload

VARIANT: Final = "endpoint"


@dataclass(frozen=True)
class Peer:
    """The server, and how many requests may be open at it at once (0 for no limit)."""

    endpoint: Endpoint
    max_concurrency: int = 0


class PeerRunner:
    """Replays the workloads of serving techniques against a server; what is not a serve run is left out.

    Raises:
        UsageError: nobody answers at the endpoint, or nothing that was chosen sends requests.
    """

    def __init__(
        self,
        facts: Facts,
        sink: Any,
        settings: Settings,
        peer: Peer,
        measure: Callable[..., PeerResult] = measure_peer,
    ) -> None:
        self.facts, self.sink, self.settings, self.peer, self.measure = facts, sink, settings, peer, measure
        self.records: list[dict[str, Any]] = []
        #: Workloads that were not begun, since the time was over.
        self.left: list[str] = []

    def run(self, items: Sequence[Item]) -> None:
        """Measures every serving workload as often as our own, or as many times as samples were asked for."""
        serving = [item for item in items if item.technique.kind == "serve"]
        if not serving:
            names = ", ".join(item.technique.name for item in items)
            raise UsageError(f"--peer-endpoint: {names} sends no requests; choose a serving technique")
        model = self.peer.endpoint.served_model()
        self.settings.note(f"{self.peer.endpoint.shown}: {model}")
        for item in serving:
            made = []
            for workload in item.workloads:
                if self.settings.over:
                    self.left.append(f"{item.technique.name} {workload.name}")
                else:
                    made.append(self._record(item, workload, model))
            self.settings.show(made)

    def _record(self, item: Item, workload: Workload, model: str) -> dict[str, Any]:
        self.settings.note(f"  {workload.name}: replay {VARIANT}")
        technique = replace(item.technique, variants=(VariantInfo(VARIANT, peer="library"),))
        event = self._event(workload, model)
        (record,) = records_of(self.facts, replace(item, technique=technique, variants=(VARIANT,)), workload, [event])
        record["reproduce"] += f" --peer-endpoint {self.peer.endpoint.shown}"
        if self.peer.max_concurrency:
            record["reproduce"] += f" --max-concurrency {self.peer.max_concurrency}"
        self.sink.append(record)
        self.records.append(record)
        self.settings.done(1)
        return record

    def _event(self, workload: Workload, model: str) -> dict[str, Any]:
        event: dict[str, Any] = {"variant": VARIANT, "status": "passed", "reason": "", "tuned": {"model": model}}
        reason = needs_trace(workload)
        if reason is not None:
            return {**event, "status": "skipped", "reason": reason}
        spans: list[float] = []
        result: PeerResult | None = None
        for sample in range(self.settings.samples or MIN_SAMPLES["serve"]):
            result = self.measure(
                self.peer.endpoint,
                workload,
                self.settings.trace,
                max_concurrency=self.peer.max_concurrency,
                # Other words each time: the server's prefix cache must not answer from the last replay.
                seed=self.settings.seed * 1000 + sample,
            )
            spans.append(result.seconds)
        assert result is not None
        entries = list(result.timeline["requests"].values())
        failures = [entry for entry in entries if entry["status"] != FINISHED]
        why = failures[0]["reason"] if failures else "no request was sent"
        if len(failures) == len(entries):
            return {**event, "status": "error", "reason": f"no request finished: {why}"}
        short = cut_short(result)
        said = [f"{len(failures)} of {len(entries)} requests failed, one of them: {why}"] if failures else []
        said += [f"{short} answers ended before their length"] if short else []
        event["reason"] = "; ".join(said)
        samples = {
            "values": spans,
            "clock": "wall",
            "cache": "warm",
            "rounds": len(spans),
            "warmup": 0,
            "settled": True,
            "host_bound": 0,
            "inner": 1,
        }
        counters = {
            "trace_rows_refused": float(len(result.trace.refused)),
            "trace_requests_clipped": float(result.trace.clipped),
            # Less work than our own engine has: a server that ends answers early is not to be compared with it.
            "answers_cut_short": float(short),
            # Waits of its own making (a limit on open requests, a client out of breath) are no doing of the server.
            "sent_late_s": max(entry["sent"] - entry["arrival"] for entry in entries),
        }
        # What the server holds is not known here: the price that was given is that of all of it.
        return {**event, "samples": samples, "timeline": result.timeline, "counters": counters, "gpus": 1}


def cut_short(result: PeerResult) -> int:
    """Finished answers of fewer tokens than were asked for."""
    answers = zip(result.trace.requests, result.timeline["requests"].values(), strict=True)
    return sum(
        entry["status"] == FINISHED and len(entry["token_times"]) < asked.output_tokens for asked, entry in answers
    )
