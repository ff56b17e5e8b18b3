"""95% intervals for what is measured on a sample of problems or texts.

A sample of texts is resampled by text (the bootstrap of Efron, 1979), since the tokens of one text are no
independent draws; a share of problems solved has Wilson's interval (1927), which has a width at 0 and 1 too.
"""

import math
from typing import NamedTuple

import torch

Z = 1.959964  # the normal distribution's 97.5% point


class Interval(NamedTuple):
    """An estimate, and the ends of its 95% interval."""

    mean: float
    low: float
    high: float

    def __format__(self, spec):
        """A difference and its interval, each number by `spec`."""
        return f"{self.mean:+{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


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


def paired_difference(wins, losses, trials):
    """`Interval` of a difference between two shares of the same independent problems, each right or wrong.

    Args:
        wins, losses: problems that only the first has right, and that only the second has.
        trials: all problems.

    Wald's interval after half a problem is added to each cell of the two-by-two table (Agresti and Min, 2005): unlike
    the bootstrap's, it has a width where the two differ in nothing.
    """
    if not trials:
        raise ValueError("there is nothing to compare")
    b, c, n = wins + 0.5, losses + 0.5, trials + 2
    centre, spread = (b - c) / n, Z * math.sqrt(b + c - (b - c) ** 2 / n) / n
    return Interval((wins - losses) / trials, max(-1.0, centre - spread), min(1.0, centre + spread))


def proportion(successes, trials):
    """`Interval` of a share of independent problems."""
    if not trials:
        raise ValueError("there is nothing to take a share of")
    share = successes / trials
    centre = share + Z * Z / (2 * trials)
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    # At 0 and 1 the formula gives the end itself but for rounding.
    return Interval(share, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))
