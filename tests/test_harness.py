"""River under lm-evaluation-harness: what is scored, where texts stop, and that both agree with lm_eval's own model."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FIXTURES, write_tiny_checkpoint

from river import RiverError, harness
from river.decode import Decoder
from river.harness import Scorer, cut, windows
from river.tokenizer import load_tokenizer

NOT_INSTALLED = "lm-evaluation-harness is not installed: pip install 'lm_eval[hf]'"
TEXT = "Most tokens are easy. River lets each token leave the backbone after any layer; a copy takes it the rest."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("harness") / "tiny")


@pytest.fixture(scope="module")
def scorer(folder):
    return Scorer(str(folder), dtype="float32", device="cpu", max_length=64)


@pytest.fixture(scope="module")
def exiting(folder):
    return Scorer(str(folder), dtype="float32", device="cpu", exit_layer=1, prefill="backbone")


def whole_log_probs(scorer, ids):
    """Log-probabilities [T - 1] of ids[1:], from one pass of the backbone over all of them."""
    decoder = scorer.llm.decoder(harness.parse_setting("backbone"), 1, len(ids))
    h, _ = decoder.forward(torch.tensor([ids]), decoder.prefill_rule)
    log_probs = scorer.llm.model.logits(h)[0].log_softmax(-1)
    return log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("context, continuation", ((TEXT[:30], TEXT[30:]), (TEXT, " the"), ("", "Hello there")))
def test_a_score_is_the_sum_of_the_continuations_log_probabilities(folder, context, continuation):
    scorer = Scorer(str(folder), "backbone", dtype="float32", device="cpu")
    prompt, ids = scorer.encode_pair(context, continuation)
    expected = whole_log_probs(scorer, prompt + ids)[-len(ids) :].sum().item()
    assert scorer.loglikelihood(context, continuation)[0] == pytest.approx(expected, abs=1e-4)


def test_every_scored_token_but_the_first_exits(exiting, monkeypatch):
    """A continuation scored in one pass, as other models do it, would measure the backbone."""
    depths = []
    descend = Decoder.descend

    def noted(self, h, *args):
        result = descend(self, h, *args)
        depths.append((h.shape[1], result[1]))
        return result

    monkeypatch.setattr(Decoder, "descend", noted)
    prompt, ids = exiting.encode_pair(TEXT[:30], TEXT[30:])
    before = len(exiting.exit_layers)
    exiting.score(prompt, ids)
    assert depths == [(len(prompt), 4)] + [(1, 1)] * (len(ids) - 1)
    assert exiting.exit_layers[before:] == [1] * (len(ids) - 1)


def test_the_setting_changes_the_score(folder, exiting):
    backbone = Scorer(str(folder), "backbone", dtype="float32", device="cpu")
    assert abs(backbone.loglikelihood(TEXT[:30], TEXT[30:])[0] - exiting.loglikelihood(TEXT[:30], TEXT[30:])[0]) > 0.01


def test_greedy_is_what_would_have_been_generated(exiting):
    run = exiting.llm.generate(TEXT[:30], raw=True, exit_layer=1, prefill="backbone", max_new_tokens=5)
    tokens = [token for step in run for token in step.tokens]
    prompt = run.prompt_ids[0]
    assert exiting.score(prompt, tokens)[1]
    for wrong in (0, len(tokens) - 1):
        assert not exiting.score(prompt, [*tokens[:wrong], tokens[wrong] + 1, *tokens[wrong + 1 :]])[1]


def test_options_of_one_token_share_their_prefill(exiting, monkeypatch):
    prompt, other = exiting.encode(TEXT), exiting.encode(TEXT[:40])
    alone = [exiting.score(ids, [token]) for token in (5, 6) for ids in (other, prompt)]
    monkeypatch.setattr(harness, "teacher_force", None)
    assert [exiting.score(prompt, [6]), exiting.score(prompt, [5])] == [alone[3], alone[1]]
    with pytest.raises(TypeError):
        exiting.score(other, [5])  # no other question may get these logits


def test_spaces_at_the_contexts_end_belong_to_the_continuation(scorer):
    """Encoded apart, "is " and "Paris" are other tokens than the model ever saw."""
    assert scorer.encode_pair("The capital is ", "Paris") == scorer.encode_pair("The capital is", " Paris")
    prompt, ids = scorer.encode_pair("The capital is", " Paris")
    assert prompt + ids == scorer.llm.tokenizer.encode("The capital is Paris")
    assert scorer.encode_pair(" ", "Paris") == ([scorer.prefix_id], scorer.encode(" Paris"))


def test_an_empty_context_is_the_prefix_and_never_twice(scorer):
    prefix = scorer.llm.tokenizer.decode([scorer.prefix_id])
    ids = scorer.encode("Hello")
    assert scorer.encode_pair("", "Hello") == scorer.encode_pair("", f"{prefix}Hello") == ([scorer.prefix_id], ids)


def test_bos_stands_once_in_front(tmp_path):
    scorer = Scorer(str(write_tiny_checkpoint(tmp_path, tokenizer="llama3_like", vocab_size=2048)), device="cpu")
    bos_id, bos = scorer.llm.tokenizer.bos_id, "<|begin_of_text|>"
    assert bos_id is not None and scorer.prefix_id == bos_id
    for text in ("Hello", f"{bos}Hello"):
        assert scorer.encode(text).count(bos_id) == 1 and scorer.encode(text)[0] == bos_id
        prompt, ids = scorer.encode_pair(text, " there")
        assert prompt[0] == bos_id and bos_id not in ids
    assert scorer.encode_pair("", "Hello")[1] == scorer.encode("Hello")[1:]


def test_a_long_context_loses_its_beginning(scorer):
    ids = scorer.encode(TEXT * 5)[:100]
    assert scorer.score(ids[:90], ids[90:]) == scorer.score(ids[35:90], ids[90:]), "64 inputs and the last target"
    assert scorer.score(ids[:90], ids[90:]) != scorer.score(ids[36:90], ids[90:])


@pytest.mark.parametrize("n, reason", ((0, "0 tokens"), (65, "65 tokens")))
def test_a_continuation_that_cannot_be_scored_is_refused(scorer, n, reason):
    """An empty one would win every multiple choice with probability 1."""
    with pytest.raises(RiverError, match=reason):
        scorer.score([5], [5] * n)


def test_scores_that_are_no_numbers_are_refused(scorer, monkeypatch):
    monkeypatch.setattr(harness, "teacher_force", lambda *args: iter([(torch.full((1024,), math.nan), 4)]))
    with pytest.raises(RiverError, match="finite"):
        scorer.score([5, 6, 7], [5])
    scorer.latest = None, None


def test_windows_score_each_token_once_with_the_most_context():
    assert list(windows(list(range(10)), -1, 4)) == [
        ([-1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(windows([], -1, 4)) == []


def test_rolling_scores_the_whole_text(scorer):
    ids = [scorer.prefix_id, *scorer.encode(TEXT[:60])]
    assert len(ids) <= 64
    backbone = whole_log_probs(scorer, ids).sum().item()
    scorer.settings = harness.parse_setting("backbone")
    assert scorer.loglikelihood_rolling(TEXT[:60]) == pytest.approx(backbone, abs=1e-3)
    assert scorer.loglikelihood_rolling("") == 0.0


def test_the_earliest_stop_string_cuts():
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one two", ["", "x"]) == "one two"
    assert cut("two", ["two"]) == ""


def generated(scorer, **gen_kwargs):
    return scorer.generate_until(TEXT[:30], {"until": [], "max_gen_toks": 12, **gen_kwargs})


def test_generation_ends_at_a_stop_string_at_once(exiting):
    before = len(exiting.exit_layers)
    whole = generated(exiting)
    steps = len(exiting.exit_layers) - before
    stop = whole[len(whole) // 3 : len(whole) // 3 + 2]
    assert generated(exiting, until=stop) == generated(exiting, until=[stop, "\0"]) == whole.split(stop)[0]
    assert len(exiting.exit_layers) - before - steps < 2 * steps - 4, "it went on after the stop string"


def test_a_special_tokens_name_stops_too(exiting):
    """Its text is never in the answer, so that looking there would miss it."""
    run = exiting.llm.generate(TEXT[:30], raw=True, exit_layer=1, prefill="backbone", max_new_tokens=12)
    tokens, texts = zip(*[(step.tokens[0], run.texts[0]) for step in run])
    name = "<stop>"
    token = SimpleNamespace(id=tokens[4], content=name, special=True)
    exiting.llm.tokenizer.added[name] = token
    try:
        assert generated(exiting, until=[name]) == texts[tokens.index(tokens[4])]
    finally:
        del exiting.llm.tokenizer.added[name]


def test_a_long_prompt_leaves_room_for_the_answer(scorer, monkeypatch):
    prompts = []
    generation = harness.Generation
    monkeypatch.setattr(
        harness, "Generation", lambda llm, ids, *args: prompts.append(ids) or generation(llm, ids, *args)
    )
    scorer.generate_until(TEXT * 5 + " end", {"max_gen_toks": 10})
    assert prompts == [[scorer.encode(TEXT * 5 + " end")[-54:]]]
    with pytest.raises(RiverError, match="no room"):
        scorer.generate_until("x", {"max_gen_toks": 64})


@pytest.mark.parametrize(
    "gen_kwargs, temperature",
    (
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.2, "top_p": 0.9, "top_k": 5}, 0.2),
    ),
)
def test_sampling_is_what_the_task_asks_for(scorer, gen_kwargs, temperature):
    stops, settings = scorer.generation_settings({"until": "Q:", "num_beams": 1, **gen_kwargs})
    assert stops == ["Q:"] and settings.temperature == temperature and settings.max_new_tokens == 256
    assert (settings.top_p, settings.top_k) == (gen_kwargs.get("top_p"), gen_kwargs.get("top_k"))


def test_a_seed_repeats_a_run_but_not_a_sample(folder):
    """pass@k over k equal samples would be pass@1."""

    def samples(seed):
        scorer = Scorer(str(folder), device="cpu", seed=seed)
        return [generated(scorer, temperature=1.0) for _ in range(2)]

    assert samples(1) == samples(1) != samples(2)
    assert len(set(samples(1))) == 2


def test_what_generation_cannot_do_is_refused_by_name(scorer):
    with pytest.raises(RiverError, match="num_beams=4"):
        scorer.generation_settings({"num_beams": 4})


CHATS = (
    ("smol_like", "chatml"), ("qwen_like", "qwen3"), ("llama3_like", "llama3.2"), ("spm_llama2_like", "llama2"),
    ("spm_llama2_like", "mistral-v1"), ("spm_llama2_like", "zephyr"), ("tekken_like", "ministral3"), ("phi4_like", "phi"),
)  # fmt: skip


@pytest.mark.parametrize("folder, chat_format", CHATS)
def test_a_chat_as_text_is_the_chat_as_ids(folder, chat_format):
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / folder, chat_format)
    scorer = object.__new__(Scorer)  # a chat needs no model
    scorer.llm = SimpleNamespace(tokenizer=tokenizer)
    talk = [{"role": role, "content": f"{role} says x"} for role in ("system", "user", "assistant", "user")]
    ids = tokenizer.chat_prompt(talk)
    bos = [tokenizer.bos_id] if chat_format == "zephyr" else []  # which the template leaves to the tokenizer
    assert scorer.encode(scorer.chat_text(talk)) == bos + ids
    begun = scorer.chat_text([*talk, {"role": "assistant", "content": "The answer is"}], add_generation_prompt=False)
    space = " " * (chat_format in ("llama2", "mistral-v1"))  # which these put before every answer
    assert begun == f"{scorer.chat_text(talk)}{space}The answer is"


@pytest.mark.parametrize(
    "model_args, setting",
    (
        ({}, harness.Settings()),
        ({"setting": "full4bit"}, harness.parse_setting("full4bit")),
        (
            {"tau": 0.9, "kv": "mask", "setting": "temperature=0.5"},
            harness.parse_setting("temperature=0.5,tau=0.9,kv=mask"),
        ),
        ({"exit-layer": 2}, harness.Settings(exit_layer=2)),
    ),
)
def test_a_setting_is_written_as_lm_eval_can_pass_it(folder, model_args, setting):
    assert Scorer(str(folder), device="cpu", **model_args).settings == setting


@pytest.mark.parametrize(
    "model_args, reason",
    (
        ({"taw": 0.9}, "'taw' is not known.*tau"),
        ({"pretrained": None}, "pretrained=FOLDER is missing"),
        ({"tau": "high"}, "tau cannot be 'high'"),
        ({"exit_layer": 9}, "0 to 4"),
        ({"max_length": 10_000}, "from 2 to 512"),
    ),
)
def test_a_mistake_in_model_args_is_named(folder, model_args, reason):
    with pytest.raises(RiverError, match=reason):
        Scorer(**{"pretrained": str(folder), "device": "cpu", **model_args})


def test_without_lm_eval_one_line_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(harness, "LM", None)
    assert harness.main([]) == 2
    assert capsys.readouterr().err == "river.harness: lm-evaluation-harness is not installed: pip install lm_eval\n"


# With lm_eval


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


@pytest.mark.parametrize("model", ("tiny", pytest.param("default_model_folder", marks=pytest.mark.slow)))
def test_the_backbone_agrees_with_lm_evals_own_model(folder, model, request):
    pytest.importorskip("lm_eval", reason=NOT_INSTALLED)
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=NOT_INSTALLED)
    args = {"pretrained": str(folder if model == "tiny" else request.getfixturevalue(model)), "max_length": 48}
    args |= {"dtype": "float32", "device": "cpu"}
    ours = harness.RiverLM(setting="backbone", **args)
    peer = huggingface.HFLM(batch_size=1, **args)
    pairs = requests(
        "loglikelihood", (TEXT[:30], TEXT[30:]), (TEXT, " the"), (TEXT, " a"), ("is ", "Paris"), ("", "Hello"),
        (TEXT * 4, " it leaves"), ("", "<|im_start|>user"), ("<|im_start|>user\n", "Straße naß"),
    )  # fmt: skip
    for mine, theirs in zip(ours.loglikelihood(pairs), peer.loglikelihood(pairs)):
        assert mine == (pytest.approx(theirs[0], abs=1e-3), theirs[1])
    texts = requests("loglikelihood_rolling", (TEXT,), (TEXT * 4,), ("Hi",))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(peer.loglikelihood_rolling(texts), abs=1e-2)
    tasks = [({"until": ["e", "\n"]}), ({"until": [], "do_sample": False}), ({"until": "."})]
    prompts = requests("generate_until", *[(t, {**k, "max_gen_toks": 16}) for k in tasks for t in (TEXT, TEXT * 4)])
    assert ours.generate_until(prompts) == peer.generate_until(prompts)


TASKS = {
    "river_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    },
    "river_words": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
    "river_text": {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "word_perplexity"}]},
}


def write_tasks(tmp_path):
    docs = [{"question": q, "choices": [" one", " two two"], "answer": 1} for q in ("How many?", "Which of them?")]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
            "test_split": "test",
            "doc_to_text": "" if name == "river_text" else "{{question}}",
            "doc_to_target": "{{question}}" if name == "river_text" else "{{answer}}",
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML


@pytest.mark.parametrize("device", ("", ",device=cpu"))
def test_the_command_line_runs_tasks_of_every_kind(folder, device, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason=NOT_INSTALLED)
    monkeypatch.setattr(sys, "argv", ["restored"])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_tasks(tmp_path)
    command = ["--model_args", f"pretrained={folder},exit_layer=1{device}", "--tasks", ",".join(TASKS)]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json"), "--apply_chat_template"]
    assert harness.main(command) == 0
    results = json.loads(next(tmp_path.glob("out*.json")).read_text())
    assert set(results["results"]) == set(TASKS)
    assert 0 <= results["results"]["river_choice"]["acc,none"] <= 1
    assert results["config"]["mean_exit_layer"] == 1 and results["config"]["river_setting"]["exit_layer"] == 1
    assert results["chat_template"] == "chatml"


def test_the_command_line_names_a_mistake_in_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason=NOT_INSTALLED)
    monkeypatch.setattr(sys, "argv", ["restored"])
    write_tasks(tmp_path)
    command = ["--model_args", "pretrained=/nowhere", "--tasks", "river_text", "--include_path", str(tmp_path)]
    assert harness.main(command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("river.harness: cannot read /nowhere/config.json")
