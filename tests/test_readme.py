"""What the README shows must work as it stands there."""

import re

from conftest import ROOT

from river import controller
from river.decode import Decoder

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_exit_rule_that_is_added_there_works(tiny_model):
    """It leaves one layer after the similarity rule does, where the similarity stays high."""
    block = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Twice" in block)
    namespace = dict(vars(controller))
    exec(block, namespace)
    depths = []
    for rule in (controller.Similarity(-1.0), namespace["Twice"](-1.0)):
        decoder = Decoder(tiny_model, tiny_model.layers, rule, "backbone", max_len=16)
        decoder.prefill([[1, 2, 3]])
        depths.append(decoder.decode_one_token(decoder.tokens[:, -1])[1])
    assert depths == [1, 2]


def test_every_file_that_it_names_is_there():
    paths = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(paths) > 20 and all((ROOT / path).exists() for path in paths)


def test_every_module_is_in_its_walk():
    named = set(re.findall(r"\]\(river/([a-z_]+\.py)\)", README))
    assert {path.name for path in (ROOT / "river").glob("*.py")} - named == {"__init__.py", "errors.py"}
