"""Weight-only quantisation: a float matrix to 4-bit codes with one scale and one zero per group.

A group is `group_size` neighbours along the input dimension, and W ~ (codes - zeros) * scales.
Two quantisers, neither of which needs data: round-to-nearest, and HQQ (Badri and Shaji, "Half-
Quadratic Quantization of Large Machine Learning Models", 2023). They are pure functions of the weight;
how the codes are stored and multiplied is the business of linear.py.
"""

from dataclasses import dataclass

import torch

from .errors import RiverError

LEVELS = 15  # 4 bits: codes 0..15


@dataclass
class Quantized:
    """A quantised weight [N, K] with G = ceil(K / group_size) groups a row; the last may be shorter.

    codes: uint8 [N, K]; scales, zeros: float32 [N, G]. A zero is a float on the scale of the codes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int

    def dequantize(self):
        """The weight that the codes stand for, float32 [N, K]."""
        width = self.codes.shape[1]
        group = torch.arange(width, device=self.codes.device) // min(self.group_size, width)
        return (self.codes - self.zeros.float()[:, group]) * self.scales.float()[:, group]


def quantize(weight, quantizer="hqq", group_size=64):
    """Quantise a weight [N, K] with the quantiser of that name.

    Raises:
        RiverError: an unknown quantiser, a group size below 1, or a weight that is not finite.
    """
    check_settings(quantizer, group_size)
    weight = weight.float()
    if not weight.isfinite().all():
        raise RiverError("the weight holds values that are not finite, which no code can stand for")
    whole = weight.shape[1] // group_size * group_size
    # A last group that is shorter is quantised on its own, so that padding cannot widen its range.
    parts = [
        QUANTIZERS[quantizer](part.reshape(len(part), -1, size))
        for part, size in ((weight[:, :whole], group_size), (weight[:, whole:], weight.shape[1] - whole))
        if part.shape[1]
    ]
    codes, scales, zeros = (torch.cat([p.flatten(1) for p in column], dim=1) for column in zip(*parts))
    return Quantized(codes.to(torch.uint8), scales, zeros, group_size)


def check_settings(quantizer, group_size):
    """Raise a RiverError if there is no such quantiser or group size."""
    if quantizer not in QUANTIZERS:
        raise RiverError(f"quantizer {quantizer!r} is not known; known are {', '.join(QUANTIZERS)}")
    if group_size < 1:
        raise RiverError(f"group size {group_size} should be at least 1")


def _affine(groups):
    """Scale (codes per unit of weight) and zero that map each group's range onto the codes 0..15."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    spread = high - low
    inverse_scale = torch.where(spread > 1e-4, LEVELS / spread, 1.0).clamp(max=2e4)
    return inverse_scale, -low * inverse_scale


def round_to_nearest(groups):
    """Quantise groups [N, G, S] over their full range; returns codes, scales, zeros (last two [N, G, 1])."""
    inverse_scale, zero = _affine(groups)
    return _round(groups, inverse_scale, zero), 1 / inverse_scale, zero


def hqq(groups, p=0.7, beta=10.0, max_steps=20):
    """Half-quadratic quantisation of groups [N, G, S]; returns codes, scales, zeros (last two [N, G, 1]).

    Minimises sum |W - (codes - z) / s|^p over the zero z, with an auxiliary error term that a
    generalised soft threshold shrinks; both half steps have closed forms. The scale stays that of
    round-to-nearest. Stops as soon as the mean absolute error no longer falls.
    """
    inverse_scale, zero = _affine(groups)
    scaled = groups * inverse_scale  # all in units of codes from here: the loop is memory-bound
    shrinks_from = beta ** (-1 / (2 - p))  # |e| at which relu(|e| - |e|^(p-1) / beta) leaves 0
    best_zero, best_error = zero, float("inf")
    for _ in range(max_steps):
        shifted = scaled + zero
        error = shifted.sub_(shifted.round().clamp_(0, LEVELS))  # W - (codes - z) / s, times s
        mean_error = float((error.abs().sum(-1, keepdim=True) / inverse_scale).sum() / error.numel())
        if mean_error >= best_error:
            break
        best_zero, best_error = zero, mean_error
        # z := mean(codes - (W - We) s) = z - mean(error - We s), where We is the shrunk error.
        correction = error.mean(-1, keepdim=True)
        if float((error.abs().amax(-1, keepdim=True) / inverse_scale).amax()) > shrinks_from:
            magnitude = error.abs() / inverse_scale
            shrunk = error.sign() * (magnitude - magnitude.pow(p - 1) / beta).relu() * inverse_scale
            correction -= shrunk.mean(-1, keepdim=True)
        zero = zero - correction
    return _round(groups, inverse_scale, best_zero), 1 / inverse_scale, best_zero


def _round(groups, inverse_scale, zero):
    return (groups * inverse_scale + zero).round().clamp(0, LEVELS)


QUANTIZERS = {"hqq": hqq, "rtn": round_to_nearest}
