"""Speed and quality of settings on the same texts, and whether tau beats a fixed depth of the same mean.

A setting is named by a pair: a KV strategy and its tau, "fixed depth" and that depth, or a baseline and None.
"""

import math
import statistics

import torch

from .agreement import BACKBONE, agreement
from .intervals import bootstrap
from .settings import Settings, parse_setting
from .strategies import STRATEGIES
from .timing import measure

FULL_4_BIT = parse_setting("full4bit")
BASELINES = {("backbone", None): BACKBONE, ("full 4-bit", None): FULL_4_BIT}


def by_strategy(taus):
    """`Settings` of every KV strategy at every tau, the prompt on the backbone for all."""
    return {(kv, tau): Settings(kv=kv, tau=tau, prefill="backbone") for kv in STRATEGIES for tau in taus}


def at_neighbouring_depths(scores):
    """`Settings` of the fixed depths just below and above the mean depth of each of `scores` (see `quality`)."""
    depths = {end for score in scores for end in _ends(mean_depth(score))}
    return {("fixed depth", depth): Settings(exit_layer=depth, prefill="backbone") for depth in sorted(depths)}


def interleaved(llm, settings, texts, rounds):
    """Time settings in turn, one text a round, longest first: name to medians over the rounds of what `measure` gives.

    All run the text's own tokens, so that a setting whose answer would go astray is timed at the same work.
    """
    longest = sorted(texts, key=lambda text: -len(text[1]))
    results = {name: [] for name in settings}
    for number in range(rounds + 1):
        prompt, tokens = longest[number % len(texts)]
        given = torch.tensor(tokens, device=llm.model.device)
        for name, setting in settings.items():
            taken = measure(llm, setting, prompt, len(tokens) - 1, given)
            if number:  # the first round is a warm-up
                results[name].append(taken)
    return {
        name: {key: statistics.median(taken[key] for taken in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    }


def quality(llm, settings, texts):
    """Name of each setting to its score: a list of the `TextAgreement` of each text."""
    by_text = list(agreement(llm, settings, texts))
    return {name: [scores[name] for scores in by_text] for name in settings}


SUMS = {"agreement": lambda text: 100 * sum(text.hits), "kl": lambda text: sum(text.kls)}  # over a text's tokens


def summary(score):
    """Mean exit depth, agreement in % and KL(backbone || setting) in nats a token, over all texts."""
    tokens = sum(text.tokens for text in score)
    means = {name: sum(of(text) for text in score) / tokens for name, of in SUMS.items()}
    return {"exit_layer": mean_depth(score)} | means


def differences(score, others):
    """`Interval`s of how far agreement and KL are above others': "agreement_difference" and "kl_difference".

    Args:
        score: of a setting, see `quality`.
        others: for "agreement" and "kl", a list of what SUMS gives of each text elsewhere.
    """
    tokens = [text.tokens for text in score]
    return {
        f"{name}_difference": bootstrap([of(text) - other for text, other in zip(score, others[name])], tokens)
        for name, of in SUMS.items()
    }


def compare_with_first(scores):
    """Of each of the scores (a dict, see `quality`) its "name", `summary`, and `differences` to the first one's."""
    first = next(iter(scores.values()))
    others = {name: [of(text) for text in first] for name, of in SUMS.items()}
    return [{"name": name} | summary(score) | differences(score, others) for name, score in scores.items()]


def mean_depth(score):
    """Mean backbone layers over the decode steps of all texts."""
    return statistics.mean(depth for text in score for depth in text.exit_layers)


def _ends(depth):
    return math.floor(depth), math.ceil(depth)


def compare_with_fixed(score, fixed):
    """A score against what fixed depths of the same mean would give: `summary`, `fixed_...` and `..._difference`.

    The latter two are between the fixed depths just below and above, interpolated linearly in each text. The
    differences have 95% intervals, from texts resampled.

    Args:
        score: of a setting, see `quality`.
        fixed: fixed depth to its score, on the same texts.
    """
    result = summary(score)
    low, high = _ends(result["exit_layer"])
    share = result["exit_layer"] - low
    between = {
        name: [(1 - share) * of(a) + share * of(b) for a, b in zip(fixed[low], fixed[high])]
        for name, of in SUMS.items()
    }
    tokens = sum(text.tokens for text in score)
    result |= {f"fixed_{name}": sum(sums) / tokens for name, sums in between.items()}
    return result | differences(score, between)


def in_words(c):
    """One line about a comparison: what `compare_with_fixed` returns, with its "tau"."""
    depth = f"{c['exit_layer']:.1f}"
    return (
        f"tau {c['tau']}: depth {depth}, agreement {c['agreement']:.1f}%; fixed depth of {depth} (interpolated): "
        f"{c['fixed_agreement']:.1f}%; difference {c['agreement_difference']:.1f}; KL {c['kl']:.3f} against "
        f"{c['fixed_kl']:.3f}, difference {c['kl_difference']:.3f}"
    )
