"""Quantisers against the published formulas in float64, and the int4 kernel against the reference."""

import pytest
import torch

from river.errors import RiverError
from river.linear import Linear, QuantLinear, join_neighbours, layout_for, pack, pack_nibbles, unpack_nibbles
from river.quantize import QUANTIZERS, quantize

QUANTIZER_NAMES = sorted(QUANTIZERS)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def heavy_tailed(*shape, seed=0):
    torch.manual_seed(seed)
    return torch.distributions.StudentT(3.0).sample(shape) * 0.3


def hqq_in_float64(weight, group_size, p=0.7, beta=10.0):
    """HQQ from its formulas, group by group as written; returns (scale, zero) for W ~ (q - zero) * scale."""
    groups = weight.double().view(len(weight), -1, group_size)
    high, low = groups.max(-1, keepdim=True).values, groups.min(-1, keepdim=True).values
    s = (15 / (high - low)).clamp(max=2e4)
    s[high - low <= 1e-4] = 1.0
    z = -low * s
    best, best_z = None, z
    for _ in range(20):
        q = (groups * s + z).round().clamp(0, 15)
        error = groups - (q - z) / s
        mean = error.abs().mean()
        if best is not None and mean >= best:
            break
        best, best_z = mean, z
        shrunk = error.sign() * (error.abs() - error.abs() ** (p - 1) / beta).clamp(min=0)
        shrunk[error == 0] = 0
        z = (q - (groups - shrunk) * s).mean(-1, keepdim=True)
    return (1 / s)[..., 0], best_z[..., 0]


@pytest.mark.parametrize("draw", (gaussian, heavy_tailed))
def test_hqq_follows_its_formulas(draw):
    """On heavy tails the shrinkage fires, on weights of ordinary size it does not: both must agree."""
    weight = draw(64, 256)
    scales, zeros = hqq_in_float64(weight, 64)
    got = quantize(weight, "hqq", 64)
    torch.testing.assert_close(got.scales.double(), scales, atol=0, rtol=1e-5)
    torch.testing.assert_close(got.zeros.double(), zeros, atol=2e-3, rtol=0)


def test_round_to_nearest_is_within_half_a_step():
    weight = gaussian(32, 192)
    got = quantize(weight, "rtn", 64)
    half_step = got.scales.repeat_interleave(64, dim=1) / 2
    assert ((got.dequantize() - weight).abs() <= half_step * 1.001).all()


@pytest.mark.parametrize("quantizer, bound", (("hqq", 0.088), ("rtn", 0.091)))
def test_relative_error_on_gaussian_weights(quantizer, bound):
    weight = gaussian(512, 1024)
    error = (quantize(weight, quantizer, 64).dequantize() - weight).norm() / weight.norm()
    assert error <= bound


