"""The analyses: each number against a computation of its own, on the tiny model."""

import json
import math
import subprocess
import sys

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, write_tiny_checkpoint

from river import analyze, pareto, probe
from river.agreement import BACKBONE, TextAgreement, agreement, reference_texts
from river.checkpoint import load_model
from river.decode import teacher_force
from river.drawing import DRAWINGS
from river.exits import LINEARS
from river.files import SafetensorsFile, save_safetensors
from river.llm import RiverLLM, load
from river.quantize import QUANTIZERS, quantize
from river.settings import Settings

PROMPTS = ["The river rises in the hills.", "Why is the sky blue?", "Seven, eight, nine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("analyze") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    return load(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def texts(llm):
    return reference_texts(llm, PROMPTS, 8)


@pytest.fixture(scope="module")
def without_error(llm):
    """A river that is the backbone itself."""
    return RiverLLM(llm.model, llm.model.layers, llm.tokenizer)


def load_tensors(folder):
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: file.tensor(name).clone() for name in file.names()}


def naive_states(folder, ids):
    """Hidden states [L+1, D] of the last of `ids`: before the first layer and after each, by naive.py.

    naive.py gives logits only: with the identity for a head, they are the states but for their length.
    """
    tensors = load_tensors(folder)
    states = [tensors["model.embed_tokens.weight"][ids[-1]].double()]
    identity = {"lm_head.weight": torch.eye(TINY["hidden_size"])}
    for depth in range(1, TINY["num_hidden_layers"] + 1):
        states.append(naive.logits(tensors | identity, TINY | {"num_hidden_layers": depth}, ids)[-1])
    return torch.stack(states)


def test_similarity_is_the_cosine_of_a_naive_forward(folder, llm, texts):
    prompt, tokens, number = texts[0][0][:4], texts[0][1], 2  # a few positions, since naive.py is slow
    got = probe.layer_similarities(llm, [(prompt, tokens)])
    assert got.shape == (4, len(tokens) - 1)
    states = naive_states(folder, prompt + tokens[: number + 1])
    want = F.cosine_similarity(states[:-1], states[1:], dim=-1)
    torch.testing.assert_close(got[:, number], want, atol=1e-4, rtol=0)


def test_kv_error_is_none_where_the_river_is_the_backbone(without_error, texts):
    cosines = probe.kv_cosines(without_error, texts, [0, 2])
    assert cosines.shape == (2, 4, 2)
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-6, rtol=0)


def test_kv_error_is_the_cosine_of_what_two_generations_leave_in_the_cache(llm, texts):
    """Token by token through `teacher_force`, vector by vector: every depth in its place, nothing of the prompt."""
    caches = {}
    for depth in (0, 2, 4):
        for number, (prompt, tokens) in enumerate(texts):
            decoder = llm.decoder(Settings(exit_layer=depth, prefill="backbone"), 1, 256)
            decoder.prefill([prompt])
            for token in tokens[:-1]:
                decoder.decode_one_token(torch.tensor([token]))
            caches[depth, number] = decoder.cache.data[:, :, 0, :, len(prompt) : len(prompt) + len(tokens) - 1]
    got = probe.kv_cosines(llm, texts, [0, 2])
    for place, depth in enumerate((0, 2)):
        for layer in range(4):
            for part in (0, 1):
                values = [
                    F.cosine_similarity(caches[depth, n][layer, part], caches[4, n][layer, part], dim=-1).flatten()
                    for n in range(len(texts))
                ]
                assert got[place, layer, part].item() == pytest.approx(torch.cat(values).mean().item(), abs=1e-5)
    assert got[1, 3].max() < 0.9999 < got[1, :2].min()


