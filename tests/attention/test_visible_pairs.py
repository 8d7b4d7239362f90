"""visible_pairs against counting the pairs of the mask one by one."""

from __future__ import annotations

import itertools

import pytest

from impls.attention.visible_pairs import visible_pairs


def counted(q_len: int, kv_len: int, left: int | None, right: int | None) -> int:
    total = 0
    for i in range(q_len):
        p = i + kv_len - q_len
        total += sum((left is None or j >= p - left) and (right is None or j <= p + right) for j in range(kv_len))
    return total


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 9), (9, 1), (7, 7), (6, 11), (11, 6)]
)
def test_equals_the_count_of_the_mask(q_len: int, kv_len: int) -> None:
    for left, right in itertools.product([None, 0, 1, 3, 8, 30], repeat=2):
        assert visible_pairs(q_len, kv_len, left=left, right=right) == counted(q_len, kv_len, left, right), (
            left,
            right,
        )


def test_a_square_causal_mask_is_half_and_its_diagonal() -> None:
    assert visible_pairs(4096, 4096, right=0) == 4096 * 4097 // 2
    assert visible_pairs(4096, 4096) == 4096**2


def test_a_window_grows_with_the_length_and_not_with_its_square() -> None:
    assert visible_pairs(16384, 16384, left=1023, right=0) == 16384 * 1024 - 1024 * 1023 // 2


def test_negative_lengths_and_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="q_len: -1"):
        visible_pairs(-1, 4)
    with pytest.raises(ValueError, match="left: -2"):
        visible_pairs(4, 4, left=-2)
