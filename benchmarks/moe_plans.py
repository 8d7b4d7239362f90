"""Who computes the products of routed experts fastest: ``python3 -m benchmarks.moe_plans [MODEL…]``, about a minute.

Every product of a training step is timed by itself on a model's experts with each way of computing it, in interleaved
rounds, then the passes between products, then the whole step with each plan (:mod:`kernels.moe_plan`) beside torch's
grouped product, eager and compiled. Plans have one way for all products, two, or the best of each. Rounds are in random
order, since the GPU slows as it warms. Results are checked first: a product's against the others' of its name, a step's
output and every gradient against the same in float32, as a multiple of the error of torch's grouped product there.

Printed are milliseconds and TFLOP/s; for a step milliseconds forward and for both, GiB of its peak, and that multiple.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.moe_shapes import MODELS, Layer
from benchmarks.rounds import seconds
from impls.moe.moe_grouped_experts import grouped_mm, oracle
from kernels.moe_combine import combine
from kernels.moe_experts import gate_backward, gated_product, moe_experts, rows_product, weights_product
from kernels.moe_gate import gate, gate_pass, spread
from kernels.moe_library import spans
from kernels.moe_order import expert_order
from kernels.moe_plan import GROUPED_MM, HOPPER, MM, Shapes, Tile, choose, launch_shapes

#: An error above this share of the largest result is said and the candidate not timed.
LARGEST_ERROR = 2.0**-6
PRODUCTS = ("gate and up", "down", "grad of act", "grad of x", "weights, up", "weights, down")


def ways(present: Shapes, hopper: bool = True) -> dict[str, Shapes]:
    """Plans of which every product is computed in one way."""
    found = {"ours": present, "grouped_mm": Shapes(*[GROUPED_MM] * 5), "mm": Shapes(*[MM] * 5)}
    if hopper and present.rows == HOPPER.rows:  # the order has one number of rows a tile
        found |= {f"hopper g{group}": Shapes(*[HOPPER._replace(group=group)] * 5) for group in (8, 16)}
    return found


def mixes(hopper: bool = True) -> dict[str, Shapes]:
    """Plans of which products are computed in two ways; none of them is picked."""
    forward = Shapes(HOPPER, HOPPER, GROUPED_MM, GROUPED_MM, GROUPED_MM)
    return {"hopper g8, grouped backward": forward} if hopper else {}


def best_of_each(known: Mapping[str, Shapes], times: Mapping[str, float], passes: Mapping[str, float]) -> Shapes:
    """The plan whose products, with the passes that each needs beside it, took least time; all without a wait."""

    def cost(way: str, *products: str) -> float:
        beside = {"gate and up": ("spread", "gate"), "grad of act": ("spread", "gate backward")}
        names = [name for product in products for name in beside.get(product, ())] if way != "ours" else []
        return sum(times.get(f"{p}|{way}", float("inf")) for p in products) + sum(passes[name] for name in names)

    def best(*products: str) -> str:
        return min((way for way in known if way != "mm"), key=lambda way: cost(way, *products))

    return Shapes(
        known[best("gate and up")].gated,
        known[best("down")].down,
        known[best("grad of act")].gate_backward,
        known[best("grad of x")].back,
        known[best("weights, up", "weights, down")].weights,
    )


class Step:
    """A layer's tensors by row, and its products as calls for a plan."""

    def __init__(self, layer: Layer, hopper: bool = True) -> None:
        self.layer, self.choices = layer, layer.model.choices
        self.ways, self.mixes = ways(layer.present, hopper), mixes(hopper)
        self.orders = {rows: self._order(rows) for rows in (16, layer.present.rows)}
        self.rows = spread(layer.x, self._order(16), self.choices)
        self.grad_rows = spread(layer.grad, self._order(16), self.choices)
        self.weighted = layer.act

    def _order(self, rows: int) -> Any:
        order = self.layer.order(rows)
        return order._replace(spans=spans(order))

    def products(self, plan: Shapes) -> dict[str, Callable[[], torch.Tensor]]:
        """Its products, without the passes beside them but with the ends that a product of ours has."""
        layer, order, choices = self.layer, self.orders[plan.rows], self.choices

        def gate_and_up(tile: Tile) -> torch.Tensor:
            if tile.by == "pointers":
                return gated_product(layer.x, layer.gate_up, order, choices, tile, keep=True)[0]
            return rows_product(self.rows, layer.gate_up, order, tile, across=False)

        def grad_of_act(tile: Tile) -> torch.Tensor:
            if tile.by == "pointers":
                return gate_backward(layer.grad, layer.down, layer.kept, layer.router, order, tile)[0]
            return rows_product(self.grad_rows, layer.down, order, tile, across=True)

        weights = plan.weights
        return {
            "gate and up": lambda: gate_and_up(plan.gated),
            "down": lambda: rows_product(layer.act, layer.down, order, plan.down, across=False),
            "grad of act": lambda: grad_of_act(plan.gate_backward),
            "grad of x": lambda: rows_product(layer.kept, layer.gate_up, order, plan.back, across=True),
            "weights, up": lambda: weights_product(layer.kept, layer.x, order, choices, weights, False, self.rows),
            "weights, down": lambda: weights_product(
                layer.grad, self.weighted, order, choices, weights, True, self.grad_rows
            ),
        }

    def passes(self) -> dict[str, Callable[[], object]]:
        """What lies between products."""
        layer, order, choices = self.layer, self.orders[16], self.choices
        grad = layer.act.clone()
        return {
            "order": lambda: expert_order(layer.chosen, layer.model.experts, 16),
            "spread": lambda: spread(layer.x, order, choices),
            "gate": lambda: gate(layer.kept, order),
            "gate backward": lambda: gate_pass(grad, layer.kept, layer.router, order),
            "combine": lambda: combine(self.rows, order.slots_P, layer.router, layer.model.tokens, choices),
        }

    def flops(self, product: str) -> float:
        """2·P·D·F, twice that where gate and up are both in it."""
        return self.layer.flops("gated" if product in ("gate and up", "grad of x", "weights, up") else "down")

    def leaves(self) -> list[torch.Tensor]:
        """x, router, gate and up, and down, which want a gradient."""
        layer = self.layer
        return [t.detach().requires_grad_() for t in (layer.x, layer.router, layer.gate_up, layer.down)]

    def both(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Output and gradients."""
        leaves = self.leaves()
        out = function(leaves[0], self.layer.chosen, *leaves[1:])
        return [out.detach(), *torch.autograd.grad(out, leaves, self.layer.grad)]

    def truth(self) -> list[torch.Tensor]:
        """Output and gradients by the definition in float32."""
        leaves = [t.detach().float().requires_grad_() for t in self.leaves()]
        out = oracle(leaves[0], self.layer.chosen, *leaves[1:])
        return [out.detach(), *torch.autograd.grad(out, leaves, self.layer.grad.float())]


def errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """The relative error of each in norm."""
    return [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]


def tried(name: str, call: Callable[[], Any]) -> Any:
    """What a call gives; None, said, where it fails."""
    try:
        return call()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None


def measure_products(step: Step) -> Shapes:
    """One line a product: each way's milliseconds and TFLOP/s; gives the plan of the best of each."""
    calls: dict[str, Callable[[], object]] = {}
    for product in PRODUCTS:
        wants: dict[torch.Size, torch.Tensor] = {}
        for way, plan in step.ways.items():
            call = step.products(plan)[product]
            found = tried(f"{product}, {way}", call)
            if found is None:
                continue
            want = wants.setdefault(found.shape, found)
            off = float((found - want).abs().max() / want.abs().max())
            if off <= LARGEST_ERROR or (product == "grad of act" and way == "ours"):
                calls[f"{product}|{way}"] = call
            else:
                print(f"{product}, {way}: its largest error is {off:.2g} of the largest result")
    times = seconds(calls)
    for product in PRODUCTS:
        said = (
            f"{key.split('|')[1]} {1e3 * time:.3f}/{step.flops(product) / time / 1e12:.0f}"
            for key, time in times.items()
            if key.startswith(product + "|")
        )
        print(f"{product:13} {'  '.join(said)}", flush=True)
    found = seconds(step.passes())
    print("passes, µs: " + ", ".join(f"{label} {1e6 * time:.0f}" for label, time in found.items()), flush=True)
    return best_of_each(step.ways, times, found)


def measure_steps(step: Step, best: Shapes, compiled: bool) -> None:
    """One line a plan: milliseconds forward, both, GiB of both's peak, and its error over torch's grouped product's."""
    functions: dict[str, Callable[..., torch.Tensor]] = {"torch_grouped_mm": grouped_mm}
    if compiled:
        functions["torch_compile"] = torch.compile(grouped_mm)
    layer = step.layer
    picked = choose(layer.pairs, layer.x, layer.gate_up, layer.down)
    for label, plan in (("best of each", best), ("picked", picked)):
        print(f"{label}: " + ", ".join(f"{t.by} g{t.group}" for t in plan), flush=True)
    for label, plan in (step.ways | step.mixes | {"best of each": best}).items():
        functions[label] = lambda *tensors, plan=plan: moe_experts(*tensors, plan=plan)
    truth = step.truth()
    base = errors(step.both(grouped_mm), truth)
    ratio: dict[str, float] = {}
    peak: dict[str, float] = {}
    for label, function in functions.items():
        results = tried(label, lambda f=function: step.both(f))
        if results is None:
            continue
        ratio[label] = max(a / b for a, b in zip(errors(results, truth), base, strict=True))
        del results
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step.both(function)
        peak[label] = (torch.cuda.max_memory_allocated() - before) / 2**30
    del truth
    tensors = step.leaves()
    inputs = [tensors[0].detach(), step.layer.chosen, *(t.detach() for t in tensors[1:])]
    calls: dict[str, Callable[[], object]] = {}
    for label in ratio:
        calls[label + "|both"] = lambda f=functions[label]: step.both(f)
        if label != "torch_compile":  # which would be compiled once more
            calls[label + "|forward"] = lambda f=functions[label]: f(*inputs)
            calls[label + "|forward"]()
    times: Mapping[str, float] = seconds(calls)
    work = 3 * sum(step.flops(product) for product in ("gate and up", "down"))
    for label in sorted(ratio, key=lambda label: times[label + "|both"]):
        both, forward = times[label + "|both"], times.get(label + "|forward", float("nan"))
        print(
            f"{label:27} forward {1e3 * forward:.3f} both {1e3 * both:.3f} ms, {work / both / 1e12:.0f} TFLOP/s, "
            f"{peak[label]:.2f} GiB, error x{ratio[label]:.2f}",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> int:
    """Measures the named models, or Mixtral's and Qwen3's of 4,096 tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", choices=[*MODELS, []], help=", ".join(MODELS))
    parser.add_argument("--no-hopper", action="store_true", help="leave our kernel with specialised warps out")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: the interpreter's times say nothing", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    for name in asked.model or ["mixtral_4k", "qwen3_4k"]:
        model = MODELS[name]
        print(f"{name}: milliseconds/TFLOP/s", flush=True)
        layer = Layer(model, "cuda")
        layer.present = launch_shapes(model.tokens * model.choices, model.experts, 2)
        step = Step(layer, not asked.no_hopper)
        best = measure_products(step)
        measure_steps(step, best, not asked.no_compile)
        del layer, step
        torch.compiler.reset()  # the next model's sizes are compiled as they are, too
    return 0


if __name__ == "__main__":
    sys.exit(main())