def test_correlation_is_of_the_similarity_with_the_last_v_of_a_token_that_alone_leaves_there(llm, texts):
    similarities, cosines = probe.similarities_and_values(llm, texts)
    prompt, tokens = texts[1]
    steps_before, number, depth = len(texts[0][1]) - 1, 3, 2
    ids = torch.tensor([prompt + tokens[:number]])
    values = {}
    for leaves_at in (depth, 4):
        decoder = llm.decoder(BACKBONE, 1, 256)
        decoder.prefill(ids.tolist())
        decoder.forward(
            torch.tensor([tokens[number : number + 1]]), llm.decoder(Settings(exit_layer=leaves_at), 1, 1).exit_rule
        )
        values[leaves_at] = decoder.cache.data[3, 1, 0, :, ids.shape[1]]
    want = F.cosine_similarity(values[depth], values[4], dim=-1).mean().item()
    assert cosines[steps_before + number, depth - 1].item() == pytest.approx(want, abs=1e-5)
    torch.testing.assert_close(similarities, probe.layer_similarities(llm, texts)[:-1].T, atol=1e-5, rtol=0)


def test_pearson_by_hand():
    x, y = torch.tensor([[1.0], [2.0], [3.0], [6.0]]).double(), torch.tensor([[2.0], [1.0], [4.0], [5.0]]).double()
    # means 3 and 3; products 2 + 2 + 0 + 6 = 10; squares 4 + 1 + 0 + 9 = 14 and 1 + 4 + 1 + 4 = 10
    assert probe.pearson(x, y).item() == pytest.approx(10 / math.sqrt(14 * 10))
    assert probe.pearson(x, -2 * x + 5).item() == pytest.approx(-1)


def generated(llm, prompt, exit_layer, n):
    """What the river writes: the text of a real generation at a fixed depth."""
    run = llm.generate(prompt, exit_layer=exit_layer, prefill="backbone", max_new_tokens=n)
    return [step.tokens[0] for step in run]


def test_optimal_depths_are_those_at_which_generation_gives_the_backbones_tokens(llm):
    """The first decode step has nothing but the backbone's cache before it, in a generation too."""
    prompts = [f"{word} and then" for word in ("ten", "eleven", "blue", "a river", "hills", "seven", "tree", "sky")]
    texts = reference_texts(llm, prompts, 5)
    depths, sequences = probe.token_depths(llm, texts), probe.sequence_depths(llm, texts)
    assert len(depths) == sum(len(tokens) - 1 for _, tokens in texts)
    assert len(set(depths)) > 1 and len(set(sequences)) > 1, "a constant would pass"
    first = 0
    for prompt, (_, tokens), sequence in zip(prompts, texts, sequences):
        right = [generated(llm, prompt, d, 2)[1] == tokens[1] for d in range(5)]
        assert depths[first] == right.index(True)
        same = [generated(llm, prompt, d, 5) == tokens for d in range(5)]
        assert sequence == same.index(True)
        first += len(tokens) - 1


def test_agreement_is_whole_with_the_backbone_and_counts_by_hand_elsewhere(llm, texts):
    settings = {"never": Settings(tau=1, prefill="backbone"), "river": Settings(exit_layer=1, prefill="backbone")}
    for (prompt, tokens), row in zip(texts, agreement(llm, settings, texts)):
        never, river = row["never"], row["river"]
        assert (sum(never.hits), never.tokens, sum(never.kls)) == (len(tokens), len(tokens), 0)
        assert never.exit_layers == [4] * (len(tokens) - 1) and river.exit_layers == [1] * (len(tokens) - 1)
        logits = {}
        for name, setting in settings.items():
            decoder = llm.decoder(setting, 1, 256)
            first, _ = decoder.prefill([prompt])
            rest = [decoder.decode_one_token(torch.tensor([token]))[0] for token in tokens[:-1]]
            logits[name] = torch.cat([first, *rest]).double()
        assert sum(river.hits) == (logits["river"].argmax(-1) == torch.tensor(tokens)).sum()
        p, q = logits["never"].softmax(-1), logits["river"].softmax(-1)
        assert sum(river.kls) == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-3, abs=1e-5)


def score(*texts):
    return [TextAgreement([True] * hits, 10, [kl], depths, 1.0) for hits, kl, depths in texts]


