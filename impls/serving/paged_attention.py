"""Paged attention in decode: gather the blocks into a contiguous copy and attend to it, against reading them in place.

    out[b, h] = softmax(q[b, h] · K_bᵀ / √E) · V_b,     K_b, V_b in blocks that a table lists (Kwon et al., SOSP 2023)

Bytes, with C the cache that the batch attends to (2 · tokens · KV heads · E · itemsize):

    plain   gather reads C, writes C; attention reads C: 3·C. A cache of 8 bits is widened in between, C read and 2·C
            written, and attention reads these: 7·C; compiled, it is widened while it is gathered: 5·C
    paged   reads C once

so about three times faster at 16 bits where memory binds, which it does from a few sequences on, and seven times at 8.
What is paid: a table look-up a block, nothing in memory; the plain way also needs C again for the copy.

The plain way is as fast as torch lets it be: one gather brings each head's part of a block where attention wants it (an
index by block alone leaves the heads inside of blocks, and costs a second copy), and scales of 8 bits go to the queries
and to the output, not to the copy.

At 8 bits it is slower than its bytes: torch's conversion from int8 or float8 is the general elementwise kernel, which
loads element by element and finds out the type of each at run time (ATen/native/cuda/Copy.cu). ``torch_compile`` has
neither that nor the copy in 8 bits: it is what the kernel is to be held against there.

``flashinfer`` is that library's decode over the same cache; its plan is made once, for tables that do not change.
Workloads name ``cache``: the queries' own dtype (``same``), int8 or float8_e4m3fn with a scale a KV head.
"""

# Shapes: B sequences, H query heads, K key-value heads, E head width, N blocks of P slots, M blocks a table, C slots.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
#: Where blocks lie, and how long sequences are, belongs to the workload: every seed reads the same places.
LAYOUT_SEED = 17


def lengths_of(workload: Workload) -> list[int]:
    """Tokens of each sequence: all ``context``, or with ``ragged`` spread evenly from a quarter of it up."""
    batch, context = int(workload.batch), int(workload.context)
    if not workload.ragged:
        return [context] * batch
    return [max(1, round(context * (0.25 + 0.75 * (i + 1) / batch))) for i in range(batch)]


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """q (B, H, E), k and v (N, K, P, E) in shuffled blocks, tables (B, M), lengths (B), and the scales of 8 bits."""
    lengths, page = lengths_of(workload), int(workload.block_size)
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(LAYOUT_SEED))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : len(blocks)] = blocks
    shape = (sum(counts), int(workload.kv_heads), page, int(workload.head_dim))
    made: dict[str, Any] = {
        "q": ctx.randn(len(lengths), int(workload.heads), int(workload.head_dim), salt=1),
        "k": ctx.randn(*shape, salt=2),
        "v": ctx.randn(*shape, salt=3),
        "tables": tables.to(ctx.device),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=ctx.device),
    }
    if workload.cache != "same":
        kind = getattr(torch, str(workload.cache))
        top = 127.0 if kind == torch.int8 else 448.0
        for name in ("k", "v"):
            scale = made[name].abs().amax(dim=(0, 2, 3)).float() / top
            narrow = made[name].float() / scale[:, None, None]
            made[name] = narrow.round().to(kind) if kind == torch.int8 else narrow.to(kind)
            made[f"{name}_scale"] = scale
    return made


