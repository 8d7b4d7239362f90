"""Speculative decoding: the plain loop's tokens or the target's distribution, whatever is drafted, in fewer passes."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from harness.check import judge, judge_scored
from harness.discover import find, load_pair, workloads_of
from harness.metric_names import METRICS
from harness.pair import Context, Inputs
from impls.model.config import ModelConfig
from impls.model.decoder import Parts, keep_unrotated
from impls.model.fetch import default_model_path
from impls.model.weights import load_model
from impls.serving import drafted_loop
from impls.serving.draft_acceptance import Greedy, expected_speedup, expected_tokens
from impls.serving.drafted_loop import DraftedLoop
from impls.serving.drafts import GivenDrafts, LayerSkip, PromptLookup
from impls.serving.fast_decoder import fast_decoder
from impls.serving.plain_loop import plain_tokens
from impls.serving.request import Request, Sampling
from impls.serving.runner import with_parts

VOCAB = 48
SMALL = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)
NEW = 21


@pytest.fixture(scope="module")
def model():
    return load_model(shape=SMALL, seed=4)


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(VOCAB, (3, 14), generator=torch.Generator().manual_seed(2)).repeat(1, 2)


@pytest.fixture(scope="module")
def answers(model, prompts):
    return [plain_tokens(model, Request("a", row, Sampling(max_tokens=NEW))) for row in prompts.tolist()]


def loop_of(model, prompts, answers, drafter, drafted, kind=DraftedLoop, new=NEW):
    loop = kind(model, *prompts.shape, new, drafted, Greedy())
    if drafter == "lookup":
        loop.drafter = PromptLookup(drafted)
    elif drafter == "skip":
        loop.drafter = LayerSkip(model, 2, drafted, loop.rule, loop.attend)
    elif drafter is not None:
        loop.drafter = GivenDrafts(drafted, drafter, VOCAB, len(prompts), loop.places, seed=1)
        loop.drafter.know(torch.as_tensor(answers, device=prompts.device), loop.prompt)
    loop.prefill(prompts)
    return loop


@pytest.mark.parametrize("drafted", [1, 4, 24])
@pytest.mark.parametrize("drafter", [None, "lookup", "skip", 0.0, 0.6, 1.0])
def test_the_tokens_are_those_of_the_plain_loop(model, prompts, answers, drafter, drafted):
    loop = loop_of(model, prompts, answers, drafter, drafted)
    for _ in range(2):
        loop.run()
        assert loop.answer().tolist() == answers
        loop.answer().fill_(0)


@pytest.mark.parametrize(("rate", "passes"), [(0.0, NEW), (1.0, math.ceil(NEW / 5))])
def test_passes_are_one_a_token_when_all_is_rejected_and_one_for_all_when_all_is_accepted(
    model, prompts, answers, rate, passes
):
    loop = loop_of(model, prompts, answers, rate, 4)
    loop.run()
    counts = loop.counters()
    assert loop.steps == counts["passes"] == passes
    assert counts["acceptance_rate"] == rate
    assert counts["emitted_tokens"] == 3 * NEW
    assert counts["acceptance_length"] == pytest.approx(NEW / passes)
    assert loop.answer().tolist() == answers, "asking for counters changed the answer"


class NoRollback(DraftedLoop):
    """Keeps rejected drafts' places."""

    def accept(self, length_B, accepted_B):
        drafts = 0 if self.draft is None else self.draft.tokens_Bk.shape[1]
        return (length_B + drafts + 1).clamp(max=self.limit)


class OneTooMany(DraftedLoop):
    """Keeps the first rejected draft's successor too."""

    def accept(self, length_B, accepted_B):
        return (length_B + accepted_B + 2).clamp(max=self.limit)


class OffByOne(DraftedLoop):
    """Reads the draft one place late."""

    def propose(self):
        super().propose()
        self.draft.tokens_Bk.copy_(self.draft.tokens_Bk.roll(1, dims=1))


@pytest.mark.parametrize("kind", [NoRollback, OneTooMany])
def test_a_loop_that_keeps_what_was_rejected_is_found_out(model, prompts, answers, kind):
    loop = loop_of(model, prompts, answers, 0.6, 4, kind)
    loop.run()
    assert loop.answer().tolist() != answers


def test_wrong_drafts_cost_passes_and_no_token(model, prompts, answers):
    good, bad = (loop_of(model, prompts, answers, 1.0, 4, kind) for kind in (DraftedLoop, OffByOne))
    good.run()
    bad.run()
    assert bad.answer().tolist() == good.answer().tolist() == answers
    assert bad.steps > 2 * good.steps


