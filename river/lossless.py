"""Lossless decoding: the river drafts, the backbone verifies, and the output is the backbone's own.

Leaving early is near the backbone's text, not equal to it. Here the river's tokens are drafts: the backbone
runs them as one block, which costs less than as many single tokens, writes exact K and V over theirs, and keeps those
that it would have given itself (speculative decoding: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318). The cache is shared, so that there is no second one to fill, and no error outlives its block.
"""

from dataclasses import dataclass

import torch

from .controller import Never
from .decode import Step

BLOCK = 4  # tokens for which a block is compiled; a larger one would be bound by arithmetic, not by the memory
# Costs in steps of the backbone, measured on two cores: what the acceptance is weighed against.
DRAFT_COST, BLOCK_COST = 0.4, 1.5


@dataclass
class Drafting:
    """How many tokens to draft, from how many were accepted lately; and the counts of a run.

    `choices`: numbers of drafts to choose from. The choice follows from what was accepted and not from the clock,
    so that a seed gives the same text again.
    """

    choices: tuple = tuple(range(8))
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    expected: float = 0.8  # chance that a draft is accepted

    def length(self):
        """Drafts for the next block: as many as promise the most tokens for the time."""

        def tokens_per_cost(k):
            return sum(self.expected**i for i in range(k + 1)) / (BLOCK_COST + DRAFT_COST * k if k else 1)

        return max(self.choices, key=tokens_per_cost)

    def note(self, drafted, accepted):
        """Take in a block of `drafted` tokens, of which the first `accepted` were right."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.expected += 0.05 * (right - self.expected)
        if not drafted:  # try again after a while
            self.expected += 0.02 * (0.8 - self.expected)

    @property
    def acceptance(self):
        """Share of the drafted tokens that were accepted, or None."""
        return self.accepted / self.drafted if self.drafted else None


def draft_and_verify(decoder, draft_head, prompt, max_new_tokens, stop_ids, sampler, drafting):
    """Yield a `Step` for each new token, as `decode.generate` does, with the backbone's own distribution.

    The exit_layer of an accepted draft is the depth at which it left; a token of the backbone's own has L.

    Args:
        decoder: a `Decoder` of one sequence with an empty cache or a finished turn in it. Its exit rule is the
            drafts', and its prefill the backbone's.
        draft_head: the head that drafts are read with, which need not be exact.
        prompt: token ids.
        max_new_tokens, stop_ids, sampler: as in `decode.generate`.
        drafting: a `Drafting`.
    """
    if max_new_tokens < 1:
        return
    logits, exit_layer = decoder.prefill([prompt])
    token = int(sampler(logits))
    yield Step([token], exit_layer)
    left = max_new_tokens - 1
    while left and token not in stop_ids:
        start = decoder.length
        most = min(drafting.length(), left - 1, _until_other_rotation(decoder, left))
        try:
            drafts = [*draft(decoder, draft_head, token, most, stop_ids, sampler)]
            decoder.tokens = decoder.tokens[:, :start]  # the backbone writes the drafts' slots again
            block = torch.tensor([[token, *(d.token for d in drafts)]], device=decoder.model.device)
            h, exit_layer = decoder.forward(block, Never())
            accepted, token = verify(drafts, decoder.model.logits(h)[0], sampler)
        except BaseException:  # Ctrl-C in a chat, which goes on: with what was shown, and no more
            decoder.tokens = decoder.tokens[:, :start]
            raise
        drafting.note(len(drafts), accepted)
        written = decoder.tokens
        steps = [*((d.token, d.exit_layer) for d in drafts[:accepted]), (token, exit_layer)]
        for count, (token, depth) in enumerate(steps, 1):
            decoder.tokens = written[:, : start + count]  # all before this token, should nobody ask for more
            yield Step([token], depth)
            left -= 1
            if token in stop_ids:
                return


@dataclass
class Draft:
    """A drafted token, the distribution [vocab] it was drawn from (None: greedy), and where it left."""

    token: int
    probabilities: torch.Tensor | None
    exit_layer: int


def draft(decoder, head, token, most, stop_ids, sampler):
    """Yield up to `most` drafts of what follows `token`, writing K and V of the slots before them."""
    for _ in range(most):
        h, exit_layer = decoder.forward(torch.tensor([[token]], device=decoder.model.device), decoder.exit_rule)
        logits = head(decoder.model.norm(h)).float()[:, 0]
        if not logits.amax().isfinite():
            return  # the river's numbers have overflowed; the backbone's need not have
        probabilities = None if sampler.greedy else sampler.probabilities(logits)[0]
        token = int(logits.argmax() if sampler.greedy else sampler.draw(probabilities[None]))
        yield Draft(token, probabilities, exit_layer)
        if token in stop_ids:
            return


def verify(drafts, logits, sampler):
    """Compare k drafts with the backbone's logits [k + 1, vocab]; returns (accepted, token that follows them).

    Greedy: a draft is right if it is the backbone's choice. Sampled: a draft from q is kept with the chance
    min(1, p / q), and the first refused one is replaced by a draw from what p has over q, which together gives
    p exactly (Leviathan et al., appendix A.1).
    """
    if sampler.greedy:
        choices = sampler(logits).tolist()
        accepted = next((i for i, d in enumerate(drafts) if d.token != choices[i]), len(drafts))
        return accepted, choices[accepted]
    target = sampler.probabilities(logits)
    for accepted, d in enumerate(drafts):
        p, q = target[accepted], d.probabilities
        if sampler.uniform() * q[d.token] >= p[d.token]:
            excess = (p - q).clamp(min=0)
            return accepted, int(sampler.draw(excess[None] if excess.sum() > 0 else p[None]))
    return len(drafts), int(sampler.draw(target[-1:]))


def _until_other_rotation(decoder, most):
    """Drafts for which a block keeps the rotary frequencies of its first token: some depend on the length."""
    variant, length = decoder.model.rope.variant, decoder.length
    return next((k for k in range(most) if variant(length + k + 2) != variant(length + 1)), most)