def test_tau_against_fixed_depths_by_hand():
    """Mean depth 2.25: three quarters of depth 2 and one of depth 3, text by text."""
    own = score((9, 1.0, [2, 2]), (8, 3.0, [2, 3]))
    fixed = {2: score((8, 2.0, [2, 2]), (7, 4.0, [2, 2])), 3: score((10, 0.0, [3, 3]), (7, 4.0, [3, 3]))}
    result = pareto.compare_with_fixed(own, fixed)
    assert result["exit_layer"] == 2.25
    assert result["agreement"] == 85 and result["fixed_agreement"] == pytest.approx(100 * (8.5 + 7) / 20)
    mean, low, high = result["agreement_difference"]
    assert (mean, low, high) == pytest.approx((7.5, 5.0, 10.0))  # the two texts: 9 - 8.5 and 8 - 7 of 10
    assert result["kl_difference"][0] == pytest.approx((4 - 5.5) / 20)
    assert list(pareto.at_neighbouring_depths([own])) == [("fixed depth", 2), ("fixed depth", 3)]


def test_rounds_are_interleaved_on_the_same_tokens_and_the_first_is_dropped(llm, texts, monkeypatch):
    calls = []

    def measure(llm, settings, prompt, steps, given):
        calls.append((settings.tau, tuple(prompt), tuple(given.tolist()), steps))
        return {"step_s": float(len(calls))}

    monkeypatch.setattr(pareto, "measure", measure)
    settings = {"a": Settings(tau=0.1), "b": Settings(tau=0.2)}
    medians = pareto.interleaved(llm, settings, texts, 3)
    assert [tau for tau, *_ in calls] == [0.1, 0.2] * 4
    assert all(one[1:] == other[1:] for one, other in zip(calls[::2], calls[1::2]))
    assert {given for _, _, given, _ in calls} == {tuple(tokens) for _, tokens in texts}
    assert medians == {"a": {"step_s": 5.0}, "b": {"step_s": 6.0}}


