"""Tensor parallelism: gather after every linear, against a column-parallel linear followed by a row-parallel one.

Shoeybi et al. 2019, "Megatron-LM", section 3; with sequence parallelism Korthikanti et al. 2022, section 4.2.2.

    baseline            every weight is cut by columns, and every output gathered at once: each rank goes on with the
                        whole of it, and each linear's backward sums its input's gradient over ranks
    optimized           columns then rows: attention by heads and the feed-forward by its inner width meet once at
                        their ends (g), their gradients once at their beginnings (f); embedding and loss work on
                        parts of the vocabulary, and logits are never gathered
    sequence_parallel   the same, and between the two the tokens are cut too: norms and residuals work on 1/N of them
    dtensor             torch's parallelize_module with the plan of its tutorial

Bytes over the link in one step, with U = (N-1)/N · B·S·D · bytes of a number, for L layers:

    optimized           8U a layer (four all-reduces of 2U), 2U each for the embedding and for the head's input, and
                        2 (N-1)/N of 3 numbers a token for the loss
    sequence_parallel   10U a layer (gathers and reduce-scatters of U: 4 forward, 4 backward, 2 that gather saved inputs
                        again), 2U for the embedding, 3U for the head, the loss, and 2 (N-1)/N of all norms' gradients
    baseline            (N-1)/N of every linear's output forward and 2 (N-1)/N of its input backward

Predicted: with the same compute on every rank, latency falls by N, less the bytes above over the link.

Heads and key-value heads must divide over ranks. The feed-forward's width and the vocabulary need not; B·S must for
sequence_parallel.
"""

# Shapes: B rows, S positions, T = B·S tokens, t = T/N, D model width, H query heads, E width of a head.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.pair import Claim, Context, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.model.config import ModelConfig
from impls.model.decoder import CausalAttention, Decoder, FeedForward, Parts, SelfAttention
from impls.parallel import shared
from impls.parallel.link import Link, gather_rows
from impls.parallel.shared import ITEMSIZE, TrainCase, ring_bytes, split_sizes, wide_size
from impls.parallel.tp_layers import (
    column_linears,
    copy_in,
    gather_out,
    gathered_linears,
    loss_numbers,
    scatter_sum,
    sum_out,
    vocab_embedding,
    vocab_loss,
)

#: Dimension along which a parameter is cut: 0 the outputs (columns of the product), 1 the inputs (rows).
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
ROWS = ("o_proj", "down_proj")


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """Tokens and initial weights; every rank gets all and keeps its part.

    Raises:
        ValueError: heads that do not divide over ranks.
    """
    check_heads(workload)
    return shared.train_inputs(workload, ctx)


def check_heads(workload: Workload) -> None:
    """Raises ValueError when heads or key-value heads do not divide over the workload's ranks."""
    for count, what in ((workload.heads, "heads"), (workload.kv_heads, "key-value heads")):
        if count % workload.ranks:
            raise ValueError(
                f"{count} {what} do not divide over {workload.ranks} ranks: a head is never cut; "
                f"choose ranks that divide {count}"
            )


