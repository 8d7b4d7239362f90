"""Tensor-parallel decoding: NCCL's all-reduce in every sublayer, against a one-shot all-reduce in a captured graph.

A decode step makes two all-reduces a layer of B·D numbers: 32 KiB for four rows of 4096 in 16 bits. That is far below
what fills a link; their latency is the step's. A ring needs 2 (N-1) hops; one shot needs one: every rank reads all
peers' buffers over NVLink and adds them up itself (TensorRT-LLM's and vLLM's custom all-reduce; torch's symmetric
memory, ``symm_mem::one_shot_all_reduce``). It moves N/2 times the bytes of a ring, which do not matter at this size.

    baseline    the backend's all-reduce, called eagerly
    optimized   the product writes into symmetric memory, one-shot all-reduce, the whole step in one CUDA graph;
                plain loads and stores over NVLink, no multicast
    captured    the baseline's step in a CUDA graph: what capturing gives alone
    gathered    one shot by an all-gather and a sum, on any backend: one exchange instead of two

Recorded besides the step: ``all_reduce_s``, one all-reduce of this size by itself, as the variant does it.
"""

# Shapes: B rows, one new token each, C cached positions, D model width, V vocabulary, v this rank's part.

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.model.cache import KVCache
from impls.model.decoder import Decoder, Parts
from impls.parallel import shared
from impls.parallel.buckets import wide
from impls.parallel.link import Link
from impls.parallel.shared import ITEMSIZE, own_part, ring_bytes, split_sizes
from impls.parallel.tensor_parallel import COLUMNS, ROWS, SplitLinear, check_heads, last_name

REPEATS = 20
Reduce = Callable[[Tensor, Tensor], Tensor]


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """Weights, one token a row, and what the cache holds: ``k`` and ``v`` (L, B, K, C, E).

    Raises:
        ValueError: heads that do not divide over ranks.
    """
    check_heads(workload)
    config = decode_config(workload)
    values = shared.draw_weights(config, ctx)
    values["tokens"] = torch.randint(0, config.vocab_size, (workload.batch, 1), generator=ctx.generator(1)).to(
        ctx.device
    )
    shape = (config.num_layers, workload.batch, config.num_kv_heads, workload.context, config.head_dim)
    values["k"], values["v"] = ctx.randn(*shape, salt=101), ctx.randn(*shape, salt=102)
    return values


def decode_config(workload: Workload) -> Any:
    """The decoder that the workload describes."""
    return shared.config_of(workload, workload.context + 1)


