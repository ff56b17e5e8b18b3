"""Lossless decoding: whatever the river drafts, the text is the backbone's own."""

import pytest
import torch
from conftest import FAMILIES, write_tiny_checkpoint

from river import RiverError, load
from river.checkpoint import load_model
from river.controller import FixedDepth, Never
from river.decode import Decoder, generate
from river.exits import load_river
from river.linear import Linear
from river.lossless import Draft, Drafting, draft_and_verify, verify
from river.model import DecoderLayer
from river.sampling import Sampler

FAMILY_NAMES = sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())
PROMPT = [1, 40, 700, 3, 12, 12, 999]


@pytest.fixture(scope="module")
def river(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("river")
    (folder / "model.safetensors").write_bytes(b"")
    return load_river(tiny_model, folder)


def noise(model, seed=3):
    """A river that knows nothing: the backbone's layers with random weights."""
    generator = torch.Generator().manual_seed(seed)
    return [
        layer.with_tensors([torch.randn(t.shape, generator=generator).to(t.dtype) for t in layer.tensor_list()])
        for layer in model.layers
    ]


def plain(model, prompt, tokens, stops=(), max_len=256):
    decoder = Decoder(model, model.layers, Never(), "backbone", max_len=max_len)
    return [step.tokens[0] for step in generate(decoder, [prompt], tokens, stops, Sampler())], decoder


def lossless(model, river, prompt, tokens, stops=(), draft=None, depth=0, max_len=256):
    """(tokens, decoder, drafting) of a greedy lossless run."""
    decoder, drafting = (
        Decoder(model, river, FixedDepth(depth), "backbone", max_len=max_len),
        Drafting() if draft is None else Drafting((draft,)),
    )
    steps = draft_and_verify(decoder, model.lm_head, prompt, tokens, stops, Sampler(), drafting)
    return [step.tokens[0] for step in steps], decoder, drafting


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family_gives_the_backbones_tokens(family_folder, expected, name):
    """Whole blocks of drafts, and across the length at which rotary frequencies change (phi4mini_cross, dynamic):
    a block must not be turned by the frequencies of its end."""
    model = load_model(family_folder(name), torch.float32)
    prompt = expected(name)["input_ids"].tolist()
    want, _ = plain(model, prompt, 40)
    river = load_river(model, family_folder(name))
    for draft, depth in ((None, 0), (4, 0), (3, 2)):
        got, _, drafting = lossless(model, river, prompt, 40, draft=draft, depth=depth)
        assert got == want
        assert drafting.drafted or name == "llama_dynamic"  # whose frequencies change with every token


@pytest.mark.parametrize("draft", (0, 1, 2, 7, None))
@pytest.mark.parametrize("kind", ("noise", "river", "backbone"))
def test_any_river_gives_the_backbones_tokens(tiny_model, river, kind, draft):
    """Nothing right, some right, all right."""
    drafter = {"noise": noise(tiny_model), "river": river, "backbone": tiny_model.layers}[kind]
    want, _ = plain(tiny_model, PROMPT, 60)
    got, _, drafting = lossless(tiny_model, drafter, PROMPT, 60, draft=draft)
    assert got == want
    assert drafting.verifications + drafting.accepted == 59  # a token a verification, and every accepted draft
    if kind == "noise" and draft:
        assert drafting.acceptance < 0.1
    if kind == "backbone" and draft:
        assert drafting.acceptance == 1


def test_the_cache_is_that_of_a_plain_backbone_after_each_step(tiny_model, river):
    """Drafts leave no trace: every slot holds what the backbone would have written, to float32's rounding."""
    want_tokens, want = plain(tiny_model, PROMPT, 40)
    decoder = Decoder(tiny_model, river, FixedDepth(0), "backbone", max_len=256)
    decoder.cache.data.fill_(float("nan"))
    steps = draft_and_verify(decoder, tiny_model.lm_head, PROMPT, 40, (), Sampler(), Drafting((5,)))
    for count, _ in enumerate(steps):
        filled = len(PROMPT) + count
        assert decoder.length == filled and decoder.tokens[0].tolist() == PROMPT + want_tokens[:count]
        torch.testing.assert_close(
            decoder.cache.data[..., :filled, :], want.cache.data[..., :filled, :], atol=1e-5, rtol=1e-5
        )


def test_a_stop_token_ends_the_text_in_the_middle_of_a_block(tiny_model):
    want, _ = plain(tiny_model, PROMPT, 30)
    for stop in set(want):
        ends = want.index(stop) + 1
        got, decoder, drafting = lossless(tiny_model, tiny_model.layers, PROMPT, 30, stops=(stop,), draft=6)
        assert got == want[:ends] and decoder.length == len(PROMPT) + ends - 1


@pytest.mark.parametrize("tokens", (0, 1, 2, 3, 9))
def test_no_more_tokens_and_slots_than_asked_for(tiny_model, tokens):
    """A block must fit into the cache that a plain run would have."""
    want, _ = plain(tiny_model, PROMPT, tokens)
    got, _, _ = lossless(tiny_model, tiny_model.layers, PROMPT, tokens, draft=7, max_len=len(PROMPT) + tokens)
    assert got == want and len(got) == tokens


def test_the_number_of_drafts_follows_the_acceptance(tiny_model):
    all_right = lossless(tiny_model, tiny_model.layers, PROMPT, 200)[2]
    none_right = lossless(tiny_model, noise(tiny_model), PROMPT, 200)[2]
    assert all_right.drafted / all_right.verifications > 4
    assert none_right.drafted / none_right.verifications < 1  # mostly plain steps, with a try now and then
    assert none_right.drafted > 5


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.5, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}],
    ids=str,
)
def test_sampled_tokens_have_the_backbones_distribution(settings):
    """Chi-square over 50,000 draws of the first token and, where the first draft was kept, of the second; the
    drafts come from quite another distribution."""
    generator = torch.Generator().manual_seed(5)
    backbone_logits = 2 * torch.randn(3, 8, generator=generator)
    river_logits = backbone_logits[:2] + torch.randn(2, 8, generator=generator)
    sampler = Sampler(seed=11, **settings)
    q, p = sampler.probabilities(river_logits), sampler.probabilities(backbone_logits)
    counts = torch.zeros(2, 8, dtype=torch.float64)
    drawn = [sampler.draw(row.expand(50_000, -1)).tolist() for row in q]
    for pair in zip(*drawn):
        drafts = [Draft(token, row, 0) for token, row in zip(pair, q)]
        accepted, token = verify(drafts, backbone_logits, sampler)
        for place, new in enumerate([*pair[:accepted], token][:2]):
            counts[place, new] += 1
    assert counts[0].sum() == 50_000 and counts[1].sum() > 10_000
    for row, wanted in zip(counts, p.double()):
        assert row[wanted == 0].sum() == 0
        possible = wanted > 0
        expected_counts = row.sum() * wanted[possible]
        chi_square = ((row[possible] - expected_counts) ** 2 / expected_counts).sum().item()
        assert chi_square < 24.3  # the 0.1% point at 7 degrees of freedom; fewer have a lower one


