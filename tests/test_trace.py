"""`generate.py --trace` tells what really happens to a token."""

import dataclasses
import re

import pytest
from conftest import write_tiny_checkpoint

from river import RiverError, Settings, load
from river.trace import trace


@pytest.mark.parametrize("depth", (0, 1, 4))
def test_it_names_the_place_of_every_layer(tmp_path, depth):
    llm = load(write_tiny_checkpoint(tmp_path / "tiny"), device="cpu")
    lines = []
    trace(llm, "Hello", dataclasses.asdict(Settings(exit_layer=depth, prefill="backbone")), lines.append)
    written = [line.split(" K, V")[0] for line in lines if "K, V written" in line]
    assert written == [f"{'backbone' if l <= depth else 'river'} {l}" for l in range(1, 5)]
    slot = int(re.search(r"slot (\d+) of", next(line for line in lines if "K, V written" in line)).group(1))
    seen = [line for line in lines if " attention " in line]
    assert len(seen) == 4 and all(f"q [1, 2, 2, 16], K and V [1, 2, {slot + 1}, 16]" in line for line in seen)
    gate_up = next(line for line in lines if "4 gate_up_proj" in line)
    assert "[1, 1, 64] -> [1, 1, 256] torch.bfloat16" in gate_up
    assert gate_up.endswith("full precision" if depth == 4 else "quantised")
    assert lines[-1] == f"left the backbone after {depth} of 4 layers"


def test_compiled_layers_show_nothing_and_are_refused(tmp_path):
    llm = load(write_tiny_checkpoint(tmp_path / "tiny"), device="cpu")
    llm.river = [object()]
    with pytest.raises(RiverError, match="--compile"):
        trace(llm, "Hello", {}, print)
