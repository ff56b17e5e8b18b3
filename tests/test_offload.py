"""Offloading: less memory, and not one bit of difference."""

import json
import os

import pytest
import torch
from conftest import write_tiny_checkpoint
from safetensors import safe_open

from river.checkpoint import load_model
from river.controller import FixedDepth
from river.decode import Decoder
from river.errors import RiverError
from river.exits import load_river
from river.files import save_safetensors
from river.offload import HostLayer, ReleasedLayer, offload_layers

linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("offload") / "wide", hidden_size=256, intermediate_size=1024, num_attention_heads=8
    )


def logits(model, river, depth):
    decoder = Decoder(model, river, FixedDepth(depth), "exit", max_len=32)
    rows = [decoder.prefill([[3, 9, 27, 81]])[0]]
    return torch.cat(rows + [decoder.decode_one_token(torch.tensor([token]))[0] for token in (5, 6, 7)])


def resident_kb(folder):
    """Kilobytes of the checkpoint's file that are in this process's memory."""
    total, ours = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0]:
                ours = str(folder / "model.safetensors") in line
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


@linux_only
def test_a_cpu_layer_gives_its_pages_back_and_changes_no_bit(folder):
    model = load_model(folder)
    river = load_river(model, folder)
    want = [logits(model, river, depth) for depth in range(5)]
    everything = resident_kb(folder)
    model.layers = offload_layers(model.layers, 1)
    assert [isinstance(layer, ReleasedLayer) for layer in model.layers] == [False, True, True, True]
    for depth in range(5):
        assert torch.equal(logits(model, river, depth), want[depth])
    layer_kb = model.layers[1].nbytes / 1024
    assert resident_kb(folder) < everything - 2.5 * layer_kb


@linux_only
def test_weights_that_are_not_mapped_are_never_given_back(folder):
    """Memory that no file stands behind comes back as zeros: the model would be lost."""
    model = load_model(folder, torch.float32)
    with pytest.raises(RiverError, match="dtype"):
        offload_layers(model.layers, 1)


@linux_only
def test_large_biases_and_linked_checkpoints_are_no_obstacle(tmp_path):
    """Biases are joined into a copy; a hub's cache holds links to files without the ending."""
    folder = write_tiny_checkpoint(tmp_path / "biased", hidden_size=256, intermediate_size=4096, num_attention_heads=8)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    for name in [name for name in tensors if "mlp" in name]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]), dtype=torch.bfloat16)
    save_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mlp_bias": True}))
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    model = load_model(folder)
    assert any(
        part.bias is not None and part.bias.nbytes > 8192
        for _, part in model.layers[0].parts()
        if hasattr(part, "bias")
    )
    assert len(offload_layers(model.layers, 1)) == 4


def test_a_host_layer_changes_no_bit(folder, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    model = load_model(folder)
    river = load_river(model, folder)
    want = logits(model, river, 3)
    model.layers = model.layers[:1] + [HostLayer(layer) for layer in model.layers[1:]]
    assert torch.equal(logits(model, river, 3), want)


def test_nothing_to_offload_and_nonsense(folder):
    layers = load_model(folder).layers
    assert offload_layers(layers, 4) == layers and offload_layers(layers, 99) == layers
    with pytest.raises(RiverError, match="-1"):
        offload_layers(layers, -1)
