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
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from harness import holding, memory, opcase
from harness.check import Verdict, judge, judge_scored
from harness.conditions import watch_device
from harness.entry import Entry, UndeclaredChange, first_line, here_of, module_bytes, tensor_bytes
from harness.errors import PairbenchError
from harness.pair import Inputs
from harness.requires import why_not
from harness.timed import Timed

LOW_PRECISION = ("bfloat16", "float16")


class Measurement(Timed):
    """One workload of one pair in this process (and its ranks)."""

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
            self.agreement.align()  # a rank that fails at one variant does so while rank 0 has that one in hand
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
        if isinstance(case, opcase.OpCase):
            changed: set[str] = set()
            if self.agreement.rank == 0:
                changed = set(case.changed_inputs(inputs)) - set(entry.variant.changes)
            changed = self.agreement.tell(changed)
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
            if self.agreement.world > 1:
                raise  # one rank's own, maybe: the others would wait for it
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

    def _let_go(self) -> None:
        """Frees the inputs and what the cases hold: all variants were loaded side by side to be timed."""
        for entry in self.entries:
            self.events.begin(self.workload.name, entry.name, "unloading")
            self._rest(entry)
            self.agreement.align()
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
