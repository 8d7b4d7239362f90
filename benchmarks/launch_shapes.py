"""Which launch shapes are fastest on this GPU: ``python3 -m benchmarks.launch_shapes [FAMILY…]``.

Every kernel takes its launch shape from one function of its module. Here that function gives one candidate after the
other; all are timed in interleaved rounds on the kernel's large workload, with the L2 overwritten between calls, and
printed in TB/s of the bytes that the mathematics needs, the present choice among them. What wins by more than the
rounds scatter belongs into the function, with the measurement in the commit. ``--compile I/N`` only compiles every N-th
candidate: a few such processes side by side fill Triton's cache first. ``--case TEXT`` takes the cases whose name has
the text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.layer_norm_shapes import BACKWARD, FORWARD, numbers
from benchmarks.rounds import seconds
from kernels import (
    adamw,
    add_rms_norm,
    bias_gelu,
    cross_entropy,
    layer_norm_dropout_add,
    paged_attention,
    rope,
    softmax,
    swiglu,
    weight_only_matmul,
)

BF16 = torch.bfloat16
SEED = 7


@dataclass(frozen=True)
class Case:
    """One call, the bytes that it must move, and what its module's launch function may give instead."""

    label: str
    nbytes: int
    call: Callable[[], Any]
    module: ModuleType
    candidates: dict[str, dict[str, Any]]  # name to the attributes of the module that stand in for its own


@dataclass(frozen=True)
class Place:
    """Where tensors are made: a device, and how many rows of the large workload are kept (all of them, or a few)."""

    device: str
    few: int | None = None

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def rows(self, many: int) -> int:
        return many if self.few is None else min(many, self.few)


def given(value: Any) -> Callable[..., Any]:
    """A launch function that knows one answer."""
    return lambda *_, **__: value


