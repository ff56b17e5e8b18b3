"""Linear layers: full precision for the backbone, quantised for the river, called alike.

A linear maps x [..., in_features] to [..., out_features]. `Linear` holds the checkpoint's own
tensors; where several projections share an input (q, k, v) it holds them all, so that they stay
memory-mapped and need no fused copy. `QuantLinear` holds codes in the layout of a PyTorch int4 or int8
kernel where one takes the shape, and in a plain layout with a reference implementation where not.
"""

import copy

import torch
import torch.nn.functional as F

from .errors import RiverError
from .quantize import Quantized

KERNEL_GROUP_SIZES = (32, 64, 128, 256)


class Linear:
    """y = x W^T + b, with the rows of W (and of b) in one tensor or in several.

    Args:
        weights: list of [out_i, in_features] tensors; the output has sum(out_i) features.
        bias: [out_features] or None.
    """

    def __init__(self, weights, bias=None):
        self.weights = join_neighbours(weights)
        self.bias = bias
        self.shape = sum(len(weight) for weight in weights), weights[0].shape[1]

    def __call__(self, x):
        biases = [None] * len(self.weights) if self.bias is None else self.bias.split([len(w) for w in self.weights])
        outputs = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, biases)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @property
    def nbytes(self):
        """Bytes that one token reads."""
        return sum(tensor.nbytes for tensor in self.tensor_list())

    def rows_from(self, first):
        """The linear of the outputs from `first` on, over the same memory."""
        weights, skip = [], first
        for weight in self.weights:
            if skip < len(weight):
                weights.append(weight[skip:])
            skip = max(0, skip - len(weight))
        return Linear(weights, None if self.bias is None else self.bias[first:])

    def tensor_list(self):
        """All its tensors; `with_tensors` takes as many."""
        return [*self.weights, *([] if self.bias is None else [self.bias])]

    def with_tensors(self, tensors):
        """The same linear over other tensors."""
        twin = copy.copy(self)
        twin.weights = tensors[: len(self.weights)]
        twin.bias = None if self.bias is None else tensors[-1]
        return twin

    def signature(self):
        """What distinguishes its computation besides the shapes of its tensors."""
        return f"linear {len(self.weights)}"


def join_neighbours(weights):
    """Matrices that lie one behind the other in the same storage, as one; nothing is copied.

    Checkpoints hold their tensors in the order of their names, in which gate_proj is followed by up_proj:
    one product instead of two.
    """
    joined = [weights[0]]
    for weight in weights[1:]:
        last = joined[-1]
        same_storage = last.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        if same_storage and last.storage_offset() + last.numel() == weight.storage_offset():
            joined[-1] = last.as_strided((len(last) + len(weight), last.shape[1]), (last.shape[1], 1))
        else:
            joined.append(weight)
    return joined


class QuantLinear:
    """y = (x * input_scales) W^T + b with W ~ (codes - zeros) * scales, in the layout that `layout_for` names.

    Args:
        tensors: dict with the tensors of the layout, as `pack` returns and a river file stores them, and
            perhaps "input_scales" [in_features] in the dtype of x (see awq.py).
        layout: a name of MATMULS.
        shape: (out_features, in_features).
        group_size: input features that share a scale and a zero.
        bias: [out_features] or None.
    """

    def __init__(self, tensors, layout, shape, group_size, bias=None):
        self.tensors, self.layout = tensors, layout
        self.shape, self.group_size, self.bias = shape, group_size, bias
        self.matmul = MATMULS[layout]

    def __call__(self, x):
        if "input_scales" in self.tensors:
            x = x * self.tensors["input_scales"]
        y = self.matmul(x.reshape(-1, self.shape[1]), self.tensors, self.group_size)
        y = y.view(*x.shape[:-1], self.shape[0])
        return y if self.bias is None else y + self.bias

    @property
    def nbytes(self):
        """Bytes that one token reads."""
        return sum(tensor.nbytes for tensor in self.tensor_list())

    def tensor_list(self):
        """All its tensors; `with_tensors` takes as many."""
        return [*self.tensors.values(), *([] if self.bias is None else [self.bias])]

    def with_tensors(self, tensors):
        """The same linear over other tensors."""
        twin = copy.copy(self)
        twin.tensors = dict(zip(self.tensors, tensors))
        twin.bias = None if self.bias is None else tensors[-1]
        return twin

    def signature(self):
        """What distinguishes its computation besides the shapes of its tensors."""
        return f"{self.layout} {self.group_size} {' '.join(self.tensors)}"


