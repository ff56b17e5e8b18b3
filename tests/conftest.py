"""Checkpoints for the tests: the fixture families, and a tiny random model with a tokenizer."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import river  # noqa: F401  isort: skip  (before torch, for its warning filter)

import torch
from safetensors import safe_open

from river.checkpoint import load_model
from river.files import save_safetensors
from weights import download

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = FIXTURES / "families"


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: needs the default model's weights, the network, or many seconds")


@pytest.fixture(autouse=True)
def no_model_is_fetched(request, monkeypatch):
    """A test that is not slow fails where it would use the default model, whether that is there or not."""
    if "slow" in request.keywords:
        return

    def guarded(function):
        def call(*args, **options):
            if DEFAULT_MODEL in args:
                raise AssertionError("a test that is not marked slow wants the default model")
            return function(*args, **options)

        return call

    monkeypatch.setattr(download, "fetch", guarded(download.fetch))
    monkeypatch.setattr(download, "is_complete", guarded(download.is_complete))


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run it with --slow"))


def _recipe_module():
    spec = importlib.util.spec_from_file_location("fixture_checkpoint", FAMILIES / "checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory):
    """A function of a fixture family's name: the folder of its checkpoint, written once a session."""
    build, root = _recipe_module().build, tmp_path_factory.mktemp("families")

    def folder(name):
        if not (root / name).exists():
            build(FAMILIES / name, root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def expected():
    """A function of a fixture family's name: its expected tensors, by name."""

    def load(name):
        with safe_open(FAMILIES / name / "expected.safetensors", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}

    return load


TINY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def write_tiny_checkpoint(folder, seed=0, dtype=torch.bfloat16, tokenizer="smol_like", **changes):
    """Write a random Llama of `TINY`'s shape into `folder`, with a fixture's tokenizer; returns the folder."""
    config = {**TINY, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    D, ff = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * D // config["num_attention_heads"]

    def draw(*shape):
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], D)}
    for index in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (D, D),
            "self_attn.k_proj": (kv, D),
            "self_attn.v_proj": (kv, D),
            "self_attn.o_proj": (D, D),
            "mlp.gate_proj": (ff, D),
            "mlp.up_proj": (ff, D),
            "mlp.down_proj": (D, ff),
        }
        layer = f"model.layers.{index}"
        tensors |= {f"{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(D, dtype=dtype)
    tensors["model.norm.weight"] = torch.ones(D, dtype=dtype)
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "tokenizers" / tokenizer / name, folder / name)
    return folder


@pytest.fixture
def tiny_folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The tiny model in float32, for properties that hold to the last bit or nearly so."""
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model"), torch.float32)


DEFAULT_MODEL = ROOT / "weights" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def default_model_folder():
    if not (DEFAULT_MODEL / "model.safetensors").exists():
        pytest.skip("the default model is not downloaded: python generate.py fetches it")
    return DEFAULT_MODEL
