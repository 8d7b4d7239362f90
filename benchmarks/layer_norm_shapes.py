"""Launch shapes of layer_norm_dropout_add that benchmarks/launch_shapes.py compares, by the length of a row."""

from __future__ import annotations

from collections.abc import Iterator

# By width: "tile-rows warps chunks registers", and "tile-rows warps chunks stages programs-a-multiprocessor".
FORWARD = {
    4096: (
        "1 4 1 96, 1 4 1 128, 1 4 1 168, 1 8 1 64, 1 8 1 80, 1 8 1 128, 1 16 1 40, 1 16 1 64, 1 2 1 200, 2 8 4 128, "
        "2 8 1 128, 2 16 2 64, 2 16 1 64"
    ),
    8192: (
        "1 8 1 96, 1 8 1 128, 1 8 1 168, 1 16 1 64, 1 16 1 128, 1 32 1 32, 1 32 1 64, 1 4 1 200, 2 16 4 128, 2 32 2 64"
    ),
    1024: (
        "1 1 1 96, 1 1 1 128, 1 2 1 64, 1 2 1 80, 1 4 1 40, 2 1 1 200, 2 2 4 96, 2 2 4 128, 2 4 2 64, 4 4 4 96, "
        "4 4 4 128, 4 8 2 64, 8 8 4 128"
    ),
}
BACKWARD = {
    4096: (
        "1 8 1 3 2, 1 8 1 4 2, 1 8 1 5 2, 1 8 1 1 2, 1 8 1 0 2, 1 8 1 3 1, 1 8 1 4 1, 1 4 1 3 2, 1 4 1 4 2, "
        "1 4 1 0 2, 1 4 1 3 3, 1 16 1 3 1, 1 16 1 4 1, 1 16 1 3 2, 1 16 1 1 2, 2 16 2 3 1, 2 16 2 4 1, 2 8 4 3 1, "
        "2 8 4 4 1, 2 8 4 0 1"
    ),
    8192: (
        "1 16 1 3 1, 1 16 1 4 1, 1 16 1 5 1, 1 16 1 1 1, 1 16 1 0 1, 1 8 1 3 1, 1 8 1 4 1, 1 8 1 5 1, 1 8 1 0 1, "
        "1 32 1 3 1, 1 32 1 4 1, 1 32 1 1 1"
    ),
    1024: (
        "4 8 2 3 2, 4 8 2 4 2, 4 8 2 1 2, 4 8 2 0 2, 8 16 2 3 1, 8 16 2 4 1, 2 4 2 3 4, 2 4 2 4 4, 2 4 2 0 4, "
        "4 4 4 3 2, 4 4 4 4 2, 4 4 4 0 2, 2 2 4 3 4, 8 8 4 3 1, 8 8 4 4 1, 1 2 1 3 8, 1 1 1 3 8, 1 4 1 3 4"
    ),
}


def numbers(text: str) -> Iterator[list[int]]:
    """The lists of numbers in a text that parts them with commas."""
    return ([int(word) for word in part.split()] for part in text.split(","))
