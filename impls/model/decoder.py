"""A Llama-family decoder in one readable file, built so that techniques can replace its parts.

    tokens -> embedding -> L x [ x + attention(norm(x));  x + feed_forward(norm(x)) ] -> norm -> logits

Shape suffixes: B batch rows, S new positions of a row, T positions attended to, D model width, H query heads,
K key-value heads, E width of a head, F feed-forward width, V vocabulary.

Three ways to replace a part:

1. What attention reads. Every forward pass is given an `Attend`: a callable that gets one layer's rotated queries and
   new keys and values, and returns the attention output. It alone knows where older keys live: nowhere
   (`CausalAttention`), in one block a row (`impls.model.cache.KVCache`), in pages (a serving engine's own)::

       class Paged:
           def __call__(self, layer, q_BSHE, k_BSKE, v_BSKE):
               write(self.cache[layer], k_BSKE, v_BSKE, self.slots)
               return paged_attention(q_BSHE, self.cache[layer], self.block_tables, self.lengths)

2. How an operation is computed. `Parts` holds the pure functions and the maker of linear layers::

       fused = Parts(norm=lambda x, delta, weight, eps: my_kernel(x, delta, weight, eps))
       model = load_model(path, parts=fused)

   With `rotate=keep_unrotated` the rotation is left to the `Attend`, which can then fuse it with the cache write; the
   angles are `model.cos_sin(positions_BS)`.

3. A module of a loaded model. `replace_linears(model, make)` swaps layers (quantization); assigning to
   `layer.self_attn` or `layer.mlp` swaps a whole sublayer (`impls.model.fuse` does that).

Attention counts its heads from the projections' output, so a shard that holds some of the heads (tensor parallelism)
needs no other change; `o_proj` and `down_proj` are then linears that reduce over ranks.

A forward pass reads nothing back to the host and its shapes follow from those of its inputs alone, so it can be
captured in a CUDA graph as long as its `Attend` can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from impls.model.config import ModelConfig, rope_frequencies


class Attend(Protocol):
    """Attention of new positions over everything before them, for one layer of one forward pass."""

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """Return out_BSHE, scaled by E ** -0.5; the queries and keys come rotated."""
        ...


class CausalAttention:
    """No cache: a row's positions are all given in this pass, and each attends to itself and those before it.

    Rows padded on the right are right at their own positions, since nothing attends to what follows it.
    """

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
        if grouped and q_BHSE.is_cuda and q_BHSE.dtype == torch.float32:
            # The kernel that keeps no scores in float32 knows no groups: given groups, torch writes all scores out.
            group = q_BHSE.shape[1] // k_BKSE.shape[1]
            k_BKSE, v_BKSE = (x.repeat_interleave(group, dim=1) for x in (k_BKSE, v_BKSE))
            grouped = False
        out_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)
        return out_BHSE.transpose(1, 2)


def rms_norm(x_BSD: Tensor, delta_BSD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `delta` to the residual stream, and normalize the sum: returns (normalized, sum).

    At least in float32, as the models were trained (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization").
    """
    if delta_BSD is not None:
        x_BSD = x_BSD + delta_BSD
    wide = x_BSD if x_BSD.dtype == torch.float64 else x_BSD.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_D * normalized.to(x_BSD.dtype), x_BSD


def rotate(q_BSHE: Tensor, k_BSKE: Tensor, cos_BSE: Tensor, sin_BSE: Tensor) -> tuple[Tensor, Tensor]:
    """Turn channel i together with channel i + E/2 by the position's angle (RoFormer, section 3.2.2).

    cos and sin are float32: products are taken there and rounded once.
    """
    cos, sin = cos_BSE.unsqueeze(2), sin_BSE.unsqueeze(2)

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)

    return turned(q_BSHE), turned(k_BSKE)


def keep_unrotated(q_BSHE: Tensor, k_BSKE: Tensor, cos_BSE: Tensor, sin_BSE: Tensor) -> tuple[Tensor, Tensor]:
    """Leave the rotation to the `Attend`."""
    return q_BSHE, k_BSKE


