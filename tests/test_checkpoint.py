"""Loading: whole and strict, with errors that a user can act on."""

import json
import shutil

import pytest
import torch
from conftest import write_tiny_checkpoint
from safetensors import safe_open

from river.checkpoint import dequantize_fp8, load_model
from river.errors import RiverError
from river.files import SafetensorsFile, save_safetensors


def read_tensors(folder, file="model.safetensors"):
    with safe_open(folder / file, framework="pt") as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}


def rewrite(folder, change):
    """Rewrite the tiny checkpoint's tensors through `change(tensors)`."""
    tensors = read_tensors(folder)
    change(tensors)
    save_safetensors(folder / "model.safetensors", tensors)


def fails(folder, *named):
    with pytest.raises(RiverError) as error:
        load_model(folder)
    message = str(error.value)
    assert "\n" not in message
    for word in named:
        assert word in message


def shard(folder, parts=3):
    """Split the tiny checkpoint into `parts` shards with an index."""
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        own = dict(list(tensors.items())[part::parts])
        save_safetensors(folder / file, own)
        weight_map |= dict.fromkeys(own, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weights_of(model):
    return torch.cat([w.flatten() for layer in model.layers for w in layer.qkv_proj.weights + layer.down_proj.weights])


def test_weights_are_mapped_not_copied(tiny_folder):
    """Backbone layers that no token reaches should never be read from the disk."""
    with (
        open("/proc/self/maps") if __import__("os").path.exists("/proc/self/maps") else pytest.skip("no /proc") as maps
    ):
        assert str(tiny_folder) not in maps.read()
    model = load_model(tiny_folder)
    with open("/proc/self/maps") as maps:
        regions = [line.split()[0].split("-") for line in maps if str(tiny_folder) in line]
    addresses = [w.data_ptr() for layer in model.layers for w in layer.gate_up_proj.weights]
    assert all(any(int(a, 16) <= address < int(b, 16) for a, b in regions) for address in addresses)


def test_shards_are_the_single_file(tiny_folder, tmp_path):
    sharded = shutil.copytree(tiny_folder, tmp_path / "sharded")
    shard(sharded)
    assert torch.equal(weights_of(load_model(tiny_folder)), weights_of(load_model(sharded)))


def test_stray_files_beside_the_shards_are_not_read(tiny_folder):
    shard(tiny_folder)
    (tiny_folder / "consolidated.safetensors").write_bytes(b"not a checkpoint")
    load_model(tiny_folder)


def test_a_renamed_folder_changes_nothing(tiny_folder, tmp_path):
    renamed = shutil.copytree(tiny_folder, tmp_path / "llama-3.1-70B")
    assert torch.equal(weights_of(load_model(tiny_folder)), weights_of(load_model(renamed)))


def test_missing_extra_and_misshapen_tensors_are_named(tiny_folder, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    for label, change, words in (
        ("missing", lambda t: t.pop(name), (name, "no tensor")),
        (
            "extra",
            lambda t: t.update({"model.layers.2.mlp.up_proj.bias": torch.zeros(128)}),
            ("up_proj.bias", "no place"),
        ),
        ("layer", lambda t: t.update({"model.layers.4.mlp.up_proj.weight": t[name]}), ("model.layers.4", "no place")),
        ("misshapen", lambda t: t.update({name: torch.zeros(128, 65)}), (name, "[128, 65]", "[128, 64]")),
        ("integers", lambda t: t.update({name: torch.zeros(128, 64, dtype=torch.int8)}), (name, "int8")),
    ):
        folder = shutil.copytree(tiny_folder, tmp_path / label)
        rewrite(folder, change)
        fails(folder, *words)


def test_untied_head_that_is_absent_is_missed(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    fails(folder, "lm_head.weight")


def test_a_redundant_tied_head_is_not_used(tiny_folder):
    rewrite(tiny_folder, lambda t: t.update({"lm_head.weight": torch.zeros(1024, 64)}))
    model = load_model(tiny_folder)
    assert torch.equal(model.lm_head.weights[0], model.embed_tokens)


def test_old_rotary_buffers_are_ignored(tiny_folder):
    rewrite(tiny_folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_model(tiny_folder)


def test_damaged_files_are_named(tiny_folder, tmp_path):
    whole = (tiny_folder / "model.safetensors").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12\n"
    for label, content, words in (
        ("cut", whole[:-10], ("model.safetensors", "cut short")),
        ("header", whole[:20], ("model.safetensors", "cut short")),
        ("empty", b"", ("model.safetensors", "cut short")),
        ("noise", b"\xff" * 100, ("model.safetensors", "damaged")),
        ("pointer", pointer, ("model.safetensors", "Git LFS")),
    ):
        folder = shutil.copytree(tiny_folder, tmp_path / label)
        (folder / "model.safetensors").write_bytes(content)
        fails(folder, *words)


def test_a_missing_shard_is_named(tiny_folder):
    shard(tiny_folder)
    (tiny_folder / "model-00002-of-00003.safetensors").unlink()
    fails(tiny_folder, "model-00002-of-00003.safetensors", "missing")


def test_an_index_that_promises_too_much_is_named(tiny_folder):
    weight_map = shard(tiny_folder)
    write_index(tiny_folder, {**weight_map, "ghost.weight": "model-00001-of-00003.safetensors"})
    fails(tiny_folder, "ghost.weight", "model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    "file", ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "..", ".", "", 7)
)
def test_an_index_cannot_point_outside_its_folder(tiny_folder, file):
    weight_map = shard(tiny_folder)
    write_index(tiny_folder, {**weight_map, "model.norm.weight": file})
    fails(tiny_folder, "model.norm.weight", "not the name of a file in this folder")


@pytest.mark.parametrize("index", ("[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "\xff"))
def test_a_malformed_index_is_named(tiny_folder, index):
    (tiny_folder / "model.safetensors").unlink()
    (tiny_folder / "model.safetensors.index.json").write_text(index)
    fails(tiny_folder, "model.safetensors.index.json")


def test_a_folder_without_anything_is_named(tmp_path):
    fails(tmp_path, str(tmp_path), "config.json")


def test_a_folder_without_weights_is_named(tiny_folder):
    (tiny_folder / "model.safetensors").unlink()
    fails(tiny_folder, str(tiny_folder), "model.safetensors")


@pytest.mark.parametrize(
    "shape, scale_shape", (((4, 6), ()), ((4, 6), (1,)), ((4, 6), (2, 3)), ((4, 6), (4, 1)), ((4, 6), (4, 6)))
)
def test_eight_bit_weights_are_multiplied_by_their_scales(shape, scale_shape):
    """The key is called weight_scale_inv and is no inverse: the weight is w8 * scale, block by block."""
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape) + 0.5
    got = dequantize_fp8(weight, scale)
    for i in range(shape[0]):
        for j in range(shape[1]):
            n, k = scale_shape if len(scale_shape) == 2 else (1, 1)
            own = scale.reshape(n, k)[i * n // shape[0], j * k // shape[1]]
            assert float(got[i, j]) == pytest.approx(float(weight[i, j].float() * own), rel=1e-6)


def test_eight_bit_weights_without_a_fitting_scale_are_named(tiny_folder, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    eight = {name: torch.zeros(128, 64).to(torch.float8_e4m3fn)}
    for label, extra, words in (
        ("none", {}, (f"{name}_scale_inv", "8 bits")),
        ("odd", {f"{name}_scale_inv": torch.ones(3, 2)}, (name, "[3, 2]")),
    ):
        folder = shutil.copytree(tiny_folder, tmp_path / label)
        rewrite(folder, lambda t: t.update(eight | extra))
        fails(folder, *words)


def test_the_text_model_of_a_multimodal_checkpoint_under_both_layouts(family_folder, tmp_path):
    """`language_model.model.*` and `model.language_model.*` are the same tensors; vision is passed over."""
    folder = family_folder("ministral3_nested")
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= read_tensors(folder, file.name)
    assert any(name.startswith("vision_tower.") for name in tensors)
    newer = tmp_path / "newer"
    newer.mkdir()
    shutil.copy(folder / "config.json", newer)
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        renamed[f"model.{name}" if name.startswith(("vision_tower.", "multi_modal_projector.")) else name] = tensor
    save_safetensors(newer / "model.safetensors", renamed)
    assert torch.equal(weights_of(load_model(folder)), weights_of(load_model(newer)))


def test_a_tensor_under_two_names_is_refused(family_folder, tmp_path):
    folder = shutil.copytree(family_folder("ministral3_nested"), tmp_path / "twice")
    extra = {"model.norm.weight": torch.zeros(64)}
    save_safetensors(folder / "extra.safetensors", extra)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
        index.write_text(json.dumps(content))
    else:
        save_safetensors(folder / "model.safetensors", read_tensors(folder) | extra)
    fails(folder, "model.norm.weight", "twice")


def test_an_untold_tie_is_told_by_the_tensors(family_folder, tmp_path):
    """mistral3's outer tie_word_embeddings says true for models that ship a head."""
    for label, ship_head in (("with", True), ("without", False)):
        folder = shutil.copytree(family_folder("ministral3_nested"), tmp_path / label)
        config = json.loads((folder / "config.json").read_text())
        del config["text_config"]["tie_word_embeddings"]
        config["tie_word_embeddings"] = True
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {}
        for file in list(folder.glob("*.safetensors*")):
            if file.suffix == ".safetensors":
                tensors |= read_tensors(folder, file.name)
            file.unlink()
        if not ship_head:
            del tensors["language_model.lm_head.weight"]
        save_safetensors(folder / "model.safetensors", tensors)
        model = load_model(folder)
        assert torch.equal(model.lm_head.weights[0], model.embed_tokens) != ship_head


def test_saved_tensors_come_back_aligned_and_the_library_can_read_them(tmp_path):
    """Tensors that do not start at a cache line are read some 10% slower by the kernels."""
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "a.weight": torch.randn(3, 64).bfloat16(),
        "empty": torch.zeros(0, 5),
        "b": torch.randn(16, 16),
        "scalar": torch.tensor(2.5),
        "strided": torch.randn(8, 64).t(),
        "eight": torch.randn(64).to(torch.float8_e4m3fn),
    }
    save_safetensors(tmp_path / "t.safetensors", tensors, {"key": "välue"})
    ours = SafetensorsFile(tmp_path / "t.safetensors")
    assert ours.metadata == {"format": "pt", "key": "välue"}
    with safe_open(tmp_path / "t.safetensors", framework="pt") as theirs:
        for name, tensor in tensors.items():
            for back in (ours.tensor(name), theirs.get_tensor(name)):
                assert back.dtype == tensor.dtype and back.shape == tensor.shape
                assert torch.equal(
                    back.view(torch.uint8) if back.dim() else back,
                    tensor.contiguous().view(torch.uint8) if back.dim() else tensor,
                )
    for name in ("a.weight", "b", "strided", "eight"):
        assert ours.tensor(name).data_ptr() % 64 == 0


def test_tensors_that_are_not_aligned_are_read_all_the_same(tmp_path):
    header = b'{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    assert len(header) % 4
    content = torch.tensor([1.0, 2.0, 3.0])
    data = bytes(content.view(torch.uint8).tolist())
    (tmp_path / "t.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert torch.equal(SafetensorsFile(tmp_path / "t.safetensors").tensor("x"), content)
