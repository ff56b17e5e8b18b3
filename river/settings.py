"""How to generate: the settings that generate.py has switches for, and their short form for comparisons."""

import math
from dataclasses import dataclass

from .controller import check_exit_rule
from .errors import RiverError
from .sampling import Sampler
from .strategies import check_strategy


@dataclass
class Settings:
    """How to generate; see `generate.py --help` for each."""

    max_new_tokens: int = 256
    exit_rule: str = "similarity"
    tau: float | str = 0.5  # or "auto"
    kv: str = "share"
    exit_layer: int | None = None
    prefill: str | None = None  # the device's default
    lossless: bool = False
    draft: int | None = None  # as many as pay
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self):
        """Refuse what no model could take; `exit_layer` and `prefill` are checked when the decoder is made."""
        check_exit_rule(self.exit_rule)
        check_strategy(self.kv)
        if self.exit_layer is not None and self.exit_rule not in ("similarity", "fixed"):
            raise RiverError(f"--exit-layer leaves at a fixed depth, and goes without --exit-rule {self.exit_rule}")
        if self.max_new_tokens < 0:
            raise RiverError(f"max-new-tokens is {self.max_new_tokens}, but should be 0 or above")
        if self.tau == "auto" and (self.exit_rule != "similarity" or self.kv != "share" or self.prefill is not None):
            raise RiverError("tau auto was calibrated for --exit-rule similarity, --kv share and the default --prefill")
        if self.tau != "auto" and not math.isfinite(self.tau):
            raise RiverError(f"tau is {self.tau}, but should be a number (1 or more never exits)")
        if self.draft is not None and (self.draft < 0 or not self.lossless):
            raise RiverError(f"draft {self.draft} should be 0 or above, and goes with --lossless")
        if self.lossless and (self.kv != "share" or self.prefill not in (None, "backbone")):
            raise RiverError("lossless decoding needs --kv share and --prefill backbone")
        if self.lossless and (self.exit_rule not in ("similarity", "fixed") or self.tau != 0.5):
            raise RiverError("lossless drafts leave at a fixed depth: --exit-layer N, 0 unless given, and no --tau")
        self.sampler()

    def sampler(self, device="cpu"):
        """A fresh `Sampler`, so that a seed gives the same text in every run."""
        return Sampler(self.temperature, self.top_k, self.top_p, self.seed, device)


def tau_value(text):
    """A threshold as it is written: a number, or "auto"; a ValueError for anything else."""
    return text if text == "auto" else float(text)


NAMED_SETTINGS = {
    "backbone": {"exit_rule": "never", "prefill": "backbone"},
    "lossless": {"lossless": True},
    "full4bit": {"exit_rule": "fixed", "exit_layer": 0, "prefill": "river"},  # no backbone, for the prompt either
}
PARTS = {
    "exit_rule": str, "tau": tau_value, "kv": str, "exit_layer": int, "prefill": str, "draft": int,
    "temperature": float, "top_k": int, "top_p": float, "seed": int,
}  # fmt: skip


def parse_setting(text, **defaults):
    """`Settings` from "backbone", "full4bit", "lossless", or switches of generate.py, as in "kv=mask,tau=0.9".

    Args:
        text: names and `switch=value` pairs with commas between them, a later one over an earlier one.
        defaults: fields of `Settings` that the text does not set.

    Raises:
        RiverError: an unknown name or switch, or a value that it cannot have.
    """
    fields = dict(defaults)
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals and name in NAMED_SETTINGS:
            fields |= NAMED_SETTINGS[name]
            continue
        key = name.replace("-", "_")
        if not equals or key not in PARTS:
            switches = ", ".join(known.replace("_", "-") for known in PARTS)
            raise RiverError(
                f"setting {text!r}: {part!r} is not known; it takes {', '.join(NAMED_SETTINGS)}, and "
                f"switch=value with the switches {switches}"
            )
        try:
            fields[key] = PARTS[key](value)
        except ValueError as error:
            raise RiverError(f"setting {text!r}: {name} cannot be {value!r}") from error
    return Settings(**fields)
