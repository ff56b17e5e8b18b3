"""Text in, text and depths out: what README's Python lines promise."""

import dataclasses
import math
import time

import pytest

import river as river_package
from river import RiverError, load
from river.controller import Never


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    from conftest import write_tiny_checkpoint

    return load(write_tiny_checkpoint(tmp_path_factory.mktemp("llm") / "tiny"), device="cpu")


def finish(run):
    steps = list(run)
    return run, steps


def test_steps_add_up_to_the_run(llm):
    run, steps = finish(llm.generate("Hello, river", max_new_tokens=20, exit_layer=2))
    assert "".join(step.texts[0] for step in steps) == run.texts[0]
    assert [step.tokens[0] for step in steps] == run.tokens[0]
    assert [step.exit_layer for step in steps] == [run.prefill_exit_layer, *run.exit_layers]
    assert run.new_tokens == len(steps) and len(run.exit_layers) == len(steps) - 1
    assert run.mean_exit_layer == 2 and run.ttft_s > 0 and run.decode_tokens_per_s > 0
    stops = [t for t in run.tokens[0] if t not in llm.config.eos_token_ids]
    assert run.texts[0] == llm.tokenizer.decode(stops, skip_special=True)


def test_settings_are_those_of_the_readme(llm):
    defaults = river_package.Settings()
    assert (defaults.tau, defaults.max_new_tokens, defaults.temperature) == (0.5, 256, 0.0)


def test_two_prompts_one_after_the_other_do_not_see_each_other(llm):
    """A cache that survives the first prompt would change the second's answer."""
    first = finish(llm.generate("one", max_new_tokens=8))[0].tokens
    finish(llm.generate("something else entirely, and longer", max_new_tokens=8))
    assert finish(llm.generate("one", max_new_tokens=8))[0].tokens == first


def test_the_same_seed_gives_the_same_text_twice(llm):
    def draw(seed):
        return finish(llm.generate("one", max_new_tokens=12, temperature=1.0, seed=seed))[0].tokens

    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize("n", (0, 1, 2))
def test_statistics_of_almost_nothing(llm, n):
    """No division by zero, whatever there is nothing of."""
    run, steps = finish(llm.generate("one", max_new_tokens=n, exit_layer=1))
    assert len(steps) == run.new_tokens == n
    assert len(run.exit_layers) == max(0, n - 1)
    assert run.mean_exit_layer == (None if n == 0 else 1 if n > 1 else run.prefill_exit_layer)
    assert (run.ttft_s is None) == (n == 0) and (run.decode_tokens_per_s is None) == (n < 2)
    assert (run.nbytes_per_step is None) == (n < 2)


def test_a_deeper_exit_reads_more_bytes(llm):
    kv = llm.decoder(river_package.Settings(), 1, 8).kv
    sizes = [llm.step_nbytes(depth, kv, Never()) for depth in range(5)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[4]


def test_the_context_is_a_limit_and_not_an_overflow(llm):
    context = llm.config.max_position_embeddings
    run, _ = finish(llm.generate("a b c d " * 20, raw=True, max_new_tokens=10**9, exit_layer=0))
    if run.stop_reasons[0] == "context":
        assert len(run.prompt_ids[0]) + run.new_tokens == context + 1, "the last token is never run"
    with pytest.raises(RiverError, match=f"context is {context}"):
        llm.generate("a b c d " * context, raw=True)


@pytest.mark.parametrize("prompts", ("", [], ["a", ""]))
def test_an_empty_prompt_is_refused(llm, prompts):
    with pytest.raises(RiverError, match="empty"):
        llm.generate(prompts)


def test_an_empty_turn_of_a_chat_is_refused_and_the_chat_goes_on(llm):
    chat, control = (llm.chat(max_new_tokens=4, exit_layer=4) for _ in range(2))
    for each in (chat, control):
        finish(each.say("Hello"))
    with pytest.raises(RiverError, match="empty"):
        chat.say("")
    assert finish(chat.say("And then?"))[0].tokens == finish(control.say("And then?"))[0].tokens


@pytest.mark.parametrize(
    "prompt",
    ("x", " ", "\n", "1+1=", "a\r\nb\r\n", "  two spaces lead", "世界", "👩\u200d👧 e\u0301", "<|im_end|>", "\x00"),
)
@pytest.mark.parametrize("raw", (True, False), ids=("raw", "chat"))
def test_a_prompt_of_any_characters_reaches_the_model_whole_and_is_answered(llm, prompt, raw):
    """Nothing is stripped, normalised or, in a chat, taken for a special token that the user only wrote about."""
    run, steps = finish(llm.generate(prompt, raw=raw, max_new_tokens=3, exit_layer=1))
    assert prompt in llm.tokenizer.decode(run.prompt_ids[0]) and len(steps) == run.new_tokens > 0
    if not raw:
        usual = llm.generate("Hello", max_new_tokens=1).prompt_ids[0]
        special = set(llm.tokenizer.encode("<|im_start|><|im_end|>", specials=True))
        assert sum(i in special for i in run.prompt_ids[0]) == sum(i in special for i in usual)


@pytest.mark.parametrize(
    "kind", ("x" * 10**6, " " * 10**6, "\r\n" * 500_000, "世" * 333_333, "😀" * 250_000, "some words " * 90_000)
)
def test_a_prompt_of_a_megabyte_is_one_clear_error_within_seconds(llm, kind):
    started = time.process_time()
    with pytest.raises(RiverError, match="the prompt has [0-9]+ tokens, but the model's context is 512"):
        llm.generate(kind)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "bad",
    (
        {"tau": math.nan},
        {"exit_layer": 5},
        {"exit_layer": -1},
        {"prefill": "up"},
        {"temperature": -1.0},
        {"top_p": 2.0},
        {"top_k": -5},
        {"max_new_tokens": -1},
    ),
)
def test_bad_settings_are_refused(llm, bad):
    with pytest.raises(RiverError):
        llm.generate("one", **bad)


