"""Launches of the Hopper kernels: what they support, their tiles, and how many programs share the work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .flash_attention_hopper import hopper_forward_kernel
from .flash_attention_hopper_backward import hopper_backward_kernel
from .flash_attention_plan import LOG2_E, cdiv, heads_per_section, is_describable, multiprocessors
from .flash_attention_problem import Problem
from .launch import Launch

# Of 65,536 for the groups that compute and the feeder, 128 threads each. Two groups then take 240 each, three 160, and
# the feeder 24.
_REGISTERS = {2: 168, 3: 128}


def _check_choices(**choices: tuple[object, tuple[object, ...]]) -> None:
    """ValueError for a field that is none of those the kernels know: another order would leave tiles uncomputed."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not supported; use {' or '.join(map(repr, known))}")


@dataclass(frozen=True)
class HopperTile:
    """`groups` of 64 queries by `block_n` keys, `stages` slots for keys and for values, and whether the groups take
    turns at the matrix units. Three groups have the registers for a head dimension of 64 alone.

    `order` says who computes which tile: "fixed", every n-th to each of as many programs as multiprocessors;
    "counter", the next one to whoever is free, by an atomic add; "grid", a program for each tile. With two `q_slots`
    queries arrive a tile ahead.
    """

    block_n: int = 128
    stages: int = 2
    ping_pong: bool = False
    order: Literal["fixed", "counter", "grid"] = "fixed"
    q_slots: int = 1
    groups: int = 2

    def __post_init__(self) -> None:
        _check_choices(
            block_n=(self.block_n, (64, 128)),
            stages=(self.stages, tuple(range(1, 9))),
            order=(self.order, ("fixed", "counter", "grid")),
            q_slots=(self.q_slots, (1, 2)),
            groups=(self.groups, (2, 3)),
        )

    def __str__(self) -> str:
        said = f"{64 * self.groups}x{self.block_n} s{self.stages}"
        said += " taking turns" if self.ping_pong else ""
        said += "" if self.order == "fixed" else f" {self.order}"
        return said + (f" q{self.q_slots}" if self.q_slots > 1 else "")


def unsupported_by_hopper(problem: Problem) -> str | None:
    """Why the Hopper kernel cannot run a problem, or None."""
    if problem.varlen:
        return "cu_seqlens_q: the Hopper kernel takes dense batches only"
    if problem.head_dim not in (64, 128):
        return f"q: the Hopper kernel takes head dimensions 64 and 128, not {problem.head_dim}"
    if problem.softcap:
        return "softcap: the Hopper kernel has none"
    if problem.left is not None or problem.right not in (None, 0):
        return "window: the Hopper kernel is causal or full"
    return None


def hopper_tile(problem: Problem) -> HopperTile:
    """The tile for a problem: as many slots as fit 227 KB beside the queries, and the order measured best.

    Under a mask tiles differ in length and go to whoever is free; with equal ones the groups take turns.
    """
    full = problem.right is None
    if problem.head_dim == 64:
        return HopperTile(128, 3, ping_pong=True, order="counter", q_slots=2, groups=3)
    return HopperTile(128, 2, ping_pong=full, order="fixed" if full else "counter", q_slots=2)


def _element(dtype: torch.dtype) -> gl.dtype:
    return {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]


