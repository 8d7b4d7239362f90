"""Ring attention's parts in one process: the zigzag deals every position, blocks merge to the whole attention."""

import pytest
import torch
import torch.nn.functional as F

from impls.parallel.ring import _seen, block_backward, block_forward, merge, zigzag


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_zigzag_deals_every_position_once_and_the_same_share_of_the_triangle(world):
    seq = 2 * world * 3
    places = [zigzag(seq, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(seq))
    assert all(torch.equal(p, p.sort().values) for p in places)
    assert len({int(p.sum()) for p in places}) == 1


def test_a_sequence_that_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match="a sequence of 10 does not divide into 4 chunks, two for each of 2 ranks"):
        zigzag(10, 0, 2)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_blocks_merge_to_causal_attention_and_its_gradients(world, heads):
    """All ranks' loops in one process: what the ring computes when every message arrives."""
    generator = torch.Generator().manual_seed(0)
    seq, width = 2 * world * 5, 8
    q, grad = (torch.randn(2, heads[0], seq, width, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, heads[1], seq, width, generator=generator, dtype=torch.float64) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    whole.backward(grad)

    places = [zigzag(seq, rank, world) for rank in range(world)]
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    with torch.no_grad():
        for rank, own in enumerate(places):
            queries = q[:, :, own]
            out, lse = block_forward(queries, k[:, :, own], v[:, :, own], causal=True)
            for source in set(range(world)) - {rank}:
                rows, keys = _seen(rank, source, len(own), len(own))
                theirs = places[source][keys]
                more = block_forward(queries[:, :, rows], k[:, :, theirs], v[:, :, theirs], causal=False)
                merge(out[:, :, rows], lse[:, :, rows], *more)
            torch.testing.assert_close(out, whole[:, :, own])

            grad_q, part_k, part_v = block_backward(
                grad[:, :, own], queries, k[:, :, own], v[:, :, own], out, lse, causal=True
            )
            grad_k[:, :, own] += part_k
            grad_v[:, :, own] += part_v
            for source in set(range(world)) - {rank}:
                rows, keys = _seen(rank, source, len(own), len(own))
                theirs = places[source][keys]
                cut = (x[:, :, rows] for x in (grad[:, :, own], queries))
                parts = block_backward(
                    *cut, k[:, :, theirs], v[:, :, theirs], out[:, :, rows], lse[:, :, rows], causal=False
                )
                grad_q[:, :, rows] += parts[0]
                grad_k[:, :, theirs] += parts[1]
                grad_v[:, :, theirs] += parts[2]
            torch.testing.assert_close(grad_q, q.grad[:, :, own])
    torch.testing.assert_close(grad_k, k.grad)
    torch.testing.assert_close(grad_v, v.grad)


def test_the_flash_kernels_are_called_with_what_they_take(monkeypatch):
    """On a GPU blocks go to torch's flash kernels; their signatures and shapes are checked without one."""
    from impls.parallel import ring

    monkeypatch.setattr(ring, "_flash", lambda q: True)
    q, k = (torch.empty(2, 64, heads, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 4))
    out, lse = block_forward(q, k, k, causal=True)
    assert (out.shape, out.dtype) == (q.shape, torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 8, 64), torch.float32)
    late, early = slice(32, 64), slice(0, 32)
    queries, keys, part = q[:, :, late], k[:, :, early], out.to(q.dtype)[:, :, late]
    grads = block_backward(queries, queries, keys, keys, part, lse[:, :, late], causal=False)
    assert [g.shape for g in grads] == [(2, 8, 32, 64), (2, 4, 32, 64), (2, 4, 32, 64)]
    assert all(g.dtype == torch.float32 for g in grads)
