"""A serve run on several ranks as a case of the harness: engines side by side, or engines in roles.

Every rank has one engine with a cache of the same size. What is timed begins together on all ranks and ends when the
last one is done; tokens, timelines and counts are gathered outside of that.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.pair import Context, Inputs
from harness.serving.metrics import quantile
from harness.workload import Workload
from impls.model.resolve import model_for
from impls.serving.answers import Answers
from impls.serving.engine import Engine
from impls.serving.kv_link import transfer_bytes
from impls.serving.kv_wire import Wire, WireReceiver, WireSender
from impls.serving.recorder import Recorder
from impls.serving.request import Request
from impls.serving.role_engines import DecodeEngine, PrefillEngine, RoleEngine
from impls.serving.role_workers import DecodeWorker, PrefillWorker, Waits
from impls.serving.runner import ModelRunner
from impls.serving.schedule_cost import StepCost
from impls.serving.scheduler import EngineConfig
from impls.serving.timelines import Part, merge, second_token_waits

#: How much faster than side by side the schedules alone allow the roles to be, from the requests at a price of steps.
Allowed = Callable[[Items[Request], StepCost], float]
#: Told by the kernel anew at every start: ranks that read the same one share a clock.
BOOT = Path("/proc/sys/kernel/random/boot_id")
#: Longest that a rank waits for news before it looks for itself (s).
PATIENCE_S = 1.0


class Ranks:
    """What the ranks of a case tell each other outside the timed path.

    Raises:
        ValueError: this process is alone, or the ranks are on several hosts: a token's time there and the next one's
            here would be of different clocks.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ValueError("this runs on several ranks (--ranks N)")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._control: Any = dist.new_group(backend="gloo")
        hosts = self.gather(BOOT.read_text() if BOOT.exists() else "")
        if len(set(hosts)) > 1:
            raise ValueError("the ranks are on several hosts, which share no clock to time a request by")

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, mine, group=self._control)
        return every

    def align(self) -> None:
        """All go on together."""
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Lets the group go."""
        dist.destroy_process_group(self._control)


class RankedServe:
    """One rank of a serve run. Subclasses have an engine, and serve their part of the requests in :meth:`serve`."""

    engine: Engine

    def __init__(self, workload: Workload, ctx: Context, config: EngineConfig, allowed: Allowed) -> None:
        self.ranks = Ranks()
        self.allowed = allowed
        # On a GPU the host's work hides behind the device's; on a CPU there is nothing to hide behind.
        self.config = replace(config, lookahead=ctx.device.type == "cuda")
        self.model = model_for(workload, ctx)
        self.recorder = Recorder()
        self.requests: tuple[Request, ...] = ()
        self.trace: dict[str, int] = {}
        self.answers = Answers()

    def load(self, inputs: Inputs) -> None:
        """Takes the requests; the engine and its cache are as new."""
        self.requests = inputs["requests"]
        self.trace = dict(inputs["trace"])
        self.engine.reset()
        self.poison()

    def run(self) -> None:
        """Serves every request, each sent at its arrival.

        Raises:
            RuntimeError: a request was refused or failed here, so that this was not the workload that was asked for.
        """
        self.answers = Answers()
        self.ranks.align()
        self.serve()
        self.answers.require_all(self.requests)

    def serve(self) -> None:
        """This rank's part."""
        raise NotImplementedError

    def result(self) -> dict[str, list[int]]:
        """The tokens of each request, of all ranks."""
        whole: dict[str, list[int]] = {request.id: [] for request in self.requests}
        for tokens in self.ranks.gather(self.answers.tokens):
            for key, part in tokens.items():
                whole[key].extend(part)
        return whole

    def poison(self) -> None:
        """Nothing of an earlier run is left to be taken for the next one's."""
        self.answers = Answers()

    def timeline(self) -> dict[str, Any]:
        """The events of the last run on all ranks."""
        engine = self.engine
        # The clock is read twice, so each try is early by what passes in between: the latest is the nearest.
        began = max(engine.clock() - engine.now for _ in range(8))
        return merge([Part(*part) for part in self.ranks.gather((began, self.recorder.timeline()))])

    def counters(self) -> dict[str, float]:
        """The engines' counts added up; of each rank the share of the run that it spent in steps; how long requests
        waited from their first to their second token; tokens a second over all ranks; the cost of a step as fitted to
        all of them, and what the schedules allow at that cost."""
        whole = self.timeline()
        span = whole["end"]
        every = self.ranks.gather((dict(self.engine.counters), self.engine.waited, self.recorder.steps))
        counted: Counter[str] = Counter()
        found: dict[str, float] = {}
        for rank, (counts, waited, steps) in enumerate(every):
            counted.update(counts)
            counted["host_waited_s"] += waited
            found[f"busy_share_rank{rank}"] = sum(seconds for *_, seconds in steps) / span if span > 0 else 0.0
        cost = StepCost.fit([step for *_, steps in every for step in steps])
        if cost is not None:
            found |= cost.as_counters() | {"allowed_speedup": self.allowed(self.requests, cost)}
        tokens = sum(request["output_tokens"] for request in whole["requests"].values())
        found["tokens_per_s_per_rank"] = tokens / span / self.ranks.world if span > 0 else 0.0
        found |= quantiles("second_token", second_token_waits(whole))
        return {key: float(value) for key, value in {**counted, **self.trace, **found}.items()}

    def close(self) -> None:
        """Gives the cache, the graphs and the group back."""
        self.ranks.close()
        del self.engine


