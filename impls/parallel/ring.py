"""Ring attention: keys and values travel around the ranks, each block's result is merged by online softmax.

Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3. Causal
attention would leave the rank of the first tokens idle: so the sequence is cut into 2N chunks and rank r holds chunks r
and 2N-1-r (Brandon et al. 2023, "Striped Attention", show the problem; this zigzag is Llama 3's and Megatron's answer).
Then every rank computes the same share of the triangle at every step:

    keys of one's own rank           the causal square of one's own two chunks, in order
    keys of a rank before (j < r)    all queries see its first chunk, none sees its second
    keys of a rank after (j > r)     the second chunk of queries sees both its chunks, the first sees none

Backward sends keys and values around once more, and behind them the gradients that each rank adds to; these start at
the first rank that is visited, so that N-1 hops bring them home.
"""

# Shapes: B rows, s positions of this rank, H query heads, K key-value heads, G = H/K, E width of a head.

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from impls.parallel.buckets import wide
from impls.parallel.link import Handle, Link

Tensor = torch.Tensor


def zigzag(seq: int, rank: int, world: int) -> Tensor:
    """The positions (S/N,) that a rank holds: chunks r and 2N-1-r of 2N, in increasing order.

    Raises:
        ValueError: a sequence that does not divide into 2N chunks.
    """
    if seq % (2 * world):
        raise ValueError(f"a sequence of {seq} does not divide into {2 * world} chunks, two for each of {world} ranks")
    chunk = seq // (2 * world)
    first, second = rank * chunk, (2 * world - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, s, E) over one block k, v (B, K, t, E): the output, and the log of the softmax's sum
    (B, H, s), both in the wide dtype. ``causal`` needs s = t."""
    if _flash(q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return out.float(), lse
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v.to(scores.dtype).unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of q, k and v, in the wide dtype; ``out`` and ``lse`` are of all blocks."""
    if _flash(q):
        # Without dropout no random state is read, but it must have the form that the forward pass gives it.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        lse = lse.contiguous()  # the kernel reads it by a plain pointer
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset
        )
        return grads[0].float(), grads[1].float(), grads[2].float()
    groups = q.shape[1] // k.shape[1]
    grad_g, out_g, lse_g = (x.unflatten(1, (-1, groups)).to(wide(q.dtype)) for x in (grad, out, lse))
    weights = torch.exp(_scores(q, k, causal) - lse_g.unsqueeze(-1))
    grad_v = (weights.transpose(-1, -2) @ grad_g).sum(2)
    inner = grad_g @ v.to(weights.dtype).unsqueeze(2).transpose(-1, -2)
    inner = weights * (inner - (grad_g * out_g).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    grad_q = (inner @ k.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    grad_k = (inner.transpose(-1, -2) @ q.unflatten(1, (-1, groups)).to(weights.dtype)).sum(2)
    return grad_q, grad_k, grad_v


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(B, K, G, s, t) in the wide dtype."""
    dtype = wide(q.dtype)
    queries = q.unflatten(1, (k.shape[1], -1)).to(dtype)
    scores: Tensor = queries @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Add a block's result to what is known so far, in place (online softmax)."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_(torch.exp(lse - total).unsqueeze(-1)).add_(more_out * torch.exp(more_lse - total).unsqueeze(-1))
    lse.copy_(total)


class _Ring:
    """One direction of travel: to the next rank, from the one before."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.to, self.source = (link.rank + 1) % link.world, (link.rank - 1) % link.world

    def pass_on(self, x: Tensor) -> tuple[Tensor, Handle]:
        """Send x to the next rank; the buffer for what comes, and the handle to wait for. Keep x alive until then."""
        received = torch.empty_like(x)
        return received, self.link.exchange(received, x, self.to, self.source)


def _seen(rank: int, source: int, queries: int, keys: int) -> tuple[slice, slice]:
    """Which queries of this rank see which keys of another rank."""
    if source < rank:
        return slice(0, queries), slice(0, keys // 2)
    return slice(queries // 2, queries), slice(0, keys)


class RingAttention(torch.autograd.Function):
    """Causal attention of q (B, H, s, E) over the k, v (B, K, s, E) of all ranks, held in zigzag."""

    @staticmethod
    def forward(ctx: Any, link: Link, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring, kv = _Ring(link), torch.stack([k, v])
        ctx.link = link
        out, lse = q, q
        for step in range(link.world):
            following = ring.pass_on(kv) if step < link.world - 1 else None
            if step == 0:
                out, lse = block_forward(q, kv[0], kv[1], causal=True)
            else:
                source = (link.rank - step) % link.world
                rows, keys = _seen(link.rank, source, q.shape[2], k.shape[2])
                merge(
                    out[:, :, rows],
                    lse[:, :, rows],
                    *block_forward(q[:, :, rows], kv[0, :, :, keys], kv[1, :, :, keys], causal=False),
                )
            kv = _arrived(kv, following)
        # Positions before heads in memory, as the next product reads it: it then keeps this very tensor, and no copy.
        out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        link: Link = ctx.link
        q, k, v, out, lse = ctx.saved_tensors
        ring, kv, grad = _Ring(link), torch.stack([k, v]), grad.contiguous()
        grad_q, own_k, own_v = q, k, v
        behind: tuple[Tensor, Handle] | None = None
        travelling: Tensor | None = None
        for step in range(link.world):
            following = ring.pass_on(kv) if step < link.world - 1 else None
            if step == 0:
                grad_q, own_k, own_v = block_backward(grad, q, kv[0], kv[1], out, lse, causal=True)
            else:
                source = (link.rank - step) % link.world
                rows, keys = _seen(link.rank, source, q.shape[2], k.shape[2])
                grad_r, q_r, out_r, lse_r = (x[:, :, rows] for x in (grad, q, out, lse))
                parts = block_backward(grad_r, q_r, kv[0, :, :, keys], kv[1, :, :, keys], out_r, lse_r, causal=False)
                grad_q[:, :, rows] += parts[0]
                if travelling is not None:
                    travelling = _arrived(travelling, behind)
                else:
                    travelling = torch.zeros_like(kv, dtype=parts[1].dtype)
                travelling[0, :, :, keys] += parts[1]
                travelling[1, :, :, keys] += parts[2]
                behind = ring.pass_on(travelling)
            kv = _arrived(kv, following)
        if travelling is not None:
            home = _arrived(travelling, behind)
            own_k, own_v = own_k + home[0], own_v + home[1]
        return None, grad_q.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype)


def _arrived(sent: Tensor, following: tuple[Tensor, Handle] | None) -> Tensor:
    """What came from the rank before, once it is there; without a message what was sent."""
    if following is None:
        return sent
    received, handle = following
    handle.wait()
    return received


class RingAttend:
    """The decoder's attention (B, s, H, E) over a ring."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        ring: Any = RingAttention
        out: Tensor = ring.apply(self.link, *(x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE)))
        return out.transpose(1, 2)

    def communicate(self, q_BSHE: Tensor, k_BSKE: Tensor) -> None:
        """A layer's messages alone: keys and values around twice, their gradients behind them the second time."""
        ring, kv = _Ring(self.link), torch.stack([k_BSKE, k_BSKE])
        grads = kv.to(wide(kv.dtype))
        for messages in ([kv], [kv, grads]):
            for _ in range(self.link.world - 1):
                for received, handle in [ring.pass_on(x) for x in messages]:
                    handle.wait()
                    del received
