"""Who holds which block of the cache (Kwon et al., SOSP 2023, "PagedAttention", section 4).

The cache is a pool of blocks of ``block_size`` tokens. A sequence's block table lists its blocks in order; they need
not be neighbours, so the only slots that never hold a token are the rest of its last block. With ``reserve`` a
sequence instead gets, when it is admitted, one contiguous run as long as the longest it may become: how engines kept
their caches before (the same section 3.1), in the same memory and for the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from impls.serving.request import Sequence


class BlockPool:
    """Numbered blocks, free or taken. Taking and giving back are constant time; a double free is a bug and raises."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._taken = bytearray(count)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` blocks from anywhere; the caller has made sure that they are there."""
        assert count <= len(self._free), f"{count} blocks asked of {len(self._free)}"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._taken[block] = 1
        return taken

    def find_run(self, count: int) -> int | None:
        """The first block of the first free run of ``count`` neighbours, or None."""
        place = self._taken.find(bytes(count))
        return None if place < 0 else place

    def take_run(self, start: int, count: int) -> list[int]:
        """The neighbours from ``start`` on."""
        run = list(range(start, start + count))
        assert not any(self._taken[block] for block in run), "a block of the run is taken"
        wanted = set(run)
        self._free = [block for block in self._free if block not in wanted]
        for block in run:
            self._taken[block] = 1
        return run

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks that their holder no longer needs."""
        for block in blocks:
            assert self._taken[block], f"block {block} was given back twice"
            self._taken[block] = 0
            self._free.append(block)


class BlockManager:
    """Block tables of all sequences on the device, and of those swapped out on the host.

    ``slots_reserved`` and ``slots_held`` add up, over every allocation that was given back, the token slots in it and
    those that ever held a token: their difference is what the way of keeping the cache wastes.

    Raises:
        ValueError: sizes that are not positive, or a cache that one reservation does not fit.
    """

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0, reserve: int = 0) -> None:
        if num_blocks < 1 or block_size < 1 or host_blocks < 0:
            raise ValueError(
                f"a cache needs blocks: got {num_blocks} of {block_size} tokens and {host_blocks} on the host"
            )
        self.block_size = block_size
        self.reserve_blocks = -(-reserve // block_size)
        if self.reserve_blocks > num_blocks:
            raise ValueError(
                f"one reservation of {reserve} tokens takes {self.reserve_blocks} of the cache's {num_blocks} blocks"
            )
        self.device = BlockPool(num_blocks)
        self.host = BlockPool(host_blocks)
        self.slots_reserved = 0
        self.slots_held = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.block_size)

    @property
    def use(self) -> float:
        """Share of the device's blocks that somebody holds."""
        return 1.0 - self.device.free / self.device.count

    def can_admit(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether a sequence without blocks could get all that its present tokens need, and ``spare`` be left."""
        if self.reserve_blocks:
            return self.device.find_run(self.reserve_blocks) is not None
        return self.blocks_for(len(sequence.tokens)) + spare <= self.device.free

    def can_extend(self, sequence: Sequence, tokens: int) -> bool:
        """Whether its table can grow to hold the first ``tokens`` tokens."""
        return self.blocks_for(tokens) - len(sequence.blocks) <= self.device.free

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Grows its table to hold the first ``tokens`` tokens."""
        if self.reserve_blocks and not sequence.blocks:
            start = self.device.find_run(self.reserve_blocks)
            assert start is not None, "no run is free for the reservation"
            sequence.blocks = self.device.take_run(start, self.reserve_blocks)
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks.extend(self.device.take(missing))

    def release(self, sequence: Sequence) -> None:
        """Takes back all its blocks, wherever they are."""
        if sequence.blocks:
            slots = len(sequence.blocks) * self.block_size
            self.slots_reserved += slots
            self.slots_held += min(slots, sequence.computed)
            self.device.give_back(sequence.blocks)
        self.host.give_back(sequence.host_blocks)
        sequence.blocks, sequence.host_blocks = [], []

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether the host has room for the blocks that hold its computed tokens."""
        return self.blocks_for(sequence.computed) <= self.host.free

    def swap_out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Moves it to the host; the (device block, host block) pairs to copy before the device blocks are reused."""
        used = self.blocks_for(sequence.computed)
        host = self.host.take(used)
        moves = list(zip(sequence.blocks[:used], host, strict=True))
        self.release(sequence)
        sequence.host_blocks = host
        return moves

    def swap_in(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Moves it back to the device; the (host block, device block) pairs to copy before it is read."""
        host, sequence.host_blocks = sequence.host_blocks, []
        self.extend(sequence, sequence.computed)
        self.host.give_back(host)
        return list(zip(host, sequence.blocks, strict=False))