def test_the_first_layers_write_into_the_cache_what_the_whole_model_does(model, prompts, answers):
    loop = loop_of(model, prompts, answers, "skip", 4)
    with torch.inference_mode():
        loop.propose()
        drafted = loop.cache.k[:2, :, :, loop.prompt - 1 : loop.prompt + 3].clone()
        loop.verify()
    torch.testing.assert_close(loop.cache.k[:2, :, :, loop.prompt - 1 : loop.prompt + 3], drafted)
    assert bool(drafted.abs().sum() > 0)


def test_a_decoder_that_leaves_the_rotation_decodes_the_same(model, prompts, answers):
    loop = loop_of(with_parts(model, Parts(rotate=keep_unrotated)), prompts, answers, "skip", 3)
    loop.run()
    assert loop.answer().tolist() == answers


@pytest.mark.slow
def test_the_fused_decoder_of_a_gpu_decodes_the_same(model, prompts, answers):
    loop = loop_of(fast_decoder(model), prompts[:1], answers[:1], "skip", 3, new=4)
    loop.run()
    assert loop.answer().tolist() == [answers[0][:4]]


def test_drafts_keep_their_memory_from_step_to_step(model, prompts, answers):
    loop = loop_of(model, prompts, answers, "lookup", 3)
    loop.run()
    held = (loop.draft.tokens_Bk.data_ptr(), loop.draft.found_B.data_ptr())
    loop.run()
    assert held == (loop.draft.tokens_Bk.data_ptr(), loop.draft.found_B.data_ptr())


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("drafter", [None, "lookup", "skip", 0.6])
def test_graphs_on_a_gpu_give_the_tokens_of_eager_steps(prompts, drafter, fused):
    plain = load_model(shape="tiny", seed=4, device="cuda")
    want = [plain_tokens(plain, Request("a", row, Sampling(max_tokens=NEW))) for row in prompts.tolist()]
    loop = loop_of(fast_decoder(plain) if fused else plain, prompts.cuda(), want, drafter, 4)
    for _ in range(2):
        loop.run()
        assert loop.answer().tolist() == want
        loop.answer().fill_(0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [1, 3])
def test_in_bfloat16_captured_passes_give_the_tokens_of_eager_ones(prompts, rows, device, monkeypatch):
    plain = load_model(shape="tiny", seed=4, dtype=torch.bfloat16, device=device)
    model = fast_decoder(plain) if device == "cuda" else plain
    answers = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(drafted_loop, "capture", lambda part: part)
        loop = loop_of(model, prompts[:rows].to(device), [], "lookup", 4)
        loop.run()
        answers.append(loop.answer().tolist())
    assert answers[0] == answers[1]


# -- lookups -------------------------------------------------------------------------------------------------------


def looked_up(text: list[int], drafted: int, longest: int) -> list[int] | None:
    """What a reader would propose: the longest last words, and of the places where they stood before the latest."""
    for n in range(min(longest, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                follows = text[end:]
                return list(itertools.islice(itertools.cycle(follows), drafted))
    return None


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_lookups_find_what_a_reader_finds_and_read_nothing_behind_the_text(vocab):
    rng = random.Random(vocab)
    texts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 24))] for _ in range(200)]
    whole = [text + [*text[-3:], 7, *text[-3:], 8][: 30 - len(text)] for text in texts]
    padded = torch.tensor([(row + [text[-1]] * 30)[:30] for row, text in zip(whole, texts, strict=True)])
    draft = PromptLookup(4, longest=3)(padded, torch.tensor([len(text) for text in texts]))
    found = [tokens if yes else None for tokens, yes in zip(draft.tokens_Bk.tolist(), draft.found_B, strict=True)]
    assert found == [looked_up(text, 4, 3) for text in texts]
    assert None in found


def test_short_matches_can_be_refused():
    text = torch.tensor([[5, 6, 7, 9, 7, 0, 0]])
    assert PromptLookup(1, 3, shortest=1)(text, torch.tensor([5])).found_B.tolist() == [True]
    assert PromptLookup(1, 3, shortest=2)(text, torch.tensor([5])).found_B.tolist() == [False]
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        PromptLookup(1, 2, shortest=3)


# -- what it is worth ----------------------------------------------------------------------------------------------