def last_name(name: str) -> str:
    """``q_proj`` of ``layers.0.self_attn.q_proj.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2]


class SplitLinear(nn.Module):
    """This rank's part of a linear layer; what happens around it is the sublayer's business."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class GatheredLinear(SplitLinear):
    """The plain way: this rank's columns, gathered to the whole output at once."""

    def __init__(self, link: Link, total: int, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.link, self.total = link, total

    def forward(self, x: Tensor) -> Tensor:
        own = F.linear(copy_in(self.link, x), self.weight)
        return gather_out(self.link, own, self.total)


class RowLinear(SplitLinear):
    """This rank's rows: partial outputs, summed over ranks by g, or by g-bar with sequence parallelism."""

    def __init__(self, link: Link, sequence: bool, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.link, self.sequence = link, sequence

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)
        if not self.sequence:
            return sum_out(self.link, partial)
        return scatter_sum(self.link, partial.flatten(0, -2))


def make_linear(link: Link, gather: bool, sequence: bool, name: str, in_features: int, out_features: int) -> nn.Module:
    """The linear of that name for this rank."""

    def own(total: int) -> int:
        return split_sizes(total, link.world)[link.rank]

    if gather:
        return GatheredLinear(link, out_features, own(out_features), in_features)
    if last_name(name) in ROWS:
        return RowLinear(link, sequence, out_features, own(in_features))
    return SplitLinear(own(out_features), in_features)


class ColumnAttention(SelfAttention):
    """Attention on this rank's heads: one f for queries, keys and values."""

    def __init__(self, config: ModelConfig, parts: Parts, layer: int, enter: Enter) -> None:
        super().__init__(config, parts, layer)
        self.enter = enter

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.enter(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        return q, k, v


class ColumnFeedForward(FeedForward):
    """Feed-forward on this rank's part of its inner width: one f for gate and up."""

    def __init__(self, config: ModelConfig, parts: Parts, layer: int, enter: Enter) -> None:
        super().__init__(config, parts, layer)
        self.enter = enter

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.enter(x, self.gate_proj.weight, self.up_proj.weight)
        return gate, up


class Enter:
    """From what ranks share to what each has of its own: f and linears, or with sequence parallelism a gather first."""

    def __init__(self, link: Link, sequence: bool) -> None:
        self.link, self.sequence = link, sequence
        self.shape = (0, 0)

    def __call__(self, x: Any, *weights: Any) -> tuple[Tensor, ...]:
        if not self.sequence:
            return column_linears(self.link, x, *weights)
        # Heads need rows of S positions again.
        return tuple(y.view(*self.shape, -1) for y in gathered_linears(self.link, x, *weights))


class VocabEmbedding(nn.Module):
    """This rank's words; the rows of the others come by g, or by g-bar with sequence parallelism."""

    def __init__(self, link: Link, sequence: bool, total: int, width: int) -> None:
        super().__init__()
        self.link, self.sequence, self.total = link, sequence, total
        self.weight = nn.Parameter(torch.empty(split_sizes(total, link.world)[link.rank], width))

    def forward(self, tokens: Tensor) -> Tensor:
        partial = vocab_embedding(self.link, tokens, self.weight, self.total)
        return scatter_sum(self.link, partial.flatten(0, 1)) if self.sequence else sum_out(self.link, partial)


def parallel_model(workload: Workload, ctx: Context, link: Link, sequence: bool) -> tuple[Decoder, Enter]:
    """The decoder with this rank's parts in place, uninitialised."""
    config = shared.model_config(workload)
    parts = Parts(linear=lambda name, i, o, bias: make_linear(link, False, sequence, name, i, o))
    enter = Enter(link, sequence)
    with torch.device("meta"):
        model = Decoder(config, parts)
        for number, layer in enumerate(model.layers):
            layer.self_attn = ColumnAttention(config, parts, number, enter)
            layer.mlp = ColumnFeedForward(config, parts, number, enter)
        model.embed_tokens = VocabEmbedding(link, sequence, config.vocab_size, config.hidden_size)  # type: ignore[assignment]
    return model.to_empty(device=ctx.device).to(ctx.dtype), enter


class GatherEverywhere(TrainCase):
    """The plain way."""

    link: Link

    def __init__(self, workload: Workload, ctx: Context) -> None:
        link = Link()
        parts = Parts(linear=lambda name, i, o, bias: make_linear(link, True, False, name, i, o))
        model = shared.empty_model(shared.model_config(workload), ctx, parts)
        super().__init__(workload, ctx, model, link)
        self.shards = {n: 0 for n in self.params if last_name(n) in COLUMNS + ROWS and last_name(n) != "embed_tokens"}

    def forward_backward(self) -> dict[str, Tensor]:
        logits = self.model(self.tokens[:, :-1])
        (shared.summed_loss(logits, self.tokens[:, 1:]) / logits.shape[:-1].numel()).backward()
        return self.own_grads()

    def hidden(self) -> Tensor:
        return shared.plain_hidden(self.model, self.tokens[:, :-1])


class Megatron(TrainCase):
    """Columns then rows, with or without sequence parallelism."""

    link: Link
    model: Decoder

    def __init__(self, workload: Workload, ctx: Context, sequence: bool) -> None:
        link = Link()
        model, self.enter = parallel_model(workload, ctx, link, sequence)
        super().__init__(workload, ctx, model, link)
        self.sequence = sequence
        self.shards = {n: 1 if last_name(n) in ROWS else 0 for n in self.params if last_name(n) in COLUMNS + ROWS}

    def _last_states(self) -> Tensor:
        """(B, S, D), or (t, D) with sequence parallelism."""
        tokens = self.tokens[:, :-1]
        self.enter.shape = (tokens.shape[0], tokens.shape[1])
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.model.hidden(tokens, positions, CausalAttention())

    def forward_backward(self) -> dict[str, Tensor]:
        states = self._last_states()
        (logits,) = self.enter(states, self.model.lm_head.weight)
        targets = self.tokens[:, 1:].flatten()
        loss = vocab_loss(self.link, logits.flatten(0, -2), targets, self.workload.vocab)
        (loss / targets.numel()).backward()
        grads = self.own_grads()
        if self.sequence:
            self._sum_norms(grads)
        return grads

    def _sum_norms(self, grads: dict[str, Tensor]) -> None:
        """Norms saw 1/N of the tokens on each rank: their gradients are summed, all in one message."""
        names = [name for name in grads if name not in self.shards]
        flat = torch.cat([grads[name].flatten() for name in names])
        self.link.all_reduce(flat).wait()
        for name, summed in zip(names, flat.split([grads[name].numel() for name in names]), strict=True):
            grads[name] = summed.view_as(grads[name])

    def hidden(self) -> Tensor:
        states = self._last_states()
        if self.sequence:
            states = gather_rows(self.link, states, [len(states)] * self.link.world)
        return states.view(*self.tokens[:, :-1].shape, -1)


def optimized(workload: Workload, ctx: Context) -> TrainCase:
    """Columns then rows."""
    return Megatron(workload, ctx, sequence=False)


def sequence_parallel(workload: Workload, ctx: Context) -> TrainCase:
    """Columns then rows, tokens cut in between."""
    return Megatron(workload, ctx, sequence=True)


def tokens_divide(workload: Workload) -> str | None:
    """Why sequence parallelism cannot cut the tokens of this workload."""
    tokens = workload.batch * workload.seq
    return f"{tokens} tokens do not divide over {workload.ranks} ranks" if tokens % workload.ranks else None


def even_parts(workload: Workload) -> str | None:
    """Why torch's tensor parallelism cannot cut this model's weights."""
    for size, what in ((workload.ffn, "the feed-forward's width"), (workload.vocab, "the vocabulary")):
        if size % workload.ranks:
            return f"{what} of {size} does not divide over {workload.ranks} ranks, which DTensor's plan needs"
    return None


def link_bytes(workload: Workload, variant: str) -> float:
    """Bytes that a rank sends in a step of one of our variants, as counted in this module's docstring."""
    c, n = shared.model_config(workload), workload.ranks
    size, tokens = ITEMSIZE[workload.dtype], workload.batch * workload.seq
    unit = tokens * c.hidden_size * size
    loss = 2 * loss_numbers(tokens) * wide_size(workload.dtype)
    if variant == "optimized":
        return ring_bytes(n, c.num_layers * 8 * unit + 4 * unit + loss)
    if variant == "sequence_parallel":
        norms = 2 * (2 * c.num_layers + 1) * c.hidden_size * wide_size(workload.dtype)
        return ring_bytes(n, c.num_layers * 10 * unit + 5 * unit + loss + norms)
    if variant != "baseline":
        raise ValueError(f"the bytes of {variant!r} are not counted here")
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears = [(c.hidden_size, heads), (c.hidden_size, kv), (c.hidden_size, kv), (heads, c.hidden_size)]
    linears += [(c.hidden_size, c.intermediate_size)] * 2 + [(c.intermediate_size, c.hidden_size)]
    linears = linears * c.num_layers + [(c.hidden_size, c.vocab_size)]
    padded = sum(2 * i + n * split_sizes(o, n)[0] for i, o in linears)
    return ring_bytes(n, tokens * size * padded)


def work(workload: Workload) -> Work:
    """The step of the whole batch."""
    return Work(
        flops=shared.train_flops(workload),
        bytes=shared.weight_traffic(workload),
        link_bytes=link_bytes(workload, "optimized"),
        messages=4 * workload.layers + 2,
        items=workload.batch * workload.seq,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal",
            "bytes": "weights, gradients and moments, once over all ranks; no activations",
            "link_bytes": "8U a layer, 4U at the ends, the loss; U = (N-1)/N of one activation",
            "messages": "an all-reduce after both halves of a layer, forward and backward, and one at each end",
        },
    )


def dtensor(workload: Workload, ctx: Context) -> TrainCase:
    """torch's own tensor parallelism."""
    from impls.parallel.tp_dtensor import DTensorParallel

    return DTensorParallel(workload, ctx)


PAIR = Pair(
    name="tensor_parallel",
    kind="step",
    layer="system",
    relieves="compute",
    claim=Claim(
        latency="lower",
        throughput="higher",
        memory="lower",
        communication="lower",
        cost="every layer waits for the link four times a step; pays inside one host",
    ),
    inputs=inputs,
    oracle=shared.oracle,
    variants={
        "baseline": Variant(GatherEverywhere, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",)),
        "sequence_parallel": Variant(sequence_parallel, requires=("ranks>=2",), supports=tokens_divide),
        "dtensor": Variant(dtensor, peer="torch", requires=("ranks>=2",), supports=even_parts),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
    check_runs=5,
)
