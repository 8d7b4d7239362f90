"""The decoder against itself: caches, unequal rows, replaced parts, precisions."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from impls.model import decoder
from impls.model.cache import KVCache
from impls.model.config import SHAPES, ModelConfig
from impls.model.decoder import CausalAttention, Parts, keep_unrotated, replace_linears, rms_norm, rotate
from impls.model.errors import ModelError
from impls.model.fuse import fuse_projections
from impls.model.weights import load_model

CONFIG = SHAPES["tiny"]


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(scope="module")
def model():
    return load_model(shape="tiny", seed=3)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, CONFIG.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_decoding_with_cache_equals_the_full_pass_for_rows_of_unequal_length(model, tokens):
    full = model(tokens)
    lengths = torch.tensor([5, 23, 11])
    cache = KVCache(CONFIG, rows=3, capacity=40)
    positions = torch.arange(23).expand(3, 23)
    first = model(tokens[:, :23], positions, cache.prefill(positions), last_B=lengths - 1)
    rows = torch.arange(3)
    assert error_of(first, full[rows, lengths - 1]) < 1e-5
    for step in range(12):
        place = lengths + step
        logits = model(
            tokens[rows, place][:, None], place[:, None], cache.extend(place[:, None], context=23 + step + 1)
        )
        assert error_of(logits[:, 0], full[rows, place]) < 1e-5


@torch.inference_mode()
def test_chunks_against_the_cache_equal_the_full_pass(model, tokens):
    cache = KVCache(CONFIG, rows=3, capacity=64)
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 40)):
        positions = torch.arange(begin, end).expand(3, -1)
        parts.append(model(tokens[:, begin:end], positions, cache.extend(positions)))
    assert error_of(torch.cat(parts, dim=1), model(tokens)) < 1e-5


@torch.inference_mode()
def test_one_row_prefilled_through_a_view_leaves_the_others_alone(model, tokens):
    cache = KVCache(CONFIG, rows=3, capacity=64)
    positions = torch.arange(40).expand(1, -1)
    model(tokens[1:2], positions, cache.rows_of(1, 2).prefill(positions))
    assert not cache.k[:, 0].any()
    assert not cache.k[:, 2].any()
    next_token, place = torch.tensor([[7]]), torch.tensor([[40]])
    got = model(next_token, place, cache.rows_of(1, 2).extend(place, context=41))
    assert error_of(got[:, 0], model(torch.cat((tokens[1:2], next_token), 1))[:, -1]) < 1e-5


@torch.inference_mode()
def test_stale_keys_behind_a_row_are_never_read(model, tokens):
    clean, dirty = (KVCache(CONFIG, rows=3, capacity=64) for _ in range(2))
    dirty.k.fill_(1e3)
    dirty.v.fill_(1e3)
    positions = torch.arange(40).expand(3, -1)
    assert torch.equal(
        model(tokens, positions, clean.extend(positions)), model(tokens, positions, dirty.extend(positions))
    )


@torch.inference_mode()
def test_positions_may_change_in_place_between_passes(model, tokens):
    """What a replayed graph does: the same `Attend`, new numbers in its position tensor."""
    cache = KVCache(CONFIG, rows=3, capacity=64)
    place = torch.zeros(3, 1, dtype=torch.long)
    attend = cache.extend(place)
    full = model(tokens)
    for step in range(10):
        place.fill_(step)
        assert error_of(model(tokens[:, step : step + 1], place, attend)[:, 0], full[:, step]) < 1e-5


def test_cache_refuses_what_does_not_fit():
    cache = KVCache(CONFIG, rows=2, capacity=8)
    with pytest.raises(ValueError, match="context of 9 does not fit the cache's capacity of 8"):
        cache.prefill(torch.arange(9).expand(2, -1))
    with pytest.raises(ValueError, match="3 rows given to a cache of 2"):
        cache.extend(torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="rows 1:3"):
        cache.rows_of(1, 3)
    with pytest.raises(ValueError, match="at least one row"):
        KVCache(CONFIG, rows=0, capacity=8)
    assert cache.nbytes == 2 * 8 * CONFIG.kv_values_per_token * 4


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01), (torch.float32, 1e-5)])
def test_lower_precisions_stay_near_float64(dtype, bound, tokens):
    wanted = load_model(shape="tiny", seed=3, dtype=torch.float64)(tokens)
    assert wanted.dtype == torch.float64
    got = load_model(shape="tiny", seed=3, dtype=dtype)(tokens)
    assert got.dtype == dtype
    assert error_of(got, wanted) < bound


@torch.inference_mode()
def test_casting_a_model_leaves_the_rotary_angles_in_float32(model, tokens):
    cast = load_model(shape="tiny", seed=3, dtype=torch.bfloat16).double()
    assert torch.equal(cast.frequencies, model.frequencies)
    loaded = load_model(shape="tiny", seed=3).double()
    assert error_of(loaded(tokens), model(tokens)) < 1e-5


@torch.inference_mode()
def test_fused_projections_compute_the_same(tokens):
    config = ModelConfig(96, 48, 80, 2, 6, 2, 8, attention_bias=True)
    plain, fused = load_model(shape=config), fuse_projections(load_model(shape=config))
    ids = tokens % 96
    assert error_of(fused(ids), plain(ids)) < 1e-5
    names = [name for name, _ in fused.named_parameters()]
    assert not any(".q_proj" in name or ".up_proj" in name for name in names)
    broken = load_model(shape=config)
    broken.layers[0].self_attn.q_proj = nn.Identity()
    with pytest.raises(ModelError, match="q_proj is a Identity"):
        fuse_projections(broken)


@torch.inference_mode()
def test_every_part_can_be_replaced(model, tokens):
    calls = {"norm": 0, "rotate": 0, "gate": 0, "linear": []}

    def norm(x, delta, weight, eps):
        calls["norm"] += 1
        return rms_norm(x, delta, weight, eps)

    def turn(q, k, cos, sin):
        calls["rotate"] += 1
        return rotate(q, k, cos, sin)

    def gate(g, up):
        calls["gate"] += 1
        return torch.nn.functional.silu(g) * up

    def linear(name, inputs, outputs, bias):
        calls["linear"].append(name)
        return nn.Linear(inputs, outputs, bias=bias)

    rebuilt = load_model(shape="tiny", seed=3, parts=Parts(norm, turn, gate, linear))
    calls["linear"].clear()
    assert torch.equal(rebuilt(tokens), model(tokens))
    assert calls["norm"] == 2 * CONFIG.num_layers + 1
    assert calls["rotate"] == calls["gate"] == CONFIG.num_layers


@torch.inference_mode()
def test_rotation_can_be_left_to_the_attend(model, tokens):
    class Rotating(CausalAttention):
        def __init__(self, cos, sin):
            self.cos, self.sin = cos, sin

        def __call__(self, layer, q, k, v):
            return super().__call__(layer, *rotate(q, k, self.cos, self.sin), v)

    bare = load_model(shape="tiny", seed=3, parts=Parts(rotate=keep_unrotated))
    positions = torch.arange(40).expand(3, -1)
    assert torch.equal(bare(tokens, positions, Rotating(*bare.cos_sin(positions))), model(tokens))


@torch.inference_mode()
def test_replacing_linears_names_each_and_keeps_the_tied_embedding(tokens):
    config = ModelConfig(96, 48, 80, 2, 6, 2, 8, tie_word_embeddings=True)
    model = load_model(shape=config)
    assert model.lm_head.weight is model.embed_tokens.weight
    before = model.embed_tokens.weight.clone()

    def doubled(name, old):
        if name != "lm_head":
            return None
        new = nn.Linear(old.in_features, old.out_features, bias=False)
        new.weight.data = old.weight * 2
        return new

    ids = tokens % 96
    wanted = model(ids) * 2
    assert replace_linears(model, doubled) == ["lm_head"]
    assert error_of(model(ids), wanted) < 1e-6
    assert torch.equal(model.embed_tokens.weight, before)


@torch.inference_mode()
def test_heads_split_over_two_shards_add_up(tokens):
    """What tensor parallelism does, in one process: half the heads each, partial sums added after o_proj."""
    config = ModelConfig(96, 48, 80, 1, 6, 2, 8)
    whole = load_model(shape=config)
    x = torch.randn(2, 5, 48)
    cos, sin = whole.cos_sin(torch.arange(5).expand(2, -1))
    attention = whole.layers[0].self_attn
    wanted = attention(x, cos, sin, CausalAttention())
    total = torch.zeros_like(wanted)
    for rank in range(2):
        shard = load_model(shape=config).layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(shard, name)
            linear.weight = nn.Parameter(linear.weight.chunk(2, 0)[rank])
        shard.o_proj.weight = nn.Parameter(shard.o_proj.weight.chunk(2, 1)[rank])
        total += shard(x, cos, sin, CausalAttention())
    assert error_of(total, wanted) < 1e-5


def test_a_forward_pass_can_be_traced_without_reading_values(model):
    """Fake tensors have shapes and no values: any read-back to the host or data-dependent shape would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tokens = torch.empty(4, 1, dtype=torch.long)
        positions = torch.empty(4, 1, dtype=torch.long)
        cache = KVCache(CONFIG, rows=4, capacity=32)
        last = torch.empty(4, dtype=torch.long)
        assert model(tokens, positions, cache.extend(positions), last_B=last).shape == (4, CONFIG.vocab_size)
        assert model(tokens, positions, cache.prefill(positions)).shape == (4, 1, CONFIG.vocab_size)


def test_gradients_flow_when_asked(tokens):
    model = load_model(shape="tiny", trainable=True)
    model(tokens).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not any(p.requires_grad for p in load_model(shape="tiny").parameters())


@pytest.mark.parametrize(
    ("device", "dtype", "repeated"),
    [("cuda", torch.float32, True), ("cuda", torch.bfloat16, False), ("cpu", torch.float32, False)],
)
def test_grouped_heads_take_a_kernel_that_writes_no_scores(monkeypatch, device, dtype, repeated):
    """In float32 on a GPU torch's kernel without scores refuses groups; those for 16 bits and a CPU's take them."""
    seen = []

    def attention(q, k, v, is_causal, enable_gqa):
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(decoder.F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q, k = (torch.empty(2, 8, heads, 16, device=device, dtype=dtype) for heads in (6, 2))
        assert CausalAttention()(0, q, k, k).shape == q.shape
    assert seen == ([(6, 6, False)] if repeated else [(2, 2, True)])
