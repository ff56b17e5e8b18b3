"""Weight-only quantisation: a float matrix to 3-, 4- or 8-bit codes with a scale and a zero per group.

A group is `group_size` neighbours along the input dimension, and W ~ (codes - zeros) * scales.
Three quantisers, none of which needs data: round-to-nearest, HQQ (Badri and Shaji, "Half-Quadratic
Quantization of Large Machine Learning Models", 2023), and `best`, which searches each group for its least
squared error. They are pure functions of the weight, which choose scales and zeros; a code is then the
nearest one. How the codes are stored and multiplied is the business of linear.py.

To add one, write a function of groups [N, G, S] and a `Grid` that returns float32 scales (above 0, also of a
group of equal values) and zeros, each [N, G, 1], and name it in QUANTIZERS.
"""

from dataclasses import dataclass

import torch

from .errors import RiverError

BITS = (3, 4, 8)


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


@dataclass(frozen=True)
class Grid:
    """What a quantiser chooses from: codes 0..levels, and scales and zeros as they can be stored.

    bits: of a code. dtype: float32, or bfloat16 for the int4 kernels, which store `scale` and `(8 - zero) * scale`.
    """

    bits: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def levels(self):
        """The highest code."""
        return 2**self.bits - 1

    def stored(self, scales, zeros):
        """What is left of float32 scales and zeros once they have been stored, as float32."""
        if self.dtype is torch.float32:
            return scales, zeros
        scales = scales.to(self.dtype).float()
        return scales, 8 - ((8 - zeros) * scales).to(self.dtype).float() / scales

    def codes(self, groups, scales, zeros):
        """The nearest code of each weight of groups [N, G, S], as float32; scales and zeros are [N, G, 1]."""
        return (groups / scales).add_(zeros).round_().clamp_(0, self.levels)


def quantize(weight, quantizer="hqq", group_size=64, bits=4, dtype=torch.float32):
    """Quantise a weight [N, K] with the quantiser of that name.

    At 8 bits a row is one group and its codes are symmetric about 128, whatever the quantiser and the group size:
    that is what PyTorch's int8 kernel multiplies.

    Args:
        weight: [N, K], of any float dtype.
        quantizer: a name of QUANTIZERS.
        group_size: neighbours along K that share a scale and a zero.
        bits: of a code, one of BITS.
        dtype: that scales and zeros will be stored in, see `Grid`; the codes are the nearest after that rounding.

    Raises:
        RiverError: an unknown quantiser, a group size below 1, other bits, or a weight that is not finite.
    """
    check_settings(quantizer, group_size, bits)
    weight, grid = weight.float(), Grid(bits, dtype)
    if not weight.isfinite().all():
        raise RiverError("the weight holds values that are not finite, which no code can stand for")
    if bits == 8:
        return _symmetric_rows(weight, dtype)
    whole = weight.shape[1] // group_size * group_size
    # A last group that is shorter is quantised on its own, so that padding cannot widen its range.
    parts = [
        _quantize_groups(part.reshape(len(part), -1, size), quantizer, grid)
        for part, size in ((weight[:, :whole], group_size), (weight[:, whole:], weight.shape[1] - whole))
        if part.shape[1]
    ]
    codes, scales, zeros = (torch.cat([p.flatten(1) for p in column], dim=1) for column in zip(*parts))
    return Quantized(codes, scales, zeros, group_size)


def check_settings(quantizer, group_size, bits=4):
    """Raise a RiverError if there is no such quantiser, group size or number of bits."""
    if quantizer not in QUANTIZERS:
        raise RiverError(f"quantizer {quantizer!r} is not known; known are {', '.join(QUANTIZERS)}")
    if group_size < 1:
        raise RiverError(f"group size {group_size} should be at least 1")
    if bits not in BITS:
        raise RiverError(f"{bits} bits are not known; known are {', '.join(map(str, BITS))}")


def _quantize_groups(groups, quantizer, grid):
    """Codes uint8 [N, G, S], scales and zeros [N, G, 1] of groups [N, G, S]."""
    scales, zeros = grid.stored(*QUANTIZERS[quantizer](groups, grid))
    if not (scales > 0).all() or not scales.isfinite().all() or not zeros.isfinite().all():
        raise RiverError(f"the quantizer {quantizer!r} gave a scale that is not above 0, or one that is not finite")
    return grid.codes(groups, scales, zeros).to(torch.uint8), scales, zeros


def _symmetric_rows(weight, dtype):
    """8 bits: one scale for each row, and the codes 1..255 for -127..127 times it."""
    highest = weight.abs().amax(1, keepdim=True)
    scales = torch.where(highest > 0, highest / 127, 1.0).to(dtype).float()
    codes = (weight / scales).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Quantized(codes, scales, torch.full_like(scales, 128), weight.shape[1])


