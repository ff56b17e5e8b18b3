"""Rotary position embedding (Su et al., arXiv 2104.09864): position p turns the pair of dimensions
(i, i + dim/2) of each query and key by the angle p * inv_freq[i].

The scaled variants change inv_freq, and some multiply cosine and sine by an attention factor, so
that a model trained at one length can read at a longer one. Everything is computed in float32: in
bfloat16, positions above 256 would share an angle.
"""

import math

import torch

from .config import positive_number
from .errors import RiverError


class Rope:
    """Cosines and sines for every position of a sequence.

    Args:
        config: a `RopeConfig`.
        device: where the tables live.

    Raises:
        RiverError: a number that the rope_type needs is missing or makes no sense.
    """

    def __init__(self, config, device="cpu"):
        self.config, self.device = config, device
        self.variant_in_use, self.inv_freq, self.attention_factor = None, None, None
        self._use(self.variant(1))
        self.query_scale_beta = None
        if config.scaling.get("llama_4_scaling_beta"):
            self.query_scale_beta = config.number("llama_4_scaling_beta")
            self.query_scale_span = config.number("original_max_position_embeddings")

    def variant(self, length):
        """What the frequencies depend on besides the configuration, for a sequence of `length` tokens.

        Keys turned under one variant must not meet queries turned under another: the decoder runs the
        sequence again when generation crosses from one to the next. Only two types have more than one.
        """
        if self.config.rope_type == "longrope":
            return "long" if length > self.config.number("original_max_position_embeddings") else "short"
        if self.config.rope_type == "dynamic":
            return max(length, self.config.max_position_embeddings)
        return "only"

    def tables(self, positions, length, dtype):
        """Return (cos, sin), each [..., dim] in `dtype`, for int64 `positions` [...] of a sequence of `length`."""
        self._use(self.variant(length))
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)

    def query_scale(self, positions, dtype):
        """Factors [..., 1] that queries at `positions` [...] are multiplied by (Ministral 3), or None."""
        if not self.query_scale_beta:
            return None
        beta, span = self.query_scale_beta, self.query_scale_span
        return (1 + beta * torch.log(1 + torch.floor(positions.float() / span)))[..., None].to(dtype)

    def _use(self, variant):
        if variant != self.variant_in_use:
            inv_freq, self.attention_factor = SCALINGS[self.config.rope_type](self.config, variant)
            self.inv_freq, self.variant_in_use = inv_freq.to(self.device), variant


def rotate(x, cos, sin):
    """Turn x [B, heads, T, head_dim] by the tables [B or 1, 1, T, dim], in the half-split convention."""
    dim = cos.shape[-1]
    turned, kept = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


# Each function below returns (inv_freq float32 [dim / 2] in radians per position, attention factor).


def _default(config, variant=None):
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    return 1.0 / config.theta**exponents, 1.0


def _linear(config, variant):
    """All positions are squeezed by `factor`."""
    return _default(config)[0] / config.number("factor"), 1.0


def _dynamic(config, length):
    """NTK-aware scaling whose base grows with the length of the sequence."""
    factor, dim = config.number("factor"), config.dim
    stretch = factor * length / config.max_position_embeddings - (factor - 1)
    theta = config.theta * stretch ** (dim / (dim - 2))
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0


def _llama3(config, variant):
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, those between blended."""
    inv_freq, _ = _default(config)
    factor, low, high = (config.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise RiverError(f"config.json: low_freq_factor {low} should be below high_freq_factor {high}")
    wavelength = 2 * math.pi / inv_freq
    keep = ((config.number("original_max_position_embeddings") / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * (1 - keep) + inv_freq * keep, 1.0


def _yarn(config, variant):
    """YaRN (Peng et al., arXiv 2309.00071): as llama3, but the ramp runs over the index of the dimension."""
    inv_freq, _ = _default(config)
    factor, original = config.number("factor"), config.number("original_max_position_embeddings")
    if config.theta <= 1:
        raise RiverError(f"config.json: rope_type 'yarn' needs a rope_theta above 1, not {config.theta}")

    def index_that_turns(rotations):
        return config.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low = index_that_turns(config.number("beta_fast", 32))
    high = index_that_turns(config.number("beta_slow", 1))
    if config.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    squeezed = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = inv_freq / factor * squeezed + inv_freq * (1 - squeezed)

    def mscale(m):
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if config.scaling.get("mscale") and config.scaling.get("mscale_all_dim"):
        attention_factor = mscale(config.number("mscale")) / mscale(config.number("mscale_all_dim"))
    else:
        attention_factor = mscale(1)
    return inv_freq, config.number("attention_factor", attention_factor)


def _longrope(config, variant):
    """LongRoPE (Ding et al., arXiv 2402.13753): a searched factor for each pair, one list for short
    sequences and one for long ones; the attention factor is the same for both."""
    key = f"{variant}_factor"
    factors = config.scaling.get(key)
    if not isinstance(factors, list) or len(factors) != config.dim // 2:
        raise RiverError(f"config.json: rope_type 'longrope' needs {config.dim // 2} numbers in {key!r}")
    for number in factors:
        positive_number(number, f"rope_type 'longrope' needs all of {key!r}")
    original = config.number("original_max_position_embeddings")
    factor = config.number("factor", config.max_position_embeddings / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    inv_freq = _default(config)[0] / torch.tensor(factors, dtype=torch.float32)
    return inv_freq, config.number("attention_factor", attention_factor)


SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
