"""What a loader needs to know of a place that holds weights, and the checks that are the same for all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from impls.model.config import ModelConfig
from impls.model.errors import ModelError

SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor.

    stored_name is its name in the file; begin and nbytes place its bytes there; encoding is the file's word for how
    the numbers are stored.
    """

    stored_name: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int
    encoding: str


class Source(Protocol):
    """A model on disk: its configuration, and its tensors under the decoder's names, read one at a time."""

    @property
    def config(self) -> ModelConfig:
        """The dimensions that the files declare."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is stored, by the decoder's names."""
        ...

    def place(self, name: str) -> tuple[Path, str]:
        """The file that should hold, or place, a tensor that is not stored, and the name that it would have there."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in the file's precision, or float32 where the file is quantized."""
        ...


def check_tensors(source: Source, expected: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Hold what is stored against what the configuration asks for, before anything is read.

    Raises:
        ModelError: a tensor is missing, unknown or of a wrong shape, or its bytes end after the file does. The file
            and the tensor are named, the tensor as the file calls it.
    """
    tensors = source.tensors
    wanted = set()
    for name, shape in expected:
        wanted.add(name)
        if name not in tensors:
            file, stored_name = source.place(name)
            raise ModelError(f"{file}: the tensor {stored_name!r} of shape {shape} is missing")
        info = tensors[name]
        if info.shape != shape:
            raise ModelError(
                f"{info.file}: the tensor {info.stored_name!r} has shape {info.shape}, "
                f"the configuration asks for {shape}"
            )
    others = {info.stored_name: info.file for name, info in tensors.items() if name not in wanted}
    unknown = sorted(others)
    if unknown:
        some = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise ModelError(f"{others[unknown[0]]}: tensors that a Llama-family decoder does not have: {some}")
    sizes: dict[Path, int] = {}
    for info in tensors.values():
        size = sizes.setdefault(info.file, info.file.stat().st_size)
        if info.begin + info.nbytes > size:
            raise ModelError(
                f"{info.file}: truncated: the tensor {info.stored_name!r} ends at byte {info.begin + info.nbytes}, "
                f"the file at {size}; fetch the file again"
            )


def source_digest(source: Source) -> str:
    """16 hex digits for the configuration and the weights, whatever the path or the split into files.

    Of each tensor the name, shape, encoding, and three samples of its bytes are hashed: the whole of a large model
    would take longer than loading it.
    """
    digest = hashlib.sha256(source.config.digest().encode())
    for name, info in sorted(source.tensors.items()):
        digest.update(json.dumps([name, info.shape, info.encoding, info.nbytes]).encode())
        with info.file.open("rb") as file:
            for start in (0, info.nbytes // 2, max(info.nbytes - SAMPLE_BYTES, 0)):
                file.seek(info.begin + start)
                digest.update(file.read(min(SAMPLE_BYTES, info.nbytes - start)))
    return digest.hexdigest()[:16]
