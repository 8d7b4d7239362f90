"""Which tiles are fastest for the products of routed experts: ``python3 -m benchmarks.moe_shapes [MODEL…]``.

Every product of the layer is timed by itself on a model's experts, in interleaved rounds, the present choice
(:func:`kernels.moe_plan.launch_shapes`) among the candidates, and torch's grouped product of the same sizes beside
them; then the steps that are no products, and the whole. Printed are microseconds, and TFLOP/s or, where few tokens
make memory bind, TB/s of the weights. A candidate whose result is another is said and not timed. Rows of a tile are
those of the order's, so the four products over rows must agree on them: compare candidates of one number of rows. Who
computes a product best, our kernel or a library's, is :mod:`benchmarks.moe_plans`'s question.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.rounds import seconds
from kernels.moe_combine import combine
from kernels.moe_experts import gate_backward, gated_product, moe_experts, rows_product, weights_product
from kernels.moe_order import Order, expert_order
from kernels.moe_plan import Tile, launch_shapes

SHARED_BYTES = 227 * 1024


class Model(NamedTuple):
    """One layer and how many tokens it is given."""

    tokens: int
    width: int
    inner: int
    experts: int
    choices: int


MODELS = {
    "mixtral_4k": Model(4096, 4096, 14336, 8, 2),
    "qwen3_4k": Model(4096, 2048, 768, 128, 8),
    "qwen3_16k": Model(16384, 2048, 768, 128, 8),
    "mixtral_decode64": Model(64, 4096, 14336, 8, 2),
    "qwen3_decode64": Model(64, 2048, 768, 128, 8),
}
#: Tiles as (rows, columns, block, warps, stages, group), columns of gate and up together for the gated product.
_MANY = [(128, 256, 64, 8, stages, 8) for stages in (3, 4, 7)] + [(128, 256, 64, 8, 4, group) for group in (4, 16, 32)]
_MANY += [(128, 256, 32, 8, 6, 8), (128, 128, 64, 8, 4, 8), (128, 128, 64, 4, 3, 8), (128, 128, 64, 4, 4, 8)]
_MANY += [(64, 256, 64, 4, 3, 8), (64, 256, 64, 4, 4, 8), (64, 256, 64, 8, 4, 8), (64, 128, 64, 4, 4, 8)]
_FEW = [(columns, block, stages) for columns in (32, 64, 128, 256) for block in (64, 128) for stages in (3, 4, 6)]


def candidates(product: str, present: Tile) -> Iterator[Tile]:
    """Tiles that fit the shared memory; turned, and of as many rows, where the present choice is."""
    tiles = [(present.rows, c, k, 4, s, 64) for c, k, s in _FEW] if present.turned else _MANY
    for rows, columns, block, warps, stages, group in tiles:
        buffers = (stages + 1) // 2 if product == "weights" else stages
        if (rows + columns) * block * 2 * buffers <= SHARED_BYTES:
            half = columns // 2 if product == "gated" else columns
            yield Tile(rows, half, block, warps, stages, group, present.turned)


class Layer:
    """A layer's tensors on the device, an order for every number of rows of a tile, and its products as calls."""

    def __init__(self, model: Model, device: str) -> None:
        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16) * scale

        tokens, width, inner, experts, choices = self.model = model
        self.pairs = tokens * choices
        self.chosen = torch.rand(tokens, experts, device=device).topk(choices, dim=1).indices
        self.router = torch.softmax(normal(tokens, choices), 1)
        self.x, self.grad = normal(tokens, width), normal(tokens, width)
        self.gate_up = normal(experts, 2 * inner, width, scale=width**-0.5)
        self.down = normal(experts, width, inner, scale=inner**-0.5)
        self._orders: dict[int, Order] = {}
        order = self.order(16)
        act, kept = gated_product(self.x, self.gate_up, order, choices, Tile(16, 32, 32, 4, 2, 8), keep=True)
        assert kept is not None
        self.act, self.kept = act, kept
        self.present = launch_shapes(self.pairs, experts, 2)

    def order(self, rows: int) -> Order:
        if rows not in self._orders:
            self._orders[rows] = expert_order(self.chosen, self.model.experts, rows)
        return self._orders[rows]

    def product(self, name: str, tile: Tile) -> Callable[[], torch.Tensor]:
        """One product with that tile; of several results the first."""
        order, choices = self.order(tile.rows), self.model.choices
        flat = tile._replace(turned=False)
        return {
            "gated": lambda: gated_product(self.x, self.gate_up, order, choices, tile, keep=False)[0],
            "down": lambda: rows_product(self.act, self.down, order, tile, across=False),
            "gate_backward": lambda: gate_backward(self.grad, self.down, self.kept, self.router, order, flat)[0],
            "back": lambda: rows_product(self.kept, self.gate_up, order, flat, across=True),
            "weights": lambda: weights_product(self.kept, self.x, order, choices, flat, gather_a=False),
        }[name]

    def flops(self, name: str) -> float:
        """2·P·D·F, twice that where gate and up are both in it."""
        double = 2 if name in ("gated", "back", "weights") else 1
        return 2.0 * double * self.pairs * self.model.width * self.model.inner

    def beside(self) -> dict[str, tuple[Callable[[], object], float]]:
        """What the products are compared with, and the steps that are none: the call, and its FLOPs or 0."""
        choices, present = self.model.choices, self.present
        order = self.order(present.gated.rows)
        token = order.order_R.long() // choices
        rows, ends = self.x.index_select(0, token), order.ends_E
        half = self.flops("down")
        return {
            "grouped_mm, gate and up": (lambda: F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends), 2 * half),
            "grouped_mm, down": (lambda: F.grouped_mm(self.act, self.down.transpose(1, 2), offs=ends), half),
            "grouped_mm, weights": (lambda: F.grouped_mm(self.kept.T, rows, offs=ends), 2 * half),
            "order": (lambda: expert_order(self.chosen, self.model.experts, present.gated.rows), 0.0),
            "gather of tokens": (lambda: self.x.index_select(0, token), 0.0),
            "combine": (lambda: combine(rows, order.slots_P, self.router, self.model.tokens, choices), 0.0),
            "whole forward": (
                lambda: moe_experts(self.x, self.chosen, self.router, self.gate_up, self.down),
                3 * half,
            ),
        }