def swiglu(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020, "GLU Variants Improve Transformer")."""
    return F.silu(gate_BSF) * up_BSF


def plain_linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
    """A linear layer whose weight is (out_features, in_features); `name` is its place in the model."""
    return nn.Linear(in_features, out_features, bias=bias)


@dataclass(frozen=True)
class Parts:
    """The operations a decoder is made of; replace any of them by something that keeps its contract."""

    norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    gate: Callable[[Tensor, Tensor], Tensor] = swiglu
    linear: Callable[[str, int, int, bool], nn.Module] = plain_linear


class Norm(nn.Module):
    """RMSNorm that also adds the last sublayer's output to the residual stream, since kernels fuse the two."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps
        self.norm = parts.norm

    def forward(self, x_BSD: Tensor, delta_BSD: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.norm(x_BSD, delta_BSD, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections and rotation around an `Attend`."""

    def __init__(self, config: ModelConfig, parts: Parts, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.rotate = parts.rotate
        prefix, bias = f"layers.{layer}.self_attn", config.attention_bias
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = parts.linear(f"{prefix}.q_proj", config.hidden_size, query_width, bias)
        self.k_proj = parts.linear(f"{prefix}.k_proj", config.hidden_size, kv_width, bias)
        self.v_proj = parts.linear(f"{prefix}.v_proj", config.hidden_size, kv_width, bias)
        self.o_proj = parts.linear(f"{prefix}.o_proj", query_width, config.hidden_size, bias)

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads not yet apart."""
        return self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)

    def forward(self, x_BSD: Tensor, cos_BSE: Tensor, sin_BSE: Tensor, attend: Attend) -> Tensor:
        q_BSHE, k_BSKE, v_BSKE = (y.view(*y.shape[:-1], -1, self.head_dim) for y in self.project(x_BSD))
        q_BSHE, k_BSKE = self.rotate(q_BSHE, k_BSKE, cos_BSE, sin_BSE)
        out_BSHE = attend(self.layer, q_BSHE, k_BSKE, v_BSKE)
        out_BSD: Tensor = self.o_proj(out_BSHE.flatten(-2))
        return out_BSD


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, parts: Parts, layer: int) -> None:
        super().__init__()
        self.gate = parts.gate
        prefix, width, inner = f"layers.{layer}.mlp", config.hidden_size, config.intermediate_size
        self.gate_proj = parts.linear(f"{prefix}.gate_proj", width, inner, False)
        self.up_proj = parts.linear(f"{prefix}.up_proj", width, inner, False)
        self.down_proj = parts.linear(f"{prefix}.down_proj", inner, width, False)

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The gate and what it gates."""
        return self.gate_proj(x_BSD), self.up_proj(x_BSD)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down_proj(self.gate(*self.project(x_BSD)))
        return out_BSD


class Layer(nn.Module):
    """One transformer layer. It takes the residual stream and what is still to be added to it, and returns both."""

    def __init__(self, config: ModelConfig, parts: Parts, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config, parts)
        self.self_attn: nn.Module = SelfAttention(config, parts, layer)
        self.post_attention_layernorm = Norm(config, parts)
        self.mlp: nn.Module = FeedForward(config, parts, layer)

    def forward(
        self, x_BSD: Tensor, delta_BSD: Tensor | None, cos_BSE: Tensor, sin_BSE: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        y_BSD, x_BSD = self.input_layernorm(x_BSD, delta_BSD)
        delta_BSD = self.self_attn(y_BSD, cos_BSE, sin_BSE, attend)
        y_BSD, x_BSD = self.post_attention_layernorm(x_BSD, delta_BSD)
        return x_BSD, self.mlp(y_BSD)


class Decoder(nn.Module):
    """The whole model. Parameters carry the names of a Hugging Face checkpoint without its prefix `model.`.

    `weights_digest` names the weights whatever their path; "" until a loader has filled them in.
    """

    def __init__(self, config: ModelConfig, parts: Parts | None = None) -> None:
        super().__init__()
        parts = parts or Parts()
        self.config = config
        self.weights_digest = ""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, parts, layer) for layer in range(config.num_layers))
        self.norm = Norm(config, parts)
        self.lm_head = parts.linear("lm_head", config.hidden_size, config.vocab_size, False)
        if config.tie_word_embeddings and isinstance(self.lm_head, nn.Linear):
            self.lm_head.weight = self.embed_tokens.weight
        # Not a buffer: a cast of the model must leave the angles in float32. See _apply. Made on the real CPU even
        # when the parameters are on the meta device.
        with torch.device("cpu"):
            self.frequencies = rope_frequencies(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.embed_tokens.weight.device.type != "meta":
            self.frequencies = self.frequencies.to(self.embed_tokens.weight.device)
        return self

    def cos_sin(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, float32, (B, S, E), the two halves of E alike."""
        angles = positions_BS.unsqueeze(-1).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def hidden(self, tokens_BS: Tensor, positions_BS: Tensor, attend: Attend) -> Tensor:
        """The normalized output of the last layer, x_BSD, from which `lm_head` makes logits."""
        x_BSD = self.embed_tokens(tokens_BS)
        cos_BSE, sin_BSE = self.cos_sin(positions_BS)
        delta_BSD = None
        for layer in self.layers:
            x_BSD, delta_BSD = layer(x_BSD, delta_BSD, cos_BSE, sin_BSE, attend)
        y_BSD: Tensor = self.norm(x_BSD, delta_BSD)[0]
        return y_BSD

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        attend: Attend | None = None,
        last_B: Tensor | None = None,
    ) -> Tensor:
        """Logits for the token after each position.

        Args:
            tokens_BS: token ids.
            positions_BS: place of each token in its row; 0 to S-1 in every row when left out.
            attend: where attention finds older keys; `CausalAttention` when left out.
            last_B: index into S of the one position of each row whose logits are wanted (rows of unequal length).

        Returns:
            (B, S, V), or (B, V) with `last_B`, in the dtype of the weights.
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        y = self.hidden(tokens_BS, positions_BS, attend or CausalAttention())
        if last_B is not None:
            y = y[torch.arange(y.shape[0], device=y.device), last_B]
        logits: Tensor = self.lm_head(y)
        return logits


def replace_linears(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None]) -> list[str]:
    """Swap linear layers of a loaded model one after another, each old one freed before the next is made.

    Args:
        model: changed in place.
        make: given a layer's name and the layer, returns what takes its place, or None to keep it.

    Returns:
        The names of the layers that were replaced.
    """
    replaced = []
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        old = getattr(parent, attribute)
        new = make(name, old)
        if new is not None and new is not old:
            setattr(parent, attribute, new)
            replaced.append(name)
    return replaced
