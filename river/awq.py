"""Activation-aware quantisation: input channels with large activations get finer steps.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (arXiv 2306.00978).
A column of the weight is multiplied by s before it is quantised, and its input by 1 / s. The paper folds 1 / s
into the layer before; here the linear multiplies its own input, since that layer may be one that backbone and river
share: a norm, or the projection that writes V into the one cache. s = mean|x|^alpha, with the alpha of the least
output error on a small text of this project (calibration.txt). The groups are then quantised by `best`.
"""

import dataclasses
from pathlib import Path

import torch

from .cache import KVCache
from .model import Positions
from .quantize import quantize
from .tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("calibration.txt")
ALPHAS = [step / 10 for step in range(11)]
SAMPLED_ROWS = 128  # of a weight, to choose alpha by: all its rows share their input
SAMPLED_TOKENS = 512


def calibration_ids(folder, config):
    """The calibration text as token ids of the checkpoint in `folder`, as many as the model takes at once."""
    ids = load_tokenizer(folder).encode(TEXT.read_text(encoding="utf-8"), bos=True)
    return [i for i in ids if i < config.vocab_size][: config.context]


class Inputs:
    """What the linears of the backbone are given on the calibration text; one layer at a time is kept.

    Args:
        model: a `Llama`.
        ids: the token ids of the text.
    """

    def __init__(self, model, ids):
        self.model, self.next_layer, self.seen = model, 0, {}
        self.h = model.embed(torch.tensor([ids], device=model.device))
        self.positions = Positions.at(model.rope, 0, len(ids), len(ids), model.dtype)
        self.cache = KVCache(model.config, 1, len(ids), model.dtype, model.device)

    def of(self, name):
        """Inputs [tokens, in_features] of the linear of that name ("layers.3.o_proj", "lm_head").

        Layers are to be asked for in their order.
        """
        while name not in self.seen:
            self._advance()
        return self.seen[name]

    def _advance(self):
        """Run the next layer, or the norm before the head after the last, and keep what its linears were given."""
        if self.next_layer == len(self.model.layers):
            self.seen = {"lm_head": self.model.norm(self.h)[0]}
            return
        layer, self.seen = self.model.layers[self.next_layer], {}
        recorders = {
            part_name: _Recorder(part, self.seen, f"layers.{layer.index}.{part_name}")
            for part_name, part in layer.parts()
            if part_name.endswith("_proj")
        }
        self.h = dataclasses.replace(layer, **recorders)(self.h, self.positions, self.cache)
        self.next_layer += 1


class _Recorder:
    """A linear that notes its input [1, tokens, in_features] under its name."""

    def __init__(self, linear, seen, name):
        self.linear, self.seen, self.name = linear, seen, name

    def __call__(self, x):
        self.seen[self.name] = x[0]
        return self.linear(x)


def search_input_scales(weight, x, quantizer, group_size, bits, dtype):
    """What to multiply the inputs of a linear by: 1 / s for the s of the least output error, ones if none is better.

    Args:
        weight: [out_features, in_features].
        x: activations [tokens, in_features].
        quantizer, group_size, bits, dtype: see `quantize`.

    Returns:
        [in_features] in the dtype of `weight`; weight / it is what is to be quantised.

    Raises:
        RiverError: see `quantize`.
    """
    size = x.float().abs().mean(0)
    size = size.clamp(min=1e-4 * size.max()).clamp(min=1e-30)  # a channel that the text leaves at 0 is not free
    rows, x = _about(weight, SAMPLED_ROWS).float(), _about(x, SAMPLED_TOKENS).float()
    best, least = None, float("inf")
    for alpha in ALPHAS:
        s = size**alpha
        inverse = (s.min().sqrt() * s.max().sqrt() / s).to(weight.dtype)
        quantized = quantize(rows / inverse.float(), quantizer, group_size, bits, dtype).dequantize()
        error = (x @ (quantized * inverse.float() - rows).t()).square().sum().item()
        if error < least:
            best, least = inverse, error
    return best


def _about(matrix, count):
    """`count` rows of a matrix or some more, evenly spaced."""
    return matrix[:: max(1, len(matrix) // count)]
