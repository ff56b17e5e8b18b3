"""Relative error of the quantised weights of a model's layers, as stored: `python tests/weight_error.py [FOLDER]`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import river  # noqa: F401  isort: skip  (before torch, for its warning filter)

import torch

from river.checkpoint import load_model
from river.exits import LINEARS
from river.quantize import quantize

KINDS = (("rtn", 4), ("hqq", 4), ("best", 4), ("hqq", 3), ("best", 3), ("hqq", 8))


def relative_errors(weights, group_size=64):
    """|Q - W| / |W| over all of the weights [N, K], one for each of KINDS, with scales and zeros in bfloat16."""
    squares, total = [0.0] * len(KINDS), 0.0
    for weight in weights:
        weight = weight.float()
        total += weight.square().sum().item()
        for i, (quantizer, bits) in enumerate(KINDS):
            quantized = quantize(weight, quantizer, group_size, bits, torch.bfloat16)
            squares[i] += (quantized.dequantize() - weight).square().sum().item()
    return [(square / total) ** 0.5 for square in squares]


if __name__ == "__main__":
    default = ROOT / "weights" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    model = load_model(sys.argv[1] if len(sys.argv) > 1 else default)
    weights = [torch.cat(getattr(layer, name).weights) for layer in model.layers for name in LINEARS]
    for (quantizer, bits), error in zip(KINDS, relative_errors(weights)):
        print(f"{quantizer:5} {bits} bits  {error:.4f}")
