"""The river file: built once, used only where it belongs, and always what would be built."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_checkpoint
from safetensors import safe_open

from river import load
from river.agreement import reference_texts
from river.checkpoint import load_model
from river.controller import Never
from river.decode import Decoder
from river.errors import RiverError
from river.exits import LINEARS, load_river
from river.files import save_safetensors
from river.linear import Linear
from river.probe import kv_cosines
from river.quantize import quantize


@pytest.fixture
def built(tiny_folder):
    """(folder, model, river), the river file written."""
    model = load_model(tiny_folder)
    return tiny_folder, model, load_river(model, tiny_folder)


def river_files(folder):
    return sorted(path.name for path in folder.glob("river-*"))


def load_again(folder, **settings):
    """(river, was it built?)"""
    lines = []
    model = load_model(folder)
    river = load_river(model, folder, log=lambda line, done: lines.append(line), **settings)
    return river, any("building" in line for line in lines)


def tensors_of(river):
    return [t for layer in river for name in LINEARS for t in getattr(layer, name).tensors.values()]


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def test_an_exit_layer_is_its_backbone_layer_quantised(built):
    _, model, river = built
    for layer, exit_layer in zip(model.layers, river, strict=True):
        assert exit_layer.index == layer.index and exit_layer.input_layernorm is layer.input_layernorm
        for name in LINEARS:
            weight = torch.cat(getattr(layer, name).weights)
            x = torch.randn(1, 1, weight.shape[1]).bfloat16()
            want = x.double() @ quantize(weight, dtype=torch.bfloat16).dequantize().double().t()
            got = getattr(exit_layer, name)(x).double()
            assert (got - want).norm() / want.norm() < 2**-7


def test_the_second_start_maps_what_the_first_built(built):
    folder, _, river = built
    again, was_built = load_again(folder)
    assert not was_built
    assert_same(again, river)


def test_the_file_is_a_third_of_the_layers_at_most(built):
    folder, model, _ = built
    layers = sum(w.nbytes for layer in model.layers for name in LINEARS for w in getattr(layer, name).weights)
    assert (folder / river_files(folder)[0]).stat().st_size < 0.3 * layers + 20_000  # and a header


@pytest.mark.parametrize("settings", ({"quantizer": "rtn"}, {"group_size": 32}, {"bits": 3}, {"bits": 8}))
def test_another_setting_gets_a_river_of_its_own(built, settings):
    folder, _, river = built
    other, was_built = load_again(folder, **settings)
    assert was_built and len(river_files(folder)) == 2
    assert not all(torch.equal(x, y) for x, y in zip(tensors_of(other), tensors_of(river)))
    assert not load_again(folder)[1], "and the first is still there"


def test_files_of_different_bits_do_not_mix(built):
    """3-bit codes are stored as 4-bit ones: by their tensors alone the two files look alike."""
    folder, _, river = built
    load_again(folder, bits=3)
    four, three = sorted(river_files(folder), key=lambda name: "-b3-" in name)
    assert four == "river-hqq-g64-cpu-bfloat16.safetensors" and "-b3-" in three
    shutil.copy(folder / three, folder / four)
    again, was_built = load_again(folder)
    assert was_built
    assert_same(again, river)


def test_a_changed_quantiser_builds_again(built, monkeypatch):
    """Whoever mended a quantiser was given the river that it had made before."""
    folder, _, _ = built
    read_text = Path.read_text
    for source in ("quantize.py", "awq.py", "linear.py", "config.py", "checkpoint.py", "model.py", "rope.py"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", lambda self, **how: read_text(self, **how) + "#" * (self.name == source))
            assert load_again(folder)[1], source
    assert load_again(folder)[1] and not load_again(folder)[1]


def test_another_checkpoint_of_the_same_shape_gets_a_river_of_its_own(built, tmp_path):
    """A copied river file, or a checkpoint replaced in place, would answer with another model's layers."""
    folder, _, _ = built
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    shutil.copy(folder / river_files(folder)[0], other)
    river, was_built = load_again(other)
    assert was_built
    assert_same(river, load_again(other)[0])

    shutil.copy(other / "model.safetensors", folder)
    assert load_again(folder)[1]


def test_one_changed_weight_is_noticed(built):
    folder, _, _ = built
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert load_again(folder)[1]


def test_a_damaged_file_is_built_again(built):
    folder, _, river = built
    path = folder / river_files(folder)[0]
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 64):
        path.write_bytes(content)
        again, was_built = load_again(folder)
        assert was_built and path.stat().st_size == len(whole)
        assert_same(again, river)


