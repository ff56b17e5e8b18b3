"""The benchmark: that it runs, compares what it says, and does its arithmetic right. Its numbers are no test."""

import json

import pytest
from conftest import write_tiny_checkpoint

from river import bench
from river.controller import Confidence, FixedDepth, Never
from river.decode import Decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("bench") / "tiny")


def test_a_table_and_one_json_line(folder, capsys, monkeypatch):
    monkeypatch.setattr(bench, "memory_bandwidth", lambda device: 10.0)
    args = [str(folder), "--rounds", "2", "--tokens", "3", "--prompt-tokens", "5", "--tau", "0.1", "--exit-layer", "3"]
    assert bench.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])["settings"]
    assert list(result) == ["backbone", "full 4-bit", "River tau 0.1", "River depth 3"]
    assert [row["layers"] for name, row in result.items() if "tau" not in name] == [4, 0, 3]
    assert result["backbone"]["to_backbone"] == result["full 4-bit"]["to_full_4_bit"] == 1
    for name, row in result.items():
        assert row["slowest"] <= row["tokens_per_s"] <= row["fastest"]
        assert row["to_backbone"] == pytest.approx(row["tokens_per_s"] / result["backbone"]["tokens_per_s"])
        assert row["of_bandwidth"] == pytest.approx(row["gb_per_s"] / 10)
        assert row["peak_mb"] > 100, name
        assert any(line.startswith(f"| {name} |") for line in lines)


def test_rounds_are_interleaved(folder, monkeypatch):
    """A A A B B B would charge a machine that slows down to B."""
    order = []
    monkeypatch.setattr(
        bench,
        "measure",
        lambda llm, rule, prompt, args: (
            order.append(str(rule)) or dict.fromkeys(("ttft_s", "step_s", "depth", "nbytes"), 1.0)
        ),
    )
    monkeypatch.setattr(bench, "measure_peak", lambda args, name: None)
    monkeypatch.setattr(bench, "memory_bandwidth", lambda device: 10.0)
    bench.main([str(folder), "--rounds", "2", "--tau", "0.5"])
    assert order == order[:3] * 3 and len(set(order)) == 3


def test_the_first_round_is_not_counted(folder, capsys, monkeypatch):
    """It warms up: pages are read, kernels chosen, and on a GPU layers compiled, which takes seconds."""
    calls = []

    def measure(llm, setting, prompt, tokens):
        calls.append(setting)
        seconds = 1000.0 if len(calls) <= 3 else 0.5
        return {"ttft_s": seconds, "step_s": seconds, "depth": 4, "nbytes": 1}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "measure_peak", lambda args, name: None)
    monkeypatch.setattr(bench, "memory_bandwidth", lambda device: 10.0)
    bench.main([str(folder), "--rounds", "1", "--tau", "0.5"])
    table = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]
    assert len(calls) == 6
    for row in table.values():
        assert row["slowest"] == row["tokens_per_s"] == 2.0 and row["ttft_ms"] == 500


def test_random_weights_of_a_shape_read_the_bytes_of_that_shape(monkeypatch):
    tiny = {
        **bench.SHAPES["llama-3.2-1b"],
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    }
    llm = bench.random_llm(tiny, False, "cpu", lambda line, done: None)
    weights = 128 * (2 * 128 + 2 * 64 + 3 * 256)
    norms = 2 * 128 * 2
    head = 512 * 128 * 2 + 128 * 2
    kv = Decoder(llm.model, llm.river, FixedDepth(1), max_len=8).kv
    assert llm.step_nbytes(3, kv, Never()) == 3 * (2 * weights + norms) + head
    assert llm.step_nbytes(3, kv, Confidence(0.5, None)) == 3 * (2 * weights + norms) + 3 * head, "asked after 1 and 2"
    assert llm.step_nbytes(3, kv, Confidence(1.0, None)) == llm.step_nbytes(3, kv, Never()), "it never asks the head"
    assert llm.step_nbytes(0, kv, Never()) == 3 * (weights // 2 + weights // 64 * 4 + norms) + head
    logits, _ = Decoder(llm.model, llm.river, FixedDepth(1), max_len=8).prefill([[1, 2, 3]])
    assert logits.shape == (1, 512) and logits.isfinite().all()


def test_a_checkpoint_that_is_none_is_one_line(tmp_path, capsys):
    assert bench.main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    (
        ["--rounds", "0"],
        ["--tokens", "0"],
        ["--prompt-tokens", "0"],
        ["--shape", "llama-3.2-1b", "--quantize-head"],
        ["--shape", "llama-3.2-1b", "--offload", "2"],
        ["--shape", "llama-3.2-1b", "--peer", "transformers"],
    ),
)
def test_what_could_not_be_measured_is_refused(args, capsys):
    """A table that names a setting which was ignored is worse than none."""
    with pytest.raises(SystemExit) as error:
        bench.main(args)
    assert error.value.code == 2


def test_a_device_that_is_not_there_is_one_line(capsys):
    assert bench.main(["--shape", "llama-3.2-1b", "--device", "warp"]) == 2
    assert "device 'warp' cannot be used here" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "args", (["--exit-layer", "99"], ["--exit-layer", "-1"], ["--tau", "nan"], ["--prompt-tokens", "9999"])
)
def test_settings_that_do_not_exist_are_refused(folder, args, capsys):
    assert bench.main([str(folder), *args]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("river.bench: ")
