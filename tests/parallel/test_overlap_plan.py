"""Chunks by waves: what is counted, and that the plan is never behind even chunks by that count."""

import itertools

import pytest

from harness.workload import parse_workload
from impls.parallel import overlap
from impls.parallel.overlap_plan import (
    ALL_REDUCE,
    HELD,
    MESSAGE,
    PRODUCTS,
    SMS,
    TILE_COLUMNS,
    TILE_ROWS,
    chunk_rows,
    step_seconds,
)

INNER, WIDTH, ROW = 7168, 4096, 8192.0
WAVE = 2 * TILE_ROWS * TILE_COLUMNS * INNER * SMS / PRODUCTS


def message(rows):
    return MESSAGE + rows * ROW / ALL_REDUCE


def test_one_product_is_its_waves_and_its_message():
    assert step_seconds([8192], INNER, WIDTH, ROW) == pytest.approx(8 * WAVE + message(8192))


def test_a_chunk_beside_a_message_lacks_the_multiprocessors_that_it_holds():
    """2,048 rows are 256 tiles: two waves of 132, and three where the first has 24 less."""
    assert SMS - HELD + SMS < 256 <= 2 * SMS
    assert step_seconds([2048, 2048], INNER, WIDTH, ROW) == pytest.approx(5 * WAVE + message(2048))
    assert step_seconds([2048, 2048], INNER, WIDTH, ROW, held=0) == pytest.approx(4 * WAVE + message(2048))


def test_even_chunks_lose_where_they_were_seen_to_lose():
    """Two H200s, 8192 tokens: 0.98 ms in one, 1.09 in four even chunks."""
    seen = 0.981872 / 1.094753
    whole, four = ([8192], [2048] * 4)
    told = step_seconds(whole, INNER, WIDTH, ROW) / step_seconds(four, INNER, WIDTH, ROW)
    assert told == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize("tokens", [64, 101, 2048, 8192, 32768])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_plan_covers_all_rows_and_is_no_worse_than_two_even_chunks(tokens, chunks):
    rows = chunk_rows(tokens, chunks, INNER, WIDTH, ROW)
    assert sum(rows) == tokens
    assert all(n > 0 for n in rows)
    assert 2 <= len(rows) <= chunks
    if tokens % 256 == 0:
        assert step_seconds(rows, INNER, WIDTH, ROW) <= step_seconds([tokens // 2] * 2, INNER, WIDTH, ROW)


def test_as_many_chunks_as_tokens_and_no_more():
    assert chunk_rows(2, 2, 8, 8, 8.0) == (1, 1)
    assert chunk_rows(7, 1, 8, 8, 8.0) == (7,)
    with pytest.raises(ValueError, match="cannot be cut"):
        chunk_rows(2, 3, 8, 8, 8.0)


def test_the_prediction_is_below_what_product_and_link_alone_would_allow():
    for tokens, ranks in itertools.product((2048, 8192, 32768), (2, 8)):
        dims = {"tokens": tokens, "inner": 14336, "width": WIDTH, "chunks": 4, "ranks": ranks}
        w = parse_workload("overlap", {"name": "w", "tier": "smoke", "dtype": "bfloat16", **dims}, "test")
        inner, row = 14336 // ranks, overlap._link_bytes_a_row(w)
        product = step_seconds([tokens], inner, WIDTH, 0.0) - MESSAGE
        link = step_seconds([tokens], inner, WIDTH, row) - product
        assert overlap.predict(w) < (product + link) / max(product, link)
