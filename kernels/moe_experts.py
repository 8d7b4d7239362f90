"""The routed experts of a mixture-of-experts layer: sort once, three products over ragged rows, gather the results.

    out[t] = Σ_k p[t, k] · down_e · (silu(gate_e · x[t]) · (up_e · x[t]))        e = experts[t, k]

Launches, however many experts there are, none of which waits for the host:

    forward   count, place, gated product, second product, combine                                   5
    backward  gate's backward, p's gradient, product back to x, combine, two products of weights     6

Kept for backward: gate and up (P, 2F) for P = T · K pairs, and the order. The activation is computed again, its product
with p written once; the result of the second product is not kept (:mod:`kernels.moe_products`). Autograd sees two
halves, gate and up and the rest, so that gate and up are freed before the gradients of their weights are made.

Where experts have many rows on Hopper, products read them laid out by expert, with passes of ours between
(:mod:`kernels.moe_plan`): 9 launches and at most 13, of which one a product clears the counter it draws tiles from.

Sources: Shazeer et al., "Outrageously Large Neural Networks", 2017, section 2 (the layer); Gale et al., "MegaBlocks",
2023 (no token dropped, none padded).
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from kernels import moe_library
from kernels._rows import INTERPRETED, check_beside, check_float, on_device_of
from kernels.moe_combine import combine, sum_parts
from kernels.moe_gate import gate, gate_pass, spread
from kernels.moe_order import Order, expert_order
from kernels.moe_plan import Shapes, Tile, choose
from kernels.moe_products import gate_backward_kernel, gated_kernel, rows_kernel, weights_kernel


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
    if tile.by != "pointers":
        kept = rows_product(spread(x_TD, order, choices), gate_up_EHD, order, tile, across=False)
        return gate(kept, order), kept
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
    if tile.by == "hopper":
        from kernels import moe_hopper_launch  # needs a Triton that has Gluon

        return moe_hopper_launch.product(a_PK, weight, order, across, tile)
    if tile.by != "pointers":
        return moe_library.product(a_PK, weight, order, across, each=tile.by == "mm")
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
    rows_PD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gate and up (P, 2F), p · act (P, F), and parts (blocks of F, P) of p's gradient in float32.

    ``rows``: the output's gradient of every row, where it is spread already.
    """
    if tile.by != "pointers":
        rows_PD = spread(grad_TD, order, router_TK.shape[1]) if rows_PD is None else rows_PD
        return gate_pass(rows_product(rows_PD, down_EDF, order, tile, across=True), kept_PH, router_TK, order)
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
    a: torch.Tensor,
    b: torch.Tensor,
    order: Order,
    choices: int,
    tile: Tile,
    gather_a: bool,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ over an expert's rows of a[r, m] · b[r, n]: (E, M, N); one of both, a with ``gather_a``, has a row a token.

    ``rows``: that one's rows by expert, where they are spread already.
    """
    if tile.by != "pointers":
        rows = spread(a if gather_a else b, order, choices) if rows is None else rows
        a, b = (rows, b) if gather_a else (a, rows)
        if tile.by == "hopper":
            from kernels import moe_hopper_launch

            return moe_hopper_launch.weights_product(a, b, order, tile)
        return moe_library.weights_product(a, b, order, each=tile.by == "mm")
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


def _sort(
    experts: torch.Tensor, count: int, plan: Shapes | None, most: int | None, *layer: torch.Tensor
) -> tuple[Order, Shapes]:
    """The pairs' order by expert, and who computes the layer of tokens, gate and up, and down."""
    pairs = experts.numel() if most is None else min(experts.numel(), most)
    shapes = choose(pairs, *layer) if plan is None else plan
    order = expert_order(experts, count, shapes.rows, most)
    if any(tile.by == "mm" for tile in shapes):
        order = order._replace(spans=moe_library.spans(order))
    return order, shapes


