"""Speculative decoding: one token a pass over the weights, against a pass that checks k guesses and keeps those it can.

A decode step of few sequences reads every weight for each token. Guesses (drafts) of the next k tokens are checked by
one pass over k + 1 positions, which reads the weights once; those up to the first wrong one stay, and the pass gives
one token more (Leviathan et al., ICML 2023, Algorithm 1; Chen et al., 2023, Algorithm 2). Greedy decoding gives the
very tokens of the plain loop; sampled decoding keeps the target's distribution (:mod:`impls.serving.draft_acceptance`).

    optimized       drafts are what followed when the last words stood in the text before: no second model
    layer_skip      the target's own first layers, its norm and its head draft, on the cache that they share
    set_acceptance  an instrument: the known answer, with mistakes put in, at the workload's ``acceptance``

A draft being right with probability a and costing c passes, a step emits (1 - a^(k+1)) / (1 - a) tokens and costs
k·c + v, v the price of a pass over k + 1 positions (Theorem 3.8 of Leviathan et al., there with v = 1):

    speedup = (1 - a^(k+1)) / ((1 - a) (k·c + v))

    bytes of a pass   weights + keys and values: hardly more than for one position, so v ≈ 1 while they bind
    FLOPs of a pass   B·(k + 1) times those of a token for B rows: v → k + 1 once arithmetic binds, B·(k + 1) beyond
                      the machine's ratio of FLOPs to bytes (about 200 rows of bfloat16 on an H200, few on a CPU)

The acceptance rate is a matter of text and model and cannot be counted beforehand, so ``predict`` gives no figure.
The record has a, c and v as measured (``acceptance_rate``, ``draft_cost``, ``verify_cost``) and two predictions to
hold against its ``speedup``: ``theory_speedup`` with v = 1, and ``predicted_speedup`` with v. A pass for which no row
has a draft runs one position; ``drafted_share`` of the rows' steps had one, ``checked_share`` of the passes ran k + 1.
A batch lasts as long as its slowest row, which neither prediction knows (``idle_row_steps``).

Where it does not pay: text that does not repeat, models that no draft fits, batches that arithmetic binds. Small models
and random ones go in circles when they decode greedily, which lookups profit from: an acceptance rate holds for its own
model and text. ``set_acceptance`` shows on random weights what a drafter of that quality and no cost would bring to a
model of that size; it is nobody's result.

The prompt's pass is not timed. Both sides are one loop, one model and one cache; on a GPU all steps are CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.model.resolve import config_for, not_here, prompts_for, token_flops
from impls.serving.case import Oracle
from impls.serving.draft_acceptance import Greedy
from impls.serving.drafted_loop import DraftedLoop
from impls.serving.drafts import Drafter, GivenDrafts, LayerSkip, PromptLookup
from impls.serving.request import Request, Sampling
from impls.serving.served_model import decoder_for, shared

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
#: Tokens of a text's beginning that stand behind it where it is to be repeated.
AGAIN = 32
#: The instrument's answer comes from the plain loop; in 16 bits a pass of more rows may choose another token.
SETTLE = 24


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """``rows`` greedy requests of ``prompt`` tokens for ``new`` ones, by the workload's ``task``.

    ``continue``: a piece of text (seeded ids for seeded weights). ``repeat``: a piece of text and its beginning once
    more, as where a source is quoted or edited; models that predict text go on with the piece.
    """
    rows, length = int(workload.rows), int(workload.prompt)
    again = min(AGAIN, length // 2) if workload.task == "repeat" else 0
    text = prompts_for(workload, ctx, rows, length - again).tolist()
    sampling = Sampling(max_tokens=int(workload.new))
    requests = tuple(Request(f"row{i}", piece + piece[:again], sampling) for i, piece in enumerate(text))
    return {"requests": requests, "trace": {}}


class Decode:
    """The plain way: one token a pass."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.workload, self.seed, self.device = workload, ctx.seed, ctx.device
        self.model = decoder_for(workload, ctx)
        self.loop: DraftedLoop | None = None
        self.requests: tuple[Request, ...] = ()

    def drafter(self, loop: DraftedLoop) -> Drafter | None:
        """Nobody drafts."""
        return None

    def load(self, inputs: Inputs) -> None:
        """Takes the prompts and runs them; the loop is made for them the first time."""
        self.requests = inputs["requests"]
        prompt_BP = torch.tensor([list(r.prompt) for r in self.requests], device=self.device)
        if self.loop is None:
            w = self.workload
            rows, prompt = prompt_BP.shape
            self.loop = DraftedLoop(self.model, rows, prompt, int(w.new), int(w.drafts), Greedy())
            self.loop.drafter = self.drafter(self.loop)
        self.loop.prefill(prompt_BP)

    def run(self) -> None:
        """Decodes N tokens a row."""
        assert self.loop is not None
        self.loop.run()

    def result(self) -> dict[str, list[int]]:
        """The tokens of each row."""
        assert self.loop is not None
        return {r.id: row for r, row in zip(self.requests, self.loop.answer().tolist(), strict=True)}

    def poison(self) -> None:
        """Token 0 everywhere, until a run has written others."""
        if self.loop is not None:
            self.loop.answer().zero_()

    def counters(self) -> dict[str, float]:
        """See :meth:`impls.serving.drafted_loop.DraftedLoop.counters`."""
        assert self.loop is not None
        return self.loop.counters()

    def unload(self) -> None:
        """Gives the cache and the graphs back."""
        self.loop = None

    close = unload


