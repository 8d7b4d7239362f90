"""GGUF: every supported encoding against the package's own dequantizer, logits against `transformers`, bad files."""

import os

import numpy as np
import pytest
import torch

from impls.model.config import ModelConfig, RopeScaling
from impls.model.errors import ModelError
from impls.model.from_gguf import ENCODINGS, GGUFSource, split_halves
from impls.model.gguf_file import read_gguf
from impls.model.source import check_tensors
from impls.model.weights import expected_shapes, load_model, open_source, random_weight

gguf = pytest.importorskip("gguf", reason="the models extra is not installed")

CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position_embeddings=256,
    rope_theta=5000.0,
)
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name):
    stem = name.removesuffix(".weight")
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        return f"blk.{layer}.{NAMES[stem]}.weight"
    return f"{NAMES[stem]}.weight"


def side_by_side(rows, heads):
    """The order in which converters write query and key rows: the two channels of a rotated pair together."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write(path, encoding="F32", *, tied=False, drop=(), add=None, metadata=None, encodings=None):
    """A file of CONFIG; returns the matrices as stored and dequantized by the package, by the decoder's name."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_vocab_size(CONFIG.vocab_size)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    written = {}
    for name, size in expected_shapes(CONFIG):
        if (tied and name == "lm_head.weight") or name in drop:
            continue
        rows = random_weight(CONFIG, name, size, 5, torch.device("cpu")).numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = side_by_side(rows, CONFIG.num_heads if "q_proj" in name else CONFIG.num_kv_heads)
        kind = gguf.GGMLQuantizationType["F32" if rows.ndim == 1 else (encodings or {}).get(name, encoding)]
        stored = gguf.quantize(rows, kind)
        writer.add_tensor(stored_name(name), stored, raw_dtype=kind)
        written[name] = torch.from_numpy(gguf.dequantize(stored, kind).copy())
    for name, rows in (add or {}).items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_encoding_equals_the_packages_dequantizer(tmp_path, encoding):
    written = write(tmp_path / "m.gguf", encoding)
    model = load_model(tmp_path / "m.gguf")
    for name, parameter in model.named_parameters():
        wanted = written[name]
        if "q_proj" in name or "k_proj" in name:
            heads = CONFIG.num_heads if "q_proj" in name else CONFIG.num_kv_heads
            assert torch.equal(torch.from_numpy(side_by_side(parameter.numpy(), heads)), wanted), name
        else:
            assert torch.equal(parameter, wanted), name


@torch.inference_mode()
def test_logits_are_those_of_the_weights_that_were_written(tmp_path):
    write(tmp_path / "m.gguf")
    tokens = torch.arange(100)[None] % CONFIG.vocab_size
    assert torch.equal(load_model(tmp_path / "m.gguf")(tokens), load_model(shape=CONFIG, seed=5)(tokens))


@torch.inference_mode()
def test_logits_equal_those_of_transformers_on_the_same_file(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF")
    write(tmp_path / "m.gguf", "Q8_0", tied=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, config=theirs_config(transformers)
    ).eval()
    tokens = torch.arange(100)[None] % CONFIG.vocab_size
    ours, wanted = load_model(tmp_path)(tokens), theirs(tokens).logits
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-5


def theirs_config(transformers):
    return transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        rms_norm_eps=CONFIG.rms_norm_eps,
        rope_theta=CONFIG.rope_theta,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )


def test_configuration_comes_from_the_metadata(tmp_path):
    write(tmp_path / "m.gguf")
    assert load_model(tmp_path / "m.gguf").config == CONFIG
    write(tmp_path / "t.gguf", tied=True)
    tied = load_model(tmp_path / "t.gguf")
    assert tied.config.tie_word_embeddings
    assert tied.lm_head.weight is tied.embed_tokens.weight


def test_stored_frequency_factors_divide_the_rotary_frequencies(tmp_path):
    factors = np.array([1, 2, 4, 8], dtype=np.float32)
    write(tmp_path / "m.gguf", add={"rope_freqs.weight": factors})
    write(tmp_path / "plain.gguf")
    scaled, plain = load_model(tmp_path / "m.gguf"), load_model(tmp_path / "plain.gguf")
    assert scaled.config.rope_scaling == RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))
    assert torch.equal(scaled.frequencies, plain.frequencies / torch.from_numpy(factors))
    assert scaled.weights_digest != plain.weights_digest


def test_splitting_halves_undoes_the_converters_order():
    rows = np.arange(24 * 3).reshape(24, 3)
    assert torch.equal(split_halves(torch.from_numpy(side_by_side(rows, 3)), 3), torch.from_numpy(rows))


def test_an_unsupported_encoding_names_file_and_tensor(tmp_path):
    write(tmp_path / "m.gguf", encodings={"layers.1.mlp.up_proj.weight": "Q5_0"})
    with pytest.raises(
        ModelError, match=r"m\.gguf: the tensor 'blk\.1\.ffn_up\.weight' is stored as Q5_0; supported are"
    ):
        load_model(tmp_path / "m.gguf")


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, drop=("layers.1.self_attn.o_proj.weight",))
    with pytest.raises(ModelError, match=r"m\.gguf: the tensor 'blk\.1\.attn_output\.weight' .* is missing"):
        load_model(path)
    write(path, drop=("norm.weight",), add={"output_norm.weight": np.ones(32, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"m\.gguf: the tensor 'output_norm\.weight' has shape \(32,\)"):
        load_model(path)
    write(path, add={"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"m\.gguf: tensors that .* does not have: blk\.0\.attn_q\.bias"):
        load_model(path)


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "Q8_0")
    whole = path.read_bytes()
    info = read_gguf(path).tensors
    last = max(info.values(), key=lambda tensor: tensor.begin)
    os.truncate(path, last.begin + last.nbytes - 1)
    with pytest.raises(ModelError, match=rf"m\.gguf: truncated: the tensor '{last.stored_name}' ends at byte"):
        load_model(path)
    with pytest.raises(ModelError, match=rf"m\.gguf: truncated: the tensor '{last.stored_name}' has"):
        GGUFSource(path).read("norm.weight" if last.stored_name == "output_norm.weight" else "lm_head.weight")
    begin = min(tensor.begin for tensor in info.values())
    for size in {*range(4, begin, 97), begin - 40}:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"m\.gguf: truncated"):
            load_model(path)
    for size in (0, 3):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"m\.gguf: not a GGUF file"):
            load_model(path)


def refusal(path):
    """What is said against a file; its name when it is read after all."""
    try:
        source = open_source(path)
        check_tensors(source, expected_shapes(source.config))
    except ModelError as error:
        return str(error)
    return str(path)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_header_never_escapes_as_another_error(tmp_path, seed):
    path = tmp_path / "m.gguf"
    write(path)
    begin = min(tensor.begin for tensor in read_gguf(path).tensors.values())
    data = bytearray(path.read_bytes())
    for place in np.random.default_rng(seed).integers(4, begin, size=6):
        data[place] ^= 0xFF
    path.write_bytes(data)
    assert "m.gguf" in refusal(path)


def test_versions_and_architectures_that_are_not_read_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    write(path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    with pytest.raises(ModelError, match="version 1"):
        load_model(path)
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"m\.gguf: architecture 'gemma3' is not of the Llama family"):
        load_model(path)


def test_a_folder_with_several_files_asks_which(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name)
    with pytest.raises(ModelError, match="2 GGUF files: name one of them"):
        load_model(tmp_path)
