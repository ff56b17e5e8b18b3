"""What becomes of a token's K and V in the layers that it left out: River-LLM's answer and four others.

`share` is River-LLM: the exit river computes them. The others are what it is compared with. Each is given
every backbone layer that a step runs (`run`), and the step's end (`finish`), where it returns the hidden
states that the head reads. To add one, write a class and name it in STRATEGIES.
"""

import dataclasses

import torch
import torch.nn.functional as F

from .errors import RiverError


class Share:
    """River-LLM: the exit layers finish the token, and write the slots of the layers that were left out."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.n_layers = decoder.model.config.n_layers

    def may_leave(self, depth):
        """Whether the exit rule is asked after `depth` layers; if not, the step goes on."""
        return True

    def must_leave(self, depth):
        """Whether a step leaves after `depth` layers, whatever the exit rule says."""
        return False

    def run(self, layer, h, positions):
        """Run one backbone layer over a step's hidden states [B, T, D]."""
        return self.decoder.run(layer, h, positions)

    def finish(self, h, exit_layer, positions):
        """Hidden states [B, T, D] for the head, of a step that left after `exit_layer` layers."""
        for layer in self.decoder.river[exit_layer:]:
            h = self.decoder.run(layer, h, positions)
        return h

    def nbytes(self, exit_layer):
        """Bytes of weights that `finish` reads for one token."""
        return sum(layer.nbytes for layer in self.decoder.river[exit_layer:])


class _WithoutRiver(Share):
    """The others: the head reads the state at which the token left."""

    def finish(self, h, exit_layer, positions):
        return h

    def nbytes(self, exit_layer):
        return 0


class Propagate(_WithoutRiver):
    """CALM, Depth-Adaptive Transformer: the exit state is taken for the input of every layer left out, and
    only their K and V projections run."""

    def finish(self, h, exit_layer, positions):
        for layer in self.decoder.model.layers[exit_layer:]:
            self.decoder.run(layer.write_keys_values, h, positions)
        return h

    def nbytes(self, exit_layer):
        return sum(layer.kv_proj.nbytes for layer in self.decoder.model.layers[exit_layer:])


class Mask(_WithoutRiver):
    """D-LLM: nothing is computed, and no later token ever attends to the missing slots."""

    def __init__(self, decoder):
        super().__init__(decoder)
        self.missing = torch.zeros(self.n_layers, 0, dtype=torch.bool, device=decoder.model.device)

    def run(self, layer, h, positions):
        missing = self.missing[layer.index]
        if missing.any():
            # The step's own slots are there.
            positions = [
                dataclasses.replace(where, missing=F.pad(missing, (0, where.end - len(missing)))) for where in positions
            ]
        return self.decoder.run(layer, h, positions)

    def finish(self, h, exit_layer, positions):
        new = torch.zeros(self.n_layers, positions[-1].end - self.missing.shape[1], dtype=torch.bool, device=h.device)
        new[exit_layer:] = True
        self.missing = torch.cat((self.missing, new), dim=1)
        # A weight of zero times whatever lies in unwritten memory need not be zero.
        self.decoder.cache.data[exit_layer:, ..., positions[0].start : positions[-1].end, :] = 0
        return h


class Recompute(_WithoutRiver):
    """EE-LLM: a token that left is kept pending, and when a later one goes deeper, it takes the pending ones
    along, in one batch, through the layers that they lack.

    So no token is ever further than an earlier one, and those that stand before a layer are neighbours.
    """

    MOST_PENDING = 16  # tokens, from which on a step goes all the way, so that the batch stays small

    def __init__(self, decoder):
        super().__init__(decoder)
        self.pending = []  # of (first slot, depth, hidden states [B, T, D]), oldest first
        self.block = None  # this step's batch: (first slot, hidden states, positions)
        self.too_many = False  # pending tokens, so that this step goes all the way and takes them along

    def may_leave(self, depth):
        return not self.too_many

    def run(self, layer, h, positions):
        start, end = positions[0].start, positions[-1].end
        if self.block is None:
            self.block = start, h, positions
        first, block, positions = self.block
        joined = first
        while self.pending and self.pending[-1][1] == layer.index:
            first, _, states = self.pending.pop()
            block = torch.cat((states, block), dim=1)
        if first < joined:
            positions = self.decoder.positions(first, end)
        block = self.decoder.run(layer, block, positions)
        self.block = first, block, positions
        return block[:, start - first :]

    def finish(self, h, exit_layer, positions):
        first, block, _ = self.block or (positions[0].start, h, positions)
        if exit_layer < self.n_layers:
            self.pending.append((first, exit_layer, block))
        self.block = None
        self.too_many = sum(states.shape[1] for _, _, states in self.pending) >= self.MOST_PENDING
        return h


class Monotonic(_WithoutRiver):
    """SkipDecode: no token goes deeper than the one before it, so a missing slot is never asked for."""

    def __init__(self, decoder):
        super().__init__(decoder)
        self.ceiling = self.n_layers

    def must_leave(self, depth):
        return depth >= self.ceiling

    def finish(self, h, exit_layer, positions):
        self.ceiling = exit_layer
        return h


STRATEGIES = {
    "share": Share,
    "recompute": Recompute,
    "propagate": Propagate,
    "mask": Mask,
    "monotonic": Monotonic,
}


def make_strategy(name, decoder):
    """The strategy of that name for one `Decoder`; a RiverError if there is none."""
    check_strategy(name)
    return STRATEGIES[name](decoder)


def check_strategy(name):
    """Raise a RiverError if there is no such strategy."""
    if name not in STRATEGIES:
        raise RiverError(f"kv {name!r} is not known; known are {', '.join(STRATEGIES)}")
