"""Weights from a Hugging Face folder: config.json and safetensors files, one or sharded.

The header of a safetensors file (8 bytes of length, then JSON) is read here, so that a missing, misshapen or cut-off
tensor is named before any weight is loaded; the tensors themselves are read by the `safetensors` package.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from impls.model.config import config_from_hf
from impls.model.errors import ModelError, need
from impls.model.source import TensorInfo

ENCODINGS = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000


class SafetensorsSource:
    """A folder of the family.

    Raises:
        ModelError: no config.json, another architecture, no safetensors file, a shard or tensor that the index names
            but that is not there, a damaged header, numbers in an encoding that is not a float.
    """

    def __init__(self, folder: Path) -> None:
        need("safetensors")
        self.folder = folder
        self.config = config_from_hf(folder / "config.json")
        self.tensors: dict[str, TensorInfo] = {}
        self.listing, found = _stored_tensors(folder)
        for stored in found:
            # Old checkpoints keep the rotary frequencies as a tensor; they follow from the configuration.
            if not stored.stored_name.endswith("rotary_emb.inv_freq"):
                self.tensors[stored.stored_name.removeprefix("model.")] = stored
        if self.config.tie_word_embeddings and "lm_head.weight" in self.tensors:
            self._drop_tied_head()

    def place(self, name: str) -> tuple[Path, str]:
        """The index, which names no shard for it, or the only file; the name has the prefix of its neighbours."""
        prefixed = any(info.stored_name.startswith("model.") for info in self.tensors.values())
        stored_name = f"model.{name}" if prefixed and name != "lm_head.weight" else name
        return self.listing, stored_name

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        if info.encoding not in ENCODINGS:
            raise ModelError(
                f"{info.file}: the tensor {info.stored_name!r} is stored as {info.encoding}, "
                f"supported are {', '.join(ENCODINGS)}"
            )
        safetensors = need("safetensors")
        try:
            with safetensors.safe_open(str(info.file), framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(info.stored_name)
        except safetensors.SafetensorError as error:
            raise ModelError(f"{info.file}: the tensor {info.stored_name!r} cannot be read ({error})") from error
        return tensor

    def _drop_tied_head(self) -> None:
        """A tied output matrix may be stored as well, as long as it is the same."""
        head, embedding = self.tensors["lm_head.weight"], self.tensors.get("embed_tokens.weight")
        if embedding is None or head.shape != embedding.shape:
            return
        if not torch.equal(self.read("lm_head.weight"), self.read("embed_tokens.weight")):
            raise ModelError(
                f"{head.file}: 'lm_head.weight' differs from the embedding, though config.json ties them "
                "(tie_word_embeddings); set it to false to use both"
            )
        del self.tensors["lm_head.weight"]


def _stored_tensors(folder: Path) -> tuple[Path, list[TensorInfo]]:
    """What is stored, and the file that says so: the only one, or the index."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    found = sorted(folder.glob("*.safetensors"))
    if not single.is_file() and index.is_file():
        return index, _sharded(index)
    if single.is_file() or len(found) == 1:
        only = single if single.is_file() else found[0]
        return only, list(read_header(only).values())
    if found:
        raise ModelError(f"{folder}: {len(found)} safetensors files but no {index.name} that says what is in which")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    hint = f"; {others[0]} is a pickle: convert it to safetensors" if others else ""
    raise ModelError(f"{folder}: no model.safetensors and no {index.name}{hint}")


def _sharded(index: Path) -> list[TensorInfo]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in where.items()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index with a weight_map ({error!r})") from error
    headers: dict[str, dict[str, TensorInfo]] = {}
    tensors = []
    for name, shard in pairs:
        path = index.parent / shard
        if not path.is_file():
            raise ModelError(f"{path}: no such file, though {index.name} says that it holds the tensor {name!r}")
        if shard not in headers:
            headers[shard] = read_header(path)
        if name not in headers[shard]:
            raise ModelError(f"{path}: the tensor {name!r} is missing, though {index.name} places it here")
        tensors.append(headers[shard][name])
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that one safetensors file says it holds, by stored name.

    Raises:
        ModelError: the file is shorter than its header, or the header is not of the format.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path}: truncated or not a safetensors file: it ends within its header")
        text = file.read(length)
    try:
        raw = json.loads(text)
        return {
            name: TensorInfo(
                stored_name=name,
                shape=tuple(map(int, entry["shape"])),
                file=path,
                begin=8 + length + int(entry["data_offsets"][0]),
                nbytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
                encoding=str(entry["dtype"]),
            )
            for name, entry in raw.items()
            if name != "__metadata__"
        }
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path}: damaged safetensors header ({error!r})") from error
