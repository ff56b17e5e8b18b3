"""`ModelConfig`: what a checkpoint's config.json says, every family's quirk normalised here.

The rest of the project asks a `ModelConfig` for facts (is there a bias, how wide is a head) and
never for the family. What this file does not know it refuses by name: a checkpoint that loads with
a setting ignored would answer fluently and wrongly.
"""

from dataclasses import dataclass, field
from pathlib import Path

from .errors import RiverError
from .files import read_json

FAMILIES = ("llama",)
ROPE_TYPES = ("default", "llama3")
# Where a key is absent, the value that the family's config class in Hugging Face transformers has.
FAMILY_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `rope_type` and the numbers its formula needs (see rope.py)."""

    rope_type: str
    theta: float
    dim: int  # rotated dimensions of each head; the rest pass through
    max_position_embeddings: int
    scaling: dict = field(default_factory=dict)  # the keys of that type, as the checkpoint spells them

    def number(self, key, default=None):
        """Return the scaling value `key`, or `default`; a RiverError if neither is a number."""
        value = self.scaling.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RiverError(f"config.json: rope_type {self.rope_type!r} needs a number for {key!r}, not {value!r}")
        return value


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the switches of a Llama-style decoder, in Hugging Face's terms."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset

    @property
    def q_size(self):
        """Width of all query heads together; need not equal `hidden_size`."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self):
        """Width of all key (or value) heads together."""
        return self.n_kv_heads * self.head_dim


class _Reader:
    """Typed access to config.json, with errors that name file, key and value."""

    def __init__(self, values, path):
        self.values, self.path = values, path

    def fail(self, key, value, wanted):
        raise RiverError(f"{self.path}: {key!r} is {value!r}, but {wanted}")

    def get(self, key, kind, default=None):
        """The value of `key`, of type `kind`; a missing or null key gives `default`, or fails without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise RiverError(f"{self.path}: the key {key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(key, value, f"should be of type {kind.__name__}")
        if kind in (int, float) and not 0 < value < float("inf"):
            self.fail(key, value, "should be above zero and finite")
        return value


def load_config(folder):
    """Read config.json (and generation_config.json, if there) of a checkpoint folder.

    Raises:
        RiverError: a file is missing or malformed, or asks for something that is not implemented.
    """
    folder = Path(folder)
    path = folder / "config.json"
    values = read_json(path)
    generation = folder / "generation_config.json"
    stops = _token_ids(values, path)
    if generation.is_file():
        stops |= _token_ids(read_json(generation), generation)
    return parse_config(values, path, stops)


def parse_config(values, path="config.json", eos_token_ids=frozenset()):
    """Turn the dict of a config.json into a `ModelConfig`; `path` is for error messages."""
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise RiverError(f"{path}: model_type {model_type!r} is not known; known are {', '.join(FAMILIES)}")
    read = _Reader({**FAMILY_DEFAULTS[model_type], **_without_nulls(values)}, path)
    activation = read.get("hidden_act", str, "silu")
    if activation != "silu":
        read.fail("hidden_act", activation, "only 'silu' is implemented")

    hidden_size = read.get("hidden_size", int)
    n_heads = read.get("num_attention_heads", int)
    n_kv_heads = read.get("num_key_value_heads", int, n_heads)
    if n_heads % n_kv_heads:
        read.fail("num_key_value_heads", n_kv_heads, f"should divide num_attention_heads, {n_heads}")
    if "head_dim" not in read.values and hidden_size % n_heads:
        read.fail("hidden_size", hidden_size, f"should be a multiple of num_attention_heads, {n_heads}")
    head_dim = read.get("head_dim", int, hidden_size // n_heads)
    attention_bias = read.get("attention_bias", bool, False)

    return ModelConfig(
        model_type=model_type,
        vocab_size=read.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=read.get("intermediate_size", int),
        n_layers=read.get("num_hidden_layers", int),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.get("rms_norm_eps", float),
        max_position_embeddings=read.get("max_position_embeddings", int),
        rope=_rope_config(read, head_dim),
        tie_word_embeddings=read.get("tie_word_embeddings", bool, False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read.get("mlp_bias", bool, False),
        eos_token_ids=frozenset(eos_token_ids),
    )


def _rope_config(read, head_dim):
    """Normalise the old key `rope_scaling` and the newer `rope_parameters`; the old one wins if set."""
    scaling = read.values.get("rope_scaling") or read.values.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        read.fail("rope_scaling", scaling, "should be an object")
    nested = _Reader({**read.values, **_without_nulls(scaling)}, read.path)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        read.fail("rope_type", rope_type, f"known are {', '.join(ROPE_TYPES)}")
    dim = head_dim
    if dim % 2:
        read.fail("head_dim", head_dim, "rotary embedding needs an even number of dimensions")
    if rope_type != "default":
        original = read.values.get("original_max_position_embeddings") or nested.values.get(
            "original_max_position_embeddings", read.get("max_position_embeddings", int)
        )
        scaling = {**scaling, "original_max_position_embeddings": original}
    return RopeConfig(
        rope_type=rope_type,
        theta=nested.get("rope_theta", float, 10000.0),
        dim=dim,
        max_position_embeddings=read.get("max_position_embeddings", int),
        scaling=scaling,
    )


def _without_nulls(values):
    """A null in a config.json means the same as an absent key."""
    return {key: value for key, value in values.items() if value is not None}


def _token_ids(values, path):
    """The end-of-sequence ids of one file: an int, a list of them, or nothing."""
    ids = values.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise RiverError(f"{path}: 'eos_token_id' is {values['eos_token_id']!r}, but should be token ids")
    return set(ids)