def measure(name: str, best: int) -> None:
    """Print a model's products and steps, the `best` candidates of each and the present choice."""
    layer = Layer(MODELS[name], "cuda")
    few = layer.present.gated.turned
    for product in ("gated", "down") if few else ("gated", "down", "gate_backward", "back", "weights"):
        present = getattr(layer.present, product)
        want = layer.product(product, present)().float()
        calls: dict[str, Callable[[], object]] = {f"{tuple(present)} (present)": layer.product(product, present)}
        for tile in candidates(product, present):
            call = layer.product(product, tile)
            try:
                off = float((call().float() - want).abs().max() / want.abs().max())
            except Exception as error:
                print(f"{name} {product} {tuple(tile)}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            if off > 2.0**-6:
                print(f"{name} {product} {tuple(tile)}: its largest error is {off:.2g} of the largest result")
            elif tile != present:
                calls[str(tuple(tile))] = call
        found = sorted(seconds(calls).items(), key=lambda item: item[1])
        for label, time in [item for place, item in enumerate(found) if place < best or "present" in item[0]]:
            print(f"{name:16} {product:14} {label:44} {said(layer, layer.flops(product), time, few)}", flush=True)
    steps = layer.beside()
    for label, time in seconds({label: call for label, (call, _) in steps.items()}).items():
        print(f"{name:16} {label:59} {said(layer, steps[label][1], time, few)}", flush=True)


def said(layer: Layer, flops: float, time: float, few: bool) -> str:
    """A time, and the rate that goes with it."""
    rate = f"{flops / time / 1e12:7.1f} TFLOP/s" if flops else ""
    if few and flops:  # each weight is read once, whoever its rows are
        weights = flops / (2.0 * layer.pairs) * len(layer.chosen.unique()) * 2
        rate = f"{weights / time / 1e12:7.2f} TB/s"
    return f"{1e6 * time:9.1f} µs {rate}"


def main(arguments: list[str] | None = None) -> int:
    """Measures the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", choices=[*MODELS, []], help=", ".join(MODELS))
    parser.add_argument("--best", type=int, default=4, help="how many candidates of each product are printed")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: the interpreter's times say nothing", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    for name in asked.model or MODELS:
        measure(name, asked.best)
    return 0


if __name__ == "__main__":
    sys.exit(main())
