"""The exit controller: does a token leave the backbone here?

A rule is asked before each backbone layer and answers for all the tokens of the step together,
since a batch (and, in prefill, a prompt) leaves at one common depth. To add a rule, write a class
with the method `leaves`.
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


@dataclass
class Similarity:
    """River-LLM's rule: leave when the least similarity among the tokens is above `tau`."""

    tau: float = 0.5

    def leaves(self, depth, h_in, h):
        """Leave after `depth` backbone layers?

        Args:
            depth: backbone layers run so far, 0 .. L-1.
            h_in: hidden states [N, D] before the last of them; None at depth 0.
            h: hidden states [N, D] after it.
        """
        return depth > 0 and self.tau < 1 and all(s > self.tau for s in similarity(h_in, h))


@dataclass
class FixedDepth:
    """Leave after exactly `exit_layer` backbone layers; 0 is the river alone, L the backbone alone."""

    exit_layer: int

    def leaves(self, depth, h_in, h):
        return depth >= self.exit_layer


class Never:
    """Stay on the backbone."""

    def leaves(self, depth, h_in, h):
        return False


def make_exit_rule(n_layers, tau=0.5, exit_layer=None):
    """The rule for the settings of a run: `exit_layer` if given, else similarity with `tau`.

    Raises:
        RiverError: exit_layer is not a whole number from 0 to n_layers.
    """
    if exit_layer is not None:
        if type(exit_layer) is not int or not 0 <= exit_layer <= n_layers:
            raise RiverError(f"exit layer {exit_layer} is out of range: this model has 0 to {n_layers}")
        return FixedDepth(exit_layer)
    return Similarity(tau)
