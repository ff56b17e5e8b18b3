"""What the README shows must work as it stands there."""

import re

import torch
from conftest import ROOT, write_tiny_checkpoint

from river import controller, load, quantize
from river.decode import Decoder

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_exit_rule_that_is_added_there_works(tiny_model):
    """It leaves one layer after the similarity rule does, where the similarity stays high."""
    namespace = with_block("class Twice", controller)
    make = added("twice", namespace)
    depths = []
    for rule in (controller.Similarity(-1.0), make(-1.0, tiny_model)):
        decoder = Decoder(tiny_model, tiny_model.layers, rule, "backbone", max_len=16)
        decoder.prefill([[1, 2, 3]])
        depths.append(decoder.decode_one_token(decoder.tokens[:, -1])[1])
    assert depths == [1, 2]


def test_the_quantiser_that_is_added_there_works(tmp_path, monkeypatch):
    monkeypatch.setitem(quantize.QUANTIZERS, "absmax", added("absmax", with_block("def absmax", quantize)))
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    error = {name: (quantize.quantize(weight, name).dequantize() - weight).norm() for name in ("absmax", "rtn")}
    assert error["rtn"] < error["absmax"] < 1.5 * error["rtn"]
    llm = load(write_tiny_checkpoint(tmp_path / "tiny"), device="cpu", quantizer="absmax")
    run = llm.generate("Hello", max_new_tokens=4)
    assert len(list(run)) == 4 and list((tmp_path / "tiny").glob("river-absmax-*"))


def with_block(text, module):
    """The names of a module and of the README's Python block that has `text`, as if that were part of it."""
    block = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if text in block)
    namespace = dict(vars(module))
    exec(block, namespace)
    return namespace


def added(name, namespace):
    """What the README's line for a table of names adds under `name`."""
    line = re.search(rf'`("{name}": .*),`', README).group(1)
    return eval(f"{{{line}}}", namespace)[name]


def test_every_file_that_it_names_is_there():
    paths = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(paths) > 20 and all((ROOT / path).exists() for path in paths)


def test_nothing_is_left_to_be_filled_in():
    """A table was once announced, and a word in capitals stood in its place."""
    assert not set(re.findall(r"^[A-Z0-9]{6,}$|\b(?:TODO|FIXME|TBD|XXX)\b", README, re.MULTILINE))


def test_every_module_is_in_its_walk():
    named = set(re.findall(r"\]\(river/([a-z_]+\.py)\)", README))
    assert {path.name for path in (ROOT / "river").glob("*.py")} - named == {"__init__.py", "errors.py"}
