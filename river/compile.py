"""Faster layers for decoding: the same decoder layer, compiled; switched on here and nowhere else.

One program serves all backbone layers, another all exit layers: weights and cache views are inputs, so
that nothing is compiled twice. A program runs the case that decides the speed, one token of one
sequence, or the few that a lossless step verifies; everything else (prompts, batches) goes to the layer as it is
written.

How a program is built and where it is kept is programs.py.
"""

import dataclasses

import torch

from .cache import KVCache
from .errors import RiverError
from .linear import Linear
from .model import Positions
from .programs import compile_module


def compile_model(model, river, log=lambda line, done: None):
    """Return (model, river) with the decode step of all layers and of the head compiled.

    Where that cannot be, both are returned as they are, after a word to `log`.

    Args:
        model: a `Llama`.
        river: its exit layers.
        log: called with (line, done).
    """
    try:
        head = compile_head(model, log) if isinstance(model.lm_head, Linear) else model.lm_head
        layers, river_layers = (compile_layers(model, layers, log) for layers in (model.layers, river))
    except RiverError as error:
        log(f"running without --compile: {error}", True)
        return model, river
    return dataclasses.replace(model, layers=layers, lm_head=head), river_layers


def compile_layers(model, layers, log=lambda line, done: None):
    """Return `layers`, of the backbone or of the river, compiled; a RiverError if PyTorch cannot here."""
    compiled = [CompiledLayer(layer) for layer in layers]
    _add_programs(model, compiled, 1, log)
    return compiled


def compile_head(model, log=lambda line, done: None):
    """Return the full-precision LM head of `model`, compiled; a RiverError if PyTorch cannot here."""
    head = CompiledHead(model.lm_head)
    head.programs[1] = _head_program(model, 1, log)
    return head


def compile_blocks(model, tokens, log=lambda line, done: None):
    """Give the compiled layers and head of `model` a program for blocks of so many tokens of one sequence too.

    Returns:
        Whether blocks run compiled now; they do not if the model does not, or PyTorch cannot here.
    """
    if not all(hasattr(layer, "programs") for layer in model.layers):
        return False
    try:
        _add_programs(model, model.layers, tokens, log)
        if hasattr(model.lm_head, "programs"):  # a quantised head runs in its kernel
            model.lm_head.programs[tokens] = _head_program(model, tokens, log)
    except RiverError as error:
        log(f"running blocks without --compile: {error}", True)
        return False
    return True


def _add_programs(model, layers, tokens, log):
    """Give compiled layers the program for steps of so many tokens."""
    programs = {}  # layers whose tensors have the same shapes share a program: as a rule there is one
    for layer in layers:
        signature = _signature(layer)
        if signature not in programs:
            programs[signature] = _program(model, layer.plain, tokens, f"{signature} x{tokens}", log)
        layer.programs[tokens] = programs[signature]


def _head_program(model, tokens, log):
    """Compile the LM head for so many tokens: a function of (hidden states, tensors)."""
    hidden = torch.zeros(1, tokens, model.config.hidden_size, dtype=model.dtype, device=model.device)
    tensors = model.lm_head.tensor_list()
    sizes = (None, [None] * len(tensors))
    return compile_module(_Head(model.lm_head), (hidden, tensors), sizes, f"{_facts(model.lm_head)} x{tokens}", log)


