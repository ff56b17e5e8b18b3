"""Sampling: what each setting promises, at its edges too."""

import pytest
import torch

from river.errors import RiverError
from river.sampling import Sampler

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])


def test_temperature_0_is_the_argmax():
    logits = torch.randn(50, 100)
    assert torch.equal(Sampler(0.0, seed=1)(logits), logits.argmax(-1))


def test_probabilities_are_the_softmax_at_that_temperature():
    got = Sampler(0.7).probabilities(LOGITS)
    torch.testing.assert_close(got, (LOGITS / 0.7).softmax(-1))


def test_draws_follow_the_probabilities():
    sampler = Sampler(1.0, seed=0)
    counts = sampler(LOGITS.expand(20_000, -1)).bincount(minlength=5) / 20_000
    torch.testing.assert_close(counts, LOGITS.softmax(-1)[0], atol=0.015, rtol=0)


@pytest.mark.parametrize("temperature", (1e-6, 1e-30, 1e-45, 1e-300, 5e-324))
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    """Dividing logits by it overflows; the top one must come out, not NaN."""
    logits = torch.tensor([[1.0, 900.0, 2.0, 899.0]])
    assert Sampler(temperature, seed=0).probabilities(logits).isfinite().all()
    assert Sampler(temperature, seed=0)(logits) == 1


@pytest.mark.parametrize("top_k, kept", ((None, 5), (0, 5), (5, 5), (99, 5), (3, 3), (2, 2), (1, 2)))
def test_top_k(top_k, kept):
    """0 is off, more than the vocabulary keeps all, and ties at the k-th place stay together."""
    got = Sampler(1.0, top_k=top_k).probabilities(LOGITS)
    assert int((got > 0).sum()) == kept
    torch.testing.assert_close(got.sum(), torch.tensor(1.0))


@pytest.mark.parametrize(
    "top_p, kept", ((None, 4), (1.0, 4), (0.9, 4), (0.8, 3), (0.7, 2), (0.5, 1), (0.3, 1), (0.0, 1))
)
def test_top_p(top_p, kept):
    """The fewest tokens that reach p: of .5 .25 .125 .125, two reach .7 and one reaches exactly .5."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    got = Sampler(1.0, top_p=top_p).probabilities(logits)
    assert int((got > 0).sum()) == kept
    torch.testing.assert_close(got.sum(), torch.tensor(1.0))


def test_the_same_seed_gives_the_same_tokens_in_one_process():
    logits = torch.randn(30, 50)

    def draw(seed):
        return Sampler(1.0, seed=seed)(logits).tolist()

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)


@pytest.mark.parametrize(
    "bad",
    (
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
    ),
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(RiverError):
        Sampler(**bad)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_logits_that_are_no_numbers_are_no_answer(temperature, bad):
    """argmax of NaN is token 0, over and over: blank text that looks like an answer."""
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(RiverError, match="not finite"):
        Sampler(temperature)(logits)
