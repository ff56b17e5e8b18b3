"""One decode step, tensor by tensor: what `generate.py --trace` prints, as an aid to reading model.py."""

import dataclasses

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .errors import RiverError
from .linear import Linear, QuantLinear
from .model import RMSNorm


def trace(llm, prompt, settings, write, raw=False, system=None):
    """Run a prompt and then one token, and `write` a line for each tensor of the token's way down.

    Args:
        llm: a `RiverLLM` that is not compiled.
        prompt, raw, system: as for `RiverLLM.generate`.
        settings: the fields of `Settings`, as a dict.
        write: called with each line.

    Raises:
        RiverError: the model is compiled, and its layers show nothing of their insides.
    """
    if not all(dataclasses.is_dataclass(layer) for layer in [*llm.model.layers, *llm.river]):
        raise RiverError("--trace shows layers as they are written: leave out --compile and --offload")
    run = llm.generate(prompt, raw, system, **{**settings, "max_new_tokens": 2})
    token = next(iter(run)).tokens[0]
    decoder = run.decoder
    write(f"prompt: {decoder.length} tokens, {run.prefill_exit_layer} of {llm.config.n_layers} layers on the backbone")
    write(f"cache {_shape(decoder.cache.data)}: layer, K or V, batch, kv head, position, head dim")
    write(f"next token {token} {llm.tokenizer.decode([token])!r} at position {decoder.length}")
    decoder.model = dataclasses.replace(decoder.model, layers=_traced(llm.model.layers, "backbone", write))
    decoder.river = _traced(llm.river, "river", write)
    write(f"{'embed':<42} {_shape(decoder.model.embed(decoder.tokens[:, -1:]))}")
    logits, exit_layer = decoder.decode_one_token(decoder.tokens.new_tensor([token]))
    write(f"{'norm, lm_head':<42} {_shape(logits)} {logits.dtype}")
    write(f"left the backbone after {exit_layer} of {llm.config.n_layers} layers")


KINDS = {RMSNorm: "norm", Linear: "full precision", QuantLinear: "quantised"}


def _traced(layers, place, write):
    return [TracedLayer(layer, place, write) for layer in layers]


class TracedLayer:
    """A `DecoderLayer` that tells of each norm, linear and attention what comes in and out."""

    def __init__(self, layer, place, write):
        self.name, self.write = f"{place} {layer.index + 1}", write
        parts = {name: self._traced_part(name, part) for name, part in layer.parts()}
        self.layer = dataclasses.replace(layer, **parts)

    def _traced_part(self, name, part):
        kind = KINDS.get(type(part), type(part).__name__)

        def call(x):
            y = part(x)
            self.write(f"{self.name + ' ' + name:<42} {_shape(x)} -> {_shape(y)} {y.dtype}, {kind}")
            return y

        return call

    def __call__(self, h, positions, cache):
        with Attention(self.name, self.write):
            h = self.layer(h, positions, cache)
        k, _ = cache.layer(self.layer.index)
        slots = f"{positions.start}..{positions.end - 1}" if positions.end - positions.start > 1 else positions.start
        self.write(f"{self.name + ' K, V written':<42} slot {slots} of {_shape(k)} each")
        return h

    def __getattr__(self, name):
        return getattr(self.layer, name)


class Attention(TorchFunctionMode):
    """Tells, while a layer runs, what its attention sees: K and V of the cache, whoever wrote them."""

    def __init__(self, name, write):
        super().__init__()
        self.name, self.write = name, write

    def __torch_function__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            q, k, _ = args
            self.write(f"{self.name + ' attention':<42} q {_shape(q)}, K and V {_shape(k)} -> {_shape(y)} {y.dtype}")
        return y


def _shape(tensor):
    return "[" + ", ".join(map(str, tensor.shape)) + "]"
