"""The routed experts of a mixture-of-experts layer: sort once, three products over ragged rows, gather the results.

    out[t] = Σ_k p[t, k] · down_e · (silu(gate_e · x[t]) · (up_e · x[t]))        e = experts[t, k]

Launches, however many experts there are, none of which waits for the host:

    forward   count, place, gated product, second product, combine                                   5
    backward  gate's backward, p's gradient, product back to x, combine, two products of weights     6

Kept for backward: gate and up (P, 2F) for P = T · K pairs, and the order. The activation is computed again, its product
with p written once; the result of the second product is not kept (:mod:`kernels.moe_products`).

Sources: Shazeer et al., "Outrageously Large Neural Networks", 2017, section 2 (the layer); Gale et al., "MegaBlocks",
2023 (no token dropped, none padded).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from kernels._rows import INTERPRETED, check_beside, check_float, on_device_of
from kernels.moe_combine import combine, sum_parts
from kernels.moe_order import Order, expert_order
from kernels.moe_products import gate_backward_kernel, gated_kernel, rows_kernel, weights_kernel


class Tile(NamedTuple):
    """The shape of one product; the one place to tune."""

    rows: int
    columns: int
    block: int  # of the sum
    warps: int
    stages: int
    group: int  # tiles of rows that share a block of columns
    turned: bool = False


class Shapes(NamedTuple):
    """Tiles of the products of a layer; all but `weights` have as many rows, those of the order's tiles."""

    gated: Tile
    down: Tile
    gate_backward: Tile
    back: Tile
    weights: Tile


