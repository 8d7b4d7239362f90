"""Context parallelism: every rank holds the whole sequence, against every rank holds 1/N of it.

    baseline    every rank computes the whole step on the whole sequence; nothing crosses the link
    optimized   ring attention, causal load balanced by zigzag (:mod:`impls.parallel.ring`)
    ulysses     heads instead of positions while attending: an all-to-all before and one after (Jacobs et al. 2023,
                "DeepSpeed Ulysses", section 3)
    torch_cp    torch's experimental context_parallel, which is a zigzag ring too

Everything but attention works on single tokens, so that positions can be spread freely. Weights are whole on every
rank, and their gradients are summed over ranks.

Bytes over the link in one step, for L layers, e bytes of a number and w of one in at least float32:

    ring      L (N-1)/N · 2·B·S·K·E · (2e + w): keys and values twice, their gradients once
    ulysses   L (N-1)/N · B·S/N · (4H + 4K)·E · e: queries, keys, values and outputs, forward and backward
    both      2 (N-1)/N of all weights' gradients · w

Memory that a rank keeps for backward, counted as ``saved_bytes``, for T = B·S tokens, heads of width H·E = D, feed-
forward width F and vocabulary V, beside weights, gradients and moments, which are whole on every rank:

    baseline  T · A       A = (2L+1)·(D(2e + w) + w) + L·((2D + 2K·E + 4F)·e + H·w) + 8E + V·w + 16
    ring      T/N · A
    ulysses   T/N · (A + L·D·e): attention's output is kept before the swap, and by the next product after it

In A: each norm's input, its factor, what it is normalized to and what it gives; queries, keys, values, output and the
softmax's sums; gate, its activation, up and their product; float32 sines and cosines; the loss; token ids. Attention's
own scores are not kept. Not counted is what lives for a moment only: a ring's two blocks of 2·B·S/N·K·E numbers, keys
and values, backward two of their gradients, and without a flash kernel one block's scores.

Predicted: activations and their memory by N, time by N as long as the link keeps up with a block's attention, whose
compute grows with (S/N)² and whose message grows with S/N.

The sequence must divide into 2N chunks for a ring, by N for Ulysses, which also needs N to divide all heads.
"""

# Shapes: B rows, S positions, s = S/N of this rank, H query heads, K key-value heads, E width of a head.

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.pair import Claim, Context, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.model.decoder import Attend, CausalAttention, Decoder
from impls.parallel import shared
from impls.parallel.buckets import Buckets
from impls.parallel.link import Link, gather_rows
from impls.parallel.ring import RingAttend, zigzag
from impls.parallel.saved import saved_bytes
from impls.parallel.shared import ITEMSIZE, TrainCase, fenced, hidden_share, ring_bytes, wide_size

BUCKET_BYTES = 25 << 20


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """Tokens and initial weights; every rank gets all of them."""
    return shared.train_inputs(workload, ctx)


