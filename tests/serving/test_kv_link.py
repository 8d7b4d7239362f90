"""What travels between a prefill and a decode worker: whole blocks, in pieces of layers, over a link that may break."""

from __future__ import annotations

import threading

import pytest
import torch

from impls.serving import kv_wire
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


def test_a_link_that_breaks_is_told_to_the_engine_instead_of_leaving_it_waiting(monkeypatch):
    def broken(*args, **more):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(kv_wire.dist, "recv", broken)
    wake = threading.Event()
    wire = kv_wire.WireReceiver(torch.zeros(2, 2, 4, 2, 4, 4), 3, None, 1, wake)
    wire.begin()
    assert wake.wait(10), "nobody is woken"
    with pytest.raises(RuntimeError, match="the link to rank 1 broke: connection closed by peer"):
        wire.poll()


def test_buffers_hold_a_layer_of_the_longest_prompt_and_no_more_than_the_whole_of_it(monkeypatch):
    kv = torch.zeros(6, 2, 40, 2, 4, 8)  # 512 bytes a block and layer
    for buffer, size in ((1, 10 * 512), (3 * 10 * 512, 3 * 10 * 512), (1 << 30, 6 * 10 * 512)):
        monkeypatch.setattr(kv_wire, "BUFFER", buffer)
        wire = kv_wire.WireReceiver(kv, 10, None, 1, threading.Event())
        assert [part.nbytes for part in wire.buffers] == [size, size]
        for blocks in (1, 3, 10):
            for layers in wire.pieces.ranges(blocks):
                assert wire.pieces.view(wire.buffers[0], layers, blocks).shape[2] == blocks
