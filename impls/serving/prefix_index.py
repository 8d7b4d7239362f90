"""Which text the cache's blocks hold: full blocks, found by a hash chained over the hash of the block before.

The keys and values of a block depend on its tokens and on all that precede them, so a block can serve another request
whose text is the same up to the block's end, and no other. The hash of a block is taken over its tokens and the hash
of the block before it (vLLM's automatic prefix caching, built on Kwon et al., SOSP 2023, "PagedAttention", section
4.4); linked to the block before, the blocks are the tree of Zheng et al., NeurIPS 2024, "SGLang", section 3
(RadixAttention), a block to an edge.

A hash only says where to look: tokens are compared, and so is the block before, which was found the same way. Two
prefixes of equal hash are therefore never taken for each other, and a short, fast hash is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import takewhile

Text = tuple[int, ...]
#: Hash of a block from the hash of the one before it (0 for none) and its tokens.
Hash = Callable[[int, Text], int]


def chained(before: int, tokens: Text) -> int:
    """Python's own hash of integers: the same in every process."""
    return hash((before, tokens))


class Node:
    """A block's worth of text after the text of ``parent``.

    block: the block that holds it, or None when it was evicted and something longer still is cached.
    uses: nodes and sequences that go on from here; while there are any, the text before them stays known.
    """

    __slots__ = ("block", "key", "parent", "tokens", "uses")

    def __init__(self, parent: Node | None, key: int, tokens: Text) -> None:
        self.parent, self.key, self.tokens = parent, key, tokens
        self.block: int | None = None
        self.uses = 0


class PrefixIndex:
    """Full blocks by their text. It holds no block itself: who does is :mod:`impls.serving.block_manager`'s affair."""

    def __init__(self, block_size: int, hash_block: Hash = chained) -> None:
        self.block_size = block_size
        self.hash_block = hash_block
        self._nodes: dict[int, list[Node]] = {}
        self._of_block: dict[int, Node] = {}

    def __len__(self) -> int:
        """Blocks whose text is known."""
        return len(self._of_block)

    @property
    def nodes(self) -> int:
        """Pieces of text that are kept: one a block, and those that longer ones need."""
        return sum(len(found) for found in self._nodes.values())

    def __contains__(self, block: int) -> bool:
        return block in self._of_block

    def text(self, tokens: Items[int], place: int) -> Text:
        """The tokens of the ``place``-th block."""
        return tuple(tokens[place * self.block_size : (place + 1) * self.block_size])

    def extend_keys(self, keys: list[int], tokens: Items[int], blocks: int) -> None:
        """Adds to ``keys``, the hashes of a text's first blocks, until there are as many as ``blocks``."""
        while len(keys) < blocks:
            keys.append(self.hash_block(keys[-1] if keys else 0, self.text(tokens, len(keys))))

    def find(self, tokens: Items[int], keys: list[int], blocks: int) -> list[Node]:
        """The longest run of cached blocks that the text begins with, ``blocks`` at most; ``keys`` as far as known."""
        return list(takewhile(lambda node: node.block is not None, self.along(tokens, keys, blocks)))

    def along(self, tokens: Items[int], keys: list[int], blocks: int) -> Iterator[Node]:
        """The pieces of a text that are kept, from its beginning on, whether a block still holds them or not."""
        self.extend_keys(keys, tokens, blocks)
        node: Node | None = None
        for place in range(blocks):
            node = self._exact(node, keys[place], self.text(tokens, place))
            if node is None:
                return
            yield node

    def put(self, parent: Node | None, key: int, tokens: Text, block: int) -> Node:
        """Says that ``block`` holds ``tokens`` after the text of ``parent``.

        When another block holds the same text already, that one stays the known one.
        """
        node = self._exact(parent, key, tokens)
        if node is None:
            node = Node(parent, key, tokens)
            self._nodes.setdefault(key, []).append(node)
            if parent is not None:
                parent.uses += 1
        if node.block is None:
            assert block not in self._of_block, f"block {block} holds another text"
            node.block = block
            self._of_block[block] = node
        return node

    def drop(self, block: int) -> None:
        """The block no longer holds its text."""
        node = self._of_block.pop(block)
        node.block = None
        self._prune(node)

    def hold(self, node: Node) -> None:
        """A sequence goes on from here."""
        node.uses += 1

    def let_go(self, node: Node) -> None:
        """The sequence is over, or has gone further."""
        node.uses -= 1
        assert node.uses >= 0, "a prefix was let go more often than held"
        self._prune(node)

    def _exact(self, parent: Node | None, key: int, tokens: Text) -> Node | None:
        for node in self._nodes.get(key, ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def _prune(self, node: Node | None) -> None:
        """Forgets text that no block holds and nothing goes on from."""
        while node is not None and node.block is None and not node.uses:
            same_key = self._nodes[node.key]
            same_key.remove(node)
            if not same_key:
                del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.uses -= 1
