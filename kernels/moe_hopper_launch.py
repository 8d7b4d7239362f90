"""Launches of the products of routed experts on Hopper (:mod:`kernels.moe_hopper`)."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels._rows import multiprocessors
from kernels.launch import Launch
from kernels.moe_hopper import ACROSS, ROWS, WEIGHTS, hopper_product_kernel
from kernels.moe_order import Order
from kernels.moe_plan import Tile

_REGISTERS = 168  # of 65,536 for three groups of 128 threads; the two that compute then take 240 each, the feeder 24


@lru_cache(maxsize=16)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def _descriptor(tensor: torch.Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), list(block), _layout(block, tensor.dtype)
    )


def product_launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, order: Order, kind: int, tile: Tile) -> Launch:
    """The launch of one product, good for one run; all tensors contiguous, of 16-bit numbers, rows of whole 16 bytes.

    ROWS and ACROSS: a (R, K), b (E, N, K) or (E, K, N), out (R, N). WEIGHTS: a (R, M), b (R, N), out (E, M, N).
    """
    n_size = out.shape[-1]
    if kind == WEIGHTS:
        many, m_size, length = out.shape[0], out.shape[1], 0
        tiles = many * -(-m_size // 128) * -(-n_size // 256)
        places, a_block, b = order.ends_E, (64, 64), b.unsqueeze(0)
    else:
        assert order.tile == 128, "the order's tiles are not this product's"
        many, m_size, length = order.tiles_3N.shape[1], 0, a.shape[1]
        tiles = many * -(-n_size // 256)
        places, a_block = order.tiles_3N, (64, 64)
    arguments = {
        "a_desc": _descriptor(a, *a_block),
        "b_desc": _descriptor(b, *((1, 256, 64) if kind == ROWS else (1, 64, 256))),
        "out_ptr": out,
        "places_ptr": places,
        "counter_ptr": torch.zeros(1, dtype=torch.int32, device=a.device),
        "many": many,
        "m_size": m_size,
        "n_size": n_size,
        "length": length,
        "tiles": tiles,
        "STAGES": tile.stages,
        "GROUP": tile.group,
        "KIND": kind,
        "STAGE_LAYOUT": _layout((64, 128), a.dtype),
    }
    grid = (min(multiprocessors(a.device) if a.is_cuda else 132, tiles),)
    return Launch(hopper_product_kernel, grid, arguments, num_warps=4, num_stages=1, options={"maxnreg": _REGISTERS})


def product(a_PK: torch.Tensor, weight: torch.Tensor, order: Order, across: bool, tile: Tile) -> torch.Tensor:
    """a (P, K) times the weights (E, N, K) of each row's expert, or (E, K, N) with ``across``: (P, N)."""
    out = a_PK.new_empty(a_PK.shape[0], weight.shape[2 if across else 1])
    product_launch(a_PK, weight, out, order, ACROSS if across else ROWS, tile).run()
    return out


def weights_product(a_RM: torch.Tensor, b_RN: torch.Tensor, order: Order, tile: Tile) -> torch.Tensor:
    """Σ over an expert's rows of a[r, m] · b[r, n]: (E, M, N)."""
    out = a_RM.new_empty(order.ends_E.shape[0], a_RM.shape[1], b_RN.shape[1])
    product_launch(a_RM, b_RN, out, order, WEIGHTS, tile).run()
    return out
