"""The attention kernels and tiles worth measuring against each other, each with what is expected of it and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.flash_attention_plan import Config, Tile, backward_launch, choose_config, forward_launch
from kernels.flash_attention_plan import query_gradient_launch as second_pass_launch
from kernels.flash_attention_problem import Problem
from kernels.launch import Launch


@dataclass(frozen=True)
class Candidate:
    """One configuration for one head dimension. `predicted` is the expected share of cuDNN's rate, `why` the reason."""

    name: str
    direction: str
    head_dim: int
    config: Config
    predicted: float
    why: str
    group: str = "triton"


def problem_for(head_dim: int, causal: bool, batch: int, heads: int, q_len: int, kv_len: int) -> Problem:
    """A dense problem with as many key heads as query heads."""
    right = 0 if causal and q_len > 1 else None
    return Problem(batch, heads, heads, q_len, kv_len, head_dim, None, right, head_dim**-0.5, 0.0, varlen=False)


def candidates(head_dim: int, causal: bool, direction: str, capability: tuple[int, int] | None) -> list[Candidate]:
    """What to measure; the first is Triton's own choice of tiles. None is the interpreter."""
    chosen = choose_config(problem_for(head_dim, causal, 1, 1, 4096, 4096), capability, describable=True)
    base = replace(chosen, hopper=None, hopper_backward=False)
    tile = base.forward if direction == "forward" else base.backward
    if capability is None or capability < (9, 0):
        default = Candidate(f"triton {tile}", direction, head_dim, base, 0.6, "the choice for every other device")
        described = replace(default, name=f"triton {tile} described", config=replace(base, descriptors=True))
        return [default, described] if capability is None else [default]
    found = (
        _triton_forward(head_dim, causal, base) if direction == "forward" else _triton_backward(head_dim, causal, base)
    )
    found.sort(key=lambda candidate: candidate.config != base)  # the choice first, the rest in order
    if head_dim in (64, 128) and capability == (9, 0):
        found += _hopper(head_dim, causal, base) if direction == "forward" else _hopper_backward(head_dim, base)
    return found


def _triton_forward(head_dim: int, causal: bool, base: Config) -> list[Candidate]:
    found = [
        Candidate(f"triton {tile}", "forward", head_dim, replace(base, forward=tile, stagger=(0, 0)), share, why)
        for tile, share, why in ((tile, share - 0.02 * causal, why) for tile, share, why in _FORWARD[head_dim])
    ]
    if base.stagger[0]:
        why = "two programs out of step from the start, so that products meet a softmax"
        found.append(Candidate(f"triton {base.forward} out of step", "forward", head_dim, base, 0.82, why))
    return found


def _triton_backward(head_dim: int, causal: bool, base: Config) -> list[Candidate]:
    found = []
    for tile, ways, share, why in _BACKWARD[head_dim]:
        if causal and ways == ("dK",):
            continue  # the mask takes the registers: two values spill
        beside = tuple(way for way in ways if way in ("dV", "dK"))
        config = replace(
            base, backward=tile, beside=beside, two_passes="two passes" in ways,
            descriptor_adds=base.descriptor_adds and "adds by threads" not in ways,
        )  # fmt: skip
        words = [way for way in ways if way not in beside]
        words += [f"{' and '.join(beside)} beside"] if beside else []
        name = " ".join(["triton", str(tile), *words])
        found.append(Candidate(name, "backward", head_dim, config, share - 0.03 * causal, why))
    return found


def is_picked(candidate: Candidate, causal: bool, seq: int = 4096) -> bool:
    """Whether `flash_attention` picks this by itself on a part of capability 9.0, for that many queries and keys."""
    problem = problem_for(candidate.head_dim, causal, 1, 1, seq, seq)
    ours, chosen = candidate.config, choose_config(problem, (9, 0), describable=True)
    if candidate.direction == "forward":
        same = (ours.forward, ours.stagger) == (chosen.forward, chosen.stagger)
        return ours.hopper == chosen.hopper and (ours.hopper is not None or same)
    return bool(replace(ours, forward=chosen.forward, hopper=chosen.hopper) == chosen)


