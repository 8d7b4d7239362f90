"""Loading: the logits of `transformers` on the same folder, seeded weights, and every way a folder can be bad."""

import dataclasses
import json
import os
import shutil

import pytest
import torch

from harness.digests import refuse_unreadable
from harness.errors import UsageError
from impls.model.config import SHAPES, ModelConfig
from impls.model.errors import ModelError, need
from impls.model.weights import expected_shapes, load_model, open_source

transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the models extra is not installed")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope_and_bias": {"rope_parameters": LINEAR, "attention_bias": True},
    "wide_heads": {"head_dim": 24},
    "one_key_head": {"num_key_value_heads": 1},
}


def reference(**changes):
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            **changes,
        }
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def error_of(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 160, (2, 150), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path):
    reference().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    reference().save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name, tmp_path, tokens):
    theirs = reference(**CASES[name])
    theirs.save_pretrained(tmp_path)
    assert error_of(load_model(tmp_path)(tokens), theirs(tokens).logits) < 1e-5


@torch.inference_mode()
def test_mistral_equals_transformers(tmp_path, tokens):
    config = transformers.MistralConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=None,
    )
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    assert error_of(load_model(tmp_path)(tokens), theirs(tokens).logits) < 1e-5


@torch.inference_mode()
def test_shards_hold_the_same_model_and_share_its_digest(folder, sharded, tokens, tmp_path):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load_model(folder), load_model(sharded)
    assert torch.equal(one(tokens), many(tokens))
    assert one.weights_digest == many.weights_digest
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    assert load_model(copied).weights_digest == one.weights_digest
    rewrite(copied, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    assert load_model(copied).weights_digest != one.weights_digest


@torch.inference_mode()
def test_a_file_in_the_folder_names_the_folder_and_any_name_will_do(folder, tokens):
    wanted = load_model(folder)(tokens)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(load_model(folder / "weights.safetensors")(tokens), wanted)


def rewrite(folder, change):
    """Load the tensors of a folder, change them in place, store them again."""
    path = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    change(tensors)
    safetensors_torch.save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


UP = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_tensor_is_named_as_its_file_calls_it(folder):
    rewrite(folder, lambda tensors: tensors.pop(UP))
    with pytest.raises(ModelError, match=rf"model\.safetensors: the tensor '{UP}' of shape \(112, 64\) is missing"):
        load_model(folder)
    rewrite(folder, lambda tensors: tensors.update({k.removeprefix("model."): tensors.pop(k) for k in list(tensors)}))
    with pytest.raises(ModelError, match=r"model\.safetensors: the tensor 'layers\.1\.mlp\.up_proj\.weight' of shape"):
        load_model(folder)


def test_who_asks_without_torch_hears_the_same(folder):
    refuse_unreadable(str(folder))
    rewrite(folder, lambda tensors: tensors.pop(UP))
    refuse_unreadable.cache_clear()
    with pytest.raises(UsageError, match=rf"^--model .*model\.safetensors: the tensor '{UP}' of shape \(112, 64\)"):
        refuse_unreadable(str(folder))


def test_a_tensor_that_no_shard_holds_is_missing_in_the_index(sharded):
    index = sharded / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    del where["weight_map"][UP]
    index.write_text(json.dumps(where))
    with pytest.raises(ModelError, match=rf"{index.name}: the tensor '{UP}' of shape \(112, 64\) is missing"):
        load_model(sharded)


def test_a_wrong_shape_is_named(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(16, 64)}))
    with pytest.raises(ModelError, match=rf"model\.safetensors: the tensor '{name}' has shape \(16, 64\).*\(32, 64\)"):
        load_model(folder)


