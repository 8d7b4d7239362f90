"""Sampling without a sort: exact thresholds, the noise of the plain sampler, rows that are not numbers."""

import math

import pytest
import torch

from impls.serving.request import Sampling
from impls.serving.sampler import Draws, exponential_noise, keep_top_k, keep_top_p
from kernels import sample
from kernels.sample import row_shape, sample_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_of(rows, vocab, seed=0, scale=3.0, dtype=torch.float32):
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(dtype).to(DEVICE)


def draw(logits, *batch):
    draws = Draws.of(batch, logits.device)
    return sample_rows(logits, draws.temperatures_B, draws.top_ks_B, draws.top_ps_B, draws.keys_B), draws


def plain(logits, draws):
    """The same by sorting: thresholds from the plain sampler, the same noise, float64 where it decides."""
    noisy = draws.temperatures_B > 0
    scaled = logits.float() / torch.where(noisy, draws.temperatures_B, 1.0)[:, None]
    kept = keep_top_p(keep_top_k(scaled, draws), draws)
    raced = kept.double() - exponential_noise(draws.keys_B, logits.shape[1]).double().log()
    return torch.where(noisy, raced.argmax(-1), logits.float().argmax(-1))


SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.0),
    Sampling(0.7, top_k=5),
    Sampling(1.0, top_p=0.6),
    Sampling(1.4, top_k=40, top_p=0.9),
    Sampling(1.0, top_k=10_000, top_p=0.999),
    Sampling(0.2, top_p=1e-6),
]


def assert_plain(logits, *batch):
    tokens, draws = draw(logits, *batch)
    assert tokens.tolist() == plain(logits, draws).tolist()


DTYPES = [
    pytest.param(torch.float32, marks=pytest.mark.slow),
    pytest.param(torch.float16, marks=pytest.mark.slow),
    torch.bfloat16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, 4099])
def test_the_tokens_are_those_of_the_sorting_sampler(vocab, dtype):
    batch = [(Sampling(s.temperature, s.top_k, s.top_p, seed=8), 7) for s in SAMPLINGS]
    assert_plain(logits_of(len(batch), vocab, dtype=dtype), *batch)


@pytest.mark.parametrize("vocab", [256, 1000])
def test_a_row_is_cut_among_programs(vocab, monkeypatch):
    monkeypatch.setattr(sample, "_CHUNK", 256)
    batch = [(Sampling(s.temperature, s.top_k, s.top_p, seed=3), 1) for s in SAMPLINGS]
    assert_plain(logits_of(len(batch), vocab, scale=1.0), *batch)


def test_a_row_draws_the_same_in_any_batch(monkeypatch):
    monkeypatch.setattr(sample, "_CHUNK", 128)
    logits = logits_of(3, 300)
    batch = [(Sampling(1.0, top_p=0.9, seed=4), 0), (Sampling(0.0), 0), (Sampling(1.3, top_k=9, seed=5), 0)]
    together, _ = draw(logits, *batch)
    for row in (2, 0):
        alone, _ = draw(logits[row : row + 1], batch[row])
        assert alone[0] == together[row]


def test_nothing_is_read_that_was_not_written(monkeypatch):
    """Memory comes as others left it: full of ones here."""
    monkeypatch.setattr(sample, "_CHUNK", 128)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kinds: empty(*size, **kinds).fill_(1))
    batch = [(Sampling(s.temperature, s.top_k, s.top_p, seed=6), 2) for s in SAMPLINGS]
    assert_plain(logits_of(len(batch), 300), *batch)


def test_a_bracket_longer_than_the_list_is_searched_in_the_row():
    """The tokens that the sample sees lie above all others, and those, three in four, between two pivots."""
    logits = logits_of(4, 1024, scale=0.1)
    logits[:, 2::4] += 2.0
    assert_plain(
        logits,
        (Sampling(1.0, top_k=600, seed=1), 0),
        (Sampling(1.0, top_p=0.9, seed=2), 0),
        (Sampling(1.0, top_k=800, top_p=0.95, seed=3), 0),
        (Sampling(1.0, top_k=300, top_p=0.2, seed=4), 0),
    )


def drawn_from(logits, sampling, seeds):
    """The tokens that a row gives under so many seeds, which are those of the plain sampler."""
    batch = [(Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=s), 0) for s in range(seeds)]
    tokens, draws = draw(logits.expand(seeds, -1), *batch)
    assert tokens.tolist() == plain(logits.expand(seeds, -1), draws).tolist()
    return set(tokens.tolist())


