"""Prefill and the decode loop: River-LLM's algorithm, and the only owner of positions.

`Decoder.descend` is the paper. Every step, of one token or of a whole prompt, goes through it:
down the backbone until the exit rule says leave, down the exit river for the rest. Both write the
same cache, so each (layer, position) slot is written once, by one of the two.
"""

from dataclasses import dataclass

import torch

from .cache import KVCache
from .controller import FixedDepth, Never
from .errors import RiverError
from .model import Positions
from .strategies import make_strategy

PREFILL_MODES = ("exit", "backbone", "river")
# The paper's prefill is "exit". On a CPU the int4 kernel is slower than a full-precision product from
# 32 tokens on at the latest, so that leaving early costs time as well as quality there.
DEFAULT_PREFILL = {"cpu": "backbone"}  # by kind of device; "exit" elsewhere
CHUNK = 512  # prompt tokens that a layer takes at a time, which bounds the memory of a long prompt


class Decoder:
    """A backbone, its exit river and one cache, at some position of a batch of sequences.

    Args:
        model: the backbone, a `Llama`.
        river: its exit layers, as `load_river` returns them.
        exit_rule: a rule of controller.py.
        prefill: "exit" (a prompt leaves at one common depth, by the same rule), "backbone" (exact
            K and V for the prompt), "river", or None for the device's default.
        batch: sequences that advance together.
        max_len: positions to make room for.
        kv: what becomes of the layers that a token left out, a name of strategies.py.
    """

    def __init__(self, model, river, exit_rule, prefill=None, batch=1, max_len=512, kv="share"):
        self.model, self.river = model, river
        if kv != "share":
            prefill = "backbone" if prefill is None else prefill
            if prefill == "river":
                raise RiverError(f"--prefill river needs --kv share: {kv!r} has no river")
        self.prefill_mode = DEFAULT_PREFILL.get(model.device.type, "exit") if prefill is None else prefill
        if self.prefill_mode not in PREFILL_MODES:
            raise RiverError(f"prefill {prefill!r} is not known; known are {', '.join(PREFILL_MODES)}")
        self.exit_rule = exit_rule
        self.prefill_rule = {"exit": exit_rule, "backbone": Never(), "river": FixedDepth(0)}[self.prefill_mode]
        self.cache = KVCache(model.config, batch, max_len, model.dtype, model.device)
        self.tokens = torch.empty((batch, 0), dtype=torch.int64, device=model.device)  # that fill the cache's slots
        self.padding = None  # int64 [B]: how many of them are padding, or None
        self.kv_name, self.kv = kv, make_strategy(kv, self)

    @property
    def length(self):
        """Cache slots filled so far. Fewer tokens make it shorter: later slots are written before they are read."""
        return self.tokens.shape[1]

    def descend(self, h, positions, rule, deciding):
        """Take hidden states through all L layers: the paper's algorithm.

        Args:
            h: embedded tokens [B, T, D].
            positions: their `Positions`, in chunks (one for a decode step).
            rule: the exit rule.
            deciding: bool [B, T], the tokens that the rule looks at, or None for all.

        Returns:
            (h, exit_layer): hidden states after layer L, and the backbone layers run, 0 .. L.
        """
        backbone, kv = self.model.layers, self.kv

        def leaves(depth, h_in, h):
            chosen = kv.may_leave(depth) and rule.leaves(depth, _select(h_in, deciding), _select(h, deciding))
            return chosen or kv.must_leave(depth)

        rule.begin(self, h, positions)
        exit_layer, h_in = 0, None
        while exit_layer < len(backbone) and not leaves(exit_layer, h_in, h):
            h_in, h = h, kv.run(backbone[exit_layer], h, positions)  # writes K, V of this layer's slots
            exit_layer += 1
        h = kv.finish(h, exit_layer, positions)  # down the river: writes the slots of the layers left out
        return h, exit_layer

    def run(self, layer, h, positions):
        """One layer over a step: all its chunks, in order, before the next layer begins."""
        if len(positions) == 1:
            return layer(h, positions[0], self.cache)
        chunks = h.split(CHUNK, dim=1)
        return torch.cat([layer(chunk, where, self.cache) for chunk, where in zip(chunks, positions)], dim=1)

    @torch.inference_mode()
    def forward(self, tokens, rule, deciding=None):
        """Append int64 tokens [B, T] to the sequences; returns (h [B, T, D], exit_layer) as `descend` does.

        Raises:
            RiverError: the cache has no room for them; nothing has been computed then.
        """
        end = self.length + tokens.shape[1]
        if end > self.cache.max_len:
            raise RiverError(f"the cache has room for {self.cache.max_len} positions, but {end} are asked for")
        rope = self.model.rope
        if self.length and rope.variant(end) != rope.variant(self.length):
            # The keys in the cache were turned by other frequencies than these tokens will be.
            earlier, self.tokens = self.tokens, self.tokens[:, :0]
            self.kv = make_strategy(self.kv_name, self)
            self._append(earlier, self.prefill_rule, self._not_padding(earlier), end)
        return self._append(tokens, rule, deciding, end)

    def _append(self, tokens, rule, deciding, final_length):
        end = self.length + tokens.shape[1]
        positions = self.positions(self.length, end, final_length)
        h, exit_layer = self.descend(self.model.embed(tokens), positions, rule, deciding)
        self.tokens = torch.cat((self.tokens, tokens), dim=1)
        return h, exit_layer

    def positions(self, start, end, final_length=None):
        """`Positions` of the slots start .. end-1, in chunks, for sequences that will be `final_length` (end) long."""
        model = self.model
        return [
            Positions.at(model.rope, first, min(first + CHUNK, end), final_length or end, model.dtype, self.padding)
            for first in range(start, end, CHUNK)
        ]

    def _not_padding(self, tokens):
        """Which of the first tokens [B, T] of the sequences are real: bool [B, T], or None for all."""
        if self.padding is None:
            return None
        return torch.arange(tokens.shape[1], device=tokens.device) >= self.padding[:, None]

    @torch.inference_mode()
    def prefill(self, prompts):
        """Run the prompts; returns (float32 logits [B, vocab] of the next token, exit_layer).

        Args:
            prompts: a list of B lists of token ids, none empty. Their lengths may differ on an empty
                cache only: shorter ones are padded on the left.
        """
        longest = max(len(prompt) for prompt in prompts)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        tokens = torch.tensor(rows, device=self.model.device)
        if any(len(prompt) < longest for prompt in prompts):
            if self.length:
                raise RiverError("prompts of different lengths can only start a sequence, not continue one")
            self.padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=tokens.device)
        deciding = None if self.length else self._not_padding(tokens)
        h, exit_layer = self.forward(tokens, self.prefill_rule, deciding)
        return self.model.logits(h[:, -1:])[:, 0], exit_layer

    @torch.inference_mode()
    def decode_one_token(self, tokens, running=None):
        """Run one token of each row; returns (logits [B, vocab] of the next, exit_layer).

        Args:
            tokens: int64 [B].
            running: bool [B], the rows whose exit decision still counts, or None for all.
        """
        deciding = None if running is None else running[:, None]
        h, exit_layer = self.forward(tokens[:, None], self.exit_rule, deciding)
        return self.model.logits(h)[:, 0], exit_layer