@pytest.mark.parametrize("quantizer", QUANTIZER_NAMES)
@pytest.mark.parametrize("value", (0.0, 3.25, -500.0, 1e-6))
def test_constant_groups_survive(quantizer, value):
    """A group without spread has no scale to divide by."""
    weight = torch.full((16, 128), value)
    torch.testing.assert_close(quantize(weight, quantizer, 64).dequantize(), weight, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("quantizer", QUANTIZER_NAMES)
@pytest.mark.parametrize(
    "in_features, group_size", ((96, 64), (65, 64), (7, 64), (33, 32), (1, 1), (600, 512), (8, 10**5), (8, 10**30))
)
def test_widths_that_the_group_does_not_divide(quantizer, in_features, group_size):
    """The last group is shorter; it must be quantised as if it stood alone. A group above the width is one group:
    expanding its scale to the group's size, and not the row's, took all memory."""
    weight = gaussian(8, in_features)
    got = quantize(weight, quantizer, group_size)
    assert got.codes.shape == weight.shape and got.codes.dtype == torch.uint8 and got.codes.max() <= 15
    assert got.dequantize().shape == weight.shape
    rest = in_features % group_size
    if rest:
        alone = quantize(weight[:, -rest:], quantizer, rest)
        torch.testing.assert_close(got.dequantize()[:, -rest:], alone.dequantize(), atol=1e-6, rtol=0)


def test_bad_settings_and_weights_are_refused():
    for weight, quantizer, group_size, named in (
        (gaussian(4, 8), "gptq", 64, "gptq"),
        (gaussian(4, 8), "hqq", 0, "group size 0"),
        (torch.full((4, 8), float("nan")), "hqq", 8, "not finite"),
        (torch.full((4, 8), float("inf")), "rtn", 8, "not finite"),
    ):
        with pytest.raises(RiverError, match=named):
            quantize(weight, quantizer, group_size)


@pytest.mark.parametrize("in_features", (1, 2, 7, 64))
@pytest.mark.parametrize("high_first", (False, True))
def test_nibbles_round_trip(in_features, high_first):
    codes = torch.randint(0, 16, (5, in_features), dtype=torch.uint8)
    packed = pack_nibbles(codes, high_first)
    assert packed.shape == (5, (in_features + 1) // 2)
    if high_first:
        packed = packed >> 4 | packed << 4
    assert torch.equal(unpack_nibbles(packed, in_features), codes)


def test_codes_above_15_are_refused():
    with pytest.raises(RiverError, match="15"):
        pack_nibbles(torch.full((1, 2), 16, dtype=torch.uint8))


@pytest.mark.parametrize(
    "out_features, in_features, group_size", ((16, 64, 32), (96, 576, 64), (48, 512, 128), (32, 512, 256))
)
@pytest.mark.parametrize("tokens", (1, 3, 40))
def test_kernel_agrees_with_the_reference(out_features, in_features, group_size, tokens):
    quantized = quantize(gaussian(out_features, in_features), "hqq", group_size)
    x = torch.randn(1, tokens, in_features).bfloat16()
    shape = (out_features, in_features)
    layout = layout_for(shape, group_size, torch.bfloat16, "cpu")
    assert layout == "int4pack_cpu"
    kernel = QuantLinear(pack(quantized, layout, "cpu"), layout, shape, group_size)(x)
    exact = x.double() @ quantized.dequantize().double().t()
    assert kernel.shape == (1, tokens, out_features) and kernel.dtype == torch.bfloat16
    assert (kernel.double() - exact).norm() / exact.norm() < 2**-7  # bfloat16 has 8 bits of precision


@pytest.mark.parametrize(
    "shape, group_size, dtype",
    (
        ((16, 64), 64, torch.float32),
        ((15, 64), 64, torch.bfloat16),
        ((16, 96), 64, torch.bfloat16),
        ((16, 1024), 512, torch.bfloat16),
    ),
)
def test_what_the_kernel_refuses_runs_on_the_reference(shape, group_size, dtype):
    quantized = quantize(gaussian(*shape), "hqq", group_size)
    layout = layout_for(shape, group_size, dtype, "cpu")
    assert layout == "plain"
    x = torch.randn(2, 3, shape[1]).to(dtype)
    y = QuantLinear(pack(quantized, layout, "cpu"), layout, shape, group_size)(x)
    assert y.dtype == dtype
    exact = x.double() @ quantized.dequantize().double().t()
    assert (y.double() - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 2**-7)


def test_bias_is_added():
    quantized = quantize(gaussian(16, 64), "rtn", 64)
    bias = torch.randn(16)
    tensors = pack(quantized, "plain", "cpu")
    x = torch.randn(3, 64)
    with_bias = QuantLinear(tensors, "plain", (16, 64), 64, bias)(x)
    torch.testing.assert_close(with_bias, QuantLinear(tensors, "plain", (16, 64), 64)(x) + bias)


def test_a_linear_of_several_parts_is_one_linear():
    x, parts, biases = torch.randn(2, 8), [torch.randn(4, 8), torch.randn(6, 8)], [torch.randn(4), torch.randn(6)]
    whole = torch.nn.functional.linear(x, torch.cat(parts), torch.cat(biases))
    torch.testing.assert_close(Linear(parts, torch.cat(biases))(x), whole)


def test_neighbours_in_memory_become_one_matrix_and_others_do_not():
    storage = torch.randn(30)
    first, second, apart = storage[:8].view(2, 4), storage[8:20].view(3, 4), storage[22:30].view(2, 4)
    stranger = torch.randn(1, 4)
    joined = join_neighbours([first, second, apart, stranger])
    assert [tuple(w.shape) for w in joined] == [(5, 4), (2, 4), (1, 4)]
    assert torch.equal(torch.cat(joined), torch.cat([first, second, apart, stranger]))
    assert joined[0].data_ptr() == storage.data_ptr()
    assert len(join_neighbours([second, first])) == 2, "order counts"