def test_thresholds_keep_ties_and_nothing_below():
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, -5.0]], dtype=torch.bfloat16, device=DEVICE)
    assert drawn_from(logits, Sampling(50.0, top_k=2), 6) == {1, 2}
    assert drawn_from(logits, Sampling(50.0, top_k=4), 16) == {0, 1, 2, 3, 4}
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16, device=DEVICE)
    assert drawn_from(logits, Sampling(1.0, top_p=0.3), 6) == {1, 2}


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.1), Sampling(0.5, 3, 0.5)], ids=str)
def test_equal_logits_all_stay(sampling):
    logits = torch.full((1, 40), 0.25, device=DEVICE)
    assert len(drawn_from(logits, sampling, 6)) > 3


def test_the_most_likely_alone():
    logits = torch.full((5, 40), -math.inf, device=DEVICE)
    logits[0, 33] = -7.0
    logits[1:] = logits_of(4, 40, seed=9)
    best = logits.argmax(-1)
    tokens, _ = draw(
        logits,
        (Sampling(2.0, top_k=7, top_p=0.5), 0),
        (Sampling(30.0, top_p=1e-30), 0),
        (Sampling(1e-30), 0),
        (Sampling(30.0, top_k=2, top_p=1e-6), 0),
        (Sampling(0.0), 0),
    )
    assert tokens.tolist() == best.tolist()


def test_one_candidate_is_drawn_however_hot():
    logits = logits_of(2, 40)
    _, draws = draw(logits, (Sampling(30.0), 0), (Sampling(30.0), 1))
    ones = torch.ones_like(draws.top_ks_B)
    tokens = sample_rows(logits, draws.temperatures_B, ones, draws.top_ps_B, draws.keys_B)
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals_across_programs(monkeypatch):
    monkeypatch.setattr(sample, "_CHUNK", 16)
    logits = torch.zeros(2, 70, device=DEVICE)
    logits[0, [20, 21, 69]] = 1.0
    logits[1, [15, 64]] = 1.0
    tokens, _ = draw(logits, (Sampling(0.0), 0), (Sampling(1e-3, top_k=70, seed=1), 0))
    assert tokens[0] == 20
    assert int(tokens[1]) in (15, 64)


def test_tokens_cut_off_before_are_never_drawn():
    logits = torch.full((1, 50), -math.inf, device=DEVICE)
    logits[0, [3, 40]] = torch.tensor([0.5, 0.4], device=DEVICE)
    for seed in range(6):
        token = int(draw(logits, (Sampling(9.0, top_p=0.99, seed=seed), seed))[0])
        assert token in (3, 40)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_is_told_apart(bad):
    logits = torch.zeros(3, 10, device=DEVICE)
    logits[1, 4] = bad
    logits[2] = -math.inf
    tokens, _ = draw(logits, *[(Sampling(1.0, top_p=0.9), 0)] * 3)
    assert tokens[1:].tolist() == [-1, -1]
    assert 0 <= int(tokens[0]) < 10


def test_wrong_arguments_are_named():
    logits = torch.zeros(2, 10, device=DEVICE)
    _, draws = draw(logits, (Sampling(1.0), 0), (Sampling(1.0), 0))
    with pytest.raises(ValueError, match="top_ps"):
        sample_rows(logits, draws.temperatures_B, draws.top_ks_B, draws.top_ps_B.double(), draws.keys_B)
    with pytest.raises(ValueError, match="logits"):
        sample_rows(logits.t(), draws.temperatures_B, draws.top_ks_B, draws.top_ps_B, draws.keys_B)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_spills_on_hopper(dtype, compile_for_hopper):
    shape = row_shape(128256, dtype)
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    arguments = {
        "logits_ptr": element, "temperatures_ptr": "*fp32", "top_ks_ptr": "*i64", "top_ps_ptr": "*fp32",
        "keys_ptr": "*i64", "ints_ptr": "*i32", "floats_ptr": "*fp32", "list_ptr": element, "out_ptr": "*i64",
        "stride": "i32", "vocab": "i32", "chunks": "i32", "room": "i32", "SHIFT": shape.shift, "CHUNK": shape.chunk,
        "CHUNKS": shape.slots, "INTS": shape.ints, "FLOATS": shape.floats,
    }  # fmt: skip
    jobs = []
    for kernel, launch in sample.LAUNCHES.items():
        names = getattr(sample, kernel).arg_names
        known = {name: value for name, value in (arguments | {"TILE": launch.tile}).items() if name in names}
        jobs.append({"kernel": f"kernels.sample:{kernel}", "arguments": known, "warps": launch.warps})
    for report in compile_for_hopper(jobs):
        assert report["stack"] == 0, report
