"""Rotary position embedding (Su et al., arXiv 2104.09864): position p turns the pair of dimensions
(i, i + dim/2) of each query and key by the angle p * inv_freq[i].

Everything is computed in float32: in bfloat16, positions above 256 would share an angle.
"""

import math

import torch


class Rope:
    """Cosines and sines for every position of a sequence.

    Args:
        config: a `RopeConfig`.
        device: where the tables live.
    """

    def __init__(self, config, device="cpu"):
        self.config = config
        self.inv_freq = _inv_freq(config).to(device)

    @property
    def device(self):
        return self.inv_freq.device

    def tables(self, positions, dtype):
        """Return (cos, sin), each [..., dim] in `dtype`, for int64 `positions` [...]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, cos, sin):
    """Turn x [B, heads, T, head_dim] by the tables [B or 1, 1, T, dim], in the half-split convention."""
    dim = cos.shape[-1]
    turned, kept = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def _inv_freq(config):
    """Angular frequency of each pair of dimensions, float32 [dim / 2], in radians per position."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    inv_freq = 1.0 / config.theta**exponents
    return inv_freq if config.rope_type == "default" else SCALINGS[config.rope_type](inv_freq, config)


def _llama3(inv_freq, config):
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, those between blended."""
    factor, low, high = (config.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = config.number("original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * (1 - keep) + inv_freq * keep


SCALINGS = {"llama3": _llama3}