class _GateUp(torch.autograd.Function):
    """act (P, F), which has no gradient of its own, beside gate and up (P, 2F), whose gradient stands for both."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, order: Order, choices: int, shapes: Shapes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        act, kept = gated_product(x, gate_up, order, choices, shapes.gated, keep=True)
        assert kept is not None
        ctx.mark_non_differentiable(act)
        ctx.set_materialize_grads(False)
        ctx.rest = choices, shapes, order.tile, order.spans
        ctx.save_for_backward(x, gate_up, *order[:4])
        return act, kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: None, grad_kept: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, *places = ctx.saved_tensors
        choices, shapes, *rest = ctx.rest
        order = Order(*places, *rest)
        grad_x = grad_gate_up = None
        with on_device_of(x):
            if ctx.needs_input_grad[0]:
                rows = rows_product(grad_kept, gate_up, order, shapes.back, across=True)
                grad_x = combine(rows, order.slots_P, None, x.shape[0], choices)
                del rows
            if ctx.needs_input_grad[1]:
                grad_gate_up = weights_product(grad_kept, x, order, choices, shapes.weights, gather_a=False)
        return grad_x, grad_gate_up, None, None, None


class _Down(torch.autograd.Function):
    """The layer's output (T, D) from act and what it was made of."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: torch.Tensor,
        act: torch.Tensor,
        router: torch.Tensor,
        down: torch.Tensor,
        order: Order,
        shapes: Shapes,
    ) -> torch.Tensor:
        ctx.rest = shapes, order.tile, order.spans
        ctx.save_for_backward(kept, router, down, *order[:4])
        return _results(act, router, down, order, shapes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, router, down, *places = ctx.saved_tensors
        shapes, *rest = ctx.rest
        order = Order(*places, *rest)
        choices = router.shape[1]
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        need_kept, _, need_router, need_down, *_ = ctx.needs_input_grad
        grad_router = grad_down = None
        with on_device_of(kept):
            library = "pointers" not in (shapes.gate_backward.by, shapes.weights.by)
            rows = spread(grad_out, order, choices) if library else None
            grad_kept, weighted, parts = gate_backward(grad_out, down, kept, router, order, shapes.gate_backward, rows)
            if need_router:
                grad_router = sum_parts(parts, order.slots_P, router)
            if need_down:
                grad_down = weights_product(grad_out, weighted, order, choices, shapes.weights, True, rows)
        return grad_kept if need_kept else None, None, grad_router, grad_down, None, None


class _Nothing(torch.autograd.Function):
    """The output for no pair at all: zeros, as are its gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.zeros_like(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def _results(act: torch.Tensor, router: torch.Tensor, down: torch.Tensor, order: Order, shapes: Shapes) -> torch.Tensor:
    rows = rows_product(act, down, order, shapes.down, across=False)
    return combine(rows, order.slots_P, router, *router.shape)


def moe_experts(
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    router_TK: torch.Tensor,
    gate_up_EHD: torch.Tensor,
    down_EDF: torch.Tensor,
    most: int | None = None,
    plan: Shapes | None = None,
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
        plan: who computes each product, and in which tiles; else :func:`kernels.moe_plan.choose` says.

    Raises:
        ValueError: a shape, stride, dtype or device outside what is said here; the argument is named.
    """
    _check(x_TD, experts_TK, router_TK, gate_up_EHD, down_EDF)
    with on_device_of(x_TD):
        layer = x_TD, gate_up_EHD, down_EDF
        order, shapes = _sort(experts_TK, gate_up_EHD.shape[0], plan, most, *layer)
        if not order.order_R.numel():
            nothing: torch.Tensor = _Nothing.apply(x_TD, router_TK, gate_up_EHD, down_EDF)
            return nothing
        choices = experts_TK.shape[1]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, router_TK, gate_up_EHD, down_EDF)):
            act, kept = _GateUp.apply(x_TD, gate_up_EHD, order, choices, shapes)
            out: torch.Tensor = _Down.apply(kept, act, router_TK, down_EDF, order, shapes)
            return out
        act, _ = gated_product(x_TD, gate_up_EHD, order, choices, shapes.gated, keep=False)
        return _results(act, router_TK, down_EDF, order, shapes)
