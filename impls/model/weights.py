"""Fill a decoder with weights: from a Hugging Face folder, from a GGUF file, or from a seed.

Tensors are read, cast and placed one at a time, so that beside the model itself never more than one of them is alive.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from impls.model.config import ModelConfig, named_shape
from impls.model.decoder import Decoder, Parts
from impls.model.errors import ModelError
from impls.model.from_gguf import GGUFSource
from impls.model.from_safetensors import SafetensorsSource
from impls.model.source import Source, check_tensors, source_digest

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Place = Callable[[str, Tensor], Tensor]


def load_model(
    path: str | Path | None = None,
    *,
    shape: str | ModelConfig = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    parts: Parts | None = None,
    place: Place | None = None,
    trainable: bool = False,
) -> Decoder:
    """A decoder ready to run.

    Args:
        path: a Hugging Face folder, a folder with one GGUF file, or a GGUF file; None for seeded random weights.
        shape: size of a random model, by name or as a configuration. Ignored when a path is given.
        seed: of the random weights.
        dtype: what the weights are cast to.
        device: where they are put.
        parts: replaced operations; see `impls.model.decoder`.
        place: given each parameter's name and whole tensor on its way in, returns what this process keeps of it (a
            shard). The linears of `parts` must then have that shape.
        trainable: whether parameters record gradients.

    Returns:
        The model in eval mode; its `weights_digest` names the weights, whatever their path.

    Raises:
        ModelError: see `open_source`, and `check_tensors` for what is missing, misshapen or cut off.
    """
    if dtype not in DTYPES:
        raise ModelError(f"weights in {dtype} are not supported; choose one of {', '.join(map(str, DTYPES))}")
    device = torch.device(device)
    if path is None:
        config = named_shape(shape) if isinstance(shape, str) else shape
        digest = hashlib.sha256(f"random {config.digest()} {seed}".encode()).hexdigest()[:16]
        read: Callable[[str, tuple[int, ...]], Tensor] = lambda name, size: random_weight(  # noqa: E731
            config, name, size, seed, device
        )
    else:
        source = sound_source(path)
        config, read = source.config, lambda name, size: source.read(name)
        digest = source_digest(source)
    with torch.device("meta"):
        model = Decoder(config, parts)
    for name, size in expected_shapes(config):
        tensor = read(name, size)
        if place is not None:
            tensor = place(name, tensor)
        _assign(model, name, tensor.to(device=device, dtype=dtype).contiguous(), trainable)
    if config.tie_word_embeddings and isinstance(model.lm_head, nn.Linear):
        model.lm_head.weight = model.embed_tokens.weight
    model.frequencies = model.frequencies.to(device)
    model.weights_digest = digest
    return model.eval()


def open_source(path: str | Path) -> Source:
    """Find out what lies at a path and read its header.

    Raises:
        ModelError: nothing there, nothing of a known format there, several GGUF files, or a file that its reader
            refuses (named).
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; give a Hugging Face folder or a GGUF file")
    if path.is_dir():
        if (path / "config.json").is_file():
            return SafetensorsSource(path)
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return GGUFSource(found[0])
        what = f"{len(found)} GGUF files: name one of them" if found else "neither a config.json nor a GGUF file"
        raise ModelError(f"{path}: {what}")
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent)
    if path.suffix in (".bin", ".pt", ".pth"):
        raise ModelError(f"{path}: pickled weights are not read; convert them to safetensors")
    return GGUFSource(path)


def sound_source(path: str | Path) -> Source:
    """What lies at a path, once its headers hold all that the configuration asks for; no weight is read.

    Raises:
        ModelError: see `open_source` and `check_tensors`.
    """
    source = open_source(path)
    check_tensors(source, expected_shapes(source.config))
    return source


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter that a checkpoint of this configuration must hold, one by one.

    Not read from a built model: a damaged file may declare a billion layers.
    """
    width, inner = config.hidden_size, config.intermediate_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width}
    yield "embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        for name, rows in projections.items():
            yield f"{prefix}.self_attn.{name}.weight", (rows, width)
            if config.attention_bias:
                yield f"{prefix}.self_attn.{name}.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (width, query_width)
        if config.attention_bias:
            yield f"{prefix}.self_attn.o_proj.bias", (width,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, width)
        yield f"{prefix}.mlp.up_proj.weight", (inner, width)
        yield f"{prefix}.mlp.down_proj.weight", (width, inner)
    yield "norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, width)


def random_weight(config: ModelConfig, name: str, size: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """One parameter of a random model, float32.

    Each has a stream of its own, from the seed and its name: the same on every rank and in any order. Matrices have
    variance 1 / fan-in, those that write to the residual stream 1 / (2 layers) of that (Radford et al., 2019,
    "Language Models are Unsupervised Multitask Learners", section 2.3); norms vary around 1 so that none is idle.
    """
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
    generator = torch.Generator(device=device).manual_seed(stream)
    noise = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    scale = 0.02 if name.endswith("bias") else size[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scale /= math.sqrt(2 * config.num_layers)
    return noise.mul_(scale)


def _assign(model: Decoder, name: str, tensor: Tensor, trainable: bool) -> None:
    owner_name, _, attribute = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    wanted = getattr(owner, attribute)
    if wanted.shape != tensor.shape:
        raise ModelError(
            f"the parameter {name!r} of this model has shape {tuple(wanted.shape)}, but was given {tuple(tensor.shape)}"
        )
    setattr(owner, attribute, nn.Parameter(tensor, requires_grad=trainable))


if __name__ == "__main__":  # `python -m impls.model.weights PATH`: for who must not import torch to ask
    try:
        sound_source(sys.argv[1])
    except ModelError as error:
        sys.exit(f"{type(error).__name__}: {error}")
