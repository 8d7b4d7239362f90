"""Real text and how well a model predicts it."""

import hashlib
import math

import pytest
import torch

from impls.model.errors import ModelError
from impls.model.perplexity import perplexity, token_losses
from impls.model.text import calibration_text, judging_text, real_text
from impls.model.weights import load_model


def test_texts_are_named_by_their_digest():
    for part in (real_text(), judging_text(), calibration_text()):
        assert part.digest == hashlib.sha256(part.text.encode()).hexdigest()[:16]
    assert len({real_text().digest, judging_text().digest, calibration_text().digest}) == 3
    assert len(real_text().text) > 400_000
    assert len(calibration_text().text) > 50_000


def test_no_paragraph_is_in_both_the_calibration_and_the_judging_text():
    calibration, judging = (set(map(str.strip, t().text.split("\n\n"))) for t in (calibration_text, judging_text))
    assert not (calibration & judging) - {""}


def test_perplexity_is_the_exponential_of_the_mean_loss():
    model = load_model(shape="tiny")
    tokens = torch.arange(50) * 7 % 512
    losses = token_losses(model, tokens, window=20)
    assert losses.shape == (19 + 19 + 9,)
    logits = torch.log_softmax(model(tokens[20:40][None])[0].double(), -1)
    wanted = -logits[torch.arange(19), tokens[21:40]]
    torch.testing.assert_close(losses[19:38], wanted, rtol=1e-5, atol=1e-5)
    assert perplexity(model, tokens, window=20) == pytest.approx(math.exp(losses.mean()))
    model.lm_head.weight.zero_()
    assert perplexity(model, tokens) == pytest.approx(512)


@pytest.mark.parametrize(
    ("tokens", "window", "message"),
    [
        ([1], 10, "at least two tokens"),
        ([[1, 2]], 10, "at least two tokens"),
        ([1, 2], 1, "a window of 1 is not within 2 and 2048"),
        ([1, 2], 4096, "a window of 4096"),
        ([1, 512], 10, "within 0 and 511"),
        ([-1, 2], 10, "within 0 and 511"),
    ],
)
def test_perplexity_refuses_what_it_cannot_score(tokens, window, message):
    with pytest.raises(ModelError, match=message):
        token_losses(load_model(shape="tiny"), torch.tensor(tokens), window)
