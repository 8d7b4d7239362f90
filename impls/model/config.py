"""The dimensions of a Llama-family decoder, read from where models keep them.

The family: RMSNorm before each sublayer, rotary positions, grouped-query attention, a SwiGLU feed-forward, tied or
untied embeddings (Touvron et al., 2023, "LLaMA", section 2.2; "The Llama 3 Herd of Models", section 3.2). Anything
that computes something else is refused by name, since a near miss would run and be wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from impls.model.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the length a model was first trained on.

    linear: every frequency over `factor` (position interpolation, Chen et al., 2023).
    llama3: long wavelengths over `factor`, short ones kept, a smooth step between (Llama 3.1).
    factors: one divisor for each frequency, as GGUF stores the result of llama3.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self)
        if any(not math.isfinite(factor) or factor <= 0 for factor in self.factors):
            raise ModelError("a divisor of the rotary frequencies is not positive")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope scaling: high_freq_factor {self.high_freq_factor} must exceed "
                f"low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the decoder's mathematics depends on; the names are those of Hugging Face's config.json.

    Raises:
        ModelError: a size that is not positive, heads that do not divide, an odd head width.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs of channels")
        scaling = self.rope_scaling
        if scaling and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(
                f"{len(scaling.factors)} rotary factors given for head_dim {self.head_dim}, not half as many"
            )

    @property
    def parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def digest(self) -> str:
        """16 hex digits that two configurations share exactly when they describe the same computation."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_numbers(config: RopeScaling | ModelConfig) -> None:
    """Hold the fields against their types, and make floats of whole numbers, so that 2 and 2.0 have one digest."""
    for field in fields(config):
        value = getattr(config, field.name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if field.type == "int" and not (number and isinstance(value, int) and value >= 1):
            raise ModelError(f"{field.name} must be a whole number of at least 1, got {value!r}")
        if field.type == "float":
            if not (number and math.isfinite(value) and value > 0):
                raise ModelError(f"{field.name} must be a positive number, got {value!r}")
            object.__setattr__(config, field.name, float(value))


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle in radians by which each pair of channels turns per position; float32, shape (head_dim / 2,), on the CPU.

    float32 and in this order of operations, because that is the arithmetic with which the models were trained.
    Sources: Su et al., 2021, "RoFormer", section 3.2.2; the llama3 step is that of Meta's llama-models.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "factors":
        return frequency / torch.tensor(scaling.factors, dtype=torch.float32)
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


SHAPES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
    ),
    # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    # "The Llama 3 Herd of Models", table 3
    "llama-3-8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
}


def named_shape(name: str) -> ModelConfig:
    """The configuration of a named size.

    Raises:
        ModelError: no such name; the message lists those there are.
    """
    if name not in SHAPES:
        raise ModelError(f"no model shape named {name!r}; there are: {', '.join(sorted(SHAPES))}")
    return SHAPES[name]


def config_from_hf(path: Path) -> ModelConfig:
    """Read a Hugging Face config.json of the family.

    Raises:
        ModelError: the file is missing or no JSON object, the architecture is another, or it asks for a computation
            that the decoder does not have (named, with the file).
    """
    raw = _read_json(path)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
        found = ", ".join(map(str, architectures)) if architectures else "none"
        raise ModelError(f"{path}: architecture {found} is not of the Llama family ({', '.join(ARCHITECTURES)})")
    _refuse_other_computations(raw, path)
    try:
        width, heads = raw["hidden_size"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or _whole_share(width, heads, path)
        theta, scaling = _hf_rope(raw, path)
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=width,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
        )
    except KeyError as error:
        raise ModelError(f"{path}: the entry {error.args[0]!r} is missing") from error
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise ModelError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def _whole_share(width: Any, heads: Any, path: Path) -> int:
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width % heads:
        raise ModelError(f"{path}: hidden_size {width!r} does not divide over {heads!r} attention heads")
    return width // heads


def _refuse_other_computations(raw: Mapping[str, Any], path: Path) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("mlp_bias"):
        raise ModelError(f"{path}: mlp_bias is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{path}: the weights are quantized ({method}); give the unquantized checkpoint or a GGUF file"
        )
    if "MistralForCausalLM" in raw["architectures"]:
        window = raw.get("sliding_window", 4096)
        if window is not None and window < raw.get("max_position_embeddings", 4096 * 32):
            raise ModelError(f"{path}: sliding_window {window} is not supported, only full attention")


def _hf_rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling from either spelling: `rope_theta` with `rope_scaling`, or one `rope_parameters`."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor is not supported: the whole head turns")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", factor=rope["factor"])
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_position_embeddings=rope["original_max_position_embeddings"],
            )
    except KeyError as error:
        raise ModelError(f"{path}: rope scaling {kind!r} lacks the entry {error.args[0]!r}") from error
    raise ModelError(f"{path}: rope scaling {kind!r} is not supported, only default, linear and llama3")


def config_from_gguf(metadata: Mapping[str, Any], path: Path, *, tied: bool, factors: tuple[float, ...]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture llama.

    Args:
        metadata: the file's key-value pairs.
        path: the file, for messages.
        tied: the file has no output matrix of its own.
        factors: divisors of the rotary frequencies (the tensor rope_freqs), empty when there are none.

    Raises:
        ModelError: another architecture, a missing entry, or a computation that the decoder does not have.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{path}: architecture {architecture!r} is not of the Llama family ('llama')")
    if metadata.get("llama.expert_count"):
        raise ModelError(f"{path}: {metadata['llama.expert_count']} experts: mixtures of experts are not supported")

    def entry(name: str) -> Any:
        key = f"llama.{name}"
        if key not in metadata:
            raise ModelError(f"{path}: the metadata entry {key!r} is missing")
        return metadata[key]

    width, heads = entry("embedding_length"), entry("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length") or _whole_share(width, heads, path)
    if metadata.get("llama.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{path}: key and value heads of different widths are not supported")
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: rotary positions on part of the head are not supported")
    scaling = RopeScaling("factors", factors=factors) if factors else None
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        scaling = RopeScaling("linear", factor=_decimal(entry("rope.scaling.factor")))
    elif kind != "none":
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported, only none, linear and rope_freqs")
    vocabulary = metadata.get("llama.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    try:
        return ModelConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=entry("feed_forward_length"),
            num_layers=entry("block_count"),
            num_heads=heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=entry("context_length"),
            rms_norm_eps=_decimal(entry("attention.layer_norm_rms_epsilon")),
            rope_theta=_decimal(metadata.get("llama.rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            tie_word_embeddings=tied,
        )
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise ModelError(f"{path}: {error}") from error


def _decimal(value: Any) -> Any:
    """GGUF keeps float32: six digits give back the decimal that was meant. What is no number is left to be refused."""
    return float(f"{value:.6g}") if isinstance(value, int | float) else value
