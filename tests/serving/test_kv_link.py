"""What travels between a prefill and a decode worker: whole blocks, cut into pieces of layers."""

from __future__ import annotations

import pytest
import torch

from impls.serving.kv_link import Pieces


@pytest.mark.parametrize("most", [1, 200, 10_000], ids=["a layer", "some layers", "all at once"])
def test_pieces_bring_whole_blocks_and_touch_no_other(most):
    generator = torch.Generator().manual_seed(2)
    source, target = (torch.randn(5, 2, 9, 2, 3, 4, generator=generator) for _ in range(2))
    before = target.clone()
    move = Pieces(source, most), Pieces(target, most)
    blocks, places = torch.tensor([7, 0, 3]), torch.tensor([1, 8, 2])
    ranges = move[0].ranges(3)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == 5
    assert len(ranges) == {1: 5, 200: 5, 10_000: 1}[most]
    for layers in ranges:
        buffer = torch.empty(5 * move[0].layer_bytes(3), dtype=torch.uint8)
        move[0].gather(move[0].view(buffer, layers, 3), layers, blocks)
        move[1].scatter(move[1].view(buffer, layers, 3), layers, places)
    assert torch.equal(target[:, :, places], source[:, :, blocks])
    others = [b for b in range(9) if b not in places.tolist()]
    assert torch.equal(target[:, :, others], before[:, :, others])
