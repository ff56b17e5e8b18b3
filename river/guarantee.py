"""A threshold with a guarantee: which taus keep a target, by a test that assumes independent texts and no more.

Learn then Test (Angelopoulos et al., arXiv 2110.01052): each tau has the null hypothesis that its expected loss is
above the target's, and the taus are tested from the strictest on, down to the first that fails; then all before it
keep the target together with the stated confidence. The test is a betting bound for losses in [0, 1]
(Waudby-Smith and Ramdas, arXiv 2010.09686, in the form of Bates et al., arXiv 2101.02703, proposition 5), which
costs fewer texts than Hoeffding's where losses vary little.
"""

import json
import math

import torch

from .errors import RiverError
from .files import SafetensorsFile, complete_or_absent, digest_of_sources, read_json

CONFIDENCE = 0.95
TAUS = (0.99, 0.98, 0.97, 0.95, 0.9, 0.8, 0.65, 0.5)  # strict to lax
MOST_KL = 2.0  # nats: what one token's divergence counts for at most, since a bound needs one


def mean_is_below(losses, bound, confidence=CONFIDENCE):
    """Whether the expected loss is below `bound`: if it is not, the answer is True with at most 1 - confidence.

    Args:
        losses: numbers in [0, 1], independent draws from one distribution, in any order but their size's.
        bound: in (0, 1).
    """
    wealth, total, squares, variance = 0.0, 0.0, 0.0, 0.25
    for count, loss in enumerate(losses, 1):
        stake = min(1.0, math.sqrt(2 * math.log(1 / (1 - confidence)) / (len(losses) * variance)))
        factor = 1 - stake * (loss - bound)
        if factor <= 0:  # a bound so near zero that nothing could be sure of it
            return False
        wealth += math.log(factor)
        if wealth > math.log(1 / (1 - confidence)):
            return True
        total += loss
        mean = (0.5 + total) / (count + 1)
        squares += (loss - mean) ** 2
        variance = (0.25 + squares) / (count + 1)
    return False


def laxest(losses_by_tau, bound):
    """The last tau, of a dict from strict to lax, before the first whose losses are not `mean_is_below`; or None."""
    found = None
    for tau, losses in losses_by_tau.items():
        if not mean_is_below(losses, bound):
            break
        found = tau
    return found


def held_out(losses_by_tau, bound, splits=100):
    """Try the choice on texts that it has not seen; returns how many of `splits` (kept, broke, chose none).

    In each split, a tau is chosen on one random half of the texts, and its mean loss taken on the other.
    """
    texts = len(next(iter(losses_by_tau.values())))
    generator, results = torch.Generator().manual_seed(0), []
    for _ in range(splits):
        first, second = (half.tolist() for half in torch.randperm(texts, generator=generator).chunk(2))
        tau = laxest({tau: [losses[i] for i in first] for tau, losses in losses_by_tau.items()}, bound)
        results.append(None if tau is None else sum(losses_by_tau[tau][i] for i in second) <= bound * len(second))
    return results.count(True), results.count(False), results.count(None)


def save(river_path, found):
    """Keep what was found beside the river file that it was found with: a dict with what `load` asks for."""
    with complete_or_absent(_path(river_path)) as temporary:
        temporary.write_text(json.dumps({"of": _identity(river_path), **found}, indent=1))


def load(river_path):
    """What `save` kept.

    Raises:
        RiverError: nothing was, or for another river.
    """
    path, folder = _path(river_path), river_path.parent
    again = f"run python -m river.calibrate {folder} --target agreement=0.98, with the river's settings"
    if not path.exists():
        raise RiverError(f"tau auto: no threshold has been calibrated for {river_path.name}; {again}")
    found = read_json(path)
    kinds = {"target": str, "confidence": float, "text": str, "texts": int}
    whole = found.get("tau") in TAUS and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    if found.get("of") != _identity(river_path) or not whole:
        raise RiverError(f"{path} belongs to another checkpoint, river, code or version of PyTorch; {again}")
    return found


def _path(river_path):
    return river_path.with_name(river_path.name.replace("river-", "tau-", 1)).with_suffix(".json")


def _identity(river_path):
    """What a guarantee is of: a river, by what its file says that it was built from, and the code that runs it."""
    return [SafetensorsFile(river_path).metadata["river"], digest_of_sources()]