def launch_shapes(pairs: int, experts: int, itemsize: int, whole: bool = True) -> Shapes:
    """By the rows that an expert has on average, which is all that the host knows.

    Up to 64 the products bind to memory: turned, tiles of rows that hold an expert's rows in one as a rule (half as
    many again as the average), 32 to 48 KiB a stage, two programs a multiprocessor. Beyond that 128 rows and 256
    columns, the largest whose float32 sums (128 registers a thread) leave room; the gated product has them as 128 of
    the gate and 128 of up. The product of weights finds its rows through the order, whose loads take every other of its
    stages. Float32 goes without tensor cores and takes what fits.

    whole: rows are of whole 16 numbers. Others are loaded number by number through registers, which must have room.
    """
    average = triton.cdiv(pairs, experts)
    rows = max(16, min(128, triton.next_power_of_2(average + average // 2)))
    if itemsize == 4:
        rows = min(rows, 32)
        small = Tile(rows, 32, 32, 4, 2, 8)
        return Shapes(small, small, small, small, Tile(32, 32, 32, 4, 2, 8))
    if not whole:
        small = Tile(min(rows, 64), 64, 32, 4, 2, 8)
        return Shapes(small, small, small, small, Tile(64, 64, 32, 4, 2, 8))
    weights = Tile(128, 256, 64, 8, 7, 8)
    if rows <= 64:
        few = Tile(rows, 128, 64, 4, 4, 64)
        return Shapes(
            Tile(rows, 64, 64, 4, 4, 64, turned=True), few._replace(turned=True), few._replace(columns=64), few, weights
        )
    many = Tile(128, 256, 64, 8, 4, 8)
    return Shapes(many._replace(columns=128), many, many, many, weights)


def _shapes(pairs: int, x: torch.Tensor, gate_up: torch.Tensor) -> Shapes:
    experts, double, width = gate_up.shape
    return launch_shapes(pairs, experts, x.element_size(), whole=(double // 2) % 16 == width % 16 == 0)


def _options(dtype: torch.dtype) -> dict[str, bool]:
    return {"EXACT": dtype == torch.float32, "WIDE": INTERPRETED and dtype == torch.bfloat16}


def _shape_of(tile: Tile) -> dict[str, int]:
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "BLOCK": tile.block, "GROUP": tile.group,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def gated_product(
    x_TD: torch.Tensor, gate_up_EHD: torch.Tensor, order: Order, choices: int, tile: Tile, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """act (P, F), and with ``keep`` gate and up (P, 2F) beside it, for gate above up (E, 2F, D)."""
    pairs, many = order.order_R.shape[0], order.tiles_3N.shape[1]
    inner, width = gate_up_EHD.shape[1] // 2, x_TD.shape[1]
    act = x_TD.new_empty(pairs, inner)
    kept = x_TD.new_empty(pairs, 2 * inner) if keep else None
    gated_kernel[(many * triton.cdiv(inner, tile.columns),)](
        x_TD, gate_up_EHD, act, act if kept is None else kept, order.order_R, order.tiles_3N,
        many, inner, width, choices, x_TD.stride(0),
        KEEP=keep, TURNED=tile.turned, EVEN=width % tile.block == 0, **_shape_of(tile), **_options(x_TD.dtype),
    )  # fmt: skip
    return act, kept


def rows_product(a_PK: torch.Tensor, weight: torch.Tensor, order: Order, tile: Tile, across: bool) -> torch.Tensor:
    """a (P, K) times the weights (E, N, K) of each row's expert, or (E, K, N) with ``across``: (P, N)."""
    many, length = order.tiles_3N.shape[1], a_PK.shape[1]
    columns = weight.shape[2 if across else 1]
    out = a_PK.new_empty(a_PK.shape[0], columns)
    rows_kernel[(many * triton.cdiv(columns, tile.columns),)](
        a_PK, weight, out, order.tiles_3N, many, columns, length,
        ACROSS=across, TURNED=tile.turned, EVEN=length % tile.block == 0, ALL=columns % tile.columns == 0,
        **_shape_of(tile), **_options(a_PK.dtype),
    )  # fmt: skip
    return out


def gate_backward(
    grad_TD: torch.Tensor,
    down_EDF: torch.Tensor,
    kept_PH: torch.Tensor,
    router_TK: torch.Tensor,
    order: Order,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gate and up (P, 2F), p · act (P, F), and parts (blocks of F, P) of p's gradient in float32."""
    pairs, many = order.order_R.shape[0], order.tiles_3N.shape[1]
    width, inner = down_EDF.shape[1:]
    blocks = triton.cdiv(inner, tile.columns)
    grad_kept, weighted = torch.empty_like(kept_PH), kept_PH.new_empty(pairs, inner)
    parts = kept_PH.new_empty(blocks, pairs, dtype=torch.float32)
    gate_backward_kernel[(many * blocks,)](
        grad_TD, down_EDF, kept_PH, router_TK, grad_kept, weighted, parts, order.order_R, order.tiles_3N,
        many, pairs, inner, width, router_TK.shape[1], grad_TD.stride(0),
        EVEN=width % tile.block == 0, ALL=inner % tile.columns == 0,
        **_shape_of(tile), **_options(grad_TD.dtype),
    )  # fmt: skip
    return grad_kept, weighted, parts


def weights_product(
    a: torch.Tensor, b: torch.Tensor, order: Order, choices: int, tile: Tile, gather_a: bool
) -> torch.Tensor:
    """Σ over an expert's rows of a[r, m] · b[r, n]: (E, M, N); one of both, a with ``gather_a``, has a row a token."""
    experts, m, n = order.ends_E.shape[0], a.shape[1], b.shape[1]
    out = a.new_empty(experts, m, n)
    grid = (experts * triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
    weights_kernel[grid](
        a, b, out, order.order_R, order.ends_E, m, n, choices, a.stride(0), b.stride(0),
        GATHER_A=gather_a, **_shape_of(tile), **_options(a.dtype),
    )  # fmt: skip
    return out


def _check(
    x: torch.Tensor, experts: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    check_float("x", x)
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; (tokens, width), rows contiguous")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_beside(name, weight, "x", x)
        if weight.ndim != 3 or not weight.is_contiguous():
            raise ValueError(
                f"{name}: shape {tuple(weight.shape)}, strides {weight.stride()}; 3 dimensions, contiguous"
            )
    count, double, width = gate_up.shape
    if width != x.shape[1] or double % 2:
        raise ValueError(f"gate_up: shape {tuple(gate_up.shape)}; it must be (experts, 2 · inner, {x.shape[1]})")
    if tuple(down.shape) != (count, width, double // 2):
        raise ValueError(f"down: shape {tuple(down.shape)}; with gate_up it must be {(count, width, double // 2)}")
    if experts.ndim != 2 or experts.shape[0] != x.shape[0] or experts.device != x.device:
        raise ValueError(f"experts: shape {tuple(experts.shape)} on {experts.device}; ({x.shape[0]}, choices) beside x")
    if router.shape != experts.shape or not router.is_contiguous():
        raise ValueError(f"router: shape {tuple(router.shape)}, strides {router.stride()}; as experts, contiguous")
    check_beside("router", router, "x", x, dtypes=(torch.float32,))


def _forward(
    x: torch.Tensor,
    experts: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    most: int | None,
    keep: bool,
) -> tuple[torch.Tensor, Order, torch.Tensor | None]:
    tokens, choices = experts.shape
    pairs = tokens * choices if most is None else min(tokens * choices, most)
    shapes = _shapes(pairs, x, gate_up)
    with on_device_of(x):
        order = expert_order(experts, gate_up.shape[0], shapes.gated.rows, most)
        if not order.order_R.numel():
            return torch.zeros_like(x), order, x.new_empty(0, gate_up.shape[1])
        act, kept = gated_product(x, gate_up, order, choices, shapes.gated, keep)
        rows = rows_product(act, down, order, shapes.down, across=False)
        return combine(rows, order.slots_P, router, tokens, choices), order, kept


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        experts: torch.Tensor,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        most: int | None,
    ) -> torch.Tensor:
        out, order, kept = _forward(x, experts, router, gate_up, down, most, keep=True)
        ctx.tile = order.tile
        ctx.save_for_backward(x, router, gate_up, down, kept, *order[:4])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, router, gate_up, down, kept, *places = ctx.saved_tensors
        order = Order(*places, ctx.tile)
        if not order.order_R.numel():
            return torch.zeros_like(x), None, *(torch.zeros_like(t) for t in (router, gate_up, down)), None
        tokens, choices = router.shape
        shapes = _shapes(len(order.order_R), x, gate_up)
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        need_x, _, need_router, need_gate_up, need_down, _ = ctx.needs_input_grad
        grad_x = grad_router = grad_gate_up = grad_down = None
        with on_device_of(x):
            grad_kept, weighted, parts = gate_backward(grad_out, down, kept, router, order, shapes.gate_backward)
            if need_router:
                grad_router = sum_parts(parts, order.slots_P, router)
            if need_x:
                rows = rows_product(grad_kept, gate_up, order, shapes.back, across=True)
                grad_x = combine(rows, order.slots_P, None, tokens, choices)
            if need_gate_up:
                grad_gate_up = weights_product(grad_kept, x, order, choices, shapes.weights, gather_a=False)
            if need_down:
                grad_down = weights_product(grad_out, weighted, order, choices, shapes.weights, gather_a=True)
        return grad_x, None, grad_router, grad_gate_up, grad_down, None


def moe_experts(
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    router_TK: torch.Tensor,
    gate_up_EHD: torch.Tensor,
    down_EDF: torch.Tensor,
    most: int | None = None,
) -> torch.Tensor:
    """The layer's routed experts, (T, D), differentiable once in all but ``experts``.

    Args:
        x_TD: tokens, float32, float16 or bfloat16; rows contiguous, any stride between them.
        experts_TK: each token's K experts, int64 or int32, contiguous. One that is not in [0, E) adds nothing.
        router_TK: their weights, x's dtype or float32, contiguous.
        gate_up_EHD: every expert's gate above its up, (E, 2F, D), x's dtype, contiguous.
        down_EDF: (E, D, F), x's dtype, contiguous.
        most: how many pairs of a token and one of these experts there are at most, where the caller knows that many
            have none of these: what is kept in memory is made for so many. Pairs beyond them add nothing.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    _check(x_TD, experts_TK, router_TK, gate_up_EHD, down_EDF)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, router_TK, gate_up_EHD, down_EDF)):
        out: torch.Tensor = _Experts.apply(x_TD, experts_TK, router_TK, gate_up_EHD, down_EDF, most)
        return out
    return _forward(x_TD, experts_TK, router_TK, gate_up_EHD, down_EDF, most, keep=False)[0]