def _affine(groups, grid):
    """Scale (codes per unit of weight) and zero that map each group's range onto the codes 0..levels."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    spread = high - low
    inverse_scale = torch.where(spread > 1e-4, grid.levels / spread, 1.0).clamp(max=2e4)
    return inverse_scale, -low * inverse_scale


def round_to_nearest(groups, grid):
    """Scales and zeros [N, G, 1] that spread the codes over the full range of each of the groups [N, G, S]."""
    inverse_scale, zero = _affine(groups, grid)
    return 1 / inverse_scale, zero


def hqq(groups, grid, p=0.7, beta=10.0, max_steps=20):
    """Half-quadratic quantisation of groups [N, G, S]; returns scales and zeros [N, G, 1].

    Minimises sum |W - (codes - z) / s|^p over the zero z, with an auxiliary error term that a
    generalised soft threshold shrinks; both half steps have closed forms. The scale stays that of
    round-to-nearest. Stops as soon as the mean absolute error no longer falls.
    """
    inverse_scale, zero = _affine(groups, grid)
    scaled = groups * inverse_scale  # all in units of codes from here: the loop is memory-bound
    shrinks_from = beta ** (-1 / (2 - p))  # |e| at which relu(|e| - |e|^(p-1) / beta) leaves 0
    best_zero, best_error = zero, float("inf")
    for _ in range(max_steps):
        shifted = scaled + zero
        error = shifted.sub_(shifted.round().clamp_(0, grid.levels))  # W - (codes - z) / s, times s
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
    return 1 / inverse_scale, best_zero


def best(groups, grid):
    """Scales and zeros [N, G, 1] of the least squared error that a search finds for each of the groups [N, G, S].

    Ranges from the full one down to half of it are starting points. From each, least squares and rounding take
    turns: given the codes, scale and zero have a closed form, and given these, a code is the nearest. What that
    leads to, round-to-nearest and HQQ are compared group by group, as they will be stored; so no group has a
    larger squared error than with one of these two.
    """
    known = [quantizer(groups, grid) for quantizer in (round_to_nearest, hqq)]
    scales, zeros = (torch.empty_like(part) for part in known[0])
    rows = max(1, 2**18 // groups[0].numel())  # as much as a core's own cache holds
    for first in range(0, len(groups), rows):
        here = slice(first, first + rows)
        part, least = groups[here], None
        for scale, zero in (*((s[here], z[here]) for s, z in known), _search(part, grid)):
            kept_scale, kept_zero = grid.stored(scale, zero)
            error = grid.codes(part, kept_scale, kept_zero).sub_(kept_zero).mul_(kept_scale).sub_(part).square_()
            least = _lesser(least, (error.sum(-1, keepdim=True), scale, zero))
        _, scales[here], zeros[here] = least
    return scales, zeros


def _search(groups, grid, starts=10, narrowest=0.55):
    """Scales and zeros [N, G, 1] of groups [N, G, S]: two rounds from every start, four more from the best."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    full = torch.where(high > low, (high - low) / grid.levels, high.abs()).clamp(min=1e-30)
    mean = groups.mean(-1, keepdim=True)
    least = None
    for share in torch.linspace(1, narrowest, starts).tolist():
        scale = full * share
        zero = grid.levels / 2 - (low + high) / 2 / scale
        for _ in range(2):
            gain, scale, zero = _fit(groups, mean, grid, scale, zero)
        least = _lesser(least, (-gain, scale, zero))
    _, scale, zero = least
    for _ in range(4):
        _, scale, zero = _fit(groups, mean, grid, scale, zero)
    return scale, zero


def _fit(groups, mean, grid, scale, zero):
    """Round to codes, then the scale and zero of least squares for them, behind what they explain of the variance."""
    codes = grid.codes(groups, scale, zero)
    mean_code = codes.mean(-1, keepdim=True)
    codes -= mean_code
    variance = codes.square().sum(-1, keepdim=True)
    covariance = (codes * groups).sum(-1, keepdim=True)
    scale = torch.where((variance > 0) & (covariance > 0), covariance / variance, scale)
    return covariance * scale, scale, mean_code - mean / scale


def _lesser(a, b):
    """Of two tuples (error, scale, zero), group by group the one of lesser error; the first may be None."""
    return b if a is None else tuple(torch.where(b[0] < a[0], y, x) for x, y in zip(a, b))


# awq.py scales the columns of a weight by what their inputs are; the groups are then quantised by `best`.
QUANTIZERS = {"hqq": hqq, "rtn": round_to_nearest, "best": best, "awq": best}
