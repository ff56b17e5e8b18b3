"""Thresholds that set themselves: the target is kept as often as promised, and only for the river it was found with."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_checkpoint

from river import RiverError, Settings, calibrate, guarantee, load
from river.agreement import TextAgreement
from river.calibrate import laxest_tau, loss, main, parse_target
from river.guarantee import laxest, mean_is_below


def draws(mean, spread, count, generator):
    """Losses in [0, 1] with that mean: shares of 16 tokens, at a level that varies from text to text."""
    levels = (mean + spread * (2 * torch.rand(count, generator=generator) - 1)).clamp(0, 1)
    return (torch.binomial(torch.full((count,), 16.0), levels, generator=generator) / 16).tolist()


@pytest.mark.parametrize("mean", (0.05, 0.06))
def test_a_mean_that_is_not_below_the_bound_passes_at_most_5_times_in_100(mean):
    generator = torch.Generator().manual_seed(1)
    passed = sum(mean_is_below(draws(mean, 0.05, 200, generator), 0.05) for _ in range(400))
    assert passed <= 0.05 * 400 + 2 * math.sqrt(400 * 0.05 * 0.95)


def test_rare_large_losses_do_not_deceive_it():
    """A loss of 1 in one of 20 texts: mean 0.05, and most samples of 20 show none of it."""
    generator = torch.Generator().manual_seed(2)
    samples = [(torch.rand(20, generator=generator) < 0.05).double().tolist() for _ in range(400)]
    assert sum(not any(sample) for sample in samples) > 100
    assert sum(mean_is_below(sample, 0.05) for sample in samples) <= 28


def test_a_mean_well_below_the_bound_is_recognised():
    generator = torch.Generator().manual_seed(3)
    assert sum(mean_is_below(draws(0.02, 0.02, 400, generator), 0.05) for _ in range(100)) >= 95
    assert not mean_is_below([0.0] * 10, 0.05)  # ten texts prove nothing, whatever they say


def test_the_choice_stops_at_the_first_failure():
    """A laxer tau that passes by luck behind one that failed is not taken: that is what keeps the confidence."""
    good, bad = [0.0] * 400, [0.5] * 400
    assert laxest({0.9: good, 0.8: good, 0.7: bad, 0.6: good}, 0.05) == 0.8
    assert laxest({0.9: bad, 0.8: good}, 0.05) is None


def test_held_out_texts_are_not_those_that_a_tau_was_chosen_on(monkeypatch):
    """One text of 40 has all of the loss: a choice that wants it on its own half never sees it on the other."""
    assert guarantee.held_out({0.9: [0.0] * 400, 0.8: [1.0] * 400}, 0.05) == (100, 0, 0)
    assert guarantee.held_out({0.9: [1.0] * 400}, 0.05) == (0, 0, 100)
    losses = {0.9: [1.0] + [0.0] * 39}
    monkeypatch.setattr(guarantee, "laxest", lambda losses, bound: 0.9 if sum(losses[0.9]) else None)
    kept, broke, none = guarantee.held_out(losses, 0.04)
    assert broke == 0 and 30 < kept < 70 and none == 100 - kept
    monkeypatch.setattr(guarantee, "laxest", lambda losses, bound: None if sum(losses[0.9]) else 0.9)
    assert guarantee.held_out(losses, 0.04) == (0, none, kept)


def test_chosen_taus_keep_the_target_on_other_text_in_95_of_100_resamples():
    """Texts differ in how hard they are, and every tau sees the same ones, as in real calibration."""
    generator = torch.Generator().manual_seed(4)
    means = {0.99: 0.005, 0.9: 0.02, 0.8: 0.045, 0.65: 0.055, 0.5: 0.2}  # expected losses; the target is 0.05
    kept, lax = 0, 0
    for _ in range(100):
        hard = torch.rand(400, generator=generator) * 2
        losses = {
            tau: (
                torch.binomial(torch.full((400,), 16.0), (mean * hard).clamp(max=1), generator=generator) / 16
            ).tolist()
            for tau, mean in means.items()
        }
        tau = laxest(losses, 0.05)
        kept += tau is None or means[tau] <= 0.05
        lax += tau in (0.9, 0.8)
    assert kept >= 95 and lax >= 95


def result(hits, kls=(0.0,) * 16, decode_s=1.0):
    return TextAgreement([True] * hits + [False] * (16 - hits), 16, list(kls), [2] * 15, decode_s)


def test_losses_are_shares_between_0_and_1():
    assert loss(result(13), "agreement") == pytest.approx(3 / 15)  # the prompt's token does not count
    assert loss(result(16, [0.5] * 16), "kl") == 0.25
    assert loss(result(16, [1e9] * 16), "kl") == 1 and loss(result(16, [-1e-9] * 16), "kl") == 0


def test_a_speedup_is_the_strictest_tau_that_is_surely_as_fast():
    slow, fast = [result(16, decode_s=1.0)] * 50, [result(16, decode_s=0.5)] * 50
    results = {None: slow} | {tau: fast if tau <= 0.9 else slow for tau in calibrate.TAUS}
    assert laxest_tau(results, "speedup", 1.5) == 0.9 and laxest_tau(results, "speedup", 2.5) is None


@pytest.mark.parametrize(
    "text", ("agreement", "agreement=2", "agreement=x", "kl=0", "kl=5", "speedup=0.5", "loss=1", "kl=nan")
)
def test_a_target_that_makes_no_sense_is_refused(text):
    with pytest.raises(RiverError, match="--target"):
        parse_target(text)


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny", eos_token_id=None)


def run(folder, target, *more):
    return main([str(folder), "--device", "cpu", "--target", target, "--texts", "40", *more])


def test_what_is_found_is_used_by_tau_auto_until_the_river_changes(folder, capsys, monkeypatch):
    """A target that every tau keeps; then another checkpoint in the same folder must not inherit it."""
    with pytest.raises(RiverError, match="river.calibrate"):
        load(folder, device="cpu").generate("Hello", tau="auto")
    assert run(folder, "agreement=0.01") == 0
    out = capsys.readouterr().out
    tau = json.loads(next(folder.glob("tau-*.json")).read_text())["tau"]
    assert tau == min(calibrate.TAUS) and f"tau {tau} keeps agreement=0.01 with 95% confidence" in out
    assert "100 kept the target on the other half and 0 did not" in out
    llm = load(folder, device="cpu")
    assert llm.decoder(Settings(tau="auto"), 1, 8).exit_rule.tau == tau
    with pytest.raises(RiverError, match="no threshold"):
        load(folder, device="cpu", quantizer="rtn").generate("Hello", tau="auto")
    read_text = Path.read_text
    with monkeypatch.context() as patch:  # another rule's thresholds are others
        patch.setattr(
            Path, "read_text", lambda self, **how: read_text(self, **how) + "#" * (self.name == "controller.py")
        )
        with pytest.raises(RiverError, match="another checkpoint, river, code"):
            load(folder, device="cpu").generate("Hello", tau="auto")
    write_tiny_checkpoint(folder, seed=1, eos_token_id=None)
    with pytest.raises(RiverError, match="another checkpoint"):
        load(folder, device="cpu").generate("Hello", tau="auto")


def test_a_target_out_of_reach_is_said_to_be_so_and_nothing_is_stored(folder, capsys):
    assert run(folder, "agreement=0.999999") == 1
    assert "nothing is stored" in capsys.readouterr().out and not list(folder.glob("tau-*"))


def test_a_text_of_ones_own_is_cut_into_pieces(folder, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("The ferry leaves at nine, and the river is high after the rain. " * 60)
    assert run(folder, "agreement=0.01", "--text", str(text)) in (0, 1)
    assert "mine.txt" in capsys.readouterr().out
    text.write_text("short")
    assert run(folder, "agreement=0.01", "--text", str(text)) == 2
    assert "too short" in capsys.readouterr().err


def test_auto_goes_with_what_was_calibrated():
    for other in ({"exit_rule": "entropy"}, {"kv": "mask"}):
        with pytest.raises(RiverError, match="tau auto"):
            Settings(tau="auto", **other)