def _widen(pages: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What an 8-bit cache stands for; any other cache as it is."""
    return pages if scale is None else (pages.to(scale.dtype) * scale[:, None, None]).to(dtype)


def _times(x_BHE: Tensor, scale_K: Tensor | None) -> Tensor:
    """Each head times the scale of its KV head."""
    if scale_K is None:
        return x_BHE
    scale_H = scale_K.repeat_interleave(x_BHE.shape[1] // scale_K.shape[0])
    return (x_BHE * scale_H[:, None]).to(x_BHE.dtype)


def gathered(workload: Workload, ctx: Context) -> Callable[..., Tensor]:
    """The plain way. Where all sequences are as long, no mask is made, and torch may take its fastest kernel."""
    ragged = bool(workload.ragged) or int(workload.context) % int(workload.block_size) != 0

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tensor,
        lengths: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        heads, width = k.shape[1], k.shape[3]
        rows_BKM = tables.long()[:, None] * heads + torch.arange(heads, device=q.device)[:, None]

        def contiguous(pages: Tensor) -> Tensor:
            parts_BKMX: Tensor = pages.flatten(2).flatten(0, 1)[rows_BKM].to(q.dtype)
            return parts_BKMX.view(*rows_BKM.shape[:2], -1, width)

        keys, values = contiguous(k), contiguous(v)
        mask = None
        if ragged:
            mask = (torch.arange(keys.shape[2], device=q.device) < lengths[:, None])[:, None, None]
        queries = _times(q, k_scale)[:, :, None]
        out: Tensor = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return _times(out.squeeze(2), v_scale).contiguous()

    return run


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Our kernel."""
    from kernels.paged_attention import paged_decode

    out: Tensor = paged_decode(q, k, v, tables, lengths, k_scale_K=k_scale, v_scale_K=v_scale)
    return out


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """One sequence after another, so that the wide copy is never larger than one of them."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        blocks = tables[row].long()
        keys, values = (
            _widen(pages[blocks], scale, q.dtype).transpose(0, 1).flatten(1, 2)[:, :length]
            for pages, scale in ((k, k_scale), (v, v_scale))
        )
        q_KGE = q[row].unflatten(0, (-1, group))
        weights = (q_KGE @ keys.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        out[row] = (weights @ values).flatten(0, 1)
    return out


def flashinfer(workload: Workload, ctx: Context) -> Callable[..., Tensor]:
    """The library's batch decode; planned at the first call, since the workload's tables never change."""
    import flashinfer as library

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=ctx.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="HND", use_tensor_cores=True)
    planned = False

    def run(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        nonlocal planned
        if not planned:
            page = k.shape[2]
            counts = (lengths.cpu() + page - 1) // page
            ends = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
            rows = zip(tables.cpu(), counts.tolist(), strict=True)
            wrapper.plan(
                ends.to(q.device),
                torch.cat([row[:count] for row, count in rows]).to(q.device),
                ((lengths.cpu() - 1) % page + 1).to(torch.int32).to(q.device),
                q.shape[1],
                k.shape[1],
                q.shape[2],
                page,
                q_data_type=q.dtype,
                kv_data_type=k.dtype,
            )
            planned = True
        out: Tensor = wrapper.run(q, (k, v))
        return out

    return run


def same_dtype(workload: Workload) -> str | None:
    """The library is compared where both read the very same cache."""
    return None if workload.cache == "same" else "compared on a cache in the queries' dtype only"


def work(workload: Workload) -> Work:
    """Keys and values of the tokens seen, each once; two products over them a query head."""
    tokens = sum(lengths_of(workload))
    kept = ITEMSIZE[workload.dtype if workload.cache == "same" else str(workload.cache)]
    cache = 2 * tokens * int(workload.kv_heads) * int(workload.head_dim) * kept
    rows = 2 * int(workload.batch) * int(workload.heads) * int(workload.head_dim) * ITEMSIZE[workload.dtype]
    return Work(
        flops=4 * tokens * int(workload.heads) * int(workload.head_dim),
        bytes=cache + rows,
        items=int(workload.batch),
        unit="tokens",
        reasons={
            "flops": "two products of E a token seen and query head, two operations each",
            "bytes": "keys and values of every token seen once, a query in and an output out a head",
        },
    )


def predict(workload: Workload) -> float:
    """Bytes of the plain way over those of the paged one; see the module."""
    if workload.cache == "same":
        return 3.0
    wide, narrow = ITEMSIZE[workload.dtype], ITEMSIZE[str(workload.cache)]
    return (3 * narrow + 2 * wide) / narrow


PAIR = Pair(
    name="paged_attention",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher", memory="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": Variant(gathered, builds=True),
        "optimized": Variant(paged, requires=("triton",)),
        "torch_compile": Variant(gathered, peer="torch", requires=("compiler",), builds=True, compiled=True),
        "flashinfer": Variant(
            flashinfer, peer="library", requires=("cuda", "package:flashinfer"), supports=same_dtype, builds=True
        ),
    },
    work=work,
    predict=predict,
)
