"""Tokens sorted by expert: places, tiles, and experts that are empty, alone, or none of ours."""

import pytest
import torch

import kernels.moe_order as module
from kernels.moe_order import expert_order, most_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sorted_by_torch(experts, count):
    """Pairs in the order of their expert, and the experts' numbers of pairs."""
    flat = experts.flatten()
    ours = (flat >= 0) & (flat < count)
    order = torch.where(ours, flat, count).sort(stable=True).indices[: int(ours.sum())]
    return order, torch.bincount(flat[ours], minlength=count)


def tiles_of(counts, tile):
    found, start = [], 0
    for expert, size in enumerate(counts.tolist()):
        found += [(expert, start + at, start + min(at + tile, size)) for at in range(0, size, tile)]
        start += size
    return found


def draw(tokens, choices, low, high, dtype=torch.int64):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(low, high, (tokens, choices), generator=generator, dtype=dtype)


@pytest.mark.parametrize(
    ("experts", "count", "tile"),
    [
        (draw(1, 1, 0, 1), 1, 16),
        (draw(64, 2, 0, 8, torch.int32), 8, 16),
        (draw(37, 3, -2, 7), 5, 4),  # some are none of ours
        (draw(300, 4, 0, 128), 128, 8),
        (draw(5, 2, 0, 130), 130, 2),
        (torch.full((70, 1), 1), 3, 16),  # all to one
        (torch.full((9, 2), -1), 3, 16),  # nothing is ours
        (torch.tensor([[2**32, 1]]), 2, 16),  # a number that 32 bits would wrap into ours
    ],
    ids=str,
)
def test_every_pair_has_the_place_of_a_stable_sort(experts, count, tile):
    order, counts = sorted_by_torch(experts, count)
    found = expert_order(experts.to(DEVICE), count, tile)
    assert torch.equal(found.order_R[: len(order)].cpu().long(), order)
    assert torch.equal(found.slots_P[order].cpu().long(), torch.arange(len(order)))
    assert int((found.slots_P < 0).sum()) == experts.numel() - len(order)
    assert torch.equal(found.ends_E.cpu().long(), counts.cumsum(0))
    assert [tuple(t) for t in found.tiles_3N.T.tolist() if t[0] >= 0] == tiles_of(counts, tile)


def test_more_pairs_than_programs_have_at_once_stay_in_order(monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", 2)
    experts = draw(300, 4, 0, 3)  # ten blocks of 128 pairs: programs take five
    found = expert_order(experts.to(DEVICE), 3, 128)
    assert torch.equal(found.order_R.cpu().long(), sorted_by_torch(experts, 3)[0])


@pytest.mark.parametrize("most", [0, 1, 9, 22, 40, 99])
def test_pairs_beyond_the_most_get_no_row(most):
    experts = draw(20, 2, 0, 5)
    order, counts = sorted_by_torch(experts, 5)
    found = expert_order(experts.to(DEVICE), 5, 4, most)
    kept = order[:most]
    assert torch.equal(found.order_R.cpu().long(), kept)
    assert torch.equal(found.slots_P[kept].cpu().long(), torch.arange(len(kept)))
    assert int((found.slots_P < 0).sum()) == 40 - len(kept)
    assert torch.equal(found.ends_E.cpu().long(), counts.cumsum(0).clamp(max=most))
    assert [t[2] - t[1] for t in found.tiles_3N.T.tolist() if t[0] >= 0].count(0) == 0
    assert sum(t[2] - t[1] for t in found.tiles_3N.T.tolist() if t[0] >= 0) == len(kept)


def test_no_tokens_have_no_tiles():
    found = expert_order(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 4, 16)
    assert found.tiles_3N.shape == (3, 0)
    assert found.ends_E.tolist() == [0] * 4


@pytest.mark.parametrize("tile", [1, 4, 128])
def test_the_most_tiles_are_enough_and_needed(tile):
    for pairs in (1, 5, 64, 257):
        for experts in (1, 3, 300):
            alone = min(experts, pairs)
            worst = [1] * (alone - 1) + [pairs - alone + 1]  # one row each, and the rest in one
            even = [pairs // alone + (e < pairs % alone) for e in range(alone)]
            needed = [sum(-(-size // tile) for size in sizes) for sizes in (worst, even)]
            assert max(needed) <= most_tiles(pairs, experts, tile) <= max(needed) + alone


def test_wrong_arguments_are_named():
    good = draw(4, 2, 0, 3).to(DEVICE)
    for arguments, name in [
        ((good.float(), 3, 16), "experts"),
        ((good[0], 3, 16), "experts"),
        ((good.T, 3, 16), "experts"),
        ((good, 0, 16), "experts"),
        ((good, 1025, 16), "experts"),
        ((good, 3, 12), "tile"),
        ((good, 3, 0), "tile"),
        ((good, 3, 16, -1), "most"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            expert_order(*arguments)
