"""Exact attention that never holds the score matrix: the public entry, its checks and its gradients.

The forward is FlashAttention-2's (Dao 2023, Algorithm 1), the backward a single pass of five matrix products that
meets dQ by float32 atomic adds, or, on request and where that was measured faster, two deterministic passes of seven.
Memory beyond the outputs grows with the sequence length, not with its square: the log-sum-exp in the forward, and in
the backward two float32 values a query row and a float32 buffer like q.
"""

from __future__ import annotations

from typing import Any

import torch

from .flash_attention_plan import (
    Config,
    backward_launch,
    choose_config,
    forward_launch,
    is_describable,
    query_gradient_launch,
    run,
)
from .flash_attention_problem import Problem, Window, check_problem
from .flash_attention_rows import query_sums_launch, row_terms_launch

__all__ = ["flash_attention", "flash_attention_backward", "flash_attention_forward", "flash_attention_kernel"]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    config: Config | None = None,
) -> Any:
    """softmax(scale · Q Kᵀ, masked) V, differentiable in q, k, v.

    `q` is [batch, q_len, heads, head_dim], `k` and `v` [batch, kv_len, kv_heads, head_dim] with kv_heads a divisor of
    heads; or, with `cu_seqlens_q` and `cu_seqlens_k` (int32, batch + 1 cumulative lengths from 0), packed
    [tokens, heads, head_dim], where `max_seqlen_q` and `max_seqlen_k` bound the lengths. Head dimensions 16, 32, 64,
    96, 128 and 256, float16 and bfloat16 (float32 too in Triton's interpreter), any strides with a contiguous last
    dimension.

    Query i stands at position p = i + kv_len - q_len on the keys' axis. `causal` lets it see the keys up to p;
    `window` = (left, right) the keys p - left to p + right, None for no bound. A query that sees no key gives 0.
    `softcap` > 0 replaces each scaled score s by softcap · tanh(s / softcap). Scaled scores are exact as float32 is;
    beyond 2²⁷ in magnitude (2³⁰ in bfloat16), and so where keys hold -inf, their rounding no longer cancels and results
    are undefined: hide keys by the mask or by lengths.

    `deterministic` selects a backward whose every sum has a fixed order. Returns the output, like q; with
    `return_lse` also the natural log of the sum of exponentials, float32 [batch, heads, q_len] or [heads, tokens],
    -inf for a query that sees no key; it is differentiable too.

    Raises ValueError that names the argument and what is supported.
    """
    problem = check_problem(
        q, k, v, causal=causal, window=window, softcap=softcap, scale=scale, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    apply: Any = _FlashAttention.apply
    out, lse = apply(q, k, v, cu_seqlens_q, cu_seqlens_k, problem, deterministic, config)
    return (out, lse) if return_lse else out


def flash_attention_kernel(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Config:
    """The tiles that `flash_attention` picks for these tensors; `describe()` puts them in words for a record."""
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    return choose_config(problem, capability, all(is_describable(t) for t in (q, k, v)))


def _checked(config: Config, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Config:
    """A caller's own choice of kernels, where these can run: ValueError instead of numbers from something else."""
    if not isinstance(config, Config):
        raise ValueError(f"config: {config!r} is not supported; use a Config of flash_attention_plan, or None")
    if not set(config.beside) <= {"dV", "dK"}:
        raise ValueError(f"config: beside={config.beside!r} is not supported; it names dV, dK or both")
    if config.descriptors:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not is_describable(tensor):
                raise ValueError(f"{name}: descriptors need a base and strides of multiples of 16 bytes; use pointers")
    if config.hopper is not None or config.hopper_backward:
        from .flash_attention_hopper_launch import HopperTile, unsupported_by_hopper

        if config.hopper is not None and not isinstance(config.hopper, HopperTile):
            raise ValueError(f"config: hopper={config.hopper!r} is not supported; use a HopperTile, or None")
        reason = unsupported_by_hopper(problem)
        if reason is not None:
            raise ValueError(f"{reason}; leave the kernel's choice open")
        if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
            raise ValueError(f"q: the Hopper kernels need a GPU of compute capability 9.0; it is on {q.device}")
    return config


def flash_attention_forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp of a checked problem, without autograd."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tokens, heads = q.shape[-3], q.shape[-2]
    lse_shape = (heads, tokens) if problem.varlen else (problem.batch, heads, tokens)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if problem.varlen:
        # Rows that no sequence covers are nobody's: they read as rows that saw no key.
        out.zero_()
        lse.fill_(float("-inf"))
    if q.numel() == 0 or problem.q_len == 0:
        return out, lse
    if k.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    config = flash_attention_kernel(problem, q, k, v) if config is None else _checked(config, problem, q, k, v)
    if config.hopper is None:
        run(forward_launch(problem, config, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k), q)
    else:
        from .flash_attention_hopper_launch import hopper_forward_launch  # Gluon: only where it is asked for

        run(hopper_forward_launch(problem, config.hopper, q, k, v, out, lse), q)
    return out, lse


def flash_attention_backward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    deterministic: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v from what the forward returned, each contiguous, without autograd."""
    empty = q.numel() == 0 or k.numel() == 0 or problem.q_len == 0 or problem.kv_len == 0
    # The kernels write every row that belongs to a sequence; rows of a packed batch that belong to none stay zero.
    fresh = torch.zeros if empty or problem.varlen else torch.empty
    dq, dk, dv = (fresh(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if empty:
        return dq, dk, dv
    if grad_out.stride(-1) != 1 or not is_describable(grad_out):
        # A copy, which `contiguous` makes none of where only the base is at fault: a part of a longer gradient.
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
    if grad_lse is not None and grad_lse.stride(-1) != 1:
        grad_lse = grad_lse.contiguous()
    config = flash_attention_kernel(problem, q, k, v) if config is None else _checked(config, problem, q, k, v)
    # Rows of 16 bytes' multiples, which the copy engine can address.
    padded = (lse.shape[-1] + 3) // 4 * 4
    shift, delta = (lse.new_empty(*lse.shape[:-1], padded)[..., : lse.shape[-1]] for _ in range(2))
    hopper = config.hopper_backward and not deterministic
    sums: torch.Tensor | None = None
    if hopper or not (deterministic or config.two_passes):
        sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    run(row_terms_launch(problem, out, grad_out, lse, grad_lse, shift, delta, sums), q)
    inputs = (q, k, v, grad_out)
    if hopper and sums is not None:
        from .flash_attention_hopper_launch import hopper_backward_launch

        run(hopper_backward_launch(problem, inputs, dk, dv, sums, shift, delta), q)
    else:
        run(backward_launch(problem, config, inputs, dk, dv, sums, shift, delta, cu_seqlens_q, cu_seqlens_k), q)
    if sums is None:
        run(query_gradient_launch(problem, config, inputs, dq, shift, delta, cu_seqlens_q, cu_seqlens_k), q)
    else:
        run(query_sums_launch(problem, sums, dq), q)
    return dq, dk, dv


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor | None,
        problem: Problem,
        deterministic: bool,
        config: Config | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attention_forward(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, config)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.problem, ctx.deterministic, ctx.config = problem, deterministic, config
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = flash_attention_backward(
            ctx.problem, q, k, v, out, lse, grad_out, grad_lse, cu_seqlens_q, cu_seqlens_k,
            ctx.deterministic, ctx.config,
        )  # fmt: skip
        return (*grads, None, None, None, None, None)