class RowReduce(nn.Module):
    """This rank's rows of a linear, then a sum over ranks: ``reduce`` gets the input (B, i) and the weight (D, i)."""

    def __init__(self, reduce: Reduce, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Decode:
    """One decode step of this rank's part of the model, eager; the all-reduce is the backend's."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.workload, self.ctx, self.link = workload, ctx, Link()
        self.config, world, rank = decode_config(workload), self.link.world, self.link.rank
        self.vocab_sizes = split_sizes(self.config.vocab_size, world)

        def make(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
            if last_name(name) in ROWS:
                return RowReduce(self.reduce, out_features, split_sizes(in_features, world)[rank])
            return SplitLinear(split_sizes(out_features, world)[rank], in_features)

        self.model = shared.empty_model(self.config, ctx, Parts(linear=make)).requires_grad_(False)
        own = dataclasses.replace(
            self.config, num_heads=self.config.num_heads // world, num_kv_heads=self.config.num_kv_heads // world
        )
        self.cache = KVCache(own, workload.batch, workload.context + 1, ctx.dtype, ctx.device)
        self.tokens = torch.zeros(workload.batch, 1, dtype=torch.long, device=ctx.device)
        self.positions = torch.full_like(self.tokens, workload.context)
        width = self.vocab_sizes[0]
        self.gathered = torch.zeros(world * workload.batch, width, dtype=ctx.dtype, device=ctx.device)

    def reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, summed over ranks."""
        out = F.linear(x, weight)
        self.link.all_reduce(out).wait()
        return out

    def load(self, inputs: Inputs) -> None:
        """Take this rank's heads, features and words."""
        rank, world = self.link.rank, self.link.world
        for name, param in self.model.named_parameters():
            whole, last = inputs[f"weight.{name}"], last_name(name)
            if last in ROWS:
                whole = own_part(whole, 1, rank, world)
            elif last in COLUMNS and last != "embed_tokens":
                whole = own_part(whole, 0, rank, world)
            param.data.copy_(whole)
        for kept, given in ((self.cache.k, inputs["k"]), (self.cache.v, inputs["v"])):
            kept[:, :, :, : self.workload.context].copy_(own_part(given, 2, rank, world))
        self.tokens.copy_(inputs["tokens"])

    def poison(self) -> None:
        """Overwrite the logits."""
        self.gathered.fill_(float("nan"))

    def step(self) -> None:
        """The new token's logits, gathered over ranks."""
        attend = self.cache.extend(self.positions, context=self.workload.context + 1)
        with torch.no_grad():
            own = self.model(self.tokens, self.positions, attend)[:, 0]
            padded = F.pad(own, (0, self.vocab_sizes[0] - own.shape[-1]))
            self.link.all_gather(self.gathered, padded).wait()

    def run(self) -> None:
        """One step."""
        self.link.reset()
        self.step()

    def result(self) -> Mapping[str, Tensor]:
        """``logits`` (B, V)."""
        parts = self.gathered.view(self.link.world, self.workload.batch, -1).unbind(0)
        return {"logits": torch.cat([p[:, :n] for p, n in zip(parts, self.vocab_sizes, strict=True)], dim=-1)}

    def counters(self) -> Mapping[str, float]:
        """Bytes of a step over the link, its exposed communication, and one all-reduce by itself."""
        self.run()
        found = {"link_bytes": self.link.most(self.link.sent, self.ctx.device)}
        found |= shared.exposure(self.run, self.link.mute, self.link, self.ctx.device)
        self.run()
        return found | {"all_reduce_s": self.all_reduce_seconds()}

    def all_reduce_seconds(self) -> float:
        """One all-reduce of a step's size, from many in a row; each follows a product too small to count, whose time
        is taken off."""
        x = torch.zeros(self.workload.batch, 1, dtype=self.ctx.dtype, device=self.ctx.device)
        weight = torch.zeros(self.config.hidden_size, 1, dtype=self.ctx.dtype, device=self.ctx.device)
        reduces = self.repeated(lambda: self.reduce(x, weight))
        products = self.repeated(lambda: F.linear(x, weight))
        with_link, without = (
            statistics.median(shared.fenced(many, self.link, self.ctx.device) for _ in range(5))
            for many in (reduces, products)
        )
        return max(0.0, with_link - without) / REPEATS

    def repeated(self, call: Callable[[], Tensor]) -> Callable[[], None]:
        """The call REPEATS times, as the step would make it."""

        def many() -> None:
            for _ in range(REPEATS):
                call()

        many()
        return many


class Gathered(Decode):
    """One shot on any backend: everybody's partial sums, added up here."""

    def reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        """One exchange, then the sum over ranks."""
        own = F.linear(x, weight)
        every = own.new_empty(self.link.world * own.shape[0], own.shape[1])
        self.link.all_gather(every, own).wait()
        return every.view(self.link.world, *own.shape).sum(0)


def capture(call: Callable[[], None]) -> Any:
    """A CUDA graph of the call, after a few eager ones on a side stream (lazy set-up must not fall into the graph)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The process group's watchdog queries events from a thread of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


class Captured(Decode):
    """The step in a CUDA graph. Weights, tokens and cache keep their places, so that load may follow capture."""

    graph: Any = None

    def run(self) -> None:
        """Replay; the first run captures."""
        if self.graph is None:
            self.graph = capture(self.step)
            # Counted once more, outside the graph: warming up and capturing counted several steps.
            self.link.reset()
            self.step()
        self.graph.replay()

    def repeated(self, call: Callable[[], Tensor]) -> Callable[[], None]:
        """The calls in one graph, so that the host is not measured."""

        def many() -> None:
            for _ in range(REPEATS):
                call()

        graph = capture(many)
        return lambda: graph.replay()

    def counters(self) -> Mapping[str, float]:
        """A graph cannot be muted: bytes as counted when it was captured, and one all-reduce by itself."""
        sent = self.link.most(self.link.sent, self.ctx.device)
        return {"link_bytes": sent, "all_reduce_s": self.all_reduce_seconds()}

    def close(self) -> None:
        """Free the graph's memory."""
        self.graph = None


class OneShot(Captured):
    """Symmetric memory: products write where peers can read, and a kernel adds up all ranks' buffers."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        super().__init__(workload, ctx)
        self.group_name = self.link.group.group_name
        symm_mem.enable_symm_mem_for_group(self.group_name)
        self.buffer = symm_mem.empty(workload.batch, self.config.hidden_size, dtype=ctx.dtype, device=ctx.device)
        symm_mem.rendezvous(self.buffer, self.link.group)

    def reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        """The kernel waits for all ranks before it reads and again before it returns: one buffer is enough."""
        torch.mm(x, weight.T, out=self.buffer)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce(self.buffer, "sum", self.group_name)
        return out

    def counters(self) -> Mapping[str, float]:
        """The kernel's loads do not pass our link."""
        return {"all_reduce_s": self.all_reduce_seconds()}


class Alone:
    """The oracle: the whole model in one process, in at least float32."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.workload, ctx = workload, dataclasses.replace(ctx, dtype=wide(ctx.dtype))
        config = decode_config(workload)
        self.model: Decoder = shared.empty_model(config, ctx).requires_grad_(False)
        self.cache = KVCache(config, workload.batch, workload.context + 1, ctx.dtype, ctx.device)
        self.logits = torch.empty(0)

    def load(self, inputs: Inputs) -> None:
        """Take everything."""
        for name, param in self.model.named_parameters():
            param.data.copy_(inputs[f"weight.{name}"])
        self.cache.k[:, :, :, : self.workload.context].copy_(inputs["k"])
        self.cache.v[:, :, :, : self.workload.context].copy_(inputs["v"])
        self.tokens = inputs["tokens"]

    def run(self) -> None:
        """One step."""
        positions = torch.full_like(self.tokens, self.workload.context)
        with torch.no_grad():
            self.logits = self.model(self.tokens, positions, self.cache.extend(positions))[:, 0]

    def result(self) -> Mapping[str, Tensor]:
        """``logits`` (B, V)."""
        return {"logits": self.logits}


def link_bytes(workload: Workload, variant: str) -> float:
    """Bytes that a rank sends in a step: two sums a layer, and this rank's logits."""
    config, n, size = decode_config(workload), workload.ranks, ITEMSIZE[workload.dtype]
    message = workload.batch * config.hidden_size * size
    logits = workload.batch * split_sizes(config.vocab_size, n)[0] * size
    each = {"baseline": 2 * message, "gathered": n * message}
    if variant not in each:
        raise ValueError(f"the bytes of {variant!r} are not counted here")
    return ring_bytes(n, 2 * config.num_layers * each[variant] + n * logits)


def work(workload: Workload) -> Work:
    """Weights and cache are read once; two all-reduces a layer."""
    config, size = decode_config(workload), ITEMSIZE[workload.dtype]
    read = config.parameters - (config.vocab_size - workload.batch) * config.hidden_size
    cached = config.kv_values_per_token * workload.batch * (workload.context + 1)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * workload.batch * (workload.context + 1)
    products = read - workload.batch * config.hidden_size
    return Work(
        flops=2.0 * products * workload.batch + attention,
        bytes=float(size * (read + cached)),
        link_bytes=link_bytes(workload, "baseline"),
        messages=2 * config.num_layers + 1,
        launches=4 * config.num_layers,
        items=workload.batch,
        unit="tokens",
        reasons={
            "bytes": "every weight of a product once over all ranks, the rows' embeddings, keys and values",
            "link_bytes": "two ring all-reduces of B·D a layer and the logits of the other ranks",
            "messages": "each of a layer's two sums waits for the one before; the logits",
            "launches": "a layer's two products and two sums must follow one another",
        },
    )


PAIR = Pair(
    name="tp_decode",
    kind="step",
    layer="system",
    relieves="link",
    claim=Claim(latency="lower", throughput="higher", cost="N/2 times a ring's bytes; shapes fixed by the graph"),
    inputs=inputs,
    oracle=Alone,
    variants={
        "baseline": Variant(Decode, requires=("ranks>=2",)),
        "optimized": Variant(OneShot, requires=("cuda", "ranks>=2")),
        "captured": Variant(Captured, requires=("cuda", "ranks>=2")),
        "gathered": Variant(Gathered, requires=("ranks>=2",)),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
)