def test_a_draft_that_the_backbone_forbids_is_never_kept():
    """Where p and q have nothing in common, every token is drawn from p alone."""
    sampler = Sampler(temperature=1.0, seed=0)
    logits = torch.tensor([[0.0, 0.0, -1e9, -1e9]] * 2)
    q = torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert {verify([Draft(2, q, 0)], logits, sampler) for _ in range(200)} == {(0, 0), (0, 1)}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return load(write_tiny_checkpoint(tmp_path_factory.mktemp("lossless") / "tiny"), device="cpu", dtype="float32")


def text(run):
    return "".join(step.texts[0] for step in run)


def test_from_python_it_is_a_setting(llm):
    plain_run, run = (llm.generate("Hello, river", max_new_tokens=40, **s) for s in ({"tau": 1.0}, {"lossless": True}))
    assert text(plain_run) == text(run) and plain_run.tokens == run.tokens
    assert run.drafting.drafted > 0 and run.nbytes_per_step > 0
    accepted = [depth for depth in run.exit_layers if depth == 0]
    assert len(accepted) == run.drafting.accepted and len(run.exit_layers) == 39


def test_a_seed_gives_the_same_text_again(llm):
    settings = {"lossless": True, "temperature": 0.8, "seed": 4, "max_new_tokens": 30}
    assert text(llm.generate("Hello", **settings)) == text(llm.generate("Hello", **settings))


def test_a_chat_goes_on_after_any_interruption(llm):
    """Broken off in the middle of a block, the cache must not keep drafts that were never shown."""
    for shown in (1, 2, 3, 5, 8):
        answers = []
        for settings in ({"tau": 1.0}, {"lossless": True, "draft": 6}):
            chat = llm.chat(max_new_tokens=12, **settings)
            for number, _ in enumerate(chat.say("Hello"), 1):
                if number == shown:
                    break
            answers.append(text(chat.say("And then?")))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("calls", (1, 3, 6, 9, 14))
def test_a_chat_goes_on_after_ctrl_c_in_the_middle_of_a_block(llm, calls, monkeypatch):
    """Drafts that were never shown stayed in the cache, and the last shown token ran twice."""
    chat = llm.chat(max_new_tokens=12, lossless=True, draft=4)
    reply = chat.say("Hello")
    next(iter(reply))
    feed_forward, left = DecoderLayer.feed_forward, [calls]

    def interrupted(layer, x):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return feed_forward(layer, x)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DecoderLayer, "feed_forward", interrupted)
        list(reply)
    assert chat.decoder.tokens[0].tolist() == reply.prompt_ids[0] + reply.tokens[0][:-1]
    plain = llm.chat(max_new_tokens=12, tau=1.0)
    for number, _ in enumerate(plain.say("Hello"), 1):
        if number == len(reply.tokens[0]):
            break
    assert text(chat.say("And then?")) == text(plain.say("And then?"))


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"kv": "mask"}, "--kv"),
        ({"prefill": "river"}, "--prefill"),
        ({"exit_rule": "entropy"}, "--exit-layer"),
        ({"draft": -1}, "draft"),
        ({"tau": 0.9}, "no --tau"),
        ({"exit_layer": 5}, "exit layer 5"),
    ],
)
def test_what_cannot_be_lossless_is_refused(llm, settings, named):
    with pytest.raises(RiverError, match=named):
        llm.generate("Hello", lossless=True, **settings)
    with pytest.raises(RiverError, match="one prompt"):
        llm.generate(["Hello", "there"], lossless=True)


def test_drafts_are_read_with_a_4_bit_head_and_the_text_with_the_full_one(tmp_path):
    """In bfloat16 a kernel takes the head: only drafts may go through it."""
    llm = load(write_tiny_checkpoint(tmp_path / "tiny"), device="cpu")
    assert (
        isinstance(llm.model.lm_head, Linear) and llm.draft_head_and_choices[0].nbytes < 0.4 * llm.model.lm_head.nbytes
    )
    run = llm.generate("Hello", lossless=True, max_new_tokens=30)
    assert len(text(run)) and run.drafting.acceptance > 0
