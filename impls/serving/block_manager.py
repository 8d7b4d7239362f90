"""Who holds which block of the cache (Kwon et al., SOSP 2023, "PagedAttention", section 4).

The cache is a pool of blocks of ``block_size`` tokens. A sequence's block table lists its blocks in order; they need
not be neighbours, so the only slots that never hold a token are the rest of its last block. With ``reserve`` a
sequence instead gets, when it is admitted, one contiguous run as long as the longest it may become: how engines kept
their caches before (the same section 3.1), in the same memory and for the same kernels.

With prefix caching a full block may have several holders, and one that nobody holds any more stays until its room is
needed. Only full blocks are shared and new tokens go behind them, so nobody ever writes to a block that another reads;
where a prompt is known to its very last token, which must run once more for its logits, the last block is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from impls.serving.prefix_index import Node, PrefixIndex
from impls.serving.request import PENDING, Sequence


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

    def give_back(self, blocks: Collection[int]) -> None:
        """Blocks that their holder no longer needs."""
        for block in blocks:
            assert self._taken[block], f"block {block} was given back twice"
            self._taken[block] = 0
            self._free.append(block)


class SharingPool(BlockPool):
    """Blocks that may have several holders.

    One that nobody holds and whose text the index knows lies idle: it counts as free, and is evicted when no other
    block is left, the one first that went idle first. Of a sequence's blocks the last go idle first, since a block is
    of use only with all those before it.
    """

    def __init__(self, count: int, index: PrefixIndex) -> None:
        super().__init__(count)
        self.index = index
        self.evicted = 0
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody holds, idle ones among them."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> list[int]:
        """Blocks that nobody holds and whose text is known, the next to be evicted first."""
        return list(self._idle)

    def is_idle(self, block: int) -> bool:
        """Whether only the index knows the block."""
        return block in self._idle

    def take(self, count: int) -> list[int]:
        """``count`` blocks for one holder; what is cached in them, if they were not free, is forgotten."""
        while len(self._free) < count and self._idle:
            block, _ = self._idle.popitem(last=False)
            self.index.drop(block)
            self.evicted += 1
            super().give_back([block])
        taken = super().take(count)
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Collection[int]) -> None:
        """One more holder for blocks whose text is known."""
        for block in blocks:
            assert block in self.index, f"block {block} holds no known text"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def forget(self, block: int) -> None:
        """What is in the block is known to nobody any more; it is free at once if nobody holds it."""
        self.index.drop(block)
        if block in self._idle:
            del self._idle[block]
            super().give_back([block])

    def give_back(self, blocks: Collection[int]) -> None:
        """One holder less, for a sequence's blocks in their order."""
        for block in reversed(list(blocks)):
            assert self._holders[block], f"block {block} was given back twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self.index:
                self._idle[block] = None
            else:
                super().give_back([block])


@dataclass(frozen=True, slots=True)
class Known:
    """What of a sequence's text is cached: ``tokens`` of it, in the blocks of ``nodes`` and, when it is known to its
    end, in the block of ``last``, which is copied."""

    tokens: int = 0
    nodes: Items[Node] = ()
    last: Node | None = None


NOTHING = Known()


class BlockManager:
    """Block tables of all sequences on the device, and of those swapped out on the host.

    ``slots_reserved`` and ``slots_held`` add up, over every allocation that was given back, the token slots in it and
    those that ever held a token: their difference is what the way of keeping the cache wastes.
    index: with one, full blocks of known text are shared.

    Raises:
        ValueError: sizes that are not positive, or a cache that one reservation does not fit.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        reserve: int = 0,
        index: PrefixIndex | None = None,
    ) -> None:
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
        self.sharing = None if index is None else SharingPool(num_blocks, index)
        self.device = self.sharing or BlockPool(num_blocks)
        # Blocks whose text became known in the step that is being put together: their tokens run in it.
        self._fresh: set[int] = set()
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

    def can_admit(self, sequence: Sequence, spare: int = 0, known: Known = NOTHING) -> bool:
        """Whether a sequence without blocks could get all that its present tokens need, and ``spare`` be left."""
        if self.reserve_blocks:
            return self.device.find_run(self.reserve_blocks) is not None
        missing = self.blocks_for(len(sequence.tokens)) - len(known.nodes)
        free = self.device.free
        if self.sharing is not None:
            free -= sum(self.sharing.is_idle(node.block) for node in known.nodes if node.block is not None)
        return missing + spare <= free

    def find_known(self, sequence: Sequence) -> Known:
        """What is cached of a sequence that holds no blocks; its last token is never among it, for it has to run."""
        if self.sharing is None:
            return NOTHING
        size, length = self.block_size, len(sequence.tokens)
        nodes = self.sharing.index.find(sequence.tokens, sequence.keys, length // size)
        if len(nodes) * size < length:
            return Known(len(nodes) * size, nodes)
        # A block whose own tokens run in the coming step can be read in it, but not be copied before it.
        if nodes[-1].block in self._fresh:
            return Known(length - size, nodes[:-1])
        return Known(length - 1, nodes[:-1], nodes[-1])

    def adopt(self, sequence: Sequence, known: Known) -> list[tuple[int, int]]:
        """Gives a sequence the blocks that are known; the (block, its copy) pairs to copy before anything is written.

        The block that is copied is not held: should its room be given away, the copy is still made before that.
        """
        if self.sharing is None or not known.tokens:
            return []
        blocks = [node.block for node in known.nodes if node.block is not None]
        self.sharing.share(blocks)
        sequence.blocks, sequence.computed = blocks, known.tokens
        if known.nodes:
            self.sharing.index.hold(known.nodes[-1])
            sequence.indexed, sequence.prefix = len(blocks), known.nodes[-1]
        if known.last is None or known.last.block is None:
            return []
        source = known.last.block
        sequence.blocks.extend(self.device.take(1))
        return [(source, sequence.blocks[-1])]

    def begin_step(self) -> None:
        """What was put together before has been launched."""
        self._fresh.clear()

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """Makes the full blocks among its first ``tokens`` known; they are computed, or will be in the coming step.

        Blocks with a token that the host does not know yet follow when it does.
        """
        if self.sharing is None:
            return
        index, full = self.sharing.index, tokens // self.block_size
        while sequence.indexed < full:
            place = sequence.indexed
            text = index.text(sequence.tokens, place)
            if PENDING in text:
                break
            index.extend_keys(sequence.keys, sequence.tokens, place + 1)
            block = sequence.blocks[place]
            node = index.put(sequence.prefix, sequence.keys[place], text, block)
            if node.block == block:
                self._fresh.add(block)
            index.hold(node)
            self._leave(sequence)
            sequence.indexed, sequence.prefix = place + 1, node

    def _leave(self, sequence: Sequence) -> None:
        """The sequence no longer goes on from the prefix that it held."""
        if self.sharing is not None and sequence.prefix is not None:
            self.sharing.index.let_go(sequence.prefix)
        sequence.indexed, sequence.prefix = 0, None

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

    def release(self, sequence: Sequence, *, broken: bool = False) -> None:
        """Takes back all its blocks, wherever they are; ``broken`` says that nobody shall find what is in them."""
        self._leave(sequence)
        if broken and self.sharing is not None:
            # By its text, since blocks of an answer that was complete by its length are no longer its own.
            full = len(sequence.tokens) // self.block_size
            for node in list(self.sharing.index.along(sequence.tokens, sequence.keys, full)):
                if node.block is not None:
                    self.sharing.forget(node.block)
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