def test_the_theory_is_the_papers():
    a, k, c = 0.8, 5, 0.05
    assert expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert expected_tokens(1.0, k) == k + 1
    assert expected_speedup(a, k, c) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)))
    assert expected_speedup(0.0, k, c) == pytest.approx(1 / (1 + k * c))
    assert expected_speedup(a, k, 0.0, pass_cost=2.0) == pytest.approx(expected_tokens(a, k) / 2)
    assert expected_speedup(a, k, 0.0, drafted_share=0.0) == 1.0
    # Of two rows one has a draft, which is accepted: each pass is a dear one, and three tokens are two rows' step.
    assert expected_speedup(1.0, 1, 0.0, 2.0, drafted_share=0.5, checked_share=1.0) == pytest.approx(1.5 / 2)


def test_a_set_rate_gives_the_length_that_the_theory_says(model):
    rows, new, k, rate = 48, 100, 4, 0.7
    prompts = torch.randint(VOCAB, (rows, 5), generator=torch.Generator().manual_seed(6))
    plain, loop = (DraftedLoop(model, rows, 5, new, drafted, Greedy()) for drafted in (0, k))
    plain.prefill(prompts)
    plain.run()
    loop.drafter = GivenDrafts(k, rate, VOCAB, rows, loop.places, seed=3)
    loop.drafter.know(plain.answer(), 5)
    loop.prefill(prompts)
    loop.run()
    counts = loop.counters()
    assert torch.equal(loop.answer(), plain.answer())
    assert counts["acceptance_rate"] == pytest.approx(rate, abs=0.03)
    assert counts["acceptance_length"] == pytest.approx(expected_tokens(rate, k), rel=0.06)
    assert counts["theory_speedup"] == pytest.approx(
        expected_speedup(counts["acceptance_rate"], k, counts["draft_cost"])
    )


# -- the pair ------------------------------------------------------------------------------------------------------


def smoke(**dims):
    technique = find("speculative_decoding")
    workload = next(w for w in workloads_of(technique) if w.tier == "smoke")
    return load_pair(technique), workload.replace(**dims) if dims else workload


def results(pair, workload):
    """The oracle, and each variant's tokens and counters."""
    ctx = Context(torch.device("cpu"), getattr(torch, workload.dtype), seed=3)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    oracle = pair.oracle(workload, ctx)
    oracle.load(inputs)
    oracle.run()
    found = {}
    for name in pair.variants:
        case = pair.variant(name).fn(workload, ctx)
        case.load(inputs)
        case.run()
        found[name] = (case.result(), case.counters())
        case.close()
    return oracle, found


@pytest.mark.parametrize("dims", [{}, {"task": "repeat", "rows": 1}], ids=["smoke", "repeat"])
def test_every_variant_gives_the_oracles_tokens(dims):
    pair, workload = smoke(new=16, **dims)
    oracle, found = results(pair, workload)
    for name, (tokens, counts) in found.items():
        assert judge(pair.tolerance, workload.dtype, oracle.result(), tokens, None).passed, name
        assert counts["emitted_tokens"] == workload.rows * workload.new
        assert counts["passes"] <= workload.new
    assert found["baseline"][1]["passes"] == workload.new
    assert "acceptance_length" in METRICS
    assert found["set_acceptance"][1]["acceptance_rate"] == pytest.approx(workload.acceptance, abs=0.25)


def test_lower_precision_is_judged_by_the_logits_that_rounding_explains():
    pair, workload = smoke(dtype="bfloat16", new=16)
    oracle, found = results(pair, workload)
    for tokens, _ in found.values():
        assert judge_scored(oracle.score(tokens)).passed
        wrong = {key: [(token + 1) % 512 for token in row] for key, row in tokens.items()}
        assert not judge_scored(oracle.score(wrong)).passed
    # The instrument knows what checking gives, also where rounding makes that another token than the plain loop's.
    assert found["set_acceptance"][1]["acceptance_rate"] == pytest.approx(workload.acceptance, abs=0.25)


@pytest.mark.slow
def test_real_weights_repeat_a_text_in_far_fewer_passes_than_tokens():
    if default_model_path() is None:
        pytest.skip("real weights are not here: run 'pairbench models fetch'")
    technique = find("speculative_decoding")
    pair = load_pair(technique)
    workload = next(w for w in workloads_of(technique) if w.name == "real_repeat").replace(new=20, rows=4)
    ctx = Context(torch.device("cpu"), torch.float32, seed=3)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    cases = {name: pair.variant(name).fn(workload, ctx) for name in ("baseline", "optimized")}
    for case in cases.values():
        case.load(inputs)
        case.run()
    assert cases["optimized"].result() == cases["baseline"].result()
    tally = cases["optimized"].loop.tally.tolist()
    assert tally[4] / tally[0] > 2
