"""AWQ: input channels are scaled where that helps, never where it does not, and nothing else changes."""

import pytest
import torch

from river import awq, load
from river.checkpoint import load_model
from river.exits import LINEARS, load_quantized_head, load_river
from river.linear import QuantLinear, layout_for, pack, scale_dtype
from river.probe import kv_cosines
from river.quantize import quantize


def activations(tokens, width, seed, large=()):
    """Gaussian; the channels of `large` are 30 times as large."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    x[:, list(large)] *= 30
    return x


def weight_of(rows=64, width=256):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)) * 0.02


def scaled_linear(weight, x, bits=4, group_size=64):
    """The `QuantLinear` that awq makes of a weight on calibration activations x."""
    layout = layout_for(weight.shape, group_size, weight.dtype, "cpu", bits)
    how = "awq", group_size, bits, scale_dtype(layout)
    scales = awq.search_input_scales(weight, x, *how)
    tensors = pack(quantize(weight / scales.float(), *how), layout, "cpu") | {"input_scales": scales}
    return QuantLinear(tensors, layout, tuple(weight.shape), group_size)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_alike_channels_are_left_as_they_are(dtype):
    x = torch.full((40, 256), 0.7) * torch.randn(40, 1).sign()
    scales = awq.search_input_scales(weight_of().to(dtype), x, "awq", 64, 4, torch.float32)
    assert scales.dtype == dtype and torch.equal(scales, torch.ones(256, dtype=dtype))


def test_large_channels_cost_less_output_on_activations_not_seen_before():
    weight, large = weight_of(), (3, 70, 71, 200)
    linear = scaled_linear(weight, activations(300, 256, 1, large))
    x = activations(300, 256, 2, large)
    want = x @ weight.t()
    plain = (x @ quantize(weight, "best").dequantize().t() - want).norm()
    assert (linear(x) - want).norm() < 0.6 * plain
    inverse = linear.tensors["input_scales"]
    assert inverse[list(large)].max() < inverse.median(), "a large input is divided, and its column multiplied"


def test_with_bits_enough_the_scales_cancel():
    """At 8 bits the product is the full one up to its rounding, however unlike the channels are."""
    weight, x = weight_of().bfloat16(), activations(300, 256, 1, (3, 70)).bfloat16()
    linear = scaled_linear(weight, x, bits=8)
    assert not torch.equal(linear.tensors["input_scales"], torch.ones(256, dtype=torch.bfloat16))
    want = x.double() @ weight.double().t()
    assert (linear(x).double() - want).norm() < 0.012 * want.norm()


def test_a_channel_that_the_text_leaves_at_zero_stays_finite():
    x = activations(50, 256, 1)
    x[:, 5] = 0
    for silent in (x, torch.zeros(50, 256)):
        scales = awq.search_input_scales(weight_of(), silent, "awq", 64, 4, torch.float32)
        assert scales.isfinite().all() and (scales > 0).all()


def test_inputs_are_what_the_backbones_linears_are_given(tiny_folder):
    """Layer by layer it is the model's own run: the last hidden state is the one that its layers give."""
    model = load_model(tiny_folder, torch.float32)
    ids = awq.calibration_ids(tiny_folder, model.config)
    assert len(ids) == min(model.config.context, len(ids)) > 100
    inputs = awq.Inputs(model, ids)
    torch.testing.assert_close(
        inputs.of("layers.0.qkv_proj"), model.layers[0].input_layernorm(model.embed(torch.tensor(ids))), atol=0, rtol=0
    )
    assert inputs.of("layers.1.down_proj").shape == (len(ids), model.layers[1].down_proj.shape[1])
    fresh, h = awq.Inputs(model, ids), model.embed(torch.tensor([ids]))
    for layer in model.layers:
        h = layer(h, fresh.positions, fresh.cache)
    torch.testing.assert_close(inputs.of("lm_head"), model.norm(h)[0], atol=0, rtol=0)


@pytest.fixture
def built(tiny_folder):
    model = load_model(tiny_folder)
    return tiny_folder, model, load_river(model, tiny_folder, "awq")


def is_built(folder, **settings):
    lines = []
    load_river(load_model(folder), folder, log=lambda line, done: lines.append(line), **settings)
    return any("building" in line for line in lines)


def test_the_river_survives_saving_and_every_linear_has_its_scales(built):
    folder, model, river = built
    again = load_river(model, folder, "awq", log=lambda line, done: pytest.fail(line))
    for layer, twin in zip(river, again, strict=True):
        for name in LINEARS:
            tensors, stored = getattr(layer, name).tensors, getattr(twin, name).tensors
            assert tensors.keys() == stored.keys() >= {"input_scales"}
            assert all(torch.equal(tensors[key], stored[key]) for key in tensors)


def test_another_text_builds_the_river_again(built, tmp_path, monkeypatch):
    folder = built[0]
    assert not is_built(folder, quantizer="awq")
    text = tmp_path / "other.txt"
    text.write_text(awq.TEXT.read_text(encoding="utf-8").replace("ferry", "barge"), encoding="utf-8")
    monkeypatch.setattr(awq, "TEXT", text)
    assert is_built(folder, quantizer="awq")


def test_the_head_can_be_scaled_too(built):
    folder, model, _ = built
    head = load_quantized_head(model, folder, "awq")
    x = model.norm(torch.randn(1, 5, model.config.hidden_size).bfloat16())
    want = model.lm_head(x).float()
    assert (head(x).float() - want).norm() < 0.15 * want.norm()


def test_keys_and_values_are_the_backbones_and_not_scaled_ones(tiny_folder):
    """Backbone and river share one cache: a V that was scaled for the river would be wrong for the backbone."""
    llm = load(tiny_folder, quantizer="awq")
    ids = llm.tokenizer.encode("The river rises in the hills above the town.")
    (cosines,) = kv_cosines(llm, [(ids[:2], ids[2:])], [0])
    assert cosines[0].min() > 0.99 and cosines.min() > 0.9  # later layers of a random model add their errors up
