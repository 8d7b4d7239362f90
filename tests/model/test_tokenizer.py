"""Tokenizers: the ids of `transformers` on a page of mixed text, from both kinds of file, and text as it streams."""

import json
import random

import pytest

from impls.model.errors import ModelError
from impls.model.tokenizer import PRE_TOKENIZERS, load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the models extra is not installed")
gguf = pytest.importorskip("gguf", reason="the models extra is not installed")

PAGE = """The quick brown fox doesn't jump; it'LL over-think. Don't you'VE I'm they're?

def fib(n: int) -> int:
\treturn n if n < 2 else fib(n-1) + fib(n-2)  # O(2**n)\r\n    x = {"a": [1, 22, 333, 4444, 55555]}

人工知能と機械学習。 你好，世界！ 한국어 문장입니다. Привет, мир! שלום עולם नमस्ते
🎉👩‍👩‍👧‍👦🇯🇵 café café naïve ½ ² ³ Ⅷ ٣٤٥ 3.14159e-10 1,234,567.89
   leading   runs    of  spaces   \n\n\n  \t\t mixed  \n before 42 and   7   .   \u00a0nbsp\u3000wide
<|im_start|>user
Hi<|im_end|><|endoftext|>   <|im_start|> http://example.org/?q=a%20b&c=d#e  ...!!!???  \x00\x7f \ufeff
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained(pre):
    """A small byte-level BPE in `tokenizers`' own words for each way of cutting, as the models publish it."""
    rules = tokenizers.pre_tokenizers
    cut = {
        "gpt-2": rules.ByteLevel(add_prefix_space=False),
        "smollm": rules.Sequence([rules.Digits(individual_digits=True), rules.ByteLevel(add_prefix_space=False)]),
        "llama-bpe": rules.Sequence(
            [
                rules.Split(
                    tokenizers.Regex(
                        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                    ),
                    "isolated",
                ),
                rules.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }[pre]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = cut
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=rules.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([PAGE * 3, "and then 1 2  3   4 the 100 1000 " * 5], trainer)
    if pre == "llama-bpe":
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return backend


def write_gguf(path, backend, pre, *, model="gpt2", change=None):
    state = json.loads(backend.to_str())["model"]
    tokens = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(change(tokens) if change else tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def pair(request, tmp_path_factory):
    """The reference, saved and read by transformers, and our tokenizers from the folder and from a GGUF file."""
    transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
    folder = tmp_path_factory.mktemp(request.param)
    backend = trained(request.param)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    )
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    write_gguf(folder / "m.gguf", backend, request.param)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return reference, load_tokenizer(folder), load_tokenizer(folder / "m.gguf")


def test_ids_equal_those_of_transformers_on_a_page_of_mixed_text(pair):
    reference, folder, file = pair
    for text in (PAGE, "", " ", "1  2", "a  1", "x\n\n\n3", *PAGE.splitlines(keepends=True)):
        wanted = reference(text)["input_ids"]
        assert folder.encode(text) == wanted, repr(text)
        assert file.encode(text) == wanted, repr(text)
    bare = reference(PAGE, add_special_tokens=False)["input_ids"]
    assert folder.encode(PAGE, special=False) == file.encode(PAGE, special=False) == bare


def test_text_survives_the_way_there_and_back(pair):
    for tokenizer in pair[1:]:
        ids = tokenizer.encode(PAGE, special=False)
        assert tokenizer.decode(ids) == PAGE
        without = PAGE
        for token in SPECIAL:
            without = without.replace(token, "")
        assert tokenizer.decode(ids, skip_special=True) == without


def test_beginning_and_end_are_known(pair):
    for tokenizer in pair[1:]:
        assert tokenizer.bos_id == 0
        assert tokenizer.eos_ids == {2, 0}
        assert tokenizer.vocab_size == 420


def test_streamed_pieces_add_up_to_the_whole_and_never_cut_a_character(pair):
    tokenizer = pair[2]
    stream = tokenizer.stream(skip_special=False)
    pieces = [stream.push(token) for token in tokenizer.encode(PAGE, special=False)]
    assert "".join(pieces) + stream.finish() == PAGE
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some characters do take several tokens


def test_streaming_any_ids_gives_what_decoding_them_at_once_gives(pair):
    tokenizer = pair[2]
    for seed in range(30):
        ids = random.Random(seed).choices(range(tokenizer.vocab_size), k=60)
        stream = tokenizer.stream(skip_special=False)
        streamed = "".join(map(stream.push, ids)) + stream.finish()
        assert streamed == tokenizer.decode(ids)


def test_ids_outside_the_vocabulary_are_refused(pair):
    for token in (-1, 420, 10**9):
        with pytest.raises(ModelError, match=f"token id {token} is outside the vocabulary of 420"):
            pair[2].decode([5, token])


def test_added_tokens_that_are_not_special_are_kept_whole_and_shown(tmp_path):
    backend = trained("gpt-2")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    state = json.loads(backend.to_str())["model"]
    tokens = [*(token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])), "<tool>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([*(3 if token in SPECIAL else 1 for token in tokens[:-1]), 4])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_eos_token_id(2)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id is None
    ids = tokenizer.encode("the <tool> 1")
    assert ids.count(420) == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special=True) == "the <tool> 1"


def test_unknown_ways_of_cutting_text_are_refused_by_name(tmp_path):
    backend, path = trained("gpt-2"), tmp_path / "m.gguf"
    write_gguf(path, backend, "tekken")
    with pytest.raises(ModelError, match=r"m\.gguf: pre-tokenizer 'tekken' is not supported, only gpt-2"):
        load_tokenizer(path)
    write_gguf(path, backend, "default", model="llama")
    with pytest.raises(ModelError, match=r"m\.gguf: tokenizer model 'llama' is not supported"):
        load_tokenizer(path)
    write_gguf(path, backend, "gpt-2", change=lambda tokens: [*tokens[:-1], tokens[0]])
    with pytest.raises(ModelError, match=r"m\.gguf: the vocabulary holds '<\|endoftext\|>' twice"):
        load_tokenizer(path)
    write_gguf(path, backend, "gpt-2", change=lambda tokens: [*tokens[:-1], "nowhere"])
    with pytest.raises(ModelError, match=r"m\.gguf: the merges do not fit the vocabulary"):
        load_tokenizer(path)


def test_bad_places_are_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere: no such file or folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    trained("gpt-2").save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).eos_ids == frozenset()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: expected a JSON object"):
        load_tokenizer(tmp_path)
