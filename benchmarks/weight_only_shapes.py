"""Which launch of the few tokens' kernel is fastest: ``python3 -m benchmarks.weight_only_shapes [--case TEXT]``.

Every candidate for :func:`kernels.weight_only_tiles.launch_shape` is held to the float64 product and then timed, the L2
overwritten before each call, in rounds of random order beside the module's own choice, the kernel over rows
(:mod:`kernels.weight_only_matmul`), torch's product with int4 weights and the one with weights of 16 bits. A line a
case: microseconds, the floor of its bytes first. ``--compile I/N`` only compiles every N-th candidate: a few such
processes side by side fill Triton's cache first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.rounds import seconds
from impls.precision.weight_only_quant import COPY, INNER_TILES, quantize, widen
from kernels import weight_only_tiles
from kernels.weight_only_matmul import pack, weight_only_matmul
from kernels.weight_only_tiles import Launch, pack_tiles

UNIT = 2.0**-8  # bfloat16: what an error may be of the largest result
GROUP = 128


class Case(NamedTuple):
    """One product."""

    bits: int
    tokens: int
    outputs: int = 14336
    inputs: int = 4096

    def __str__(self) -> str:
        return f"int{self.bits} {self.inputs} to {self.outputs}, {self.tokens} tokens"


CASES = [Case(4, 1), Case(8, 1), Case(4, 16), Case(8, 16), Case(4, 8), Case(4, 1, 4096, 14336)]


def candidates(case: Case) -> Iterator[Launch]:
    """Programs of 2 to 16 warps that ask for one to four blocks at once, and some of two tiles."""
    tokens = 8 if case.tokens <= 8 else 16
    for warps in (2, 4, 8, 16):
        for ahead in (1, 2, 4):
            if ahead <= (4 if case.bits == 4 else 2) and 4 <= warps * ahead <= 32:
                yield Launch(tokens, warps, ahead)
    yield from (Launch(tokens, warps, ahead, tiles=2) for warps, ahead in ((4, 1), (8, 1), (8, 2), (16, 1)))
    yield Launch(tokens, 8, 1, tiles=2, registers=96)
    yield Launch(tokens, 4, 2, registers=72)
    yield Launch(tokens, 4, 2, splits=2)


class Product:
    """A case's tensors on a device, and what can be called on them."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.group = GROUP if case.bits == 4 else None
        weight = torch.randn(case.outputs, case.inputs, device=device, dtype=torch.bfloat16) * case.inputs**-0.5
        self.q, self.scales = quantize(weight, case.bits, self.group)
        self.x = torch.randn(case.tokens, case.inputs, device=device, dtype=torch.bfloat16)
        self.tiles = pack_tiles(self.q, case.bits, self.group)
        self.nbytes = 2 * (self.tiles.numel() + self.scales.numel() + self.x.numel() + case.tokens * case.outputs)

    def truth(self) -> torch.Tensor:
        return self.x.double() @ widen(self.q, self.scales.double(), self.group).T

    def few(self, shape: Launch | None = None) -> torch.Tensor:
        """The kernel over tiles with that launch, or with its own choice."""

        def call() -> torch.Tensor:
            return weight_only_tiles.weight_only_tiles(
                self.x, self.tiles, self.scales, bits=self.case.bits, group=self.group
            )

        if shape is None:
            return call()
        with mock.patch.object(weight_only_tiles, "launch_shape", return_value=shape):
            return call()

    def peers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """What the kernel is compared with on a GPU."""
        bits, group = self.case.bits, self.group
        packed, weight = pack(self.q, bits, group), widen(self.q, self.scales, group)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "16-bit weights": lambda: self.x @ weight.T,
            "over rows": lambda: weight_only_matmul(self.x, packed, self.scales, bits=bits, group=group),
        }
        if bits == 4 and self.x.is_cuda:
            nibbles = (self.q + 8).to(torch.uint8)
            tiled = torch.ops.aten._convert_weight_to_int4pack(nibbles[:, ::2] << 4 | nibbles[:, 1::2], INNER_TILES)
            zeros = torch.stack([self.scales, torch.zeros_like(self.scales)], dim=2)
            calls["torch_int4"] = lambda: torch.ops.aten._weight_int4pack_mm(self.x, tiled, GROUP, zeros)
        return calls


def name(shape: Launch) -> str:
    """A launch in few characters: warps x blocks ahead x tiles, at most so many registers, in so many splits."""
    tiles = f"x{shape.tiles}" if shape.tiles > 1 else ""
    registers = f" at {shape.registers}" if shape.registers else ""
    splits = f" in {shape.splits}" if shape.splits > 1 else ""
    return f"{shape.warps}x{shape.ahead}{tiles}{registers}{splits}"


def measure(case: Case, rounds: int, best: int, device: str = "cuda") -> str:
    """A case's line: the peers and the present choice, then the `best` candidates. Wrong ones are said, not timed."""
    product = Product(case, device)
    truth = product.truth()
    calls: dict[str, Callable[[], torch.Tensor]] = {**product.peers(), "as it is": product.few}
    peers = list(calls)
    calls |= {name(shape): lambda s=shape: product.few(s) for shape in candidates(case)}  # type: ignore[misc]
    wrong = []
    for label in list(calls):
        try:
            off = float((calls[label]().double() - truth).abs().max() / truth.abs().max())
            keep = off <= UNIT or label in peers
            said = "" if off <= UNIT else f"{label}: off by {off:.2g}"
        except Exception as error:
            keep, said = False, f"{label}: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        wrong += [said] if said else []
        if not keep:
            del calls[label]
    found = seconds(calls, rounds)
    ours = sorted(found.keys() - set(peers), key=lambda label: found[label])
    order = [*(p for p in peers if p in found), *ours[:best]]
    times = "; ".join(f"{label} {1e6 * found[label]:.1f}" for label in order)
    return f"{case}: floor {1e6 * product.nbytes / COPY:.1f}; {times}" + "".join(f"\n  WRONG {w}" for w in wrong)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.weight_only_shapes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--best", type=int, default=9, help="how many candidates of a case to print")
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose printed name has this text")
    parser.add_argument("--compile", metavar="I/N", help="compile every N-th candidate from the I-th on; time nothing")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here: launch shapes are compared by their times", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    cases = [case for case in CASES if args.case in str(case)]
    if args.compile:
        first, every = (int(n) for n in args.compile.split("/"))
        small = [(c._replace(outputs=64), shape) for c in cases for shape in (None, *candidates(c))]
        for case, shape in small[first::every]:
            Product(case, "cuda").few(shape)
        return 0
    for case in cases:
        print(measure(case, args.rounds, args.best), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
