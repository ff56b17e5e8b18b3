"""The decoder against independent sources: the fixture families and a naive float64 re-implementation."""

import dataclasses

import naive
import pytest
import torch
from conftest import FAMILIES, TINY, write_tiny_checkpoint
from safetensors import safe_open

from river.checkpoint import load_model
from river.controller import Never
from river.decode import Decoder
from river.model import RMSNorm

FAMILY_NAMES = sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())
# Rotary frequencies that depend on the length of the sequence: what an earlier piece of a prompt gave
# before the rest arrived is not what the whole prompt gives there.
LENGTH_DEPENDENT = ("llama_dynamic", "phi4mini", "phi4mini_cross")


def backbone(model, max_len=64, batch=1):
    return Decoder(model, model.layers, Never(), batch=batch, max_len=max_len)


def prompt_logits(model, ids, piece=None):
    """Logits [len(ids), vocab] of a prompt that is handed to the decoder `piece` tokens at a time."""
    decoder = backbone(model)
    parts = [decoder.forward(part[None], Never())[0] for part in ids.split(piece or len(ids))]
    return model.logits(torch.cat(parts, dim=1))[0]


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("chunk", (512, 7, 1))
def test_prompt_logits_are_those_of_transformers(family_folder, expected, name, chunk, monkeypatch):
    """Whole, and in chunks: a layer takes a long prompt piece by piece, and each must see all before it."""
    monkeypatch.setattr("river.decode.CHUNK", chunk)
    model = load_model(family_folder(name), torch.float32)
    want = expected(name)
    torch.testing.assert_close(prompt_logits(model, want["input_ids"].long()), want["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("piece", (7, 1), ids=("pieces of 7", "token by token"))
def test_a_prompt_that_comes_in_pieces_gives_the_same_logits(family_folder, expected, name, piece):
    """Mask, positions and cache must not depend on what came in one call and what in the next."""
    model = load_model(family_folder(name), torch.float32)
    want = expected(name)
    got = prompt_logits(model, want["input_ids"].long(), piece)
    if name in LENGTH_DEPENDENT:
        torch.testing.assert_close(got[-1], want["logits"][-1], atol=1e-4, rtol=0)
    else:
        torch.testing.assert_close(got, want["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "llama_dynamic"])
def test_greedy_tokens_and_their_logits_are_those_of_transformers(family_folder, expected, name):
    """All but llama_dynamic, whose keys transformers leaves turned by the base of the step that wrote them."""
    model = load_model(family_folder(name), torch.float32)
    want = expected(name)
    decoder = backbone(model)
    logits, _ = decoder.prefill([want["input_ids"].tolist()])
    for token, step_logits in zip(want["greedy"], want["gen_logits"]):
        torch.testing.assert_close(logits[0], step_logits, atol=1e-4, rtol=0)
        assert logits.argmax() == token
        logits, _ = decoder.decode_one_token(token.view(1).long())


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_generation_across_a_change_of_frequencies_is_the_whole_sequence_at_once(family_folder, expected, name):
    """Keys turned by the short factors must not meet queries turned by the long ones."""
    model = load_model(family_folder(name), torch.float32)
    ids = torch.cat((expected(name)["input_ids"], expected(name)["greedy"])).long()
    torch.testing.assert_close(prompt_logits(model, ids, 1)[-1], prompt_logits(model, ids)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_bfloat16_runs_and_stays_near(family_folder, expected, name):
    model = load_model(family_folder(name), torch.bfloat16)
    want = expected(name)
    got = prompt_logits(model, want["input_ids"].long())
    assert got.dtype == torch.float32
    assert (got - want["logits"]).norm() / want["logits"].norm() < 0.05


def test_agrees_with_the_naive_decoder(tmp_path):
    folder = write_tiny_checkpoint(tmp_path, dtype=torch.float32)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    ids = [5, 900, 17, 17, 3, 512, 44]
    got = prompt_logits(load_model(folder, torch.float32), torch.tensor(ids))
    torch.testing.assert_close(got.double(), naive.logits(tensors, TINY, ids), atol=1e-4, rtol=0)


def test_rms_norm_leaves_its_input_alone():
    """Public code has met a norm that scaled the residual stream in place."""
    x = torch.randn(2, 3, 8)
    before = x.clone()
    RMSNorm(torch.full((8,), 2.0), 1e-6)(x)
    assert torch.equal(x, before)


def test_positions_far_out_stay_apart_in_bfloat16(tiny_model):
    """Angles computed in bfloat16 merge neighbouring positions above 256."""
    cos, _ = tiny_model.rope.tables(torch.tensor([400, 401]), 402, torch.float32)
    expected = torch.tensor([400.0, 401.0]).double()[:, None] * 10000 ** (-torch.arange(0, 16, 2).double() / 16)
    torch.testing.assert_close(cos[:, :8].double(), expected.cos(), atol=1e-4, rtol=0)


def test_a_norm_that_a_fork_extends_keeps_its_fields_in_compiled_programs():
    """`with_tensors`, which the compiled layer calls, made a plain RMSNorm of it: wrong numbers without an error."""

    @dataclasses.dataclass
    class Offset(RMSNorm):
        offset: float = 0.0

    norm = Offset(torch.ones(4), 1e-5, offset=1.0)
    assert norm.with_tensors([torch.zeros(4)]).offset == 1.0
    assert norm.signature() != Offset(torch.ones(4), 1e-5).signature()
    assert norm.signature() == Offset(torch.zeros(4), 1e-5, offset=1.0).signature()
