"""The header of a GGUF file: metadata and the table of tensors.

Read here rather than with the `gguf` package's reader, which maps every string of the vocabulary to an array (seconds
for 50,000 tokens) and cannot say which tensor a cut-off file lacks. Layout: the GGUF page of the ggml documentation.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impls.model.errors import ModelError, need
from impls.model.source import TensorInfo

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFFile:
    """metadata: key to Python value (arrays as lists). tensors: by stored name, shapes in torch's order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A place in the bytes, and what was being read there, for the message when they end."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.data, self.path, self.at, self.what = data, path, 0, "the header"

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        if self.at + length > len(self.data):
            raise struct.error("the string is longer than the file")
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: {self.what} has the unknown type {kind}; the file is damaged")
        item, count = self.take("I")[0], self.take("Q")[0]
        if item in _SCALARS:
            return list(self.take(_SCALARS[item], count))
        if count > len(self.data):
            raise struct.error("the array is longer than the file")
        read: Callable[[], Any] = self.text if item == _STRING else lambda: self.value(item)
        return [read() for _ in range(count)]


def read_gguf(path: Path) -> GGUFFile:
    """Read metadata and the table of tensors; no weights.

    Raises:
        ModelError: not a GGUF file, a version or byte order other than 2 or 3 little-endian, a header that is cut off
            (with the entry in hand), or a number type that the `gguf` package does not know.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)  # type: ignore[arg-type]  # a map slices and unpacks like bytes
            try:
                return _parse(cursor, path)
            except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, RecursionError) as error:
                raise ModelError(
                    f"{path}: truncated or damaged: {cursor.what} cannot be read "
                    f"at byte {cursor.at} of {size} ({error})"
                ) from error


def _parse(cursor: _Cursor, path: Path) -> GGUFFile:
    cursor.at = 4
    (version,) = cursor.take("I")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} (or big-endian) is not supported, only 2 and 3")
    tensor_count, entry_count = cursor.take("Q", 2)
    metadata: dict[str, Any] = {}
    for index in range(entry_count):
        cursor.what = f"metadata entry {index + 1} of {entry_count}"
        key = cursor.text()
        cursor.what = f"the metadata entry {key!r}"
        metadata[key] = cursor.value(cursor.take("I")[0])
    table: list[tuple[str, tuple[int, ...], int, int]] = []
    for index in range(tensor_count):
        cursor.what = f"the entry of tensor {index + 1} of {tensor_count}"
        name = cursor.text()
        cursor.what = f"the entry of the tensor {name!r}"
        shape = tuple(reversed(cursor.take("Q", cursor.take("I")[0])))
        encoding, offset = cursor.take("I")[0], cursor.take("Q")[0]
        table.append((name, shape, encoding, offset))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, not a positive number")
    data_begin = -(-cursor.at // alignment) * alignment
    tensors = {
        name: TensorInfo(name, shape, path, data_begin + offset, *_stored_size(path, name, shape, encoding))
        for name, shape, encoding, offset in table
    }
    return GGUFFile(path, metadata, tensors)


def _stored_size(path: Path, name: str, shape: tuple[int, ...], encoding: int) -> tuple[int, str]:
    """Bytes that the tensor takes, and the name of its encoding."""
    gguf = need("gguf")
    try:
        kind = gguf.GGMLQuantizationType(encoding)
    except ValueError as error:
        raise ModelError(f"{path}: the tensor {name!r} is stored in the unknown type {encoding}") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    values = 1
    for extent in shape:
        values *= extent
    if not shape or shape[-1] % block:
        raise ModelError(f"{path}: the tensor {name!r} of shape {shape} does not divide into blocks of {block}")
    return values // block * block_bytes, str(kind.name)
