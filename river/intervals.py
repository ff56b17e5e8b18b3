"""95% intervals for what is measured on a sample of problems or texts.

A sample of texts is resampled by text (the bootstrap of Efron, 1979), since the tokens of one text are no
independent draws; a share of problems solved has Wilson's interval (1927), which has a width at 0 and 1 too.
"""

import math
from typing import NamedTuple

import torch


class Interval(NamedTuple):
    """An estimate, and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def bootstrap(sums, counts=None, draws=10_000, seed=0):
    """`Interval` of the mean of everything counted: sum(sums) / sum(counts), over resampled groups.

    Args:
        sums: of each group (a text, a problem), the sum of what was measured in it.
        counts: of each group, how many were summed; None for one each.
        draws: resamples.
        seed: of the resamples, so that the same data give the same interval.

    Raises:
        ValueError: nothing was counted.
    """
    data = torch.tensor([sums, [1.0] * len(sums) if counts is None else counts], dtype=torch.float64)
    if data.shape[1] == 0 or data[1].sum() == 0:
        raise ValueError("there is nothing to take a mean of")
    generator = torch.Generator().manual_seed(seed)
    means = []
    for _ in range(draws):
        total, count = data[:, torch.randint(data.shape[1], (data.shape[1],), generator=generator)].sum(1).tolist()
        if count:
            means.append(total / count)
    ends = torch.tensor(means, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval((data[0].sum() / data[1].sum()).item(), *ends.tolist())


def proportion(successes, trials):
    """`Interval` of a share of independent problems."""
    if not trials:
        raise ValueError("there is nothing to take a share of")
    z = 1.959964
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At 0 and 1 the formula gives the end itself but for rounding.
    return Interval(share, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))
