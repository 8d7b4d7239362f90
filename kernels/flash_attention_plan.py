"""From an attention problem to kernel launches: tile shapes, tensor descriptors, and the order of the grid.

The figures behind the tile table stand in docs/attention.md.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ._rows import multiprocessors as multiprocessors_of
from ._rows import on_device_of
from .flash_attention_backward import backward_kernel, query_gradient_kernel
from .flash_attention_forward import flash_attention_forward_kernel
from .flash_attention_problem import Problem
from .launch import Launch

LOG2_E = 1.4426950408889634
_L2_BYTES_ASSUMED = 48 * 2**20  # without a device to ask: what a Hopper part has at least


@dataclass(frozen=True)
class Tile:
    """A tile of `block_m` queries by `block_n` keys, the warps of a program and the depth of its load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class Config:
    """How to run a problem: a tile for each kernel, and where tiles come from.

    `descriptors` loads tiles through tensor descriptors (Hopper's bulk copy engine) instead of pointers;
    `descriptor_adds` sends the tiles of dQ through its reductions instead of atomic adds a thread. `two_passes` takes
    the deterministic backward even when nobody asked: where one pass would not fit the registers, or is slower.
    `hopper` (a HopperTile of flash_attention_hopper_launch) runs the forward on the Gluon kernel instead,
    `hopper_backward` the one-pass backward. `beside` names those of the Triton backward's sums
    (dV, dK) that are issued to run beside other work. `stagger` is (clocks, programs): so far apart the programs start
    that a multiprocessor runs at first in the Triton forward.
    """

    forward: Tile
    backward: Tile
    query_gradient: Tile
    descriptors: bool = False
    descriptor_adds: bool = False
    two_passes: bool = False
    hopper: Any = None
    hopper_backward: bool = False
    beside: tuple[str, ...] = ()
    stagger: tuple[int, int] = (0, 0)

    def describe(self) -> str:
        """The choice in words, for a record."""
        source = "descriptors" if self.descriptors else "pointers"
        passes = "two passes" if self.two_passes else "one pass"
        late = f", {self.stagger[0]} clocks apart" if self.stagger[0] else ""
        forward = f"triton, {source}, {self.forward}{late}" if self.hopper is None else f"gluon, {self.hopper}"
        passes += "".join(f", {name} beside" for name in self.beside)
        backward = f"triton, {source}, {self.backward} in {passes}"
        if self.hopper_backward:
            backward = "gluon, one pass, dQ in bulk"
        return f"forward {forward}; backward {backward}"


# Hopper by head dimension (rounded up to a power of two): each fits 227 KB of shared memory and 255 registers.
_HOPPER = {
    64: Config(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 4, 2)),
    128: Config(Tile(128, 64, 4, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), two_passes=True, beside=("dV",)),
    256: Config(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), two_passes=True),
}
# Elsewhere: what fits the 99 KB of the smallest parts since Ampere.
_ELSEWHERE = {
    64: Config(Tile(128, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    128: Config(Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    256: Config(Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
}
# The interpreter: small and uneven, so that short sequences cross tile edges.
_INTERPRETER = Config(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))


def multiprocessors(q: torch.Tensor) -> int:
    """Of the GPU that a tensor is on; without one, of an H100 or H200."""
    return multiprocessors_of(q.device) if q.is_cuda else 132


def cdiv(a: int, b: int) -> int:
    """a over b, rounded up. Triton's own is the compiler's and slow to call: a good part of the host's time here."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def choose_config(problem: Problem, capability: tuple[int, int] | None, describable: bool) -> Config:
    """The kernels and tiles for a problem on a device of this compute capability; None is the interpreter.

    `describable` says whether every tensor's base and strides are multiples of 16 bytes, as descriptors need.
    """
    if capability is None:
        return _INTERPRETER
    rounded = max(64, power_of_two(problem.head_dim))
    if capability < (9, 0):
        return _ELSEWHERE[rounded]
    config = replace(_HOPPER[rounded], descriptors=describable, descriptor_adds=describable)
    full = problem.left is None and problem.right is None
    if rounded == 64 and full:
        config = replace(config, beside=("dV", "dK"))  # under a mask the same costs more than it hides
    if rounded == 256 and full:
        config = replace(config, beside=("dV",))
    if rounded == 128 and full and not problem.varlen:
        config = replace(config, stagger=(1024, 2))  # under a mask programs fall out of step by themselves
    if capability == (9, 0) and describable and problem.head_dim in (64, 128):
        from .flash_attention_hopper_launch import hopper_tile, unsupported_by_hopper

        if unsupported_by_hopper(problem) is None:
            # Measured ahead of Triton everywhere but in the causal forward at D=64 up to 4096, where it is level.
            ahead = problem.head_dim == 128 or full or problem.q_len > 4096
            config = replace(config, hopper=hopper_tile(problem) if ahead else None, hopper_backward=True)
    return config


def is_describable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can address `tensor`: base and strides multiples of 16 bytes, none of them zero."""
    if tensor.numel() == 0 or tensor.data_ptr() % 16:
        return False
    strides = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in strides)


def block_d(problem: Problem) -> int:
    """The head dimension as tiles hold it: a power of two, zeros beyond the real one."""
    return power_of_two(problem.head_dim)


@lru_cache(maxsize=64)
def _l2_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).L2_cache_size)