def test_unknown_tensors_are_named_and_old_rotary_buffers_pass(folder):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(folder, lambda tensors: tensors.update(buffer))
    load_model(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with pytest.raises(ModelError, match=r"does not have: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_model(folder)


def test_integers_are_refused_by_name(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is stored as I8, supported are F64"):
        load_model(folder)


@pytest.mark.parametrize("encoding", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_precisions_are_cast(folder, encoding):
    rewrite(folder, lambda tensors: tensors.update({k: v.to(encoding) for k, v in tensors.items()}))
    wanted = safetensors_torch.load_file(folder / "model.safetensors")["model.norm.weight"].float()
    assert torch.equal(load_model(folder).norm.weight, wanted)


def test_a_truncated_file_is_named_with_the_tensor_it_lacks(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated: the tensor 'model\.\S+' ends at byte"):
        load_model(folder)
    for size in (100, 4, 0):
        os.truncate(path, size)
        with pytest.raises(ModelError, match=r"model\.safetensors: truncated or not a safetensors file"):
            load_model(folder)
    # A header that contradicts itself is found by the package that reads the tensors.
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors: the tensor 'model\.norm\.weight' cannot be read"):
        open_source(folder).read("norm.weight")
    path.write_bytes((4).to_bytes(8, "little") + b"[1] ")
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged safetensors header"):
        load_model(folder)


def test_a_missing_shard_or_index_entry_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    name, other = "model.norm.weight", "model.embed_tokens.weight"
    shard = where["weight_map"][name]
    assert where["weight_map"][other] != shard
    index.write_text(json.dumps({"weight_map": {**where["weight_map"], other: shard}}))
    with pytest.raises(ModelError, match=rf"{shard}: the tensor '{other}' is missing, though {index.name}"):
        load_model(sharded)
    index.write_text(json.dumps(where))
    (sharded / shard).unlink()
    with pytest.raises(ModelError, match=rf"{shard}: no such file, though {index.name} says .* tensor 'model\.\S+'"):
        load_model(sharded)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        load_model(sharded)
    index.unlink()
    with pytest.raises(ModelError, match=r"safetensors files but no model\.safetensors\.index\.json"):
        load_model(sharded)


def test_a_stored_copy_of_a_tied_output_matrix_must_be_the_same(tmp_path):
    reference(tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight
    rewrite(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' differs from the embedding"):
        load_model(tmp_path)


def test_paths_that_hold_no_model_say_what_is_wrong(tmp_path, folder):
    with pytest.raises(ModelError, match="nowhere: no such file or folder"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: neither a config\.json nor a GGUF file"):
        load_model(tmp_path / "empty")
    (tmp_path / "weights.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match=r"weights\.bin: pickled weights"):
        load_model(tmp_path / "weights.bin")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt: not a GGUF file"):
        load_model(tmp_path / "notes.txt")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model\.safetensors.*pytorch_model\.bin is a pickle"):
        load_model(folder)
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match=r"config\.json: architecture GPT2LMHeadModel"):
        open_source(folder)


def test_a_missing_package_is_an_error_with_the_command():
    with pytest.raises(ModelError, match=r"'no_such_package'.*python -m pip install 'pairbench\[models\]'"):
        need("no_such_package.part")


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_expected_shapes_are_those_of_the_model(changes):
    config = dataclasses.replace(SHAPES["tiny"], **changes)
    model = load_model(shape=config)
    assert dict(expected_shapes(config)) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert config.parameters == sum(p.numel() for p in model.parameters())


def test_seeded_weights_are_the_same_again_and_differ_by_seed(tokens):
    first, again, other = load_model(seed=1), load_model(seed=1), load_model(seed=2)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
    assert first.weights_digest == again.weights_digest != other.weights_digest
    rounded = load_model(seed=1, dtype=torch.bfloat16)
    assert torch.equal(rounded.embed_tokens.weight, first.embed_tokens.weight.bfloat16())
    logits = first(tokens)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2


def test_place_keeps_a_shard_of_what_is_loaded():
    def half(name, tensor):
        return tensor.chunk(2, 0)[1] if name.endswith("up_proj.weight") else tensor

    whole = load_model()
    with pytest.raises(ModelError, match=r"'layers\.0\.mlp\.up_proj\.weight' of this model has shape .* but was given"):
        load_model(place=half)

    from impls.model.decoder import Parts

    def linear(name, inputs, outputs, bias):
        return torch.nn.Linear(inputs, outputs // 2 if name.endswith("up_proj") else outputs, bias=bias)

    shard = load_model(place=half, parts=Parts(linear=linear))
    wanted = whole.layers[2].mlp.up_proj.weight.chunk(2, 0)[1]
    assert torch.equal(shard.layers[2].mlp.up_proj.weight, wanted)


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ModelError, match=r"torch\.int8 are not supported"):
        load_model(dtype=torch.int8)


def test_loading_holds_one_tensor_beside_the_model(tmp_path, monkeypatch):
    """Every tensor read is dropped before the next is read, so a cast never doubles the memory."""
    import weakref

    from impls.model import weights

    config = ModelConfig(160, 64, 112, 2, 8, 4, 8)
    alive: list[weakref.ref] = []
    real = weights.random_weight

    def tracked(*arguments):
        assert sum(ref() is not None for ref in alive) <= 1
        tensor = real(*arguments)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(weights, "random_weight", tracked)
    load_model(shape=config, dtype=torch.bfloat16)
    assert len(alive) == 2 * 9 + 3
