"""Weights from a GGUF file of architecture llama, dequantized by the `gguf` package as they are read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from impls.model.config import config_from_gguf
from impls.model.errors import ModelError, need
from impls.model.gguf_file import GGUFFile, read_gguf
from impls.model.source import TensorInfo

ENCODINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """One GGUF file.

    Raises:
        ModelError: not GGUF, cut off, another architecture, an encoding that is not supported (tensor and file named).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: GGUFFile = read_gguf(path)
        stored = dict(self.file.tensors)
        divisors = stored.pop("rope_freqs.weight", None)
        for info in self.file.tensors.values():
            _check_encoding(info)
        self.config = config_from_gguf(
            self.file.metadata,
            path,
            tied="output.weight" not in stored,
            factors=tuple(_values(divisors).flatten().tolist()) if divisors else (),
        )
        self.tensors: dict[str, TensorInfo] = {decoder_name(info.stored_name): info for info in stored.values()}

    def place(self, name: str) -> tuple[Path, str]:
        return self.path, gguf_name(name)

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        tensor = _values(info)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.config.num_heads if "q_proj" in name else self.config.num_kv_heads
            return split_halves(tensor, heads)
        return tensor


def decoder_name(stored_name: str) -> str:
    """The decoder's name for a tensor of a GGUF file; one that it does not know keeps its own."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored_name)
    if match and match[2] in _LAYER_NAMES:
        return f"layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
    return _NAMES.get(stored_name, stored_name)


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor that the decoder knows by this one."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    theirs = {ours: stored for stored, ours in _LAYER_NAMES.items()}
    if match and match[2] in theirs:
        return f"blk.{match[1]}.{theirs[match[2]]}.{match[3]}"
    return {ours: stored for stored, ours in _NAMES.items()}.get(name, name)


def split_halves(rows: Tensor, heads: int) -> Tensor:
    """Undo GGUF's order of query and key rows.

    llama.cpp turns channel 2i with 2i + 1, so the file holds the two channels of a pair side by side; the decoder turns
    i with i + E/2.
    """
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)


def _check_encoding(info: TensorInfo) -> None:
    if info.encoding not in ENCODINGS:
        raise ModelError(
            f"{info.file}: the tensor {info.stored_name!r} is stored as {info.encoding}; "
            f"supported are {', '.join(ENCODINGS)}"
        )


def _values(info: TensorInfo) -> Tensor:
    """float16 and float32 as they are; all other encodings as float32."""
    gguf = need("gguf")
    raw = np.fromfile(info.file, dtype=np.uint8, count=info.nbytes, offset=info.begin)
    if raw.size < info.nbytes:
        raise ModelError(
            f"{info.file}: truncated: the tensor {info.stored_name!r} has {raw.size} of its {info.nbytes} bytes; "
            "fetch the file again"
        )
    if info.encoding in ("F32", "F16"):
        return torch.from_numpy(raw.view(np.float32 if info.encoding == "F32" else np.float16)).view(info.shape)
    if info.encoding == "BF16":
        return torch.from_numpy(raw).view(torch.bfloat16).view(info.shape)
    rows = raw.reshape(*info.shape[:-1], -1)
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[info.encoding]))