def test_a_river_that_lacks_a_tensor_is_built_again(built):
    """With the right identity and a hole, the run would stop in the middle of an answer."""
    folder, _, river = built
    path = folder / river_files(folder)[0]
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        metadata = file.metadata()
    del tensors["layers.0.down_proj.packed"]
    save_safetensors(path, tensors, metadata)
    again, was_built = load_again(folder)
    assert was_built
    assert_same(again, river)


def test_a_disk_that_has_become_read_only_costs_a_rebuild_only(tiny_folder, monkeypatch):
    """On such a disk tidying up fails too, and must not hide the error that is being handled."""

    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    model, lines = load_model(tiny_folder), []
    monkeypatch.setattr("os.replace", read_only)
    monkeypatch.setattr("pathlib.Path.unlink", read_only)
    river = load_river(model, tiny_folder, log=lambda line, done: lines.append(line))
    assert len(river) == 4 and "Read-only" in lines[-1]


def test_a_folder_that_cannot_be_written_costs_a_rebuild_only(tiny_folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    model, lines = load_model(tiny_folder), []
    monkeypatch.setattr(os, "replace", full)
    river = load_river(model, tiny_folder, log=lambda line, done: lines.append(line))
    assert len(river) == 4 and "No space left" in lines[-1]
    assert os.listdir(tiny_folder).count("model.safetensors") == 1 and not river_files(tiny_folder)
    assert not [name for name in os.listdir(tiny_folder) if name.endswith(".part")]


@pytest.mark.parametrize("group_size", (32, 64, 512))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_every_layout_survives_saving(tmp_path, group_size, dtype):
    """Group 512 is outside the kernel's: the plain layout must come back as the plain layout."""
    folder = write_tiny_checkpoint(tmp_path / "wide", hidden_size=64, intermediate_size=1024)
    model = load_model(folder, dtype)
    river = load_river(model, folder, group_size=group_size)
    again = load_river(
        load_model(folder, dtype), folder, group_size=group_size, log=lambda line, done: pytest.fail(line)
    )
    ids = [[3, 9, 27, 81]]
    first, second = (Decoder(model, r, Never(), "river", max_len=8).prefill(ids)[0] for r in (river, again))
    assert torch.equal(first, second)


def test_weights_that_are_not_finite_are_refused(tiny_folder):
    from test_checkpoint import read_tensors

    tensors = read_tensors(tiny_folder)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_safetensors(tiny_folder / "model.safetensors", tensors)
    with pytest.raises(RiverError, match="layers.1.gate_up_proj.*not finite"):
        load_again(tiny_folder)
    assert not river_files(tiny_folder)


def test_unknown_quantizer_is_refused_with_the_known_ones(tiny_folder):
    with pytest.raises(RiverError, match="gptq.*hqq"):
        load_again(tiny_folder, quantizer="gptq")


@pytest.mark.parametrize("name", ("llama_bias", "phi4mini", "qwen2", "qwen3", "ministral3_nested", "mistral_swa"))
def test_every_kind_of_family_has_a_river(family_folder, name, tmp_path):
    """Biases, fused projections, head norms: the river is the backbone with dequantised weights, and no more."""
    folder = shutil.copytree(family_folder(name), tmp_path / name)
    model = load_model(folder, torch.float32)
    river = load_river(model, folder)
    twin = [
        dataclasses.replace(
            layer,
            **{
                name: Linear(
                    [quantize(torch.cat(getattr(layer, name).weights)).dequantize()], getattr(layer, name).bias
                )
                for name in LINEARS
            },
        )
        for layer in model.layers
    ]
    ids = [torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(1)).tolist()]
    got, want = (Decoder(model, layers, Never(), "river", max_len=32).prefill(ids)[0] for layers in (river, twin))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_keys_and_values_of_the_river_are_near_the_backbones(default_model_folder):
    """The paper's ground for sharing the cache: a cosine of about 0.97. Layers above the exit are exact."""
    llm = load(default_model_folder, device="cpu")
    texts = reference_texts(llm, ["Why is the sky blue?", "List three birds and where they live."], 48)
    whole_river, late = kv_cosines(llm, texts, [0, 15]).float()  # [layer, K or V] each
    assert whole_river[:, 0].mean() > 0.97 and whole_river[:, 1].mean() > 0.93
    torch.testing.assert_close(late[:15], torch.ones(15, 2), atol=1e-3, rtol=0)
    assert late[15:].mean() > whole_river[15:].mean()