class SideBySide(RankedServe):
    """Every rank serves its share of the requests from the first token to the last."""

    def __init__(self, workload: Workload, ctx: Context, config: EngineConfig, allowed: Allowed) -> None:
        super().__init__(workload, ctx, config, allowed)
        self.engine = Engine(ModelRunner(self.model, self.config), self.config, recorder=self.recorder)

    def serve(self) -> None:
        """This rank's requests."""
        shares = share_out([len(r.prompt) + r.sampling.max_tokens for r in self.requests], self.ranks.world)
        mine = [request for request, rank in zip(self.requests, shares, strict=True) if rank == self.ranks.rank]
        self.engine.serve(mine, self.answers.keep)


class InRoles(RankedServe):
    """The first ``prefill_ranks`` ranks run prompts, the others decode.

    roles: the configurations of a prefill and of a decode rank.
    """

    engine: RoleEngine

    def __init__(
        self,
        workload: Workload,
        ctx: Context,
        roles: tuple[EngineConfig, EngineConfig],
        prefill_ranks: int,
        allowed: Allowed,
    ) -> None:
        world, self.prefill_ranks = ctx.world, prefill_ranks
        assert 0 < prefill_ranks < world, "a role has no rank"
        self.prefills = ctx.rank < prefill_ranks
        prefill, decode = roles
        super().__init__(workload, ctx, prefill if self.prefills else decode, allowed)
        runner = ModelRunner(self.model, self.config)
        longest = -(-self.config.context // self.config.block_size)
        self.wake = threading.Event()
        self.groups = {
            (p, d): dist.new_group([p, d]) for p in range(prefill_ranks) for d in range(prefill_ranks, world)
        }
        ends: list[Any] = []
        for pair, group in self.groups.items():
            if ctx.rank in pair:
                end, peer = (WireSender, pair[1]) if self.prefills else (WireReceiver, pair[0])
                ends.append(end(runner.cache.kv, longest, group, peer, self.wake))
        self.wires: list[Wire] = ends
        self.worker: PrefillWorker | DecodeWorker
        if self.prefills:
            room = decode.num_blocks * decode.block_size
            first = PrefillEngine(runner, self.config, decode_cache_tokens=room, recorder=self.recorder)
            self.engine, self.worker = first, PrefillWorker(first, ends)
        else:
            second = DecodeEngine(runner, self.config, recorder=self.recorder)
            self.engine, self.worker = second, DecodeWorker(second, ends)
        for wire in self.wires:
            wire.greet()

    def serve(self) -> None:
        """This rank's role; a rank with nothing to run sleeps until a peer tells something or a request arrives."""
        worker = self.worker
        if isinstance(worker, PrefillWorker):
            prompts = share_out([len(r.prompt) for r in self.requests], self.prefill_ranks)
            answers = share_out([r.sampling.max_tokens for r in self.requests], len(self.wires))
            mine = {k: r for k, r in enumerate(self.requests) if prompts[k] == self.ranks.rank}
            worker.begin(mine, dict(enumerate(answers)))
        else:
            worker.begin(dict(enumerate(self.requests)))
        for wire in self.wires:
            wire.begin()
        while not worker.done:
            self.wake.clear()
            for output in worker.turn():
                self.answers.keep(output)
            if not worker.moved:
                self.wake.wait(self._patience())
        for wire in self.wires:
            wire.end()

    def _patience(self) -> float:
        due = self.worker.next_arrival if isinstance(self.worker, PrefillWorker) else None
        return PATIENCE_S if due is None else min(PATIENCE_S, max(0.0, due - self.engine.now))

    def counters(self) -> dict[str, float]:
        """Also what travelled, counted and by the formula, and how long requests waited for it."""
        found = super().counters()
        waits = self.worker.waits if isinstance(self.worker, DecodeWorker) else Waits()
        sent = sum(wire.bytes for wire in self.wires) if self.prefills else 0
        took = 0.0 if self.prefills else sum(wire.seconds for wire in self.wires)
        every = self.ranks.gather((waits, sent, took))
        answers = self.result()
        handed = [request for request in self.requests if len(answers[request.id]) > 1]
        size = self.model.embed_tokens.weight.element_size()
        block = self.config.block_size
        found["transferred_requests"] = float(sum(len(waits.whole) for waits, _, _ in every))
        found["transferred_bytes"] = float(sum(sent for _, sent, _ in every))
        found["transferred_bytes_formula"] = float(
            sum(transfer_bytes(self.model.config, len(r.prompt), block, size) for r in handed)
        )
        seconds = sum(took for *_, took in every)
        if seconds > 0:
            found["transfer_rate"] = found["transferred_bytes"] / seconds
        found |= quantiles("transfer_wait", sorted(w for waits, _, _ in every for w in waits.whole))
        found |= quantiles("transfer", sorted(w for waits, _, _ in every for w in waits.transfer))
        decode_ranks = self.ranks.world - self.prefill_ranks
        found["tokens_per_s_per_decode_rank"] = found["tokens_per_s_per_rank"] * self.ranks.world / decode_ranks
        return found

    def close(self) -> None:
        """Gives the cache, the graphs and the groups back."""
        del self.wires, self.worker
        for pair, group in self.groups.items():
            if self.ranks.rank in pair:
                dist.destroy_process_group(group)
        super().close()


def share_out(sizes: Items[int], parts: int) -> list[int]:
    """The part that each item goes to, in their order: the one with the least so far.

    What a good router does, and more than that where sizes are answers', which none can know.
    """
    filled = [0] * parts
    chosen = []
    for size in sizes:
        part = min(range(parts), key=filled.__getitem__)
        filled[part] += size
        chosen.append(part)
    return chosen


def quantiles(name: str, ordered: list[float]) -> dict[str, float]:
    """Median and p99 of ascending seconds, named for a record's counters; nothing of none."""
    if not ordered:
        return {}
    return {f"{name}_p50_s": quantile(ordered, 0.5), f"{name}_p99_s": quantile(ordered, 0.99)}
