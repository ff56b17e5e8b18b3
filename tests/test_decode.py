"""The decode loop: the paper's invariants, on a tiny random model in float32."""

import random

import pytest
import torch

from river.cache import KVCache
from river.controller import ExitRule, FixedDepth, Never, Similarity, make_exit_rule, similarity
from river.decode import Decoder, generate
from river.errors import RiverError
from river.exits import load_river
from river.sampling import Sampler

L = 4
PROMPT = [1, 40, 700, 3, 12, 12, 999]


@pytest.fixture(scope="module")
def river(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("river")
    (folder / "model.safetensors").write_bytes(b"")  # only its size and time go into the river's identity
    return load_river(tiny_model, folder)


class Scripted(ExitRule):
    """Leaves at the given depths, one after the other; what a chance rule would do, made repeatable."""

    def __init__(self, depths):
        self.depths, self.step = list(depths), 0

    def leaves(self, depth, h_in, h):
        if depth == self.depths[self.step]:
            self.step += 1
            return True
        return False


def run(model, river, rule, prompts=(PROMPT,), steps=12, prefill="exit", decoder=None):
    """Greedy tokens [steps][B] and the logits behind each."""
    decoder = decoder or Decoder(model, river, rule, prefill, batch=len(prompts), max_len=64)
    logits, _ = decoder.prefill([list(p) for p in prompts])
    history, tokens = [logits], [logits.argmax(-1)]
    for _ in range(steps - 1):
        logits, _ = decoder.decode_one_token(tokens[-1])
        history.append(logits)
        tokens.append(logits.argmax(-1))
    return torch.stack(tokens), torch.stack(history)


def plain_decode(layers, model, steps=12):
    """A decode loop that has never heard of exits: the given layers in order, whole prompt first."""
    from river.model import Positions

    cache = KVCache(model.config, 1, 64, model.dtype, model.device)
    ids, start, history = list(PROMPT), 0, []
    for _ in range(steps):
        h = model.embed(torch.tensor([ids[start:]]))
        for layer in layers:
            h = layer(h, Positions.at(model.rope, start, len(ids), len(ids), model.dtype), cache)
        history.append(model.logits(h[:, -1:])[:, 0])
        start = len(ids)
        ids.append(int(history[-1].argmax()))
    return torch.stack(history)


@pytest.mark.parametrize("rule", (Never(), FixedDepth(L), Similarity(1.0), Similarity(7.0)), ids=str)
def test_never_leaving_is_the_plain_backbone_bit_for_bit(tiny_model, river, rule):
    """That includes tau = 1: a similarity that rounding lifts above 1 must not leave."""
    with torch.inference_mode():
        want = plain_decode(tiny_model.layers, tiny_model)
    assert torch.equal(run(tiny_model, river, rule)[1], want)


def test_depth_0_is_every_layer_in_4_bits_bit_for_bit(tiny_model, river):
    with torch.inference_mode():
        want = plain_decode(river, tiny_model)
    assert torch.equal(run(tiny_model, river, FixedDepth(0))[1], want)


def test_backbone_and_river_differ(tiny_model, river):
    """Depth settings that change nothing have been met: here each depth has logits of its own."""
    logits = [run(tiny_model, river, FixedDepth(depth), steps=1)[1] for depth in range(L + 1)]
    for i, a in enumerate(logits):
        assert all(not torch.equal(a, b) for b in logits[i + 1 :])


class RecordingCache(KVCache):
    """Counts how often each (layer, position) slot is assigned, and starts out as NaN."""

    def __init__(self, *args):
        super().__init__(*args)
        self.data.fill_(float("nan"))
        self.writes = torch.zeros(self.data.shape[0], 2, self.max_len, dtype=torch.int64)

    def layer(self, l):
        return tuple(RecordingView(view, self.writes[l, index]) for index, view in enumerate(super().layer(l)))


class RecordingView:
    def __init__(self, view, writes):
        self.view, self.writes = view, writes

    def __getitem__(self, key):
        return self.view[key]

    def __setitem__(self, key, value):
        self.view[key] = value
        self.writes[key[2]] += 1


@pytest.mark.parametrize("seed", range(5))
def test_every_slot_is_written_exactly_once_and_never_read_before(tiny_model, river, seed):
    """A token that leaves early must leave no hole, whatever the depths; a hole would show as NaN."""
    steps = 15
    chance = random.Random(seed)
    rule = Scripted([chance.randrange(L) for _ in range(steps)])
    decoder = Decoder(tiny_model, river, rule, "exit", max_len=64)
    decoder.cache = RecordingCache(tiny_model.config, 1, 64, tiny_model.dtype, tiny_model.device)
    _, history = run(tiny_model, river, rule, decoder=decoder, steps=steps)
    length = len(PROMPT) + steps - 1
    assert history.isfinite().all()
    assert decoder.length == length and (decoder.cache.writes[:, :, :length] == 1).all()
    assert (decoder.cache.writes[:, :, length:] == 0).all()
    assert decoder.cache.data[..., :length, :].isfinite().all()


def test_positions_do_not_depend_on_the_depth(tiny_model):
    """A position kept by the last layer stalls when a token leaves early; here with river = backbone,
    so that the depth must change no bit of what is computed."""
    same = tiny_model.layers
    never = run(tiny_model, same, Never())[1]
    early = run(tiny_model, same, Scripted([1, 0, 2, 3, 0, 1, 2, 0, 3, 1, 1, 0]))[1]
    assert torch.equal(never, early)


PROMPTS = ([1, 40, 700, 3, 12, 12, 999], [5], [88, 2, 2, 519], [7, 300, 4, 4, 1000, 12, 1])


@pytest.mark.parametrize("depth", range(L + 1))
@pytest.mark.parametrize("prefill", ("exit", "backbone", "river"))
def test_a_batch_equals_its_rows_one_at_a_time(tiny_model, river, depth, prefill):
    """Rows of different lengths, exits forced equal."""
    tokens, logits = run(tiny_model, river, FixedDepth(depth), PROMPTS, prefill=prefill)
    for row, prompt in enumerate(PROMPTS):
        alone_tokens, alone_logits = run(tiny_model, river, FixedDepth(depth), [prompt], prefill=prefill)
        torch.testing.assert_close(logits[:, row], alone_logits[:, 0], atol=1e-4, rtol=0)
        assert torch.equal(tokens[:, row], alone_tokens[:, 0])


def test_padding_has_no_say_in_the_exit(tiny_model, river):
    """The least similarity of a batch is that of its rows, however they are padded."""
    seen = []

    class Watching(Never):
        def leaves(self, depth, h_in, h):
            if depth:
                seen.append(min(similarity(h_in, h)))
            return False

    run(tiny_model, river, Watching(), PROMPTS, steps=1)
    together, seen[:] = list(seen), []
    for prompt in PROMPTS:
        run(tiny_model, river, Watching(), [prompt], steps=1)
    rows = torch.tensor(seen).view(len(PROMPTS), -1)
    torch.testing.assert_close(torch.tensor(together), rows.min(0).values, atol=1e-5, rtol=0)


def test_rows_that_have_stopped_have_no_say_in_the_exit(tiny_model, river):
    class Counting(Never):
        def __init__(self):
            self.counts = []

        def leaves(self, depth, h_in, h):
            self.counts.append(len(h))
            return True

    rule = Counting()
    decoder = Decoder(tiny_model, river, rule, "exit", batch=2, max_len=32)
    first = run(tiny_model, river, Never(), PROMPTS[:1], steps=1)[0]
    steps = list(
        generate(
            decoder, [list(p) for p in (PROMPTS[0], PROMPTS[2])], 6, {int(first[0, 0])}, lambda l: first[0].expand(2)
        )
    )
    assert [step.tokens for step in steps] == [[int(first[0, 0])] * 2], "both rows stop at their first token"
    stops = iter([torch.tensor([9, 3]), torch.tensor([4, 5]), torch.tensor([6, 9])])
    decoder = Decoder(tiny_model, river, rule, "exit", batch=2, max_len=32)
    rule.counts.clear()
    steps = list(generate(decoder, [list(p) for p in (PROMPTS[0], PROMPTS[2])], 6, {9}, lambda l: next(stops)))
    assert [step.tokens for step in steps] == [[9, 3], [None, 5], [None, 9]]
    assert rule.counts == [7 + 4, 1, 1], "neither padding nor a row that has stopped"


def test_a_prompt_may_be_continued_on_the_same_cache(tiny_model, river):
    """What a chat does: two pieces on one cache are the whole at once."""
    decoder = Decoder(tiny_model, river, Never(), max_len=32)
    decoder.prefill([PROMPT[:3]])
    logits, _ = decoder.prefill([PROMPT[3:]])
    torch.testing.assert_close(logits, run(tiny_model, river, Never(), steps=1)[1][0], atol=1e-5, rtol=0)


def test_a_full_cache_is_refused_before_anything_is_computed(tiny_model, river):
    decoder = Decoder(tiny_model, river, Never(), max_len=len(PROMPT))
    decoder.prefill([PROMPT])
    before = decoder.cache.data.clone()
    with pytest.raises(RiverError, match=str(len(PROMPT))):
        decoder.decode_one_token(torch.tensor([3]))
    assert torch.equal(decoder.cache.data, before) and decoder.length == len(PROMPT)


def test_growing_the_cache_keeps_what_is_written(tiny_model, river):
    decoder = Decoder(tiny_model, river, Never(), max_len=len(PROMPT))
    decoder.prefill([PROMPT])
    decoder.cache.grow(64)
    logits, _ = decoder.decode_one_token(torch.tensor([3]))
    want, _ = Decoder(tiny_model, river, Never(), max_len=32).prefill([PROMPT + [3]])
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)


