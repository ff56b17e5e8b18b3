"""`ModelConfig`: what a checkpoint's config.json says, every family's quirk normalised here.

The rest of the project asks a `ModelConfig` for facts (is there a bias, how wide is a head) and
never for the family. What this file does not know it refuses by name: a checkpoint that loads with
a setting ignored would answer fluently and wrongly.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from .errors import RiverError
from .files import read_json

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Each family, and what its class in Hugging Face transformers takes for a key that is absent. The key
# sliding_window is special: absent means the default, null means none.
FAMILIES = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "ministral3": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
MULTIMODAL = "mistral3"  # its text model sits in text_config
LARGEST = 1e300  # a number in JSON may have any length


def positive_number(value, what):
    """Return `value`; a RiverError that begins with `what` unless it is a number above zero and finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
        raise RiverError(f"config.json: {what} to be a number above zero, not {value!r}")
    return value


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `rope_type` and the numbers its formula needs (see rope.py)."""

    rope_type: str
    theta: float
    dim: int  # rotated dimensions of each head; the rest pass through
    max_position_embeddings: int
    scaling: dict = field(default_factory=dict)  # the keys of that type, as the checkpoint spells them

    def number(self, key, default=None):
        """Return the scaling value `key`, or `default`; a RiverError unless it is above zero and finite."""
        value = self.scaling.get(key)
        return positive_number(default if value is None else value, f"rope_type {self.rope_type!r} needs {key!r}")


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
    tie_word_embeddings: bool | None  # None: tied if the checkpoint ships no lm_head
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head
    fused_projections: bool  # the checkpoint stores q, k, v as one tensor, and gate, up as another
    windows: tuple  # for each layer, the positions its attention looks back on (itself included), or None
    eos_token_ids: frozenset

    @property
    def context(self):
        """The longest sequence that the model is made for.

        Configs with yarn or dynamic scaling may keep the length from before the scaling.
        """
        if self.rope.rope_type == "yarn":
            stretched = self.rope.number("factor") * self.rope.number("original_max_position_embeddings")
        elif self.rope.rope_type == "dynamic":
            stretched = self.rope.number("factor") * self.max_position_embeddings
        else:
            stretched = 0
        return max(self.max_position_embeddings, int(stretched))

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
            value = float(value) if abs(value) < LARGEST else math.inf
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(key, value, f"should be of type {kind.__name__}")
        if kind in (int, float) and not 0 < value < LARGEST:
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
    _refuse_quantised(values, path)
    nested = values.get("model_type") == MULTIMODAL
    if nested:
        values = values.get("text_config")
        if not isinstance(values, dict):
            raise RiverError(f"{path}: 'text_config' is missing, where {MULTIMODAL} keeps its text model")
        eos_token_ids = _token_ids(values, path) | set(eos_token_ids)
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join((*FAMILIES, MULTIMODAL))
        raise RiverError(f"{path}: model_type {family!r} is not known; known are {known}")
    # A null means the same as an absent key, except for the window.
    read = _Reader({**FAMILIES[family], **_without_nulls(values, keep=("sliding_window",))}, path)
    activation = read.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        read.fail("hidden_act", activation, "only 'silu' is implemented")

    hidden_size = read.get("hidden_size", int)
    n_heads = read.get("num_attention_heads", int)
    n_kv_heads = read.get("num_key_value_heads", int, n_heads)
    if n_heads % n_kv_heads:
        read.fail("num_key_value_heads", n_kv_heads, f"should divide num_attention_heads, {n_heads}")
    if "head_dim" not in read.values and hidden_size % n_heads:
        read.fail("hidden_size", hidden_size, f"should be a multiple of num_attention_heads, {n_heads}")
    head_dim = read.get("head_dim", int, hidden_size // n_heads)
    n_layers = read.get("num_hidden_layers", int)
    if n_layers > 10_000:
        read.fail("num_hidden_layers", n_layers, "no model has so many")
    attention_bias = family in ("llama", "qwen3") and read.get("attention_bias", bool, False)
    # Where the text model is part of a larger one, the two configs contradict each other: the tensors decide.
    tied = None if nested else read.get("tie_word_embeddings", bool, False)

    return ModelConfig(
        model_type=family,
        vocab_size=read.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=read.get("intermediate_size", int),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.get("rms_norm_eps", float),
        max_position_embeddings=read.get("max_position_embeddings", int),
        rope=_rope_config(read, family, head_dim),
        tie_word_embeddings=tied,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and read.get("mlp_bias", bool, False),
        qk_norm=family == "qwen3",
        fused_projections=family == "phi3",
        windows=_windows(read, family, n_layers),
        eos_token_ids=frozenset(eos_token_ids),
    )


def _refuse_quantised(values, path):
    quantization = values.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in (None, "fp8"):
        raise RiverError(
            f"{path}: the checkpoint is quantised already ({method}): take one in bfloat16 or FP8, "
            "its river is made here"
        )


def _windows(read, family, n_layers):
    """The sliding window of each layer, None where it sees everything before it."""
    if family == "llama":  # whose class has no window, whatever a converted config has kept
        return (None,) * n_layers
    window = read.get("sliding_window", int) if read.values.get("sliding_window") is not None else None
    if family not in ("qwen2", "qwen3"):
        return (window,) * n_layers
    if not read.get("use_sliding_window", bool, False):
        return (None,) * n_layers
    if "layer_types" in read.values:
        kinds = {"full_attention": None, "sliding_attention": window}
        layer_types = read.values["layer_types"]
        if not isinstance(layer_types, list) or len(layer_types) != n_layers or not set(layer_types) <= set(kinds):
            read.fail("layer_types", layer_types, f"should be {n_layers} of {', '.join(kinds)}")
        return tuple(kinds[kind] for kind in layer_types)
    full_layers = read.get("max_window_layers", int) if read.values["max_window_layers"] != 0 else 0
    return (None,) * min(full_layers, n_layers) + (window,) * max(0, n_layers - full_layers)


def _rope_config(read, family, head_dim):
    """Normalise the old key `rope_scaling` and the newer `rope_parameters`; the old one wins if set."""
    scaling = read.values.get("rope_scaling") or read.values.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        read.fail("rope_scaling", scaling, "should be an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        read.fail("rope_parameters", scaling, "a rotary embedding for each kind of layer is not implemented")
    if family != "ministral3":
        scaling = {key: value for key, value in scaling.items() if key != "llama_4_scaling_beta"}
    nested = _Reader({**read.values, **_without_nulls(scaling)}, read.path)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if family == "phi3" and rope_type in ("su", "yarn"):
        rope_type = "longrope"  # what it was called before it had a name
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        read.fail("rope_type", rope_type, f"known are {', '.join(ROPE_TYPES)}")
    dim = head_dim
    if rope_type != "default" or family == "phi3":
        dim = int(head_dim * nested.get("partial_rotary_factor", float, 1.0))
    if dim % 2 or not 2 <= dim <= head_dim:
        read.fail("head_dim", head_dim, f"rotary embedding needs an even number of its dimensions, not {dim}")
    if rope_type in ("llama3", "yarn", "longrope"):
        # The key at the top level wins over the one in the scaling.
        keys = read if "original_max_position_embeddings" in read.values else nested
        original = keys.get("original_max_position_embeddings", int, read.get("max_position_embeddings", int))
        scaling = {**scaling, "original_max_position_embeddings": original}
    return RopeConfig(
        rope_type=rope_type,
        theta=nested.get("rope_theta", float, 10000.0),
        dim=dim,
        max_position_embeddings=read.get("max_position_embeddings", int),
        scaling=scaling,
    )


def _without_nulls(values, keep=()):
    return {key: value for key, value in values.items() if value is not None or key in keep}


def _token_ids(values, path):
    """The end-of-sequence ids of one file: an int, a list of them, or nothing."""
    ids = values.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise RiverError(f"{path}: 'eos_token_id' is {values['eos_token_id']!r}, but should be token ids")
    return set(ids)