def layout_for(shape, group_size, dtype, device, bits=4):
    """Name the layout for a weight [out_features, in_features] that meets activations of `dtype` on `device`.

    3-bit codes are stored as 4-bit ones. The int4 kernels take bfloat16 only (the CPU one takes float32 too, 20 to
    40 times slower). The int8 kernel reads 16 input features at once, and beyond the end of a row where they do not
    divide it.
    """
    out_features, in_features = shape
    device = torch.device(device).type
    if bits == 8:
        fits = dtype is torch.bfloat16 and device in ("cpu", "cuda") and in_features % 16 == 0
        return "int8pack" if fits else "plain_int8"
    fits = dtype is torch.bfloat16 and group_size in KERNEL_GROUP_SIZES and in_features % group_size == 0
    if fits and device == "cpu" and out_features % 16 == 0:
        return "int4pack_cpu"
    if fits and device == "cuda" and out_features % 8 == 0 and in_features % (16 * INNER_K_TILES) == 0:
        return "int4pack_cuda"
    return "plain"


def scale_dtype(layout):
    """What a layout stores scales and zeros in."""
    return torch.float32 if layout.startswith("plain") else torch.bfloat16


def pack(quantized, layout, device):
    """Return the tensors of `layout` for a `Quantized` weight, on `device`."""
    codes, scales, zeros = (t.to(device) for t in (quantized.codes, quantized.scales, quantized.zeros))
    if layout in ("plain_int8", "int8pack"):  # the zeros are all 128
        signed = (codes.short() - 128).to(torch.int8)
        return {"packed": signed, "scales": scales.flatten().to(scale_dtype(layout))}
    if layout == "plain":
        return {"packed": pack_nibbles(codes), "scales": scales, "zeros": zeros}
    # Both kernels compute (codes - 8) * scale + zero, with [groups, out_features, 2] for the pair.
    pairs = torch.stack((scales.t(), ((8 - zeros) * scales).t()), dim=-1).contiguous().to(scale_dtype(layout))
    if layout == "int4pack_cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)  # the 1 is ignored
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack(pack_nibbles(codes, high_first=True), INNER_K_TILES)
    return {"packed": packed, "scales_and_zeros": pairs}


INNER_K_TILES = 8  # of the CUDA kernel's layout: 16 * 8 input features are stored together


def pack_nibbles(codes, high_first=False):
    """Store uint8 codes 0..15 [N, K] two to a byte, uint8 [N, ceil(K / 2)]; an odd K is padded with 0."""
    if codes.numel() and int(codes.max()) > 15:
        raise RiverError(f"4-bit codes go from 0 to 15, not to {int(codes.max())}")
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    even, odd = codes[:, 0::2], codes[:, 1::2]
    return even << 4 | odd if high_first else odd << 4 | even


def unpack_nibbles(packed, in_features):
    """Undo `pack_nibbles(codes)`: uint8 [N, ceil(K / 2)] to uint8 codes [N, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :in_features]


def _matmul_plain(x, tensors, group_size):
    """The reference: expand the weight, then a full-precision product; any shape, dtype and device."""
    codes = unpack_nibbles(tensors["packed"], x.shape[1])
    weight = Quantized(codes, tensors["scales"], tensors["zeros"], group_size).dequantize()
    return F.linear(x, weight.to(x.dtype))


def _matmul_cpu(x, tensors, group_size):
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, tensors["packed"], group_size, tensors["scales_and_zeros"])


def _matmul_cuda(x, tensors, group_size):
    return torch.ops.aten._weight_int4pack_mm(x, tensors["packed"], group_size, tensors["scales_and_zeros"])


def _matmul_plain_int8(x, tensors, group_size):
    weight = tensors["packed"].float() * tensors["scales"][:, None]
    return F.linear(x, weight.to(x.dtype))


def _matmul_int8(x, tensors, group_size):
    return torch.ops.aten._weight_int8pack_mm(x.contiguous(), tensors["packed"], tensors["scales"])


MATMULS = {
    "plain": _matmul_plain,
    "plain_int8": _matmul_plain_int8,
    "int4pack_cpu": _matmul_cpu,
    "int4pack_cuda": _matmul_cuda,
    "int8pack": _matmul_int8,
}