def test_prefill_modes(tiny_model, river):
    """`exit` follows the rule, `backbone` and `river` do not; decode follows the rule in all three."""
    for prefill, depth in (("exit", 2), ("backbone", L), ("river", 0)):
        decoder = Decoder(tiny_model, river, FixedDepth(2), prefill, max_len=32)
        assert decoder.prefill([PROMPT])[1] == depth
        assert decoder.decode_one_token(torch.tensor([3]))[1] == 2
    with pytest.raises(RiverError, match="sideways"):
        Decoder(tiny_model, river, Never(), "sideways")


def test_the_threshold_is_strict_and_looks_at_the_least_similar_token():
    h_in = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    h = torch.tensor([[2.0, 0.0], [0.6, 0.8]])
    assert similarity(h_in, h) == pytest.approx([1.0, 0.6])
    least = min(similarity(h_in, h))
    assert not Similarity(least).leaves(1, h_in, h), "equal is not above"
    assert Similarity(least - 1e-6).leaves(1, h_in, h)
    assert Similarity(0.9).leaves(1, h_in[:1], h[:1])
    assert not Similarity(-1.0).leaves(0, None, h), "before the first layer there is nothing to compare"


def test_similarity_never_exceeds_1():
    """cos(x, x) comes out as 1.0000001 for some x: with tau = 1 the token would leave."""
    x = torch.randn(10_000, 7, generator=torch.Generator().manual_seed(0))
    assert max(similarity(x, x)) <= 1
    torch.testing.assert_close(torch.tensor(similarity(x, -x)), torch.full((10_000,), -1.0))
    assert not Similarity(1.0).leaves(3, x[:1], x[:1])