def test_a_batch_has_a_text_for_each_prompt(llm):
    prompts = ["one", "a much longer prompt than the others", "three"]
    run, steps = finish(llm.generate(prompts, max_new_tokens=9, exit_layer=1))
    assert all(len(step.texts) == len(step.tokens) == 3 for step in steps)
    for row in range(3):
        assert "".join(step.texts[row] for step in steps) == run.texts[row]
        assert all(run.stop_reasons)


def test_a_chat_continues_on_its_cache_as_if_it_had_been_one_prompt(llm):
    chat = llm.chat(max_new_tokens=6, exit_layer=4)
    ids = []
    for turn in ("Hello", "And then?", "Why"):
        reply, _ = finish(chat.say(turn))
        ids += reply.prompt_ids[0]
        whole = llm.model
        from river.controller import Never
        from river.decode import Decoder

        logits, _ = Decoder(whole, llm.river, Never(), max_len=512).prefill([ids])
        assert int(logits.argmax()) == reply.tokens[0][0]
        ids += reply.tokens[0][:-1]
    assert chat.decoder.length == len(ids)


def test_the_token_that_ended_an_answer_is_not_run_twice(llm, monkeypatch):
    """It is part of what the next turn begins with."""
    tokens = finish(llm.chat(max_new_tokens=6, exit_layer=4).say("Hello"))[0].tokens[0]
    config = dataclasses.replace(llm.config, eos_token_ids=frozenset(tokens[2:3]))
    monkeypatch.setattr(llm.model, "config", config)
    chat = llm.chat(max_new_tokens=6, exit_layer=4)
    first, _ = finish(chat.say("Hello"))
    assert first.stop_reasons == ["stop"]
    assert chat.say("And then?").prompt_ids == [llm.tokenizer.chat_turn("And then?")]


def test_an_answer_that_was_left_early_does_not_harm_the_next(llm):
    chat = llm.chat(max_new_tokens=50, exit_layer=4)
    next(iter(chat.say("Hello")))
    reply, _ = finish(chat.say("Go on"))
    assert reply.new_tokens > 0


def test_a_run_goes_once(llm):
    """A second loop over it used to run the prompt again, on a cache that was full of the first."""
    run, steps = finish(llm.generate("one", max_new_tokens=5, exit_layer=1))
    tokens = list(run.tokens[0])
    assert list(run) == [] and run.tokens[0] == tokens
    run = llm.generate("one", max_new_tokens=5, exit_layer=1)
    first = next(iter(run))
    assert [first.tokens[0]] + [step.tokens[0] for step in run] == tokens, "and may be left and taken up again"


def test_a_turn_that_was_never_begun_is_dropped(llm):
    """Two turns on one cache, the first not run: the second must not think that it was."""
    chat, control = (llm.chat(max_new_tokens=6, exit_layer=4) for _ in range(2))
    finish(chat.say("Hello"))
    finish(control.say("Hello"))
    chat.say("never iterated over")
    assert finish(chat.say("And then?"))[0].tokens == finish(control.say("And then?"))[0].tokens


def test_folders_that_are_no_checkpoint_are_named(tmp_path):
    with pytest.raises(RiverError, match="config.json"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("bad", ({"device": "warp"}, {"dtype": "int4"}))
def test_unknown_devices_and_dtypes_are_refused(tmp_path, bad):
    with pytest.raises(RiverError, match=next(iter(bad.values()))):
        load(tmp_path, **{"device": "cpu", **bad})


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path):
    """A tokenizer may have more tokens than the model, as long as a prompt does without them."""
    from conftest import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path / "small", vocab_size=500)
    llm = load(folder, device="cpu")
    with pytest.raises(RiverError, match="the model knows 500"):
        llm.generate("".join(map(chr, range(33, 500))), raw=True)


def test_settings_have_a_short_form():
    """What evaluate and analyze compare is written with the names of generate.py's switches."""
    parse = river_package.settings.parse_setting
    assert parse("kv=mask, tau=0.9") == river_package.Settings(kv="mask", tau=0.9)
    assert parse("exit-layer=3,prefill=exit", tau=0.7) == river_package.Settings(exit_layer=3, prefill="exit", tau=0.7)
    assert parse("backbone").exit_rule == "never"
    assert parse("full4bit").exit_layer == 0 and parse("full4bit").prefill == "river"


@pytest.mark.parametrize("text", ["", "tau", "tau=", "tau=x", "tau=nan", "depth=3", "tau=0.5,,", "exit-layer=1.5"])
def test_a_wrong_setting_is_named(text):
    with pytest.raises(river_package.RiverError, match="tau|depth|exit-layer|setting"):
        river_package.settings.parse_setting(text)
