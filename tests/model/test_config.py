"""Configurations: read from Hugging Face and GGUF, refused by name when they describe something else."""

import dataclasses
import json

import pytest
import torch

from impls.model.config import (
    SHAPES,
    ModelConfig,
    RopeScaling,
    config_from_gguf,
    config_from_hf,
    named_shape,
    rope_frequencies,
)
from impls.model.errors import ModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def write(tmp_path):
    def written(changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in {**LLAMA, **changes}.items() if v != "absent"}))
        return path

    return written


def test_reads_both_spellings_of_the_rotary_entries(write):
    old = config_from_hf(write({"rope_scaling": LLAMA3}))
    new = config_from_hf(write({"rope_theta": "absent", "rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}))
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert config_from_hf(write({"rope_scaling": {"type": "linear", "factor": 2}})).rope_scaling == RopeScaling(
        "linear", 2.0
    )
    assert config_from_hf(write({"rope_scaling": None})).rope_scaling is None


def test_defaults_are_those_of_the_family(write):
    config = config_from_hf(write({"num_key_value_heads": None, "rope_theta": "absent", "head_dim": None}))
    assert (config.num_kv_heads, config.rope_theta, config.head_dim) == (8, 10000.0, 8)
    assert not config.tie_word_embeddings


def test_mistral_is_read_without_a_window(write):
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert config_from_hf(write({**mistral, "sliding_window": None})).num_layers == 2
    assert config_from_hf(write(mistral)).num_layers == 2  # the default window of 4096 is longer than the model
    with pytest.raises(ModelError, match=r"config\.json: sliding_window 128"):
        config_from_hf(write({**mistral, "sliding_window": 128}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM is not of the Llama family"),
        ({"architectures": "absent"}, "architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks the entry 'low_freq_factor'"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "factor must be a positive number, got '8'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1.0 must exceed"),
        ({"rope_theta": True}, "rope_theta must be a positive number, got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "absent"}, "the entry 'hidden_size' is missing"),
        ({"hidden_size": 60}, "does not divide over 8"),
        ({"vocab_size": -1}, "vocab_size must be a whole number of at least 1, got -1"),
        ({"num_hidden_layers": 2.5}, "num_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_with_the_file(write, changes, message):
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        config_from_hf(write(changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        config_from_hf(path)
    with pytest.raises(ModelError, match=r"nowhere\.json: no such file"):
        config_from_hf(tmp_path / "nowhere.json")


def test_gguf_refuses_other_computations(tmp_path):
    good = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.attention.head_count": 8,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.vocab_size": 128,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    }
    config = config_from_gguf(good, tmp_path, tied=True, factors=())
    assert (config.rms_norm_eps, config.num_kv_heads, config.rope_theta) == (1e-5, 8, 10000.0)
    for change, message in (
        ({"general.architecture": "qwen2"}, "'qwen2' is not of the Llama family"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.dimension_count": 4}, "part of the head"),
        ({"llama.attention.value_length": 4}, "different widths"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "'llama.rope.scaling.factor' is missing"),
    ):
        with pytest.raises(ModelError, match=message):
            config_from_gguf({**good, **change}, tmp_path, tied=True, factors=())
    with pytest.raises(ModelError, match="3 rotary factors given for head_dim 8"):
        config_from_gguf(good, tmp_path, tied=True, factors=(1.0, 2.0, 3.0))
    del good["llama.block_count"]
    with pytest.raises(ModelError, match=r"'llama\.block_count' is missing"):
        config_from_gguf(good, tmp_path, tied=True, factors=())


def test_digest_changes_with_every_field():
    config = SHAPES["tiny"]
    assert config.digest() == dataclasses.replace(config, rope_theta=10000).digest()
    changes = {
        "vocab_size": 513,
        "hidden_size": 136,
        "intermediate_size": 353,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 18,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e5,
        "rope_scaling": RopeScaling("linear", 2.0),
        "tie_word_embeddings": True,
        "attention_bias": True,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(ModelConfig)}
    digests = {dataclasses.replace(config, **{name: value}).digest() for name, value in changes.items()}
    assert len(digests | {config.digest()}) == len(changes) + 1


def test_named_shapes_have_their_published_sizes():
    assert named_shape("llama-3-8b").parameters == 8_030_261_248
    assert named_shape("smollm2-135m").parameters == 134_515_008
    assert (named_shape("tiny").num_heads, named_shape("tiny").num_kv_heads) == (8, 4)
    with pytest.raises(ModelError, match="no model shape named 'large'; there are: llama-3-8b, smollm2-135m, tiny"):
        named_shape("large")


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    config = dataclasses.replace(
        SHAPES["llama-3-8b"], rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), max_position_embeddings=131072
    )
    plain = rope_frequencies(SHAPES["llama-3-8b"])
    ratio = plain / rope_frequencies(config)
    wavelength = 2 * torch.pi / plain
    assert torch.equal(ratio[wavelength < 8192 / 4], torch.ones_like(ratio[wavelength < 8192 / 4]))
    torch.testing.assert_close(ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0))
    assert (ratio.diff() >= -1e-6).all()