_BESIDE_EACH_OTHER = "two programs a multiprocessor: one's softmax beside the other's products"
_FORWARD: dict[int, tuple[tuple[Tile, float, str], ...]] = {
    64: (
        (Tile(128, 64, 4, 3), 0.90, _BESIDE_EACH_OTHER),
        (Tile(128, 64, 4, 2), 0.88, "a slot less of keys; still two programs, bound by registers"),
        (Tile(128, 128, 4, 2), 0.85, "fewer barriers a key, but the scores of 128 keys take 128 registers"),
        (Tile(128, 128, 8, 3), 0.85, "two groups of warps in one program"),
        (Tile(64, 64, 4, 3), 0.75, "three or four small programs; each key tile serves half the queries"),
    ),
    128: (
        (Tile(128, 64, 4, 2), 0.82, _BESIDE_EACH_OTHER),
        (Tile(128, 64, 4, 3), 0.60, "131 KB: one program a multiprocessor, nothing beside its softmax"),
        (Tile(128, 128, 8, 2), 0.80, "two groups of warps, one program, half the barriers"),
        (Tile(128, 64, 8, 3), 0.75, "two groups of warps, one program"),
        (Tile(64, 64, 4, 2), 0.65, "each key tile serves half the queries"),
    ),
    256: (
        (Tile(128, 64, 8, 2), 0.70, "one program a multiprocessor, two groups of warps"),
        (Tile(64, 64, 4, 2), 0.65, "one program a multiprocessor with four warps"),
    ),
}
_ONE_PASS = "one program, so exponentials and products alternate; dQ leaves by bulk reduction"
_BY_THREADS = "no staging of dQ, but an atomic add for every four elements"
_TWO_PASSES = "seven products where five suffice, no atomic adds"
# The sums that are only accumulated (dV, dK) are issued beside other work where nothing spills in the loop.
_BACKWARD: dict[int, tuple[tuple[Tile, tuple[str, ...], float, str], ...]] = {
    64: (
        (Tile(128, 128, 8, 2), (), 0.72, _ONE_PASS),
        (Tile(64, 128, 8, 2), (), 0.66, "half the work between barriers of the 128x128 tile"),
        (Tile(64, 128, 8, 3), (), 0.66, "the same with a slot more"),
        (Tile(64, 64, 4, 2), (), 0.60, "two programs a multiprocessor, twice the reduction traffic for dQ"),
        (Tile(128, 128, 8, 2), ("adds by threads",), 0.60, _BY_THREADS),
        (Tile(128, 128, 8, 2), ("two passes",), 0.60, _TWO_PASSES),
        (Tile(128, 128, 8, 2), ("dV", "dK"), 0.75, "dV's product beside dS's arithmetic, dK's beside dQ's way out"),
        (Tile(64, 64, 4, 2), ("dV", "dK"), 0.77, "the same with two programs a multiprocessor"),
    ),
    128: (
        (Tile(64, 128, 8, 2), (), 0.72, _ONE_PASS),
        (Tile(64, 64, 4, 2), (), 0.55, "one program by its 139 KB, with half the warps"),
        (Tile(64, 128, 8, 1), (), 0.55, "no prefetch: shows what the pipeline gives"),
        (Tile(64, 128, 8, 2), ("adds by threads",), 0.60, _BY_THREADS),
        (Tile(64, 128, 8, 2), ("two passes",), 0.60, _TWO_PASSES),
        (Tile(64, 128, 8, 2), ("dK",), 0.68, "dK's product beside dQ's way out; dV's beside dS would spill"),
        (
            Tile(64, 128, 8, 2),
            ("two passes", "dV"),
            0.72,
            "dV's product beside dS's arithmetic; two passes have the registers",
        ),
    ),
    256: (
        (Tile(64, 64, 8, 2), ("two passes",), 0.72, _TWO_PASSES),
        (Tile(64, 64, 8, 2), ("two passes", "dV"), 0.60, "the same with dV's product beside dS's arithmetic"),
    ),
}


