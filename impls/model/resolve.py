"""From a workload's `model` and `text` to weights and prompts: the one place where techniques on a model begin.

A workload says `model`: the name of a seeded shape (`tiny`, `llama-3-8b`), or `smollm2-135m-instruct` for the real
weights that `pairbench models fetch` brings. A path that the user gives takes the place of either.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.pair import Context
from harness.workload import Workload
from impls.model.config import ModelConfig, named_shape
from impls.model.decoder import Decoder
from impls.model.errors import ModelError
from impls.model.fetch import default_model_path
from impls.model.text import judging_text
from impls.model.tokenizer import load_tokenizer
from impls.model.weights import load_model, open_source

REAL = "smollm2-135m-instruct"
#: Configurations of the models that this process was given a path to, by the name that a workload has for them.
_CONFIGS: dict[str, ModelConfig] = {}


def model_path(workload: Workload, ctx: Context) -> Path | None:
    """The weights' file or folder; None for seeded weights.

    Raises:
        ModelError: the real weights are asked for and not here.
    """
    if ctx.model_path is not None:
        return Path(ctx.model_path).expanduser()
    if workload.model != REAL:
        return None
    path = default_model_path()
    if path is None:
        raise ModelError(f"the weights of {REAL} are not here: run 'pairbench models fetch'")
    return path


def not_here(workload: Workload) -> str | None:
    """Why a workload on real weights cannot run, for `Variant(supports=...)`: the weights, or what reads them."""
    name, brought = str(workload.dims.get("model")), "model" in workload.digests
    if not brought and name != REAL:
        return None
    if not brought and default_model_path() is None:
        return "needs real weights: run 'pairbench models fetch'"
    reader = "gguf" if not brought or name.endswith(".gguf") else "safetensors"
    missing = [package for package in (reader, "tokenizers") if importlib.util.find_spec(package) is None]
    if missing:
        return f"needs {' and '.join(missing)} to read the weights: pip install 'pairbench[models]'"
    return None


def model_for(workload: Workload, ctx: Context, dtype: torch.dtype | None = None) -> Decoder:
    """The model, loaded once a process for each dtype: its weights are only read.

    Raises:
        ModelError: weights that are missing or unfit; names the file and the tensor.
    """
    path = model_path(workload, ctx)
    if path is not None:
        _CONFIGS[str(workload.model)] = open_source(path).config
    shape = "tiny" if path is not None else str(workload.model)
    return _load(path, shape, dtype or ctx.dtype, ctx.device)


@lru_cache(maxsize=2)
def _load(path: Path | None, shape: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    return load_model(path, shape=shape, seed=0, dtype=dtype, device=device)


def config_for(workload: Workload, path: str | Path | None = None) -> ModelConfig:
    """Dimensions of the workload's model without its weights: what `work` counts with.

    A model that the user brought is known by its file's name alone, once `model_for` or this function saw its path.
    """
    name = str(workload.model)
    if path is not None:
        _CONFIGS[name] = open_source(path).config
    if name in _CONFIGS:
        return _CONFIGS[name]
    return named_shape("smollm2-135m" if name == REAL else name)


def prompts_for(workload: Workload, ctx: Context, rows: int, length: int) -> Tensor:
    """(rows, length) token ids: pieces of real text for real weights, seeded ids for seeded ones.

    Which pieces depends on the seed, so that fresh inputs are fresh text.

    Raises:
        ModelError: the text is shorter than what is asked for.
    """
    path = model_path(workload, ctx)
    if path is None:
        vocabulary = named_shape(str(workload.model)).vocab_size
        return torch.randint(vocabulary, (rows, length), generator=ctx.generator(11)).to(ctx.device)
    ids = _text_ids(path)
    if len(ids) < 2 * length:
        raise ModelError(f"the judging text has {len(ids)} tokens, too few for prompts of {length}")
    starts = torch.randint(len(ids) - length, (rows,), generator=ctx.generator(11)).tolist()
    return torch.stack([ids[start : start + length] for start in starts]).to(ctx.device)


@lru_cache(maxsize=2)
def _text_ids(path: Path) -> Tensor:
    return torch.tensor(load_tokenizer(path).encode(judging_text().text[:60_000], special=False))


def token_flops(config: ModelConfig, context: float) -> float:
    """Model FLOPs of one token that attends to `context` positions: two for each weight that multiplies it, the output
    head included and the embedding look-up not, and 4·heads·head width for each position attended to."""
    head = config.vocab_size * config.hidden_size
    weights = config.parameters - (0 if config.tie_word_embeddings else head)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return 2.0 * weights + attention


def head_flops(config: ModelConfig) -> float:
    """What of :func:`token_flops` is the output head: a prompt's tokens but its last need no logits."""
    return 2.0 * config.vocab_size * config.hidden_size


def describe(model: Decoder) -> Mapping[str, Any]:
    """What a record keeps of a model."""
    return {"weights_digest": model.weights_digest, "config_digest": model.config.digest()}