def rows_of(columns: int, *pairs: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
    """Tiles of whole rows as (tile rows, block, warps), by name."""
    return {f"{rows} rows, {warps} warps": (rows, columns, warps) for rows, warps in pairs}


def of_add_rms_norm(place: Place) -> Iterator[Case]:
    m = add_rms_norm
    for width in (4096, 8192):
        rows = place.rows(16384)
        x, residual, grad, passed = (place.randn(rows, width) for _ in range(4))
        weight = place.randn(width)
        _, summed, rstd = m.add_rms_norm_forward(x, residual, weight, 1e-6)
        tiles = rows_of(width, (1, 4), (1, 8), (1, 16), (2, 8), (2, 16))
        forward = {name: {"forward_shape": given(m.ForwardLaunch(*tile))} for name, tile in tiles.items()}
        yield Case(
            f"forward {width}",
            8 * x.numel(),
            lambda a=(x, residual, weight): m.add_rms_norm_forward(*a, 1e-6),
            m,
            forward,
        )
        backward = {
            f"{rows} rows, {warps} warps, {stages} stages": {
                "backward_shape": given(m.BackwardLaunch(rows, width, warps, 2048 // warps, True, stages))
            }
            for rows, warps, stages in (
                (1, 16, 3),
                (2, 16, 3),
                (1, 32, 3),
                (2, 32, 3),
                (1, 16, 4),
                (1, 32, 4),
                (2, 16, 4),
            )
            if 3 * (stages - 1) * rows * width * 2 <= 220 * 1024
        }
        arguments = (grad, passed, summed, weight, rstd)
        yield Case(f"backward {width}", 8 * x.numel(), lambda a=arguments: m.add_rms_norm_backward(*a), m, backward)


def of_layer_norm_dropout_add(place: Place) -> Iterator[Case]:
    m = layer_norm_dropout_add
    for width, many in ((4096, 32768), (1024, 131072), (8192, 32768)):
        rows = place.rows(many)
        x, residual, grad = (place.randn(rows, width) for _ in range(3))
        weight, bias = place.randn(width), place.randn(width)
        _, mean, rstd = m.layer_norm_dropout_add_forward(x, residual, weight, bias, 0.1, SEED)
        shapes = [m.Launch(r, width, warps, n, chunks) for r, warps, chunks, n in numbers(FORWARD[width])]
        forward = {str(shape): {"launch_shape": given(shape)} for shape in shapes}
        arguments: Any = (x, residual, weight, bias, 0.1, SEED)
        yield Case(
            f"forward {width}", 6 * x.numel(), lambda a=arguments: m.layer_norm_dropout_add_forward(*a), m, forward
        )
        shapes = [
            m.Launch(r, width, warps, min(248, 2048 // (warps * programs) // 8 * 8), chunks, stages, programs)
            for r, warps, chunks, stages, programs in numbers(BACKWARD[width])
        ]
        backward = {str(shape): {"launch_shape": given(shape)} for shape in shapes}
        arguments = (grad, x, weight, mean, rstd, 0.1, SEED)
        yield Case(
            f"backward {width}", 6 * x.numel(), lambda a=arguments: m.layer_norm_dropout_add_backward(*a), m, backward
        )


def of_softmax(place: Place) -> Iterator[Case]:
    m = softmax
    for columns, many, pairs in (
        (4096, 65536, ((1, 4), (1, 8), (1, 16), (2, 8))),
        (1024, 262144, ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4))),
        (32768, 16384, ((1, 16), (1, 32))),
    ):
        x = place.randn(place.rows(many), columns)
        y, grad = m.softmax_forward(x), place.randn(*x.shape)
        held = ((False, None),) if columns < 32768 else ((True, None), (True, 32), (True, 64))
        shapes = {
            f"{name}, 16 bits held, {registers} registers" if again else name: {
                "launch_shape": given(m.Launch(*tile, convert_again=again, registers=registers))
            }
            for name, tile in rows_of(columns, *pairs).items()
            for again, registers in held
        }
        yield Case(f"forward {columns}", 4 * x.numel(), lambda x=x: m.softmax_forward(x), m, shapes)
        yield Case(f"backward {columns}", 6 * x.numel(), lambda g=grad, y=y: m.softmax_backward(g, y), m, shapes)


def of_cross_entropy(place: Place) -> Iterator[Case]:
    m = cross_entropy
    for many, vocabulary in ((8192, 128256), (32768, 32000)):
        logits = place.randn(place.rows(many), vocabulary)
        target = torch.randint(vocabulary, (logits.shape[0],), device=logits.device)
        _, lse, count = m.cross_entropy_forward(logits, target)
        one = torch.ones((), device=logits.device)
        shapes = {
            f"{warps} warps, {unroll} vectors": {"launch_shape": given(m.Launch(32 * warps, 8, unroll, warps))}
            for warps in (1, 2, 4, 8, 16, 32)
            for unroll in (1, 2)
        }
        yield Case(
            f"forward {vocabulary}",
            2 * logits.numel(),
            lambda a=(logits, target): m.cross_entropy_forward(*a),
            m,
            shapes,
        )
        pieces = {f"{warps} warps": {"backward_shape": given((512 * warps, warps))} for warps in (2, 4, 8, 16)}
        arguments = (one, logits, target, lse, count)
        yield Case(
            f"backward {vocabulary}", 4 * logits.numel(), lambda a=arguments: m.cross_entropy_backward(*a), m, pieces
        )
        losses = torch.empty(logits.shape[0], device=logits.device)
        part = (logits[:2048], target[:2048], losses[:2048], one)
        yield Case(
            f"loss and gradient {vocabulary}",
            4 * part[0].numel(),
            lambda a=part: m.cross_entropy_gradient_(*a),
            m,
            shapes,
        )


def of_bias_gelu(place: Place) -> Iterator[Case]:
    m = bias_gelu
    x, bias = place.randn(place.rows(16384), 16384), place.randn(16384)
    grad = place.randn(*x.shape)
    tiles = [(block, rows, warps) for block in (1024, 2048, 4096) for rows in (1, 2, 4) for warps in (4, 8)]
    for form in m.FORMS:
        forward = {
            f"{block} x {rows}, {warps} warps": {"launch_shape": given(m.Launch(block, rows, warps, 128, 0))}
            for block, rows, warps in tiles
            if 8 <= block * rows / (32 * warps) <= 32
        }
        yield Case(f"{form} forward", 4 * x.numel(), lambda f=form: m.bias_gelu_forward(x, bias, f), m, forward)
        backward = {
            f"{block} x {rows}, {warps} warps, {programs} programs": {
                "launch_shape": given(m.Launch(block, rows, warps, 2048 // (warps * programs), programs))
            }
            for block, rows, warps in tiles
            for programs in (2, 3, 4, 6)
            if 8 <= block * rows / (32 * warps) <= 16 and warps * programs <= 48
        }
        yield Case(
            f"{form} backward", 6 * x.numel(), lambda f=form: m.bias_gelu_backward(grad, x, bias, f), m, backward
        )


def of_swiglu(place: Place) -> Iterator[Case]:
    m = swiglu
    gate, up, grad = (place.randn(place.rows(16384), 14336) for _ in range(3))
    shapes = {
        f"{elements} elements, {warps} warps": {"tile_shape": given((1, elements)), "_WARPS": warps}
        for elements in (1024, 2048, 4096, 8192)
        for warps in (2, 4, 8)
        if 8 <= elements / (32 * warps) <= 32
    }
    yield Case("forward", 6 * gate.numel(), lambda: m.swiglu_forward(gate, up), m, shapes)
    yield Case("backward", 10 * gate.numel(), lambda: m.swiglu_backward(grad, gate, up), m, shapes)


def of_rope(place: Place) -> Iterator[Case]:
    m = rope
    for heads, kv_heads, width in ((32, 8, 128), (32, 32, 64)):
        q, k = place.randn(place.rows(8), 8192, heads, width), place.randn(place.rows(8), 8192, kv_heads, width)
        if place.few is not None:
            q, k = q[:, : place.few], k[:, : place.few]
        angle = place.randn(q.shape[1], width // 2, dtype=torch.float32)
        shapes = {f"{warps} warps": {"warps_for": given(warps)} for warps in (1, 2, 4, 8)}
        arguments = (q, k, angle.cos(), angle.sin())
        yield Case(
            f"{kv_heads} kv heads of {width}",
            4 * (q.numel() + k.numel()),
            lambda a=arguments: m.rope_forward(*a),
            m,
            shapes,
        )


def of_adamw(place: Place) -> Iterator[Case]:
    m = adamw
    sizes = [2048 * 8192] * 60 if place.few is None else [5000, 70]
    grads, params = ([place.randn(size) for size in sizes] for _ in range(2))
    optimizer = m.AdamW(params)
    shapes = {
        f"{warps} warps, {registers} registers": {"_WARPS": warps, "_REGISTERS": registers}
        for warps in (4, 8)
        for registers in (32, 40, 48, 64)
    }
    yield Case("16 bits with masters", 28 * sum(sizes), lambda: optimizer.step(grads), m, shapes)


def of_paged_attention(place: Place) -> Iterator[Case]:
    m = paged_attention
    for batch, context in ((32, 4096), (128, 4096), (64, 16384), (1, 32768)):
        if place.few is not None:
            batch, context = 2, 64
        pages = context // 16
        k, v = (place.randn(batch * pages, 8, 16, 128) for _ in range(2))
        tables = torch.randperm(batch * pages, device=k.device).to(torch.int32).view(batch, pages)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=k.device)
        shapes = {
            f"{tile} positions, {warps} warps, {stages} stages, {programs} programs": {
                "launch_shape": given(m.Launch(tile, warps, stages, min(2, programs), programs))
            }
            for tile in (32, 64, 128)
            for warps in (2, 4, 8)
            for stages in (3, 4, 5)
            for programs in (1, 2, 3, 4)
            if tile * 128 * 2 * 2 * (stages - 2) * programs <= 200 * 1024
        }
        arguments = (place.randn(batch, 32, 128), k, v, tables, lengths)
        yield Case(
            f"batch {batch}, context {context}", 4 * k.numel(), lambda a=arguments: m.paged_decode(*a), m, shapes
        )


def of_weight_only_matmul(place: Place) -> Iterator[Case]:
    m = weight_only_matmul
    tall = ((32, 2), (64, 4), (128, 4), (128, 8), (256, 8))
    for many, columns, (bits, group) in itertools.product((14336, 4096), (4096, 14336), ((8, None), (4, 128))):
        if many == columns:
            continue
        q = torch.randint(-8, 8, (place.rows(many), columns), dtype=torch.int8, device=place.device)
        packed, scales = m.pack(q, bits, group), place.randn(1 if group is None else columns // group, len(q))
        sizes = ((1, 8, 4), (1, 16, 8), (8, 16, 8), (16, 16, 4), (64, 64, 2), (256, 64, 1), (256, 128, 1))
        for tokens, wide, splits in sizes:
            x = place.randn(tokens, columns)
            tiles = ((16, 1), (32, 1), *tall) if tokens == 1 else tall
            shapes = {
                f"{rows} rows, {warps} warps, {stages} stages, {parts} splits{'' if tricks else ', converted'}": {
                    "launch_shape": given(m.Launch(rows, wide, warps, stages, parts, tricks))
                }
                for (rows, warps), stages, parts in itertools.product(tiles, (3, 4, 5, 7), (1, 2, 3, 4, 6, 8))
                for tricks in ((True, False) if stages == 5 else (True,))
                if parts <= splits and rows * wide <= 64 * 32 * warps
                if (16 * rows * bits + 256 * wide) * (stages - 1) <= 200 * 1024
            }
            label = f"{bits} bits, {columns} to {many}, {tokens} tokens by {wide}"
            nbytes = 2 * (packed.numel() + scales.numel() + x.numel() + tokens * len(q))
            options = {"bits": bits, "group": group}
            yield Case(label, nbytes, lambda a=(x, packed, scales), o=options: m.weight_only_matmul(*a, **o), m, shapes)


FAMILIES: dict[str, Callable[[Place], Iterator[Case]]] = {
    name.removeprefix("of_"): value for name, value in list(globals().items()) if name.startswith("of_")
}


def run(case: Case, attributes: dict[str, Any]) -> Any:
    """The call under a candidate; no attributes are the module as it is."""
    if not attributes:
        return case.call()
    with mock.patch.multiple(case.module, **attributes):
        return case.call()


def timed(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds by candidate, ``as it is`` among them; a candidate that cannot be launched is left out, named."""
    lanes = {"as it is": {}, **case.candidates}
    for name in list(lanes):
        try:
            run(case, lanes[name])
            torch.cuda.synchronize()
        except Exception as error:
            print(f"#   {case.label}: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            del lanes[name]
    return seconds({name: partial(run, case, lane) for name, lane in lanes.items()}, rounds)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.launch_shapes", description=__doc__)
    parser.add_argument("families", nargs="*", choices=[[], *FAMILIES], help="all when none is named")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--best", type=int, default=6, help="how many of a case to print")
    parser.add_argument(
        "--compile", metavar="I/N", help="compile every N-th candidate from the I-th on, and time nothing"
    )
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose printed name has this text")
    parser.add_argument("--json", metavar="FILE", help="append every median to this file, a line a case")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here: launch shapes are compared by their times", file=sys.stderr)
        return 2
    first, every = (int(n) for n in args.compile.split("/")) if args.compile else (0, 0)
    turn = 0
    for family in args.families or FAMILIES:
        for case in FAMILIES[family](Place("cuda", 1056 if every else None)):
            if args.case not in case.label:
                continue
            if every:
                for attributes in case.candidates.values():
                    turn += 1
                    if turn % every == first:
                        run(case, attributes)
                continue
            seconds = timed(case, args.rounds)
            order = sorted(seconds, key=lambda name: seconds[name])
            shown = [*order[: args.best], *(["as it is"] if "as it is" not in order[: args.best] else [])]
            rates = " | ".join(f"{name} {case.nbytes / seconds[name] / 1e12:.2f}" for name in shown)
            print(f"{family}, {case.label}: {rates}", flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps({"family": family, "label": case.label, "seconds": seconds}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
