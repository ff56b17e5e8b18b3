"""The command line: what it prints where, and how it says no."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, write_tiny_checkpoint

import generate
from river import commands
from river.terminal import ExitPainter

BACKBONE_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.<|im_end|>"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "tiny")


def run(capsys, *args):
    """(exit status, standard output, standard error) of one call."""
    try:
        status = generate.main([str(arg) for arg in args])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    return status, out, err


def test_text_goes_to_stdout_and_statistics_to_stderr(folder, capsys):
    status, out, err = run(capsys, "--model", folder, "--prompt", "Hello", "--max-new-tokens", 6, "--exit-layer", 3)
    assert status == 0 and out.endswith("\n")
    for words in ("6 new tokens", "tokens/s", "GB/s", "of 4: prompt", "decode 3.0"):
        assert words in err and words not in out
    assert re.search(r"^ +3 +5 +#+$", err, re.MULTILINE), "the histogram of exit depths"


def test_json_is_one_object_with_the_promised_keys(folder, capsys):
    status, out, _ = run(
        capsys,
        "--model",
        folder,
        "--prompt",
        "Hello",
        "--max-new-tokens",
        6,
        "--exit-layer",
        3,
        "--json",
        "--prefill",
        "river",
    )
    assert status == 0 and out.count("\n") == 1
    report = json.loads(out)
    assert set(report) == {
        "model",
        "n_layers",
        "tau",
        "prefill",
        "prompt",
        "prompt_tokens",
        "text",
        "tokens",
        "new_tokens",
        "exit_layers",
        "prefill_exit_layer",
        "mean_exit_layer",
        "ttft_s",
        "decode_tokens_per_s",
        "stop_reason",
    }
    assert report["prefill"] == "river" and report["prefill_exit_layer"] == 0
    assert report["n_layers"] == 4 and report["prompt"] == "Hello"
    assert report["exit_layers"] == [3] * (report["new_tokens"] - 1)


def test_a_batch_is_a_list(folder, capsys):
    status, out, _ = run(
        capsys, "--model", folder, "--prompt", "a", "--prompt", "b c d", "--json", "--max-new-tokens", 3
    )
    reports = json.loads(out)
    assert status == 0 and [r["prompt"] for r in reports] == ["a", "b c d"]
    status, out, err = run(capsys, "--model", folder, "--prompt", "a", "--prompt", "b c d", "--max-new-tokens", 3)
    assert status == 0 and "--- 1: a" in err and "--- 2: b c d" in err


def test_the_prompt_may_come_from_stdin(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\r\n"))
    status, out, _ = run(capsys, "--model", folder, "--prompt", "-", "--json", "--max-new-tokens", 1)
    assert status == 0 and json.loads(out)["prompt"] == "from a pipe\r\n"


def test_show_exits_marks_each_token(folder, capsys):
    args = ("--model", folder, "--prompt", "Hello", "--max-new-tokens", 6, "--exit-layer", 2)
    plain = run(capsys, *args)[1]
    _, marked, err = run(capsys, *args, "--show-exits")
    assert re.sub(r"\[\d+\]", "", marked) == plain and "[2]" in marked
    assert "after n of 4 layers" in err


def test_show_exits_colours_a_terminal_unless_told_not_to(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[" in ExitPainter(30).paint("word", 3) and "\033[" in ExitPainter(30).legend()
    monkeypatch.setenv("NO_COLOR", "1")
    assert ExitPainter(30).paint("word", 3) == "word[3]"


def test_every_depth_has_a_colour():
    for n_layers in (1, 4, 30, 32, 100):
        painter = ExitPainter(n_layers)
        colours = [painter._colour_of(depth) for depth in range(n_layers + 1)]
        assert colours[0] == painter.RAMP[0] and set(colours) <= set(painter.RAMP)


def test_no_new_tokens_prints_nothing_new(folder, capsys):
    status, out, err = run(capsys, "--model", folder, "--prompt", "Hello", "--max-new-tokens", 0)
    assert status == 0 and out.strip() == "" and "0 new tokens" in err
    status, out, _ = run(capsys, "--model", folder, "--prompt", "Hello", "--max-new-tokens", 0, "--json")
    report = json.loads(out)
    assert report["tokens"] == [] and report["mean_exit_layer"] is None and report["stop_reason"] == "length"


def test_chat_keeps_its_cache_and_passes_over_empty_lines(folder, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n\n   \nAnd then?\n"))
    status, out, err = run(capsys, "--model", folder, "--max-new-tokens", 4)
    assert status == 0 and err.count("new tokens") == 2


@pytest.mark.parametrize(
    "args, named",
    (
        (("--tau", "high"), ("--tau", "high")),
        (("--tau", "nan"), ("tau", "nan")),
        (("--exit-layer", "5"), ("exit layer 5", "0 to 4")),
        (("--exit-layer", "-1"), ("exit layer -1",)),
        (("--exit-layer", "2.5"), ("--exit-layer", "2.5")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--top-p", "1.5"), ("top-p", "1.5")),
        (("--top-k", "-3"), ("top-k", "-3")),
        (("--max-new-tokens", "-1"), ("max-new-tokens", "-1")),
        (("--prefill", "sideways"), ("prefill", "sideways", "backbone")),
        (("--quantizer", "gptq"), ("quantizer", "gptq", "hqq")),
        (("--bits", 5), ("5 bits", "3, 4, 8")),
        (("--group-size", "0"), ("group size 0",)),
        (("--seed", str(2**64)), ("seed", str(2**64))),
        (("--device", "meta"), ("device", "meta")),
        (("--dtype", "int3"), ("dtype", "int3", "bfloat16")),
        (("--device", "warp"), ("device", "warp")),
        (("--chat-format", "morse"), ("morse", "chatml")),
        (("--prompt", ""), ("prompt is empty",)),
        (("--prompt", "word " * 2000), ("context is 512",)),
        (("--speed", "11"), ("--speed",)),
        (("--trace", "--json"), ("--trace", "--json")),
        (("--trace", "--lossless"), ("--trace", "--lossless")),
        (("--raw", "--system", "Be brief."), ("--system", "--raw")),
        (("--exit-rule", "never", "--exit-layer", 2), ("--exit-layer", "--exit-rule never")),
        (("--exit-rule", "fixed"), ("fixed", "--exit-layer", "0 to 4")),
        (("--model", ""), ("folder", "ORG/NAME")),
        (("--trace", "--prompt", "and another"), ("--trace", "one prompt")),
    ),
)
def test_bad_values_get_one_clear_line(folder, capsys, args, named):
    base = ("--model", folder) + (() if args[0] == "--prompt" else ("--prompt", "Hello"))
    status, out, err = run(capsys, *base, *args)
    assert status == 2 and out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("generate.py: ") and "Traceback" not in err
    for word in named:
        assert word in last


@pytest.mark.parametrize("option, value", (("--exit-rule", "similarly"), ("--kv", "hare")))
def test_a_name_that_is_not_known_is_refused_before_a_model_is_loaded(capsys, monkeypatch, option, value):
    monkeypatch.setattr(commands, "find_model", lambda name: pytest.fail("the model is looked for already"))
    status, out, err = run(capsys, "--prompt", "Hello", option, value)
    assert status == 2 and value in err and "known are" in err


@pytest.mark.parametrize("closed", ("<&-", ">&-", "2>&-", ">&- 2>&-"))
def test_streams_that_the_shell_has_closed_are_no_traceback(folder, closed):
    """Python has None in place of them: writing ended in an AttributeError, or statistics landed in the text."""
    status, out, err = shell(f"$G --model {folder} --max-new-tokens 4 --prompt Hello {closed}")
    assert status == 0 and "Traceback" not in err
    assert ("prompt tokens" in err) is ("2>" not in closed) and b"prompt tokens" not in out
    status, _, err = shell(f"$G --model {folder} {closed}")
    assert status == 2 and "Traceback" not in err


def test_models_that_cannot_be_had_get_one_clear_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(commands, "WEIGHTS", tmp_path / "weights")
    (tmp_path / "empty").mkdir()
    bad = {
        name: write_tiny_checkpoint(tmp_path / name)
        for name in ("cut", "pointer", "family", "rope", "tensor", "json", "tokenizer")
    }
    weights = (folder / "model.safetensors").read_bytes()
    (bad["cut"] / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (bad["pointer"] / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    config = json.loads((folder / "config.json").read_text())
    (bad["family"] / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    (bad["rope"] / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "spiral"}}))
    (bad["tensor"] / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (bad["json"] / "config.json").write_text("{")
    (bad["tokenizer"] / "tokenizer.json").unlink()
    cases = {
        "nonsense": ("nonsense", "ORG/NAME"),
        "ORG/NAME/too/deep": ("ORG/NAME/too/deep",),
        "nobody/nothing": ("127.0.0.1",),
        tmp_path / "empty": ("config.json",),
        bad["cut"]: ("model.safetensors", "cut short"),
        bad["pointer"]: ("model.safetensors", "Git LFS"),
        bad["family"]: ("config.json", "rwkv", "llama"),
        bad["rope"]: ("config.json", "spiral", "llama3"),
        bad["tensor"]: ("lm_head.weight",),
        bad["json"]: ("config.json", "JSON"),
        bad["tokenizer"]: ("tokenizer",),
    }
    for model, named in cases.items():
        status, out, err = run(capsys, "--model", model, "--prompt", "Hello")
        last = err.strip().splitlines()[-1]
        assert status == 2 and out == "" and last.startswith("generate.py: "), err
        for word in named:
            assert word in last


def shell(command, **environment):
    """(exit status, standard output bytes, standard error) of a shell command in which generate.py is $G."""
    env = {**os.environ, "G": f"{sys.executable} {ROOT / 'generate.py'}", **environment}
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, env=env)
    return result.returncode, result.stdout, result.stderr.decode("utf-8", "replace")


def test_a_reader_that_has_seen_enough_is_no_error(folder):
    """`generate.py | head -1` used to end in a BrokenPipeError traceback."""
    for json_flag in ("", "--json"):
        status, _, err = shell(f"$G --model {folder} --prompt Hello --max-new-tokens 60 {json_flag} | true")
        assert status == 0 and "Traceback" not in err and "Exception" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(folder):
    status, _, err = shell(f"$G --model {folder} --prompt Hello --max-new-tokens 2 > /dev/full")
    assert status == 2 and "No space left" in err and "Traceback" not in err


@pytest.mark.parametrize("encoding", ("utf-8:strict", "ascii:strict"))
def test_bytes_that_are_no_text_are_no_error(folder, encoding):
    """Neither in the prompt, nor in an answer that the terminal's encoding lacks characters for."""
    args = f"--model {folder} --max-new-tokens 8 --temperature 5 --seed 3"
    status, out, err = shell(f"printf 'caf\\xff \\xe2\\x82' | $G {args} --prompt - --json", PYTHONIOENCODING=encoding)
    assert status == 0 and json.loads(out)["prompt"] == "caf\ufffd \ufffd", err
    status, out, err = shell(f"$G {args} --prompt $'caf\\xff' --json", PYTHONIOENCODING=encoding)
    assert status == 0 and json.loads(out)["new_tokens"] > 0, err
    status, _, err = shell(f"$G {args} --prompt Hello", PYTHONIOENCODING=encoding)
    assert status == 0 and "Traceback" not in err


