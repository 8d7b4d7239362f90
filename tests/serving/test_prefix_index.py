"""Which blocks are known by their text, who holds them, and which goes first when room is needed."""

from __future__ import annotations

import pytest

from impls.serving.block_manager import BlockManager, SharingPool
from impls.serving.prefix_index import PrefixIndex, chained
from impls.serving.request import PENDING, Request, Sampling, Sequence

SIZE = 4


def put_text(index: PrefixIndex, tokens: list[int], blocks: list[int]) -> list:
    keys: list[int] = []
    index.extend_keys(keys, tokens, len(blocks))
    nodes = []
    for place, block in enumerate(blocks):
        nodes.append(index.put(nodes[-1] if nodes else None, keys[place], index.text(tokens, place), block))
    return nodes


def found(index: PrefixIndex, tokens: list[int]) -> list[int | None]:
    return [node.block for node in index.find(tokens, [], len(tokens) // index.block_size)]


def sequence(tokens: list[int], name: str = "s") -> Sequence:
    return Sequence(Request(name, tokens, Sampling(max_tokens=8)))


def manager(blocks: int, **more) -> BlockManager:
    return BlockManager(blocks, SIZE, index=PrefixIndex(SIZE, **more))


def admit(blocks: BlockManager, seq: Sequence, tokens: int | None = None) -> list[tuple[int, int]]:
    """Lets a sequence in and runs its tokens, as a step of its own."""
    blocks.begin_step()
    known = blocks.find_known(seq)
    assert blocks.can_admit(seq, known=known)
    copies = blocks.adopt(seq, known)
    seq.computed = len(seq.tokens) if tokens is None else tokens
    blocks.extend(seq, seq.computed)
    blocks.publish(seq, seq.computed)
    return copies


def test_a_hash_is_of_all_the_text_up_to_the_end_of_the_block():
    index = PrefixIndex(2)
    one, two = [], []
    index.extend_keys(one, [1, 2, 3, 4], 2)
    index.extend_keys(two, [9, 9, 3, 4], 2)
    assert one[1] != two[1], "equal tokens after different text must not have the hash of each other"
    assert one == [chained(0, (1, 2)), chained(chained(0, (1, 2)), (3, 4))]
    more = list(one)
    index.extend_keys(more, [1, 2, 3, 4, 5, 6], 3)
    assert more[:2] == one
    assert len(more) == 3


def test_a_text_finds_the_blocks_that_it_begins_with_and_no_others():
    index = PrefixIndex(2)
    put_text(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert found(index, [1, 2, 3, 4, 9, 9]) == [10, 11]
    assert found(index, [1, 2, 3]) == [10]
    assert found(index, [3, 4, 5, 6]) == [], "a block's text counts from the beginning"
    assert found(index, [1, 9, 3, 4]) == []


@pytest.mark.parametrize("planted", [lambda before, tokens: 7, lambda before, tokens: sum(tokens) % 3])
def test_texts_of_one_hash_are_told_apart(planted):
    index = PrefixIndex(2, planted)
    put_text(index, [1, 2, 3, 4], [0, 1])
    put_text(index, [2, 1, 3, 4], [2, 3])  # the same second block after another first
    put_text(index, [4, 2, 0, 1], [4, 5])
    assert found(index, [1, 2, 3, 4]) == [0, 1]
    assert found(index, [2, 1, 3, 4]) == [2, 3]
    assert found(index, [4, 2, 0, 1]) == [4, 5]
    assert found(index, [1, 2, 0, 1]) == [0]
    assert found(index, [3, 4]) == []
    for block in range(6):
        index.drop(block)
    assert index.nodes == len(index) == 0


def test_a_text_that_lost_its_beginning_is_found_again_when_that_is_back():
    index = PrefixIndex(2)
    put_text(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    index.drop(10)
    assert found(index, [1, 2, 3, 4, 5, 6]) == []
    put_text(index, [1, 2], [30])
    assert found(index, [1, 2, 3, 4, 5, 6]) == [30, 11, 12]
    index.drop(12)
    assert index.nodes == 2
    index.drop(30)
    assert index.nodes == 2, "the text of block 11 still needs what precedes it"
    index.drop(11)
    assert index.nodes == 0


def test_a_text_keeps_its_first_block_when_another_comes_to_hold_it():
    index = PrefixIndex(2)
    put_text(index, [1, 2], [10])
    put_text(index, [1, 2, 3, 4], [20, 21])
    assert found(index, [1, 2, 3, 4]) == [10, 21]
    assert 20 not in index


def test_a_partly_filled_block_is_known_to_nobody_until_it_is_full():
    blocks = manager(16)
    writer = sequence(list(range(7)))
    admit(blocks, writer)
    assert blocks.find_known(sequence(list(range(7)), "reader")).tokens == SIZE
    assert writer.blocks[1] not in blocks.sharing.index
    writer.tokens.append(7)
    writer.computed = 8
    blocks.begin_step()
    blocks.publish(writer, 8)
    assert blocks.find_known(sequence([*range(8), 99], "reader")).tokens == 2 * SIZE


def test_tokens_that_the_host_does_not_know_yet_name_no_block():
    blocks = manager(16)
    writer = sequence(list(range(7)))
    admit(blocks, writer)
    writer.tokens.append(PENDING)
    writer.computed = 8
    blocks.publish(writer, 8)
    assert writer.indexed == 1
    assert writer.blocks[1] not in blocks.sharing.index
    writer.tokens[7] = 7
    blocks.publish(writer, 8)
    assert writer.indexed == 2
    assert blocks.find_known(sequence([*range(8), 99], "reader")).tokens == 2 * SIZE


def test_readers_of_one_text_hold_the_same_blocks_and_write_to_their_own():
    blocks = manager(16)
    first = sequence([*range(8), 50])
    second = sequence([*range(8), 60], "t")
    admit(blocks, first)
    admit(blocks, second)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert blocks.device.free == 16 - 4
    blocks.release(first)
    assert blocks.device.free == 16 - 3, "what the other still reads is not free"
    blocks.release(second)
    assert blocks.device.free == 16


def test_a_prompt_known_to_its_end_runs_its_last_token_in_a_copy():
    blocks = manager(16)
    first = sequence(list(range(8)))
    admit(blocks, first)
    same = sequence(list(range(8)), "t")
    blocks.begin_step()
    known = blocks.find_known(same)
    assert known.tokens == 7
    copies = blocks.adopt(same, known)
    assert copies == [(first.blocks[1], same.blocks[1])]
    assert same.blocks[0] == first.blocks[0]
    assert same.blocks[1] != first.blocks[1]


def test_a_block_whose_tokens_run_in_the_same_step_is_shared_but_not_copied():
    blocks = manager(16)
    admit(blocks, sequence(list(range(8))))  # the step is still being put together
    assert blocks.find_known(sequence(list(range(8)), "t")).tokens == SIZE
    assert blocks.find_known(sequence([*range(8), 9], "t")).tokens == 2 * SIZE


def test_what_was_used_last_is_evicted_last_and_ends_go_before_beginnings():
    blocks = manager(6)
    texts = {"a": [1] * 8, "b": [2] * 8, "c": [3] * 8}
    held = {}
    for name, tokens in texts.items():
        seq = sequence(tokens, name)
        admit(blocks, seq)
        held[name] = list(seq.blocks)
        blocks.release(seq)
    assert blocks.sharing.idle == [block for name in "abc" for block in reversed(held[name])]
    again = sequence([*texts["a"], 9], "again")
    assert blocks.find_known(again).tokens == 8
    blocks.adopt(again, blocks.find_known(again))
    assert not set(held["a"]) & set(blocks.sharing.idle), "a block that somebody holds cannot be evicted"
    blocks.release(again)
    order = [held["b"][1], held["b"][0], held["c"][1], held["c"][0], held["a"][1], held["a"][0]]
    assert blocks.sharing.idle == order
    for count in range(1, 7):
        assert blocks.device.take(1) == [order[count - 1]]
        assert blocks.sharing.evicted == count
    assert blocks.sharing.index.nodes == 0


def test_free_blocks_go_before_cached_ones():
    blocks = manager(4)
    seq = sequence([1] * 8)
    admit(blocks, seq)
    cached = set(seq.blocks)
    blocks.release(seq)
    assert not set(blocks.device.take(2)) & cached
    assert blocks.sharing.evicted == 0
    assert set(blocks.device.take(2)) == cached


def test_idle_blocks_that_a_prompt_takes_up_are_not_counted_as_room_for_the_rest():
    blocks = manager(4)
    first = sequence([1] * 8)
    admit(blocks, first)
    blocks.release(first)
    blocks.device.take(1)
    longer = sequence([1] * 16, "t")  # two known blocks, two more, one of them left
    known = blocks.find_known(longer)
    assert known.tokens == 8
    assert not blocks.can_admit(longer, known=known)
    fits = sequence([1] * 12, "u")
    assert blocks.can_admit(fits, known=blocks.find_known(fits))
    assert not blocks.can_admit(fits, spare=1, known=blocks.find_known(fits))


def test_what_a_broken_request_wrote_is_known_to_nobody():
    blocks = manager(8)
    bad = sequence([1] * 9)
    admit(blocks, bad)
    blocks.release(bad, broken=True)
    assert blocks.find_known(sequence([1] * 9, "t")).tokens == 0
    assert blocks.device.free == 8
    assert blocks.sharing.idle == []
    assert blocks.sharing.index.nodes == 0


def test_giving_back_twice_and_sharing_the_unknown_are_bugs():
    pool = SharingPool(4, PrefixIndex(SIZE))
    taken = pool.take(2)
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(taken)
    with pytest.raises(AssertionError, match="no known text"):
        pool.share(pool.take(1))
