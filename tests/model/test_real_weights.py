"""SmolLM2-135M-Instruct: logits, tokens and perplexity of the real thing."""

import pytest
import torch

from impls.model.cache import KVCache
from impls.model.fetch import default_model_path
from impls.model.perplexity import perplexity
from impls.model.text import real_text
from impls.model.tokenizer import load_tokenizer
from impls.model.weights import load_model

PATH = default_model_path()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PATH is None, reason="no real weights here; get them with: pairbench models fetch"),
]


@pytest.fixture(scope="module")
def model():
    return load_model(PATH)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(PATH)


@torch.inference_mode()
def test_logits_and_ids_equal_those_of_transformers(model, tokenizer):
    transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        PATH.parent, gguf_file=PATH.name, dtype=torch.float32
    ).eval()
    reader = transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)
    # The reader cuts a GGUF vocabulary as GPT-2 does; the model itself sets every digit apart first.
    rules = pytest.importorskip("tokenizers").pre_tokenizers
    reader.backend_tokenizer.pre_tokenizer = rules.Sequence(
        [rules.Digits(individual_digits=True), reader.backend_tokenizer.pre_tokenizer]
    )
    page = real_text().text[:3000] + "\nx  =  12  # 世界 🎉<|im_start|>user\n\n   1 2  3<|im_end|>"
    ids = reader(page)["input_ids"]
    assert tokenizer.encode(page) == ids
    tokens = torch.tensor(ids[:200])[None]
    wanted = theirs(tokens).logits
    assert float((model(tokens) - wanted).norm() / wanted.norm()) < 1e-4


@torch.inference_mode()
def test_it_answers_a_question_through_the_cache(model, tokenizer):
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt)
    cache = KVCache(model.config, rows=1, capacity=96)
    positions = torch.arange(len(ids))[None]
    logits = model(torch.tensor([ids]), positions, cache.prefill(positions))[:, -1]
    answer, stream = "", tokenizer.stream()
    for place in range(len(ids), 96):
        token = logits.argmax(-1)
        if int(token) in tokenizer.eos_ids:
            break
        answer += stream.push(int(token))
        at = torch.tensor([[place]])
        logits = model(token[None], at, cache.extend(at, context=place + 1))[:, 0]
    assert "Paris" in answer + stream.finish()


def test_perplexity_on_english_documentation_is_about_twelve(model, tokenizer):
    tokens = torch.tensor(tokenizer.encode(real_text().text))
    assert 10 < perplexity(model, tokens[:2048], window=1024) < 15


@torch.inference_mode()
def test_bfloat16_stays_close_in_what_it_predicts(model, tokenizer):
    tokens = torch.tensor(tokenizer.encode(real_text().text))[:512]
    low = load_model(PATH, dtype=torch.bfloat16)
    assert perplexity(low, tokens) == pytest.approx(perplexity(model, tokens), rel=0.02)