def test_a_chat_goes_on_when_a_turn_does_not_fit(folder, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n" + "word " * 2000 + "\nAnd then?\n"))
    status, _, err = run(capsys, "--model", folder, "--max-new-tokens", 4)
    assert status == 0 and err.count("new tokens") == 2 and "conversation so far" in err


def test_no_prompt_and_no_terminal_is_said(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, _, err = run(capsys, "--model", folder)
    assert status == 2 and "--prompt -" in err


def test_help_fits_two_screens_and_needs_no_torch():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "generate.py", "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0 and len(result.stdout.splitlines()) <= 48
    assert "| torch" not in result.stderr, "help should be there at once"


@pytest.mark.slow
def test_the_default_model_knows_the_capital(default_model_folder):
    """The whole way, as the README's first command goes it."""

    def report(*args):
        command = [sys.executable, ROOT / "generate.py", "--prompt", QUESTION, "--json", *args]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    backbone = report("--exit-layer", "30")
    assert backbone["tokens"] == BACKBONE_IDS and backbone["stop_reason"] == "stop"
    assert backbone["exit_layers"] == [30] * 7
    early = report()
    assert "Paris" in early["text"] and early["tau"] == 0.5 and early["mean_exit_layer"] < 15
    assert report("--tau", "1")["tokens"] == BACKBONE_IDS