def _hopper(head_dim: int, causal: bool, base: Config) -> list[Candidate]:
    from kernels.flash_attention_hopper_launch import HopperTile

    stages = 2 if head_dim == 128 else 3
    tile = HopperTile(128, stages)
    tiles: list[tuple[Any, float, str]] = [
        (HopperTile(128, stages, False), 0.92, "softmax beside the group's own product, and the other group's"),
        (HopperTile(128, stages, True), 0.95, "the same, the groups taking turns: steadier overlap"),
        (HopperTile(64, 2 * stages, False), 0.80, "half the keys a turn: twice the barriers, fewer registers"),
        (
            replace(tile, ping_pong=True, q_slots=2),
            1.00,
            "queries come a tile ahead; nobody waits for the output to leave",
        ),
    ]
    if head_dim == 64:
        three = replace(tile, q_slots=2, groups=3)
        tiles += [
            (
                replace(three, ping_pong=True),
                1.00,
                "a third group's softmax beside two groups' products; 160 registers",
            ),
            (replace(three, ping_pong=True, order="counter"), 1.02, "the same, dealt out evenly"),
        ]
    if causal:
        tiles += [
            (replace(tile, order="grid"), 0.95, "the hardware deals out tiles evenly, but each starts with cold rings"),
            (replace(tile, order="counter"), 0.98, "dealt out evenly, the next keys fetched meanwhile"),
            (replace(tile, order="counter", q_slots=2), 1.01, "the same; queries come a tile ahead"),
            (replace(tile, order="counter", q_slots=2, ping_pong=True), 1.01, "the same, the groups taking turns"),
        ]
    return [
        Candidate(f"hopper {tile}", "forward", head_dim, replace(base, hopper=tile), predicted, why, group="hopper")
        for tile, predicted, why in tiles
    ]


def _hopper_backward(head_dim: int, base: Config) -> list[Candidate]:
    why = "dQ leaves by bulk reduction, which takes no instruction of the computing warps; next scores beside it"
    config, share = replace(base, hopper_backward=True), {64: 1.05, 128: 0.95}[head_dim]
    return [Candidate("hopper one pass, dQ in bulk", "backward", head_dim, config, share, why, "hopper")]


def launches(candidate: Candidate, causal: bool, seq: int = 4096) -> list[Launch]:
    """The launches whose code a candidate's speed hangs on, over tensors without storage: to compile, not to run."""
    dim, config = candidate.head_dim, candidate.config
    problem = problem_for(dim, causal, 16384 // seq, 2048 // dim, seq, seq)
    q = torch.empty(problem.batch, seq, problem.heads, dim, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(problem.batch, problem.heads, seq, device="meta")
    if candidate.direction == "forward":
        if config.hopper is not None:
            from kernels.flash_attention_hopper_launch import hopper_forward_launch

            return [hopper_forward_launch(problem, config.hopper, q, q, q, q, rows)]
        return [forward_launch(problem, config, q, q, q, q, rows, None, None)]
    inputs = (q, q, q, q)
    if config.hopper_backward:
        from kernels.flash_attention_hopper_launch import hopper_backward_launch

        whole = torch.empty(q.shape, device="meta")
        return [hopper_backward_launch(problem, inputs, q, q, whole, rows, rows)]
    sums = None if config.two_passes else torch.empty(q.shape, device="meta")
    first = backward_launch(problem, config, inputs, q, q, sums, rows, rows, None, None)
    if sums is not None:
        return [first]
    return [first, second_pass_launch(problem, config, inputs, q, rows, rows, None, None)]