class WholeSequence(shared.OneProcess):
    """The plain way: the same whole step on every rank."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx)
        self.link = Link()

    def counters(self) -> Mapping[str, float]:
        """Nothing over the link, and ``saved_bytes``, what is kept for backward."""
        if not self._counters:
            self._counters = {"link_bytes": 0.0, "saved_bytes": _most_saved(self)}
        return self._counters


class Spread(TrainCase):
    """Some positions of every row on each rank; ``attend`` sees to it that they find one another."""

    link: Link
    model: Decoder

    def __init__(self, workload: Workload, ctx: Context, places: Tensor, attend: Attend, link: Link) -> None:
        super().__init__(workload, ctx, shared.empty_model(shared.model_config(workload), ctx), link)
        self.places, self.attend = places.to(ctx.device), attend
        self.buckets = Buckets(list(self.params.values()), link, BUCKET_BYTES, overlap=True)

    def _last_states(self) -> Tensor:
        """(B, s, D)"""
        positions = self.places.expand(self.tokens.shape[0], -1)
        return self.model.hidden(self.tokens[:, self.places], positions, self.attend)

    def forward_backward(self) -> dict[str, Tensor]:
        self.buckets.start()
        logits = self.model.lm_head(self._last_states())
        loss = shared.summed_loss(logits, self.tokens[:, self.places + 1])
        (loss / (self.workload.batch * self.workload.seq)).backward()
        sums = self.buckets.finish()
        return {name: sums[param] for name, param in self.params.items()}

    def hidden(self) -> Tensor:
        states_SBD = self._last_states().transpose(0, 1).contiguous()
        counts = [len(self.places)] * self.link.world
        places = gather_rows(self.link, self.places, counts)
        whole_SBD = gather_rows(self.link, states_SBD, counts)
        return torch.empty_like(whole_SBD).index_copy_(0, places, whole_SBD).transpose(0, 1).contiguous()

    def close(self) -> None:
        self.buckets.close()


class Travelling(Attend, Protocol):
    """Attention of our own, whose messages can be sent by themselves."""

    def communicate(self, q_BSHE: Tensor, k_BSKE: Tensor) -> None:
        """What one layer sends in a step, forward and backward, and no computation."""
        ...


class Counted(Spread):
    """A spread step whose memory and communication are told apart."""

    def __init__(self, workload: Workload, ctx: Context, places: Tensor, attend: Travelling, link: Link) -> None:
        super().__init__(workload, ctx, places, attend, link)
        self.travelling = attend

    def communicate(self) -> None:
        """A step's communication by itself."""
        config, shape = self.model.config, (self.workload.batch, len(self.places))
        q, k = (
            torch.zeros(*shape, heads, config.head_dim, dtype=self.ctx.dtype, device=self.ctx.device)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        for _ in range(config.num_layers):
            self.travelling.communicate(q, k)
        self.buckets.communicate()

    def counters(self) -> Mapping[str, float]:
        """Besides those of every step ``comm_s``, its communication alone, ``hidden_share``, what of it the step hides,
        and ``saved_bytes``, what the fullest rank keeps for backward."""
        if "comm_s" not in self._counters:
            found = dict(super().counters())
            alone = statistics.median(fenced(self.communicate, self.link, self.ctx.device) for _ in range(5))
            found |= {"comm_s": alone, "hidden_share": hidden_share(found["exposed_comm"], alone)}
            self._counters = found | {"saved_bytes": _most_saved(self)}
        return self._counters


def _most_saved(case: TrainCase) -> float:
    """Bytes that the fullest rank keeps for backward. The case is loaded anew afterwards."""
    assert case.link is not None
    assert case._inputs is not None
    saved = saved_bytes(case.forward_backward, case.params.values())
    case.load(case._inputs)
    return case.link.most(saved, case.ctx.device)


class _Swap(torch.autograd.Function):
    """All-to-all along dimension 0; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor) -> Tensor:
        ctx.link = link
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        link.all_to_all(out, x.contiguous()).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        ctx.link.all_to_all(out, grad.contiguous()).wait()
        return None, out


_swap: Any = _Swap.apply


class UlyssesAttend:
    """Positions of all heads become all positions of some heads, and back."""

    def __init__(self, link: Link) -> None:
        self.link, self.whole = link, CausalAttention()

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        world = self.link.world
        sizes = [x.shape[2] // world for x in (q_BSHE, k_BSKE, v_BSKE)]
        # (N, B, s, H/N + 2K/N, E): one message for queries, keys and values.
        parts = torch.cat([x.unflatten(2, (world, -1)) for x in (q_BSHE, k_BSKE, v_BSKE)], dim=3)
        came = _swap(self.link, parts.movedim(2, 0))
        whole = came.movedim(0, 1).flatten(1, 2)
        out = self.whole(layer, *whole.split(sizes, dim=2))
        back = _swap(self.link, out.unflatten(1, (world, -1)).movedim(1, 0))
        heads: Tensor = back.movedim(0, 2).flatten(2, 3)
        return heads

    def communicate(self, q_BSHE: Tensor, k_BSKE: Tensor) -> None:
        """Two swaps, and two back."""
        there = torch.cat([q_BSHE, k_BSKE, k_BSKE], dim=2).reshape(self.link.world, -1)
        back = q_BSHE.reshape(self.link.world, -1)
        for x in (there, back, back, there):
            self.link.all_to_all(torch.empty_like(x), x).wait()


class RepeatedAttend:
    """Causal attention by SDPA, with key-value heads repeated: torch's ring knows no groups."""

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        groups = q_BSHE.shape[2] // k_BSKE.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class TorchContextParallel(Spread):
    """torch's own: it replaces scaled_dot_product_attention by a ring while its context is entered."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        link = Link()
        if ctx.mesh is None:
            raise ValueError("torch's context parallelism needs a mesh: start several ranks (--ranks N)")
        self.mesh = ctx.mesh
        super().__init__(workload, ctx, zigzag(workload.seq, link.rank, link.world), RepeatedAttend(), link)

    def _within(self) -> Any:
        from torch.distributed.tensor.experimental import context_parallel

        # It wants a buffer to cut; the places are cut already, in the same zigzag.
        whole = torch.arange(self.workload.seq, device=self.ctx.device).unsqueeze(0)
        return context_parallel(self.mesh, buffers=[whole], buffer_seq_dims=[1], no_restore_buffers={whole})

    def forward_backward(self) -> dict[str, Tensor]:
        with self._within():
            return super().forward_backward()

    def hidden(self) -> Tensor:
        with self._within():
            return super().hidden()

    def counters(self) -> Mapping[str, float]:
        return {}


def optimized(workload: Workload, ctx: Context) -> TrainCase:
    """A zigzag ring."""
    link = Link()
    return Counted(workload, ctx, zigzag(workload.seq, link.rank, link.world), RingAttend(link), link)


def ulysses(workload: Workload, ctx: Context) -> TrainCase:
    """Contiguous positions, swapped for heads while attending."""
    link = Link()
    part = workload.seq // link.world
    return Counted(workload, ctx, torch.arange(part) + link.rank * part, UlyssesAttend(link), link)


def chunks_divide(workload: Workload) -> str | None:
    """Why the sequence cannot be dealt in zigzag."""
    chunks = 2 * workload.ranks
    return f"{workload.seq} positions do not divide into {chunks} chunks" if workload.seq % chunks else None


def heads_divide(workload: Workload) -> str | None:
    """Why Ulysses cannot swap positions for heads."""
    for count, what in ((workload.seq, "positions"), (workload.heads, "heads"), (workload.kv_heads, "key-value heads")):
        if count % workload.ranks:
            return f"{count} {what} do not divide over {workload.ranks} ranks"
    return None


def link_bytes(workload: Workload, variant: str) -> float:
    """Bytes that a rank sends in a step of one of our variants, as counted in this module's docstring."""
    c, n, size = shared.model_config(workload), workload.ranks, ITEMSIZE[workload.dtype]
    wide_bytes, tokens = wide_size(workload.dtype), workload.batch * workload.seq
    gradients = 2 * c.parameters * wide_bytes
    if variant == "baseline":
        return 0.0
    if variant == "optimized":
        numbers = 2 * tokens * c.num_kv_heads * c.head_dim
        return ring_bytes(n, c.num_layers * numbers * (2 * size + wide_bytes) + gradients)
    if variant == "ulysses":
        numbers = tokens // n * 4 * (c.num_heads + c.num_kv_heads) * c.head_dim
        return ring_bytes(n, c.num_layers * numbers * size + gradients)
    raise ValueError(f"the bytes of {variant!r} are not counted here")


def saved_formula(workload: Workload, variant: str) -> float:
    """Bytes that a rank keeps for backward in one of our variants, as counted in this module's docstring; up to the
    last id of each row and the loss itself."""
    c, size, wide_bytes = shared.model_config(workload), ITEMSIZE[workload.dtype], wide_size(workload.dtype)
    tokens, width, heads_width = workload.batch * workload.seq, c.hidden_size, c.num_heads * c.head_dim
    norm = width * (2 * size + wide_bytes) + wide_bytes
    layer = 2 * (heads_width + c.num_kv_heads * c.head_dim) + 4 * c.intermediate_size
    layer_bytes = layer * size + c.num_heads * wide_bytes
    a_token = (2 * c.num_layers + 1) * norm + c.num_layers * layer_bytes
    a_token += 8 * c.head_dim + c.vocab_size * wide_bytes + 16
    if variant == "baseline":
        return float(tokens * a_token)
    if variant == "optimized":
        return float(tokens * a_token / workload.ranks)
    if variant == "ulysses":
        return float(tokens * (a_token + c.num_layers * heads_width * size) / workload.ranks)
    raise ValueError(f"what {variant!r} keeps is not counted here")


def work(workload: Workload) -> Work:
    """The step of the whole sequence."""
    return Work(
        flops=shared.train_flops(workload),
        bytes=workload.ranks * shared.weight_traffic(workload),
        link_bytes=link_bytes(workload, "optimized"),
        messages=3 * (workload.ranks - 1) * workload.layers + 1,
        collective="send_recv",
        items=workload.batch * workload.seq,
        unit="tokens",
        reasons={
            "flops": "6 a weight and token, attention causal",
            "bytes": "each rank's weights, gradients and moments; no activations",
            "link_bytes": "the ring's keys, values and their gradients, and all weights' gradients",
            "messages": "N-1 hops a layer of keys and values, forward and backward, and of their gradients; one more",
        },
    )


PAIR = Pair(
    name="context_parallel",
    kind="step",
    layer="system",
    relieves="capacity",
    claim=Claim(
        latency="lower",
        throughput="higher",
        memory="lower",
        communication="higher",
        cost="weights are whole on every rank; short sequences leave the ring waiting for the link",
    ),
    inputs=inputs,
    oracle=shared.oracle,
    variants={
        "baseline": Variant(WholeSequence, requires=("ranks>=2",)),
        "optimized": Variant(optimized, requires=("ranks>=2",), supports=chunks_divide),
        "ulysses": Variant(ulysses, requires=("ranks>=2",), supports=heads_divide),
        "torch_cp": Variant(TorchContextParallel, peer="torch", requires=("cuda", "ranks>=2"), supports=chunks_divide),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
    check_runs=5,
)