class _Head(torch.nn.Module):
    """What is compiled of a head: its product with a few tokens, as a function of its tensors."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x, tensors):
        return _FewVectors(self.linear.with_tensors(tensors))(x)


class CompiledHead:
    """A `Linear` that goes through a compiled program where there is one: `programs` is by number of tokens."""

    def __init__(self, linear):
        self.linear, self.programs = linear, {}
        self.tensors = linear.tensor_list()

    def __call__(self, x):
        program = self.programs.get(x.shape[1]) if len(x) == 1 else None
        return program(x, self.tensors) if program else self.linear(x)

    def __getattr__(self, name):
        return getattr(self.linear, name)


class CompiledLayer:
    """A `DecoderLayer` that goes through a compiled program where there is one: `programs` is by number of tokens."""

    def __init__(self, layer):
        self.plain, self.programs = layer, {}
        self.tensors = layer.tensor_list()

    def __call__(self, h, positions, cache):
        program = self._program_for(h.shape[1], positions, cache) if len(h) == 1 else None
        if program:
            return program(h, positions, *cache.layer(self.index), self.tensors)
        return self.plain(h, positions, cache)

    def _program_for(self, tokens, positions, cache):
        # A program knows no window that has begun to slide, and was traced with a slot to spare.
        fits = tokens < positions.end < cache.max_len and (self.window is None or positions.end <= self.window)
        return self.programs.get(tokens) if fits and positions.padding is None and positions.missing is None else None

    def with_tensors(self, tensors):
        """The same layer over other tensors, through the same programs."""
        twin = CompiledLayer(self.plain.with_tensors(tensors))
        twin.programs = self.programs
        return twin

    def __getattr__(self, name):
        return getattr(self.plain, name)


class _DecodeStep(torch.nn.Module):
    """What is compiled: a layer at the last slots of a sequence, as a function of all the tensors it uses.

    `slots` is any tensor as long as the sequence: its length, and not its values, is the position, so that
    one program serves every position.
    """

    def __init__(self, layer, tokens):
        super().__init__()
        self.layer, self.tokens = dataclasses.replace(layer, window=None), tokens

    def forward(self, h, slots, cos, sin, query_scale, k, v, tensors):
        end = slots.shape[0]
        torch._check(end > self.tokens)
        torch._check(end < k.shape[2])
        layer = self.layer.with_tensors(tensors)
        linears = {name: _FewVectors(part) for name, part in layer.parts() if isinstance(part, Linear)}
        layer = dataclasses.replace(layer, **linears)
        return layer(h, Positions(end - self.tokens, end, cos, sin, query_scale, None), _OneLayer(k, v))


class _OneLayer:
    """A cache of which one layer is there."""

    def __init__(self, k, v):
        self.views = k, v

    def layer(self, l):
        return self.views


class _FewVectors:
    """A `Linear` of a few tokens, spelled as multiplications and sums, for the compiler to make one loop of.

    Inductor's loop streams the matrix once for all tokens: for one at the speed of the memory (35 GB/s where F.linear
    has 25: two cores of an AMD EPYC), for four bound by arithmetic, at half again the time. Uncompiled it would be
    slow: it would write the products down.
    """

    def __init__(self, linear):
        self.linear = linear

    def __call__(self, x):
        vectors = x[0].float()
        if len(vectors) > 1:
            # A product that the compiler cannot see through: without it, each row of the matrix would compute x (a
            # norm, a SiLU) anew for every token.
            vectors = torch.eye(len(vectors), device=x.device) @ vectors
        rows = [torch.cat([(w.float() * vector).sum(-1) for w in self.linear.weights]) for vector in vectors.unbind()]
        y = torch.stack(rows)
        if self.linear.bias is not None:
            y = y + self.linear.bias.float()
        return y.to(x.dtype)[None]


def _signature(layer):
    """All of a layer that goes into its program, as text: everything but its index, window and values.

    It takes in every field there is, so that one of a new family cannot be left out and meet another's program.
    """
    facts = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    facts |= {name: _facts(part) for name, part in layer.parts()}
    return " ".join(f"{name}={fact}" for name, fact in facts.items() if name not in ("index", "window"))


def _facts(part):
    """All of a norm or linear that goes into a program, as text."""
    return " ".join([part.signature(), *(f"{tuple(t.shape)}{t.dtype}" for t in part.tensor_list())])


def _program(model, layer, tokens, signature, log):
    """Compile a layer for steps of so many tokens: a function of (h, positions, K view, V view, tensors)."""
    hidden = torch.zeros(1, tokens, model.config.hidden_size, dtype=model.dtype, device=model.device)
    cache = KVCache(model.config, 1, 128, model.dtype, model.device)
    positions = Positions.at(model.rope, 100 - tokens, 100, 100, model.dtype)
    slots = torch.empty(positions.end, device=model.device)
    place = (slots, positions.cos, positions.sin, positions.query_scale)
    arguments = (hidden, *place, *cache.layer(0), layer.tensor_list())
    varies = torch.export.Dim.DYNAMIC
    sizes = (None, {0: varies}, None, None, None, {2: varies}, {2: varies}, [None] * len(arguments[-1]))
    run = compile_module(_DecodeStep(layer, tokens), arguments, sizes, signature, log)

    def program(h, positions, k, v, tensors):
        nonlocal slots
        if positions.end > len(slots):
            slots = torch.empty(2 * positions.end, device=h.device)
        return run(h, slots[: positions.end], positions.cos, positions.sin, positions.query_scale, k, v, tensors)

    return program