@lru_cache(maxsize=64)
def _layout(block_shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Made once: working it out takes longer than the rest of a launch."""
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), _element(dtype))


def _descriptor(tensor: torch.Tensor, block: int, columns: int | None = None) -> TensorDescriptor:
    """Tiles of `block` rows of a head, whole or `columns` wide."""
    batch, rows, heads, dim = tensor.shape
    aligned = 16 * heads * dim  # a valid stride for a dimension of one, whose own means nothing
    strides = [s if n > 1 else aligned for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    block_shape = [1, 1, block, columns or dim]
    return TensorDescriptor(
        tensor,
        [batch, heads, rows, dim],
        [strides[0], strides[2], strides[1], 1],
        block_shape,
        _layout(tuple(block_shape), tensor.dtype),
    )


def hopper_forward_launch(
    problem: Problem,
    tile: HopperTile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    """The Hopper forward of a dense problem: writes `out` (like q) and `lse` (float32, contiguous [B, H, S]).

    With a counter of tiles the launch is good for one run.

    ValueError when the problem or a tensor's strides are not supported.
    """
    reason = unsupported_by_hopper(problem)
    if reason is not None:
        raise ValueError(f"{reason}; leave the kernel's choice open")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if not is_describable(tensor):
            raise ValueError(f"{name}: its base and strides must be multiples of 16 bytes; call .clone() first")
    if tile.groups == 3 and problem.head_dim != 64:
        raise ValueError(f"config: hopper={tile} takes a head dimension of 64, not {problem.head_dim}; use two groups")
    num_tiles = cdiv(problem.q_len, 64 * tile.groups)
    num_heads = problem.batch * problem.heads
    args = {
        "q_desc": _descriptor(q, 64),
        "k_desc": _descriptor(k, tile.block_n),
        "v_desc": _descriptor(v, tile.block_n),
        "o_desc": _descriptor(out, 64),
        "lse_ptr": lse,
        "counter_ptr": torch.zeros(1, dtype=torch.int32, device=q.device) if tile.order == "counter" else None,
        "q_len": problem.q_len,
        "kv_len": problem.kv_len,
        "num_tiles": num_tiles,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "num_heads": num_heads,
        "heads_per_section": heads_per_section(
            problem,
            q,
            problem.heads,
            2 * problem.kv_len * problem.head_dim * k.element_size(),
            dealt_out=tile.order != "fixed",
        ),
        "scale_log2": problem.scale * LOG2_E,
        "BLOCK_M": 64 * tile.groups,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": problem.head_dim,
        "STAGES": tile.stages,
        "CAUSAL": problem.right == 0,
        "EVEN_N": problem.kv_len % tile.block_n == 0,
        "PING_PONG": tile.ping_pong,
        "Q_SLOTS": tile.q_slots,
        "COUNTER": tile.order == "counter",
    }
    tiles = num_tiles * num_heads
    grid = (tiles if tile.order == "grid" else min(multiprocessors(q), tiles),)
    options = {"maxnreg": _REGISTERS[tile.groups]}
    return Launch(hopper_forward_kernel, grid, args, num_warps=4, num_stages=1, options=options)


def hopper_backward_launch(
    problem: Problem,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dk: torch.Tensor,
    dv: torch.Tensor,
    dq_sums: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
) -> Launch:
    """The Hopper backward of a dense problem, for `inputs` (q, k, v, do): writes dk and dv (contiguous), and adds dQ
    over scale into `dq_sums`, contiguous float32 like q, zero before.

    Tiles of 128 keys by 64 queries, 128 at a head dimension of 64, where they fill 199 KB of shared memory. `shift` and
    `delta` are [B, H, S] with rows that start at multiples of 16 bytes. ValueError when the problem or a tensor's
    strides are not supported.
    """
    reason = unsupported_by_hopper(problem)
    if reason is not None:
        raise ValueError(f"{reason}; leave the kernel's choice open")
    q, k, v, grad_out = inputs
    for name, tensor in (("q", q), ("k", k), ("v", v), ("grad_out", grad_out), ("shift", shift), ("delta", delta)):
        if not is_describable(tensor):
            raise ValueError(f"{name}: its base and strides must be multiples of 16 bytes; call .clone() first")
    block_m, block_n = 64 if problem.head_dim == 128 else 128, 128
    num_tiles = cdiv(problem.kv_len, block_n)
    num_heads = problem.batch * problem.kv_heads
    bytes_a_row = problem.head_dim * (2 * q.element_size() + 4)
    query_bytes = problem.q_len * bytes_a_row * (problem.heads // problem.kv_heads)
    flat_rows = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    row_shape = [problem.batch * problem.heads, problem.q_len]
    args = {
        "q_desc": _descriptor(q, block_m),
        "k_desc": _descriptor(k, block_n),
        "v_desc": _descriptor(v, block_n // 2),
        "do_desc": _descriptor(grad_out, block_m),
        "shift_desc": TensorDescriptor(shift, row_shape, [shift.stride(1), 1], [1, block_m], flat_rows),
        "delta_desc": TensorDescriptor(delta, row_shape, [delta.stride(1), 1], [1, block_m], flat_rows),
        "dk_desc": _descriptor(dk, block_n // 2),
        "dv_desc": _descriptor(dv, block_n // 2),
        "dq_desc": _descriptor(dq_sums, 64, 64),
        "q_len": problem.q_len,
        "kv_len": problem.kv_len,
        "num_tiles": num_tiles,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "num_heads": num_heads,
        "heads_per_section": heads_per_section(problem, q, problem.kv_heads, query_bytes),
        "scale_log2": problem.scale * LOG2_E,
        "scale": problem.scale,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "HEAD_DIM": problem.head_dim,
        "STAGES": 2,
        "GROUP": problem.heads // problem.kv_heads,
        "CAUSAL": problem.right == 0,
        "DS_LAYOUT": _layout((block_n, block_m), q.dtype),
    }
    grid = (num_tiles * num_heads,)
    options = {"maxnreg": _REGISTERS[2]}
    return Launch(hopper_backward_kernel, grid, args, num_warps=4, num_stages=1, options=options)