def test_a_state_that_is_not_a_number_stays_on_the_backbone():
    bad, good = torch.full((1, 4), float("nan")), torch.ones(1, 4)
    for pair in ((bad, good), (good, bad)):
        both = torch.cat(pair)
        assert not Similarity(-2.0).leaves(1, both, both), "one such token among others keeps them all"
    assert not Similarity(-2.0).leaves(1, bad, bad)
    assert not Similarity(-2.0).leaves(1, torch.zeros(1, 4), torch.zeros(1, 4))


def test_two_thresholds_give_two_histograms(tiny_model, river):
    def depths(tau):
        decoder = Decoder(tiny_model, river, Similarity(tau), max_len=64)
        return [s.exit_layer for s in generate(decoder, [PROMPT], 20, set(), Sampler())]

    low, high = depths(0.1), depths(0.99)
    assert sum(low) < sum(high)


def test_make_exit_rule(tiny_model):
    assert make_exit_rule("similarity", tiny_model) == Similarity(0.5)
    assert make_exit_rule("similarity", tiny_model, exit_layer=0) == FixedDepth(0)
    assert make_exit_rule("fixed", tiny_model, exit_layer=2) == FixedDepth(2)
    for bad in ({"name": "hunch"}, {"name": "fixed"}):
        with pytest.raises(RiverError):
            make_exit_rule(model=tiny_model, **bad)
    for bad in ({"exit_layer": -1}, {"exit_layer": L + 1}, {"exit_layer": 2.5}, {"exit_layer": True}):
        with pytest.raises(RiverError):
            make_exit_rule("similarity", tiny_model, **bad)


def test_generate_stops_at_stop_tokens_and_at_the_limit(tiny_model, river):
    free = [
        s.tokens[0] for s in generate(Decoder(tiny_model, river, Never(), max_len=64), [PROMPT], 10, set(), Sampler())
    ]
    assert len(free) == 10
    stop = free[4]
    first = free.index(stop)
    stopped = [
        s.tokens[0] for s in generate(Decoder(tiny_model, river, Never(), max_len=64), [PROMPT], 10, {stop}, Sampler())
    ]
    assert stopped == free[: first + 1]
    assert not list(generate(Decoder(tiny_model, river, Never(), max_len=64), [PROMPT], 0, set(), Sampler()))
