"""The KV strategies and the exit rules that River is compared with: what each promises, on a tiny model."""

import random

import pytest
import torch
from test_decode import PROMPT, L, Scripted, plain_decode, run

from river.controller import Confidence, Entropy, ExitRule, FixedDepth, Margin, Never, Oracle
from river.decode import Decoder
from river.errors import RiverError
from river.exits import load_river
from river.strategies import STRATEGIES, Recompute

OTHERS = [name for name in STRATEGIES if name != "share"]


@pytest.fixture(scope="module")
def river(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("river")
    (folder / "model.safetensors").write_bytes(b"")
    return load_river(tiny_model, folder)


def decoder(model, river, rule, kv, prefill="backbone"):
    made = Decoder(model, river, rule, prefill, max_len=64, kv=kv)
    made.cache.data.fill_(float("nan"))  # whoever attends to an unwritten slot gives himself away
    return made


def decode(model, river, depths, kv, steps=None):
    """(decoder, logits of each step) of a decode that leaves at the given depths, greedy."""
    made = decoder(model, river, Scripted(depths), kv)
    _, history = run(model, river, None, decoder=made, steps=steps or len(depths) + 1)
    return made, history


def random_depths(seed, steps=20):
    chance = random.Random(seed)
    return [chance.randrange(L) for _ in range(steps)]


@pytest.mark.parametrize("kv", STRATEGIES)
def test_never_leaving_is_the_backbone_bit_for_bit(tiny_model, river, kv):
    _, history = run(tiny_model, river, Never(), decoder=decoder(tiny_model, river, Never(), kv))
    with torch.inference_mode():
        assert torch.equal(history, plain_decode(tiny_model.layers, tiny_model))


@pytest.mark.parametrize("kv", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_strategy_attends_to_an_unwritten_slot(tiny_model, river, kv, seed):
    depths = sorted(random_depths(seed), reverse=True) if kv == "monotonic" else random_depths(seed)
    _, history = decode(tiny_model, river, depths, kv)
    assert history.isfinite().all()


@pytest.mark.parametrize("kv", OTHERS)
def test_the_head_reads_the_state_at_which_the_token_left(tiny_model, river, kv):
    made = decoder(tiny_model, river, FixedDepth(2), kv)
    made.prefill([PROMPT])
    got, depth = made.decode_one_token(torch.tensor([7]))
    two_layers = Decoder(tiny_model, river, Never(), max_len=64)
    two_layers.prefill([PROMPT])
    h = tiny_model.embed(torch.tensor([[7]]))
    with torch.inference_mode():
        for layer in tiny_model.layers[:2]:
            h = two_layers.run(layer, h, two_layers.positions(len(PROMPT), len(PROMPT) + 1))
        assert depth == 2 and torch.equal(got, tiny_model.logits(h)[:, 0])


@pytest.mark.parametrize("seed", range(6))
def test_recompute_fills_the_cache_as_the_backbone_would(tiny_model, river, seed):
    """Tokens that a later one took along have the K and V of the backbone in every layer; so has all of the
    cache after a step that goes all the way."""
    depths = [*random_depths(seed, 10), L]
    made = decoder(tiny_model, river, Scripted([*depths[:-1], 99]), "recompute")
    fed = [3, 14, 159, 26, 535, 8, 97, 93, 238, 46, 264]
    made.prefill([PROMPT])
    for token in fed:
        made.decode_one_token(torch.tensor([token]))
    plain = decoder(tiny_model, river, Never(), "share")
    plain.prefill([PROMPT + fed])
    length = len(PROMPT) + len(fed)
    assert not made.kv.pending
    torch.testing.assert_close(
        made.cache.data[..., :length, :], plain.cache.data[..., :length, :], atol=1e-5, rtol=1e-5
    )


def test_recompute_takes_pending_tokens_only_as_deep_as_needed(tiny_model, river):
    made = decoder(tiny_model, river, Scripted([1, 2]), "recompute")
    made.prefill([PROMPT])
    made.decode_one_token(torch.tensor([5]))
    slot = len(PROMPT)
    written = made.cache.data[:, 0, 0, 0, slot, 0].isfinite().tolist()
    assert written == [True, False, False, False]
    made.decode_one_token(torch.tensor([6]))
    written = made.cache.data[:, 0, 0, 0, slot : slot + 2, 0].isfinite().all(-1).tolist()
    assert written == [True, True, False, False], "layer 2 took the pending token along"


def test_recompute_forces_a_full_pass_when_too_many_are_pending(tiny_model, river, monkeypatch):
    monkeypatch.setattr(Recompute, "MOST_PENDING", 3)
    made = decoder(tiny_model, river, FixedDepth(1), "recompute")
    made.prefill([PROMPT])
    depths = [made.decode_one_token(torch.tensor([token]))[1] for token in range(5, 13)]
    assert depths == [1, 1, 1, L, 1, 1, 1, L]


@pytest.mark.parametrize("exit_layer", (0, 1, 3))
def test_propagate_writes_the_projections_of_the_exit_state(tiny_model, river, exit_layer):
    made = decoder(tiny_model, river, FixedDepth(exit_layer), "propagate")
    made.prefill([PROMPT])
    h, _ = made.forward(torch.tensor([[7]]), made.exit_rule)
    where = made.positions(len(PROMPT), len(PROMPT) + 1)[0]
    for layer in tiny_model.layers[exit_layer:]:
        x = layer.input_layernorm(h)
        want = [x @ w.t() for w in torch.cat(layer.qkv_proj.weights)[tiny_model.config.q_size :].chunk(2)]
        k, v = (t.view(1, 2, 16) for t in want)
        turned = torch.cat((-k[..., 8:], k[..., :8]), dim=-1)
        k = k * where.cos[0] + turned * where.sin[0]
        got_k, got_v = made.cache.layer(layer.index)
        torch.testing.assert_close(got_k[:, :, len(PROMPT)], k, atol=1e-5, rtol=0)
        torch.testing.assert_close(got_v[:, :, len(PROMPT)], v, atol=1e-5, rtol=0)


def test_mask_is_attention_without_the_missing_tokens(tiny_model, river):
    """With the same exits, a deep token sees in a deep layer only what was written there."""
    made = decoder(tiny_model, river, Scripted([1, 1, 99]), "mask")
    made.prefill([PROMPT])
    for token in (5, 6, 7):
        h, _ = made.forward(torch.tensor([[token]]), made.exit_rule)
    slot = len(PROMPT)
    assert made.kv.missing[:, slot : slot + 2].all(-1).tolist() == [False, True, True, True]
    made.cache.data[1:, :, :, :, slot : slot + 2] = 1e4  # would change everything if anybody looked
    made.tokens, made.kv.missing = made.tokens[:, :-1], made.kv.missing[:, :-1]
    again, _ = made.forward(torch.tensor([[7]]), Never())
    torch.testing.assert_close(again, h, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_monotonic_depth_never_rises(tiny_model, river, seed):
    class Wild(ExitRule):
        chance = random.Random(seed)

        def leaves(self, depth, h_in, h):
            return self.chance.random() < 0.2

    made = decoder(tiny_model, river, Wild(), "monotonic")
    made.prefill([PROMPT])
    depths = [made.decode_one_token(torch.tensor([token]))[1] for token in range(5, 25)]
    assert depths == sorted(depths, reverse=True)


def test_unknown_names_and_a_river_without_a_river_are_refused(tiny_model, river):
    with pytest.raises(RiverError, match="pray.*recompute"):
        decoder(tiny_model, river, Never(), "pray")
    with pytest.raises(RiverError, match="river"):
        decoder(tiny_model, river, Never(), "mask", prefill="river")


def test_the_oracle_finishes_with_the_backbones_token_at_the_earliest_depth(tiny_model, river):
    oracle = decoder(tiny_model, river, Oracle(), "share")
    plain = decoder(tiny_model, river, Never(), "share")
    token = oracle.prefill([PROMPT])[0].argmax(-1)
    plain.prefill([PROMPT])
    depths = []
    for _ in range(12):
        for depth in range(L):  # by hand, before the oracle writes its slots: what a fixed depth would say
            probe = decoder(tiny_model, river, FixedDepth(depth), "share")
            probe.cache.data.copy_(oracle.cache.data)
            probe.tokens = oracle.tokens
            target = decoder(tiny_model, river, Never(), "share")
            target.cache.data.copy_(oracle.cache.data)
            target.tokens = oracle.tokens
            backbones = target.decode_one_token(token)[0].argmax(-1)
            if probe.decode_one_token(token)[0].argmax(-1) == backbones:
                break
        else:
            depth = L
        logits, got = oracle.decode_one_token(token)
        assert got == depth and logits.argmax(-1) == backbones
        depths.append(got)
        token = logits.argmax(-1)
    assert len(set(depths)) > 1, "an oracle that always says the same tests nothing"


def test_early_head_rules_score_probabilities():
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]).log()
    h = torch.zeros(2, 3)
    for rule, scores in ((Confidence, [0.5, 0.9]), (Margin, [0.25, 0.85])):
        least = min(scores)
        assert rule(least - 0.01, lambda h: logits).leaves(1, h, h)
        assert not rule(least + 0.01, lambda h: logits).leaves(1, h, h), "the least sure token decides"
    halves = torch.tensor([[0.5, 0.5]]).log()
    assert Confidence(0.4999, lambda h: halves).leaves(1, h[:1], h[:1])
    assert not Confidence(0.5, lambda h: halves).leaves(1, h[:1], h[:1]), "equal is not above"
    assert not Margin(0.0, lambda h: halves).leaves(1, h[:1], h[:1])
    uniform = torch.zeros(1, 8)
    assert not Entropy(0.01, lambda h: uniform).leaves(1, h, h)
    sure = torch.tensor([[50.0] + [0.0] * 7])
    assert Entropy(0.99, lambda h: sure).leaves(1, h, h)
    for rule in (Confidence, Margin, Entropy):
        assert not rule(0.0, lambda h: sure).leaves(0, None, h), "before the first layer there is no state to judge"
        assert not rule(1.0, lambda h: sure).leaves(2, h, h), "1 never leaves"
        assert not rule(0.1, lambda h: sure * float("nan")).leaves(2, h, h)
