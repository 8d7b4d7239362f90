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
