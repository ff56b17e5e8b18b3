"""The exit controller: does a token leave the backbone here?

A rule is asked before each backbone layer and answers for all the tokens of the step together,
since a batch (and, in prefill, a prompt) leaves at one common depth. To add a rule, write a class
with the method `leaves` and name it in EXIT_RULES.
"""

import math
from dataclasses import dataclass

import torch

from .errors import RiverError


def similarity(h_in, h):
    """State transition similarity s_l = cos(h_{l-1}, h_l) of each token: N floats for states [N, D].

    A list, since the check stands between two layers of every token: what follows the sums is cheaper in
    Python than as tensor operations, and they are read with one synchronisation.
    """
    a, b = h_in.float(), h.float()
    sums = torch.stack((a * b, a * a, b * b)).sum(-1).tolist()
    # Rounding must not lift a cosine above a tau of 1, which never exits.
    return [min(ab / math.sqrt(aa * bb), 1.0) if aa * bb > 0 else math.nan for ab, aa, bb in zip(*sums)]


class ExitRule:
    """What every rule inherits: `leaves` is all that a new one has to write."""

    def begin(self, decoder, h, positions):
        """Called before each step, a decode step or a prompt; for rules that keep something or look ahead.

        Args:
            decoder: the `Decoder`, whose exit rule lives as long as it does.
            h: the embedded tokens [B, T, D].
            positions: a list of `Positions`, one for each chunk of the step; a decode step has one.
        """

    def leaves(self, depth, h_in, h):
        """Leave after `depth` backbone layers?

        Args:
            depth: backbone layers run so far, 0 .. L-1.
            h_in: hidden states [N, D] before the last of them; None at depth 0.
            h: hidden states [N, D] after it, of the N tokens that decide together: rows of a batch that still
                run, or a prompt's tokens. N falls when a row ends.
        """
        raise NotImplementedError

    def head_reads(self, asked):
        """How often the LM head is read where `leaves` is asked behind so many layers: it counts as weights read."""
        return 0


@dataclass
class Similarity(ExitRule):
    """River-LLM's rule: leave when the least similarity among the tokens is above `tau`."""

    tau: float = 0.5

    def leaves(self, depth, h_in, h):
        return depth > 0 and self.tau < 1 and all(s > self.tau for s in similarity(h_in, h))


@dataclass
class FixedDepth(ExitRule):
    """Leave after exactly `exit_layer` backbone layers; 0 is the river alone, L the backbone alone."""

    exit_layer: int

    def leaves(self, depth, h_in, h):
        return depth >= self.exit_layer


class Never(ExitRule):
    """Stay on the backbone."""

    def leaves(self, depth, h_in, h):
        return False


@dataclass
class Confidence(ExitRule):
    """CALM, EE-LLM: leave when the head, applied early, gives every token's best word more than `tau`."""

    tau: float
    logits: object  # the model's: hidden states [..., D] to logits [..., vocab]

    def leaves(self, depth, h_in, h):
        return depth > 0 and self.tau < 1 and bool((self.score(self.logits(h).softmax(-1)) > self.tau).all())

    def head_reads(self, asked):
        return asked if self.tau < 1 else 0

    def score(self, probabilities):
        """How sure the head is of each token: [N] for probabilities [N, vocab]."""
        return probabilities.amax(-1)


class Margin(Confidence):
    """CALM's other measure: the best word's probability less the second best's."""

    def score(self, probabilities):
        best, second = probabilities.topk(2).values.unbind(-1)
        return best - second


class Entropy(Confidence):
    """BranchyNet: leave when the entropy is low; as a share of the greatest possible, and turned round, so
    that a higher tau is stricter here too."""

    def score(self, probabilities):
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
        return 1 - entropy / math.log(probabilities.shape[-1])


class Oracle(ExitRule):
    """The earliest depth from which the river gives the backbone's own next token: what no rule can know.

    For analysis, of one sequence, in decoding: it runs the backbone ahead, and the river from every depth. All
    of it writes the slots of this step's position, and the step itself writes them last.
    """

    def begin(self, decoder, h, positions):
        self.decoder, self.positions = decoder, positions
        self.target = self.next_token(h, decoder.model.layers)

    def leaves(self, depth, h_in, h):
        return self.next_token(h[None], self.decoder.river[depth:]) == self.target

    def next_token(self, h, layers):
        for layer in layers:
            h = self.decoder.run(layer, h, self.positions)
        return int(self.decoder.model.logits(h[:, -1:]).argmax())


# Each is made of a tau and the model, a `Llama`.
EXIT_RULES = {
    "similarity": lambda tau, model: Similarity(tau),
    "confidence": lambda tau, model: Confidence(tau, model.logits),
    "margin": lambda tau, model: Margin(tau, model.logits),
    "entropy": lambda tau, model: Entropy(tau, model.logits),
    "never": lambda tau, model: Never(),
    "oracle": lambda tau, model: Oracle(),
}


def make_exit_rule(name, model, tau=0.5, exit_layer=None):
    """The rule of that name, for a `Llama`; `exit_layer`, if given, is a fixed depth whatever the name.

    Raises:
        RiverError: an unknown name, or an exit_layer that is missing or no whole number from 0 to n_layers.
    """
    check_exit_rule(name)
    n_layers = model.config.n_layers
    if exit_layer is None and name == "fixed":
        raise RiverError(f"the exit rule 'fixed' needs an --exit-layer, from 0 to {n_layers}")
    if exit_layer is None:
        return EXIT_RULES[name](tau, model)
    if type(exit_layer) is not int or not 0 <= exit_layer <= n_layers:
        raise RiverError(f"exit layer {exit_layer} is out of range: this model has 0 to {n_layers}")
    return FixedDepth(exit_layer)


def check_exit_rule(name):
    """Raise a RiverError if there is no such rule."""
    if name != "fixed" and name not in EXIT_RULES:
        raise RiverError(f"exit rule {name!r} is not known; known are fixed, {', '.join(EXIT_RULES)}")
