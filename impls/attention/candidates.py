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
    base = replace(chosen, hopper=None)
    tile = base.forward if direction == "forward" else base.backward
    default = Candidate(f"triton {tile}", direction, head_dim, base, *_expected(head_dim, direction, causal))
    if capability is None:
        described = replace(base, descriptors=True)
        return [default, replace(default, name=f"triton {tile} described", config=described)]
    if capability < (9, 0):
        return [default]
    found = [default]
    variants = _FORWARD if direction == "forward" else _BACKWARD
    for other, predicted, why in variants.get(head_dim, ()):
        if other != tile:
            config = replace(base, **{direction: other})
            found.append(Candidate(f"triton {other}", direction, head_dim, config, predicted, why))
    if direction == "backward" and not base.two_passes:
        found += [
            Candidate(f"triton {tile} adds by threads", direction, head_dim, replace(base, descriptor_adds=False), 0.6,
                      "no staging of dQ, but an atomic add for every four elements"),
            Candidate(f"triton {tile} two passes", direction, head_dim, replace(base, two_passes=True), 0.6,
                      "seven products where five suffice, no atomic adds"),
        ]  # fmt: skip
    if direction == "backward":
        for other, two_passes, beside, predicted, why in _BESIDE.get(head_dim, ()):
            if causal and beside == ("dK",):
                continue  # the mask takes the registers: two values spill
            config = replace(base, backward=other, two_passes=two_passes, beside=beside)
            name = f"triton {other}{' two passes' if two_passes else ''} {' and '.join(beside)} beside"
            share = predicted - 0.03 * causal
            found.append(Candidate(name, direction, head_dim, config, share, why))
    if head_dim in (64, 128) and capability == (9, 0):
        found += _hopper(head_dim, causal, base) if direction == "forward" else [_hopper_backward(head_dim, base)]
    return found


def is_picked(candidate: Candidate, causal: bool) -> bool:
    """Whether `flash_attention` picks this by itself on a part of capability 9.0."""
    problem = problem_for(candidate.head_dim, causal, 1, 1, 4096, 4096)
    ours, chosen = candidate.config, choose_config(problem, (9, 0), describable=True)
    if candidate.direction == "forward":
        return ours.hopper == chosen.hopper and (ours.hopper is not None or ours.forward == chosen.forward)
    return bool(replace(ours, forward=chosen.forward, hopper=chosen.hopper) == chosen)


def _expected(head_dim: int, direction: str, causal: bool) -> tuple[float, str]:
    if direction == "forward":
        share = {64: 0.90, 128: 0.82, 256: 0.7}.get(head_dim, 0.6)
        return share - 0.02 * causal, "two programs a multiprocessor: one's softmax beside the other's products"
    return 0.72 - 0.04 * causal, "one program, so exponentials and products alternate; dQ leaves by bulk reduction"


_FORWARD: dict[int, tuple[tuple[Tile, float, str], ...]] = {
    64: (
        (Tile(128, 64, 4, 2), 0.88, "a slot less of keys; still two programs, bound by registers"),
        (Tile(128, 128, 4, 2), 0.85, "fewer barriers a key, but the scores of 128 keys take 128 registers"),
        (Tile(128, 128, 8, 3), 0.85, "two groups of warps in one program"),
        (Tile(64, 64, 4, 3), 0.75, "three or four small programs; each key tile serves half the queries"),
    ),
    128: (
        (Tile(128, 64, 4, 3), 0.60, "131 KB: one program a multiprocessor, nothing beside its softmax"),
        (Tile(128, 128, 8, 2), 0.80, "two groups of warps, one program, half the barriers"),
        (Tile(128, 64, 8, 3), 0.75, "two groups of warps, one program"),
        (Tile(64, 64, 4, 2), 0.65, "each key tile serves half the queries"),
    ),
    256: ((Tile(64, 64, 4, 2), 0.65, "one program a multiprocessor with four warps"),),
}

_BACKWARD: dict[int, tuple[tuple[Tile, float, str], ...]] = {
    64: (
        (Tile(64, 128, 8, 2), 0.66, "half the work between barriers of the 128x128 tile"),
        (Tile(64, 128, 8, 3), 0.66, "the same with a slot more"),
        (Tile(64, 64, 4, 2), 0.60, "two programs a multiprocessor, twice the reduction traffic for dQ"),
    ),
    128: (
        (Tile(64, 64, 4, 2), 0.55, "one program by its 139 KB, with half the warps"),
        (Tile(64, 128, 8, 1), 0.55, "no prefetch: shows what the pipeline gives"),
    ),
}


# Products that are only accumulated, issued so that they run beside other work, where nothing spills in the loop.
_BESIDE: dict[int, tuple[tuple[Tile, bool, tuple[str, ...], float, str], ...]] = {
    64: (
        (
            Tile(128, 128, 8, 2),
            False,
            ("dV", "dK"),
            0.75,
            "dV's product beside dS's arithmetic, dK's beside dQ's way out",
        ),
        (Tile(64, 64, 4, 2), False, ("dV", "dK"), 0.77, "the same with two programs a multiprocessor"),
    ),
    128: (
        (Tile(64, 128, 8, 2), False, ("dK",), 0.68, "dK's product beside dQ's way out; dV's beside dS would spill"),
        (
            Tile(64, 128, 8, 2),
            True,
            ("dV",),
            0.72,
            "dV's product beside dS's arithmetic; two passes have the registers",
        ),
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


def _hopper_backward(head_dim: int, base: Config) -> Candidate:
    why = {
        128: "exponentials beside dP's product, dS beside dV's; a feeder; adds by threads are what may bind it",
        64: "the same with 128 queries a tile; the compiler keeps about ten values of the loop out of registers",
    }[head_dim]
    share = {128: 0.82, 64: 0.72}[head_dim]
    config = replace(base, hopper_backward=True)
    return Candidate("hopper one pass", "backward", head_dim, config, share, why, group="hopper")


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

        return [hopper_backward_launch(problem, inputs, q, q, torch.empty(q.shape, device="meta"), rows, rows)]
    sums = None if config.two_passes else torch.empty(q.shape, device="meta")
    first = backward_launch(problem, config, inputs, q, q, sums, rows, rows, None, None)
    if sums is not None:
        return [first]
    return [first, second_pass_launch(problem, config, inputs, q, rows, rows, None, None)]
