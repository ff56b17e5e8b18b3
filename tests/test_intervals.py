"""Intervals of evaluate and analyze: they cover the truth as often as they say, on data whose truth is known."""

import pytest
import torch

from river.intervals import bootstrap, paired_difference, proportion


def coverage(truth, intervals):
    return sum(i.low <= truth <= i.high for i in intervals) / len(intervals)


def test_bootstrap_by_text_covers_where_tokens_of_a_text_agree_with_each_other():
    """Texts of unequal length, each with a level of its own: what a bootstrap by token would be far too sure of."""
    generator = torch.Generator().manual_seed(1)
    intervals, by_token = [], []
    for _ in range(200):
        lengths = torch.randint(5, 60, (60,), generator=generator)
        levels = 0.8 + 0.15 * (2 * torch.rand(60, generator=generator) - 1)
        hits = torch.binomial(lengths.double(), levels.double(), generator=generator)
        intervals.append(bootstrap(hits.tolist(), lengths.tolist(), draws=400))
        by_token.append(proportion(hits.sum().item(), lengths.sum().item()))
    assert 0.90 <= coverage(0.8, intervals) <= 0.99
    assert coverage(0.8, by_token) < coverage(0.8, intervals)


def test_a_paired_difference_covers_and_is_narrower_than_either_score():
    generator = torch.Generator().manual_seed(2)
    intervals, narrower = [], 0
    for _ in range(200):
        hard = torch.rand(100, generator=generator)
        baseline = (hard < 0.5).double()
        value = torch.where(torch.rand(100, generator=generator) < 0.1, 0.0, baseline)  # a tenth of them are lost
        paired = bootstrap((value - baseline).tolist())
        intervals.append(paired)
        narrower += paired.high - paired.low < (i := proportion(baseline.sum().item(), 100)).high - i.low
    assert 0.88 <= coverage(-0.05, intervals) <= 0.99
    assert narrower > 150


@pytest.mark.parametrize("share, trials", [(0.5, 100), (0.05, 60), (0.97, 100)])
def test_proportion_covers(share, trials):
    generator = torch.Generator().manual_seed(3)
    hits = torch.binomial(torch.full((2000,), trials).double(), torch.tensor(share).double(), generator=generator)
    assert 0.92 <= coverage(share, [proportion(h, trials) for h in hits.tolist()]) <= 0.98


@pytest.mark.parametrize("win, loss", [(0.02, 0.12), (0.0, 0.05), (0.1, 0.1)])
def test_paired_difference_covers(win, loss):
    generator = torch.Generator().manual_seed(4)
    draws = torch.rand(2000, 100, generator=generator, dtype=torch.float64)
    wins, losses = (draws < win).sum(1).tolist(), (draws > 1 - loss).sum(1).tolist()
    assert 0.92 <= coverage(win - loss, [paired_difference(*cell, 100) for cell in zip(wins, losses)]) <= 0.995


def test_no_difference_in_a_few_problems_is_not_certain():
    assert paired_difference(0, 0, 5).low < -0.2 and paired_difference(0, 0, 5).high > 0.2
    assert paired_difference(3, 0, 3).mean == 1


def test_proportion_has_a_width_at_its_ends():
    """Published values: Wilson's interval of 0 of 10 is 0 to 0.2775, and that of 10 of 10 its mirror."""
    assert proportion(0, 10) == pytest.approx((0, 0, 0.2775), abs=1e-4)
    assert proportion(10, 10) == pytest.approx((1, 0.7225, 1), abs=1e-4)


def test_nothing_measured_is_an_error():
    for call in (
        lambda: bootstrap([]),
        lambda: bootstrap([0.0], [0]),
        lambda: proportion(0, 0),
        lambda: paired_difference(0, 0, 0),
    ):
        with pytest.raises(ValueError):
            call()
