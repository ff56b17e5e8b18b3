"""Quantisers against the published formulas in float64, and the int4 kernel against the reference."""

import pytest
import torch

from river.errors import RiverError
from river.linear import Linear, QuantLinear, join_neighbours, layout_for, pack, pack_nibbles, unpack_nibbles
from river.quantize import BITS, QUANTIZERS, quantize

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


def relative_error(weight, *how):
    return (quantize(weight, *how).dequantize() - weight).norm() / weight.norm()


@pytest.mark.parametrize(
    "quantizer, above, below", (("hqq", 0.085, 0.088), ("rtn", 0.089, 0.091), ("best", 0.081, 0.0858))
)
def test_relative_error_on_gaussian_weights(quantizer, above, below):
    """0.0858 is what a search of 21 clipped ranges gives; a fine search of scale and zero has found 0.081."""
    assert above <= relative_error(gaussian(512, 1024), quantizer, 64) < below


def weights_of_all_kinds():
    """[rows, 96]: with groups of 64 the last is short. By name, each kind that has broken a quantiser or may."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    normal = torch.randn(32, 96, generator=generator)
    outlier = normal.clone()
    outlier[:, ::48] = 60.0
    return {
        "gaussian": normal * 0.02,
        "laplace": torch.distributions.Laplace(0.0, 0.02).sample((32, 96)),
        "student": torch.distributions.StudentT(3.0).sample((32, 96)),
        "outlier": outlier,
        "one-sided": normal.abs() + 5,
        "constant": torch.full((16, 96), 0.37),
        "zero": torch.zeros(16, 96),
        "tiny": normal * 1e-9,
        "two-valued": normal.sign() * 0.02,
        "on the grid": torch.randint(0, 16, (32, 96), generator=generator) * 0.25 - 1.5,
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bits", (3, 4))
@pytest.mark.parametrize("kind", weights_of_all_kinds())
def test_best_has_the_least_squared_error_in_every_group(kind, bits, dtype):
    """As stored, too: what is best before its scale is rounded to bfloat16 need not be after."""
    weight = weights_of_all_kinds()[kind]

    def errors(quantizer):
        square = (quantize(weight, quantizer, 64, bits, dtype).dequantize() - weight).double().square()
        return torch.stack((square[:, :64].sum(1), square[:, 64:].sum(1)))

    rounding = 1e-12 * weight.double().square().sum(1)  # of dequantize() in float32
    for other in ("hqq", "rtn"):
        assert (errors("best") <= errors(other) * (1 + 1e-4) + rounding).all(), other


@pytest.mark.parametrize("kind", weights_of_all_kinds())
def test_what_the_kernel_stores_is_what_was_quantised(kind):
    """The kernels keep bfloat16(scale) and bfloat16((8 - zero) * scale): rounding them again must change nothing."""
    weight = weights_of_all_kinds()[kind]
    quantized = quantize(weight, "best", 32, dtype=torch.bfloat16)
    pairs = pack(quantized, "int4pack_cpu", "cpu")["scales_and_zeros"].float()
    scales, offsets = (part.t().repeat_interleave(32, dim=1) for part in pairs.unbind(-1))
    stored = (quantized.codes.float() - 8) * scales + offsets
    torch.testing.assert_close(stored, quantized.dequantize(), atol=1e-6 * float(weight.abs().max()), rtol=1e-4)


def test_codes_are_the_nearest_to_what_is_stored():
    """Of two grid points, the stored scale and zero decide which is nearer, and not those before rounding."""
    weight = weights_of_all_kinds()["gaussian"]
    got = quantize(weight, "hqq", 96, dtype=torch.bfloat16)
    inside = (got.codes > 0) & (got.codes < 15)
    step = got.scales.expand_as(weight)
    assert ((got.dequantize() - weight).abs() <= step * 0.5001)[inside].all()


@pytest.mark.parametrize("quantizer", QUANTIZER_NAMES)
@pytest.mark.parametrize("draw", (gaussian, heavy_tailed))
def test_more_bits_are_nearer_to_the_weight(quantizer, draw):
    errors = {bits: relative_error(draw(64, 512), quantizer, 64, bits) for bits in BITS}
    assert errors[8] < errors[4] / 2 < errors[3] / 2


@pytest.mark.parametrize("quantizer", QUANTIZER_NAMES)
def test_codes_fit_into_their_bits(quantizer):
    for bits in BITS:
        codes = quantize(heavy_tailed(32, 96), quantizer, 64, bits).codes
        assert codes.max() <= 2**bits - 1 and codes.min() >= (bits == 8)
        assert int(codes.max()) - int(codes.min()) >= 2**bits - 2, "a symmetric quantiser may leave out one code"


def test_eight_bits_are_symmetric_with_one_scale_a_row():
    weight = gaussian(16, 96)
    weight[3] = 0
    got = quantize(weight, "hqq", 64, 8)
    torch.testing.assert_close(got.scales[:, 0] * 127, weight.abs().amax(1).where(torch.arange(16) != 3, 127.0))
    assert got.scales.shape == (16, 1) and (got.zeros == 128).all()
    assert ((got.dequantize() - weight).abs() <= got.scales / 2 * 1.001).all()


@pytest.mark.parametrize("out_features, in_features, layout", ((15, 64, "int8pack"), (16, 100, "plain_int8")))
@pytest.mark.parametrize("tokens", (1, 3, 40))
def test_eight_bits_multiply_as_the_reference(out_features, in_features, layout, tokens):
    """The int8 kernel reads 16 features at once: 100 of them ended in NaN or the process in a segmentation fault."""
    shape = out_features, in_features
    assert layout_for(shape, 64, torch.bfloat16, "cpu", 8) == layout
    quantized = quantize(gaussian(*shape), "hqq", 64, 8, torch.bfloat16)
    x = torch.randn(1, tokens, in_features).bfloat16()
    exact = x.double() @ quantized.dequantize().double().t()
    for either in {layout, "plain_int8"}:
        y = QuantLinear(pack(quantized, either, "cpu"), either, shape, 64)(x)
        assert y.shape == (1, tokens, out_features) and y.dtype == torch.bfloat16
        assert (y.double() - exact).norm() / exact.norm() < 2**-7


def test_the_input_may_be_scaled():
    quantized = quantize(gaussian(16, 64), "rtn", 64)
    tensors, x, scales = pack(quantized, "plain", "cpu"), torch.randn(3, 64), torch.rand(64)
    got = QuantLinear(tensors | {"input_scales": scales}, "plain", (16, 64), 64)(x)
    torch.testing.assert_close(got, QuantLinear(tensors, "plain", (16, 64), 64)(x * scales))


@pytest.mark.parametrize("quantizer", QUANTIZER_NAMES)
@pytest.mark.parametrize("value", (0.0, 3.25, -500.0, 1e-6))
def test_constant_groups_survive(quantizer, value):
    """A group without spread has no scale to divide by."""
    weight = torch.full((16, 128), value)
    torch.testing.assert_close(quantize(weight, quantizer, 64).dequantize(), weight, atol=1e-7, rtol=1e-5)
    stored = quantize(weight, quantizer, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(stored.dequantize(), weight, atol=2e-6, rtol=2**-7)


@pytest.mark.parametrize(
    "scale, zero", ((0.0, 8), (float("nan"), 8), (float("inf"), 8), (-1.0, 8), (1.0, float("nan")))
)
def test_a_quantiser_that_gives_no_scale_is_refused_by_name(scale, zero, monkeypatch):
    """A new one that forgot the group of zeros gave NaN, which was saved as a river and blamed on the checkpoint."""

    def forgetful(groups, grid):
        scales = groups.abs().amax(-1, keepdim=True) / 7
        zeros = torch.full_like(scales, 8.0)
        scales[0, 0], zeros[0, 0] = scale, zero
        return scales, zeros

    monkeypatch.setitem(QUANTIZERS, "forgetful", forgetful)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RiverError, match="'forgetful' gave a scale"):
            quantize(gaussian(8, 128), "forgetful", 64, dtype=dtype)


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


@pytest.mark.parametrize("bits", (0, 2, 5, 16))
def test_bits_that_no_layout_holds_are_refused(bits):
    with pytest.raises(RiverError, match=f"{bits} bits.*3, 4, 8"):
        quantize(gaussian(4, 8), bits=bits)