def _select(h, deciding):
    """The hidden states [N, D] of the tokens that decide together, of h [B, T, D]."""
    if h is None:
        return None
    return h.flatten(0, 1) if deciding is None else h[deciding]


@dataclass
class Step:
    """What one step of generation gave: a token for each row, and the depth at which all left.

    tokens: ids, None for a row that had already stopped. texts: what each row's text grew by, filled in
    by generation.py (the decoder knows no text). exit_layer: backbone layers run for these tokens.
    """

    tokens: list
    exit_layer: int
    texts: list = None


def generate(decoder, prompts, max_new_tokens, stop_ids, sampler):
    """Yield a `Step` for each new token: the first by the prompts' prefill, each other by one decode step.

    A row ends with its first token of `stop_ids` (which is yielded); the loop ends when all rows have,
    or after `max_new_tokens`.
    """
    if max_new_tokens < 1:
        return
    logits, exit_layer = decoder.prefill(prompts)
    running = torch.ones(len(prompts), dtype=torch.bool, device=logits.device)
    for _ in range(max_new_tokens - 1):
        tokens = sampler(logits)
        yield Step(_of_running(tokens, running), exit_layer)
        running &= ~_is_any_of(tokens, stop_ids)
        if not running.any():
            return
        logits, exit_layer = decoder.decode_one_token(tokens, running)
    yield Step(_of_running(sampler(logits), running), exit_layer)


def teacher_force(decoder, prompt, continuation):
    """Yield (logits [vocab] float32, exit_layer) for each token of a continuation that is given, not chosen.

    The first come from the prompt's prefill, each other from one decode step, as in `generate`.
    """
    logits, exit_layer = decoder.prefill([prompt])
    yield logits[0], exit_layer
    for token in continuation[:-1]:
        logits, exit_layer = decoder.decode_one_token(torch.tensor([token], device=logits.device))
        yield logits[0], exit_layer


def _of_running(tokens, running):
    return [token if runs else None for token, runs in zip(tokens.tolist(), running.tolist())]


def _is_any_of(tokens, ids):
    return torch.tensor([token in ids for token in tokens.tolist()], device=tokens.device)