class Lookup(Decode):
    """Drafts from the text so far."""

    def drafter(self, loop: DraftedLoop) -> Drafter:
        """Matches of the last ``ngram`` tokens."""
        return PromptLookup(loop.drafted, int(self.workload.ngram))


class Skipping(Decode):
    """Drafts by the target's first layers."""

    def drafter(self, loop: DraftedLoop) -> Drafter:
        """``draft_layers`` of them."""
        return LayerSkip(self.model, int(self.workload.draft_layers), loop.drafted, loop.rule, loop.attend)


class SetAcceptance(Decode):
    """Drafts from the answer, right at a rate that the workload sets."""

    def drafter(self, loop: DraftedLoop) -> Drafter:
        """Mistakes are drawn once for every place."""
        rate, rows = float(self.workload.acceptance), int(self.workload.rows)
        return GivenDrafts(loop.drafted, rate, self.model.config.vocab_size, rows, loop.places, self.seed)

    def load(self, inputs: Inputs) -> None:
        """Finds the answer: the plain loop's, and where checking gave others, what it gave."""
        super().load(inputs)
        assert self.loop is not None
        assert isinstance(self.loop.drafter, GivenDrafts)
        plain = DraftedLoop(self.model, self.loop.rows, self.loop.prompt, self.loop.new, 0, Greedy())
        plain.prefill(self.loop.text_BC[:, : self.loop.prompt])
        plain.run()
        answer_BN = plain.answer()
        for _ in range(SETTLE):
            self.loop.drafter.know(answer_BN, self.loop.prompt)
            self.loop.run()
            if torch.equal(self.loop.answer(), answer_BN):
                break
            answer_BN = self.loop.answer().clone()


def sets_acceptance(workload: Workload) -> str | None:
    """Why the instrument has nothing to do here."""
    return not_here(workload) or (None if "acceptance" in workload.dims else "the workload sets no acceptance rate")


def work(workload: Workload) -> Work:
    """N tokens a row; the weights once for every k + 1 tokens, which is the least that k drafts a pass allow."""
    config, rows, new = config_for(workload), int(workload.rows), int(workload.new)
    first, size = int(workload.prompt), ITEMSIZE[workload.dtype]
    passes = -(-new // (int(workload.drafts) + 1))
    weights = token_flops(config, 0) / 2
    kept = config.kv_values_per_token * rows * passes * (first + new / 2)
    return Work(
        flops=rows * sum(token_flops(config, first + i) for i in range(new)),
        bytes=(weights * passes + kept) * size,
        launches=passes,
        items=rows * new,
        unit="tokens",
        reasons={
            "flops": "two for each weight and token of the answers; drafts and rejected positions are not counted",
            "bytes": "weights, keys and values once a pass, with every draft of every pass accepted",
        },
    )


PAIR = Pair(
    name="speculative_decoding",
    kind="step",
    layer="system",
    relieves="memory",
    claim=Claim(
        latency="lower",
        throughput="higher",
        cost="k positions more a pass; a loss where drafts are rejected (text that does not repeat) "
        "and where arithmetic binds (large batches)",
    ),
    inputs=inputs,
    shared=shared,
    oracle=Oracle,
    variants={
        "baseline": Variant(Decode, supports=not_here),
        "optimized": Variant(Lookup, supports=not_here),
        "layer_skip": Variant(Skipping, supports=not_here),
        "set_acceptance": Variant(SetAcceptance, supports=sets_acceptance),
    },
    work=work,
    tolerance=Tolerance(rule="tokens"),
)
