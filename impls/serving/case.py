"""A serve run as a case of the harness: one engine, one trace, and the trusted loop that judges its tokens."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.pair import Context, Inputs
from harness.workload import Workload
from impls.model.resolve import model_for
from impls.serving.answers import Answers
from impls.serving.engine import Engine
from impls.serving.plain_loop import cached_tokens, score_tokens
from impls.serving.recorder import TIMED_STEPS, Recorder
from impls.serving.request import Request
from impls.serving.runner import ModelRunner
from impls.serving.schedule_cost import StepCost, Switch, allowed_speedup
from impls.serving.scheduler import EngineConfig

#: Arithmetic that the scoring of a check takes at most, in float32: seconds of a large GPU. A trace has hundreds of
#: thousands of tokens (prompts and answers), which a model of 8 billion weights would score for minutes.
SCORED_FLOPS = 1.5e14
#: Fewer steps of the largest batch say nothing.
FULL_STEPS = 10


class ServeCase:
    """An engine that serves the whole trace once a run, from an empty cache each time.

    ``counters`` gives what the last run counted, the cost of a step as fitted to it, and ``allowed_speedup``: how much
    faster than the plain way of ``switch`` the schedules alone allow at that cost (none without a switch, where it is
    not the number and size of steps that changes). With prefix caching it also gives the share of the prompts' tokens
    that were in the cache, and how many cached blocks made room for others. With graphs it gives ``decode_step_s`` and
    ``decode_model_s``, what a step of the largest batch takes from its tokens' arrival to the next ones' and what the
    device computes in it, and ``beside_model_share``, what of the step is not the model and not hidden behind it:
    sampling, copies, and the host where the device waits for it.
    """

    def __init__(self, workload: Workload, ctx: Context, config: EngineConfig, switch: Switch | None = None) -> None:
        # On a GPU the host's work hides behind the device's; on a CPU there is nothing to hide behind.
        self.config = config = replace(config, lookahead=ctx.device.type == "cuda")
        self.switch = switch
        self.recorder = Recorder()
        self.runner = ModelRunner(model_for(workload, ctx), config)
        self.engine = Engine(self.runner, config, recorder=self.recorder)
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
            RuntimeError: a request was refused or failed, so that this was another workload than the one asked for.
        """
        self.answers = Answers()
        self.engine.serve(self.requests, self.answers.keep)
        self.answers.require_all(self.requests)

    def result(self) -> dict[str, list[int]]:
        """The tokens of each request."""
        return self.answers.of(self.requests)

    def poison(self) -> None:
        """Nothing of an earlier run is left to be taken for the next one's."""
        self.answers = Answers()

    def timeline(self) -> dict[str, Any]:
        """The events of the last run."""
        return self.recorder.timeline()

    def counters(self) -> dict[str, float]:
        """What the last run counted; see the class."""
        counts = {key: float(value) for key, value in {**self.engine.counters, **self.trace}.items()}
        counts["host_waited_s"] = self.engine.waited
        counts.update(self._full_steps())
        cost = StepCost.fit(self.recorder.steps)
        if cost is not None:
            counts.update(cost.as_counters())
            if self.switch is not None:
                counts["allowed_speedup"] = allowed_speedup(self.requests, self.config, cost, self.switch)
        sharing = self.engine.scheduler.blocks.sharing
        if sharing is not None:
            counts["cache_hit_rate"] = counts["cached_tokens"] / max(1.0, counts["prompt_tokens"])
            counts["evicted_blocks"] = float(sharing.evicted)
        return counts

    def _full_steps(self) -> dict[str, float]:
        """Where the time of decode steps of the largest batch went; nothing without graphs or such steps."""
        graphs = self.runner.graphs
        steps = [s for prompt, decodes, s in self.recorder.steps if not prompt and decodes == self.config.max_running]
        steps = steps[-TIMED_STEPS:]
        # Of the same steps on both sides: graphs remember those of earlier runs too.
        model = graphs.full_seconds(len(steps)) if graphs is not None and len(steps) >= FULL_STEPS else None
        if model is None:
            return {}
        step = statistics.median(steps)
        return {"decode_step_s": step, "decode_model_s": model, "beside_model_share": max(0.0, 1.0 - model / step)}

    def close(self) -> None:
        """Gives the cache and the graphs back."""
        del self.engine, self.runner


class Oracle:
    """Each request alone in float32; in lower precision, the judge of the tokens that an engine gave."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.exact = model_for(workload, ctx, torch.float32)
        self.low = model_for(workload, ctx)
        self.judges = workload.dtype in ("bfloat16", "float16")
        self.requests: tuple[Request, ...] = ()
        self.tokens: dict[str, list[int]] = {}
        self.seed = 0

    def load(self, inputs: Inputs) -> None:
        """Takes the requests."""
        self.requests = inputs["requests"]
        self.tokens = {}
        self.seed = inputs.seed

    def run(self) -> None:
        """The tokens of each request; in lower precision there is nothing to give, only to judge."""
        if not self.judges:
            self.tokens = {request.id: cached_tokens(self.exact, request) for request in self.requests}

    def result(self) -> Mapping[str, Any]:
        """The tokens of each request."""
        return self.tokens

    def score(self, result: Mapping[str, Any]) -> dict[str, float]:
        """See :func:`impls.serving.plain_loop.score_tokens`; an answer that is missing or short fails.

        Every answer is counted. Those that are scored are drawn by the inputs' seed where there are too many.
        """
        short = [r.id for r in self.requests if len(result.get(r.id, ())) != r.sampling.max_tokens]
        if short:
            return {"gap": float("inf"), "bound": 0.0, "over": float(len(short)), "divergences": 0.0}
        return score_tokens(self.exact, self.low, drawn(self.requests, self.seed, scored_tokens(self.exact)), result)


def scored_tokens(model: torch.nn.Module) -> int:
    """How many tokens a check scores at most: two operations a weight and token."""
    return int(SCORED_FLOPS / (2 * sum(weight.numel() for weight in model.parameters())))


def drawn(requests: Sequence[Request], seed: int, most: int) -> list[Request]:
    """Requests in random order, of up to ``most`` tokens together, and one at least."""
    order = list(requests)
    random.Random(seed).shuffle(order)
    chosen: list[Request] = []
    tokens = 0
    for request in order:
        size = len(request.prompt) + request.sampling.max_tokens
        if not chosen or tokens + size <= most:
            chosen.append(request)
            tokens += size
    return chosen