def groups_per_section(groups: int, most: int, dealt_out: bool) -> int:
    """How many of `groups` equal heads, at most `most`, are dealt out together when their tiles differ in length.

    Where a free program takes the next tile, sections of one size end evenly: a divisor, unless none comes near. Where
    shares are fixed a divisor may hand the long tiles to the same programs every time, and nearly equal is better.
    """
    most = max(1, min(most, groups))
    for size in range(most, most // 2, -1):
        if dealt_out and groups % size == 0:
            return size
    return cdiv(groups, cdiv(groups, most))


def heads_per_section(
    problem: Problem, tensor: torch.Tensor, heads: int, bytes_a_head: int, dealt_out: bool = True
) -> int:
    """How many heads' tiles are dealt out together: as many as share half the L2 when a mask makes tiles unequal."""
    members = heads // problem.kv_heads
    if problem.right is None and problem.left is None:
        return members
    index = tensor.device.index
    l2 = _l2_bytes(index) if tensor.is_cuda and index is not None else _L2_BYTES_ASSUMED
    groups = problem.batch * problem.kv_heads
    return members * groups_per_section(groups, l2 // 2 // max(1, bytes_a_head), dealt_out)


def _source(tensor: torch.Tensor, problem: Problem, block: int, described: bool) -> Any:
    """A tensor as the kernels take it: a descriptor (batch, head, row, column) made here, or the tensor itself.

    Packed batches get their descriptors on the device, one a sequence, so that a tile ends with its sequence.
    """
    if problem.varlen or not described:
        return tensor
    batch, rows, heads, dim = tensor.shape
    width = block_d(problem)
    aligned = 16 * heads * dim  # a valid stride for a dimension of one, whose own means nothing
    strides = [s if n > 1 else aligned for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return TensorDescriptor(
        tensor, [batch, heads, rows, dim], [strides[0], strides[2], strides[1], 1], [1, 1, block, width]
    )


def strides(name: str, tensor: torch.Tensor, varlen: bool) -> dict[str, int]:
    """A tensor's strides of batch, head and row, as the kernels' arguments are called."""
    row, head = tensor.stride(-3), tensor.stride(-2)
    batch = 0 if varlen else tensor.stride(0)
    return {f"stride_{name}b": batch, f"stride_{name}h": head, f"stride_{name}s": row}


def row_strides(rows: torch.Tensor, varlen: bool) -> dict[str, int]:
    """The strides of batch and head of what has a number a row."""
    return {"stride_lb": 0 if varlen else rows.stride(0), "stride_lh": rows.stride(-2)}


def _common(problem: Problem, tile: Tile, config: Config) -> dict[str, Any]:
    scale_log2 = LOG2_E if problem.softcap else problem.scale * LOG2_E
    return {
        "q_len": problem.q_len,
        "kv_len": problem.kv_len,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "left": problem.left or 0,
        "right": problem.right or 0,
        "scale_log2": scale_log2,
        "scale": problem.scale,
        "cap": problem.softcap,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d(problem),
        "HAS_LEFT": problem.left is not None,
        "HAS_RIGHT": problem.right is not None,
        "HAS_CAP": problem.softcap != 0.0,
        "EVEN_N": not problem.varlen and problem.kv_len % tile.block_n == 0,
        "VARLEN": problem.varlen,
        "USE_DESC": config.descriptors,
        "PRECISION": "ieee",
    }


def forward_launch(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> Launch:
    """The forward kernel: writes `out` (like q) and `lse`, float32 [B, H, S] or [H, T]."""
    tile = config.forward
    num_tiles = cdiv(problem.q_len, tile.block_m)
    num_heads = problem.batch * problem.heads
    kv_bytes = 2 * problem.kv_len * problem.head_dim * k.element_size()
    args = {
        "q_src": _source(q, problem, tile.block_m, config.descriptors),
        "k_src": _source(k, problem, tile.block_n, config.descriptors),
        "v_src": _source(v, problem, tile.block_n, config.descriptors),
        "o_dst": _source(out, problem, tile.block_m, config.descriptors),
        "lse_ptr": lse,
        "cu_q_ptr": cu_q,
        "cu_k_ptr": cu_k,
        "num_tiles": num_tiles,
        "num_heads": num_heads,
        "heads_per_section": heads_per_section(problem, q, problem.heads, kv_bytes),
        **row_strides(lse, problem.varlen),
        **_common(problem, tile, config),
        "STAGGER": config.stagger[0],
        "FIRST": config.stagger[1] and config.stagger[1] * multiprocessors(q),
    }
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
        args |= strides(name, tensor, problem.varlen)
    return Launch(flash_attention_forward_kernel, (num_tiles * num_heads,), args, tile.num_warps, tile.num_stages)


def backward_launch(
    problem: Problem,
    config: Config,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dk: torch.Tensor,
    dv: torch.Tensor,
    dq_sums: torch.Tensor | None,
    shift: torch.Tensor,
    delta: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> Launch:
    """The pass over keys, for `inputs` (q, k, v, do): writes dk and dv, and adds dQ over scale into `dq_sums`
    (float32, like q, zero before) unless that is None.
    """
    q, k, v, grad_out = inputs
    tile = config.backward
    num_tiles = cdiv(problem.kv_len, tile.block_n)
    num_heads = problem.batch * problem.kv_heads
    bytes_a_row = problem.head_dim * (2 * q.element_size() + 4)
    query_bytes = problem.q_len * bytes_a_row * (problem.heads // problem.kv_heads)
    args = {
        "q_src": _source(q, problem, tile.block_m, config.descriptors),
        "k_src": _source(k, problem, tile.block_n, config.descriptors),
        "v_src": _source(v, problem, tile.block_n, config.descriptors),
        "do_src": _source(grad_out, problem, tile.block_m, config.descriptors),
        "dk_ptr": dk,
        "dv_ptr": dv,
        "dq_dst": dq_sums if dq_sums is None else _source(dq_sums, problem, tile.block_m, config.descriptor_adds),
        "shift_ptr": shift,
        "delta_ptr": delta,
        "cu_q_ptr": cu_q,
        "cu_k_ptr": cu_k,
        "num_tiles": num_tiles,
        "num_heads": num_heads,
        "heads_per_section": heads_per_section(problem, q, problem.kv_heads, query_bytes),
        **row_strides(shift, problem.varlen),
        **_common(problem, tile, config),
        "GROUP": problem.heads // problem.kv_heads,
        "ADD_DQ": dq_sums is not None,
        "DESC_ADD": config.descriptor_adds,
        "DV_BESIDE": "dV" in config.beside,
        "DK_BESIDE": "dK" in config.beside,
    }
    named = (("q", q), ("k", k), ("v", v), ("do", grad_out), ("dk", dk), ("dv", dv))
    for name, tensor in (*named, ("dq", q if dq_sums is None else dq_sums)):
        args |= strides(name, tensor, problem.varlen)
    return Launch(backward_kernel, (num_tiles * num_heads,), args, tile.num_warps, tile.num_stages)


def query_gradient_launch(
    problem: Problem,
    config: Config,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> Launch:
    """The second pass of the deterministic backward, for `inputs` (q, k, v, do): writes dq."""
    q, k, v, grad_out = inputs
    tile = config.query_gradient
    num_tiles = cdiv(problem.q_len, tile.block_m)
    num_heads = problem.batch * problem.heads
    kv_bytes = 2 * problem.kv_len * problem.head_dim * k.element_size()
    args = {
        "q_src": _source(q, problem, tile.block_m, config.descriptors),
        "k_src": _source(k, problem, tile.block_n, config.descriptors),
        "v_src": _source(v, problem, tile.block_n, config.descriptors),
        "do_src": _source(grad_out, problem, tile.block_m, config.descriptors),
        "dq_ptr": dq,
        "shift_ptr": shift,
        "delta_ptr": delta,
        "cu_q_ptr": cu_q,
        "cu_k_ptr": cu_k,
        "num_tiles": num_tiles,
        "num_heads": num_heads,
        "heads_per_section": heads_per_section(problem, q, problem.heads, kv_bytes),
        **row_strides(shift, problem.varlen),
        **_common(problem, tile, config),
    }
    for name, tensor in (("q", q), ("k", k), ("v", v), ("do", grad_out), ("dq", dq)):
        args |= strides(name, tensor, problem.varlen)
    return Launch(query_gradient_kernel, (num_tiles * num_heads,), args, tile.num_warps, tile.num_stages)


def run(launch: Launch, tensor: torch.Tensor) -> None:
    """Launch on the device of `tensor`, with memory for descriptors that the kernel makes itself.

    The allocator is set in a copy of the context, so that a caller's own stays as it was.
    """
    with on_device_of(tensor):
        contextvars.copy_context().run(_run_with_allocator, launch, tensor.device)


def _run_with_allocator(launch: Launch, device: torch.device) -> None:
    if device.type == "cuda":
        allocate: Callable[[int, int, int | None], torch.Tensor] = lambda size, alignment, stream: torch.empty(  # noqa: E731
            size, dtype=torch.int8, device=device
        )
        triton.set_allocator(allocate)
    launch.run()