def run_json(capsys, *args):
    assert analyze.main([*map(str, args), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert sum(line.startswith("|") for line in lines) == 2 + len(result["rows"])
    return result, lines


def test_pareto_and_strategies(folder, capsys):
    """Every strategy at every tau; a tau that never exits is the backbone; one line answers for each tau."""
    few = [folder, "--text", folder / "prompts.txt", "--max-new-tokens", "6", "--rounds", "1"]
    (folder / "prompts.txt").write_text("ten, eleven\n\nWhy is the sky blue?\n")
    result, lines = run_json(capsys, "pareto", *few, "--tau", "1", "--tau", "0.3")
    rows = {(row["group"], row["value"]): row for row in result["rows"]}
    assert result["texts"] == 2
    for kv in ("share", "recompute", "propagate", "mask", "monotonic"):
        assert rows[kv, 1]["agreement"] == 100 and rows[kv, 1]["kl"] == 0 and rows[kv, 1]["exit_layer"] == 4
        assert rows[kv, 0.3]["exit_layer"] < 4 and rows[kv, 0.3]["kl"] > 0
    assert rows["full 4-bit", None]["exit_layer"] == 0
    assert [line.split(":")[0] for line in lines if line.startswith("tau")] == ["tau 1.0", "tau 0.3"]
    assert result["comparisons"][0]["agreement_difference"] == [0, 0, 0]

    result, _ = run_json(capsys, "strategies", *few)
    assert [(row["group"], row["tau"]) for row in result["rows"][2:4]] == [("share", 0.5), ("share", 0.9)]
    assert len(result["rows"]) == 2 + 5 * 2 and all(row["ms_per_token"] > 0 for row in result["rows"])


def test_quantizers_are_compared_on_the_same_texts(folder, llm, capsys):
    """Against the same river read by hand; more bits err less; what is built for this is not saved."""
    result, lines = run_json(capsys, "quantizers", folder, "--max-new-tokens", "6", "--device", "cpu")
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == list(QUANTIZERS) and not list(folder.glob("river-awq*"))
    assert rows["best"]["weight_error"] < rows["hqq"]["weight_error"] < rows["rtn"]["weight_error"]
    assert rows["awq"]["weight_error"] is None and "| awq |  |" in "\n".join(lines)
    assert rows["hqq"]["kl_difference"] == [0, 0, 0]
    assert rows["rtn"]["kl_difference"][0] == pytest.approx(rows["rtn"]["kl"] - rows["hqq"]["kl"])
    whole = load(folder, device="cpu", quantizer="rtn")
    texts = reference_texts(whole, analyze.PROMPTS, 6)
    assert pareto.summary(pareto.quality(whole, {0: pareto.FULL_4_BIT}, texts)[0])["kl"] == rows["rtn"]["kl"]
    eight, _ = run_json(capsys, "quantizers", folder, "--max-new-tokens", "6", "--bits", "8", "--quantizer", "hqq")
    assert eight["rows"][0]["weight_error"] < rows["best"]["weight_error"] / 5
    assert eight["rows"][0]["kl"] < rows["best"]["kl"] / 5
    for model, dtype in ((llm.model, torch.float32), (whole.model, torch.bfloat16)):
        assert probe.weight_error(model, "rtn", 4) == pytest.approx(naive_error(model, "rtn", dtype), rel=1e-5)
    assert naive_error(whole.model, "rtn", torch.bfloat16) != pytest.approx(
        naive_error(whole.model, "rtn", torch.float32), rel=2e-5
    ), "the check above tells stored scales from others"


def naive_error(model, quantizer, dtype):
    matrices = [matrix for layer in model.layers for name in LINEARS for matrix in getattr(layer, name).weights]
    pairs = [
        (matrix.double(), quantize(matrix, quantizer, 64, dtype=dtype).dequantize().double()) for matrix in matrices
    ]
    wrong, whole = (torch.cat([t.flatten() for t in column]) for column in zip(*((b - a, a) for a, b in pairs)))
    return (wrong.norm() / whole.norm()).item()


def test_lossless_says_where_a_text_differs_and_how_near_a_tie_it_was(folder, llm, texts, capsys):
    result, lines = run_json(capsys, "lossless", folder, "--max-new-tokens", "8", "--dtype", "float32")
    assert all(row["equal"] and row["differs_at"] is None and row["tokens"] == 8 for row in result["rows"])
    assert lines[-2].startswith(f"{len(analyze.PROMPTS)} of {len(analyze.PROMPTS)} texts are the backbone's own")
    (prompt, tokens), *_ = texts
    other = [*tokens[:3], tokens[3] + 1, *tokens[4:]]  # not what the backbone would write at 3
    found = probe.lossless_against_plain(llm, prompt, other)
    logits = [logits for logits, _ in teacher_force(llm.decoder(BACKBONE, 1, 200), prompt, tokens[:4])][3]
    assert not found["equal"] and found["differs_at"] == 3
    assert found["lead"] == pytest.approx(float(logits.sort().values[-1] - logits.sort().values[-2]))


def gigabytes(model, *layers):
    """Of what is really there: a tensor that several share counts once."""
    tensors = [model.embed_tokens, *model.lm_head.tensor_list(), model.norm.weight]
    tensors += [tensor for layer in layers for tensor in layer.tensor_list()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) / 1e9


@pytest.mark.parametrize("tied", (True, False))
def test_memory_is_what_a_model_its_river_and_its_cache_take(tmp_path, tied, capsys):
    folder = write_tiny_checkpoint(tmp_path / "tiny", tie_word_embeddings=tied, dtype=torch.bfloat16)
    if not tied:
        tensors = load_tensors(folder)
        save_safetensors(
            folder / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
        )
    result, _ = run_json(capsys, "memory", folder, "--offload", "1")
    llm = load(folder, device="cpu")
    cache = llm.decoder(BACKBONE, 1, llm.config.context).cache.data.nbytes / 1e9
    assert [row["positions"] for row in result["rows"]] == [0, 512]
    row = result["rows"][-1]
    assert row["cache"] == pytest.approx(cache)
    assert row["backbone"] == pytest.approx(gigabytes(llm.model, *llm.model.layers) + cache)
    assert row["full_4_bit"] == pytest.approx(gigabytes(llm.model, *llm.river) + cache)
    assert row["river"] == pytest.approx(gigabytes(llm.model, *llm.river, llm.model.layers[0]) + cache)
    assert row["river_all"] == pytest.approx(gigabytes(llm.model, *llm.river, *llm.model.layers) + cache)
    assert result["rows"][0]["river"] == pytest.approx(row["river"] - cache)


@pytest.mark.parametrize("family", ("llama_bias", "qwen2", "qwen3"))
def test_memory_counts_the_biases_and_norms_of_a_family(family, family_folder, capsys):
    folder = family_folder(family)
    result, _ = run_json(capsys, "memory", folder, "--offload", "0")
    model = load_model(folder, torch.bfloat16)
    assert result["rows"][0]["backbone"] == pytest.approx(gigabytes(model, *model.layers))


def test_memory_of_the_papers_model(capsys):
    """Llama-3.1-8B at 64K: the paper's backbone is 22.96 GiB, and so many bytes are 24.65 GB."""
    result, _ = run_json(capsys, "memory", "--shape", "llama-3.1-8b")
    rows = {row["positions"]: row for row in result["rows"]}
    assert list(rows) == [0, 1024, 4096, 16384, 65536, 131072]
    assert rows[65536]["backbone"] == pytest.approx(22.96 * 2**30 / 1e9, rel=0.01)
    assert rows[0]["backbone"] == pytest.approx(2 * 8.03, rel=0.01)


QUICK = {what: ["--max-new-tokens", "4"] for what in analyze.LINES} | {"memory": []}
QUICK |= {what: QUICK[what] + ["--tau", "0.3", "--rounds", "1"] for what in ("strategies", "pareto")}


@pytest.mark.parametrize("what", DRAWINGS)
def test_figures_are_small_and_the_same_every_time(what, folder, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed, and is not needed but for figures")
    from river.drawing import draw

    result, _ = run_json(capsys, what, folder, *QUICK[what], "--figure", tmp_path / "a.svg")
    draw(result, tmp_path / "b.svg")
    svg = (tmp_path / "a.svg").read_bytes()
    assert svg == (tmp_path / "b.svg").read_bytes()
    assert len(svg) < 60_000 and b"<text" in svg and b"<dc:date>" not in svg


def test_the_figure_of_a_deep_model_is_small_too(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed, and is not needed but for figures")
    from river.drawing import draw

    depths = [0, 1, 2, 4, 8, 16]
    values = torch.rand(40, 2, len(depths), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"layer": layer, "k": k, "v": v} for layer, (k, v) in enumerate(values, 1)]
    draw({"what": "kv-error", "exit_layers": depths, "rows": rows}, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 60_000


def test_an_output_that_cannot_be_written_is_one_line(folder):
    command = [sys.executable, "-m", "river.analyze", "memory", str(folder)]
    for where, status in (("/dev/full", 2), ("/dev/null", 0)):
        with open(where, "w") as out:
            result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert result.returncode == status and "Traceback" not in result.stderr, result.stderr
        assert ("cannot write the output" in result.stderr) is (status == 2)


def test_without_matplotlib_a_figure_is_refused_before_anything_is_measured(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(analyze, "load", lambda *args, **kwargs: pytest.fail("the measurement has begun"))
    assert analyze.main(["similarity", str(folder), "--figure", str(tmp_path / "out.svg")]) == 2
    assert capsys.readouterr().err == (
        "river.analyze: matplotlib is not installed: pip install matplotlib, or leave out --figure\n"
    )


@pytest.mark.parametrize(
    "args, said",
    (
        (["similarity", "--text", "no/such/file"], "no/such/file"),
        (["similarity", "no/such/model"], "no folder 'no/such/model'"),
        (["similarity", "--figure", "out.png"], ".svg"),
        (["similarity", "--figure", "no/such/folder/out.svg"], "folder"),
        (["memory", "--shape", "llama-3.2-1b", "--offload", "17"], "17"),
    ),
)
def test_mistakes_are_one_line(args, said, capsys):
    assert analyze.main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("river.analyze: ") and error.count("\n") == 1 and said in error


@pytest.mark.parametrize(
    "args", ([], ["nonsense"], ["similarity", "--rounds", "2"], ["pareto", "--rounds", "0"], ["memory", "--max", "2"],
             ["kv-error", "--max-new-tokens", "1"], ["similarity", "--tex", "x"])
)  # fmt: skip
def test_unknown_arguments_are_one_line(args, capsys):
    with pytest.raises(SystemExit) as exit:
        analyze.main(args)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1
