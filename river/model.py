"""The decoder, Llama-style and by hand: read it top to bottom.

A layer is a callable of the hidden state, the positions it works at, and the cache. It does not
know whether its linears are full precision (a backbone layer) or 4-bit (an exit layer), and it does
not know how far the sequence has come: positions are handed in by the decode loop.

Shapes: B batch, T tokens of this step, S positions visible so far, D hidden, H heads, K kv heads.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .rope import Rope, rotate


@dataclass
class RMSNorm:
    """x / rms(x) * weight, the statistics in float32 (Zhang and Sennrich, arXiv 1910.07467)."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return x32.to(x.dtype) * self.weight

    def tensor_list(self):
        return [self.weight]

    def with_tensors(self, tensors):
        return dataclasses.replace(self, weight=tensors[0])

    def signature(self):
        return repr(dataclasses.replace(self, weight=None))


@dataclass
class Positions:
    """Where in the sequence one step takes place; every layer of the step gets the same.

    The step's tokens fill the cache slots start .. end-1. A row of a batch whose prompt is shorter
    is padded on the left: its first `padding` slots hold nothing that may be attended to, and its
    positions count from there.
    """

    start: int
    end: int
    cos: torch.Tensor  # [B or 1, 1, T, rotary dim]
    sin: torch.Tensor
    query_scale: torch.Tensor | None  # [B or 1, 1, T, 1], or None
    padding: torch.Tensor | None  # int64 [B], or None if no row is padded
    missing: torch.Tensor | None = None  # bool [end], slots that nothing was written to, or None for none

    @classmethod
    def at(cls, rope, start, end, length, dtype, padding=None):
        """Positions of the slots start .. end-1 of a sequence of `length`, with the tables of `rope` in `dtype`."""
        slots = torch.arange(start, end, device=rope.device)
        positions = slots[None, None] if padding is None else (slots - padding[:, None, None]).clamp(min=0)
        cos, sin = rope.tables(positions, length, dtype)  # positions is (B or 1, 1, T)
        return cls(start, end, cos, sin, rope.query_scale(positions, dtype), padding)

    def first_visible(self, window):
        """The first slot that any query of the step may see."""
        return 0 if window is None else max(0, self.start - window + 1)

    def mask(self, repeats, window):
        """Which slots first_visible .. end-1 each query sees: bool [B or 1, 1, repeats * T, slots], None for all.

        The T rows stand there `repeats` times, once for each query head that shares a kv head.
        """
        if self.end - self.start == 1 and self.padding is None and self.missing is None:
            return None
        keys = torch.arange(self.first_visible(window), self.end, device=self.cos.device)
        queries = torch.arange(self.start, self.end, device=self.cos.device).repeat(repeats)[:, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        if self.missing is not None:
            visible &= ~self.missing[keys]
        if self.padding is not None:
            # A padding query sees itself, since a softmax over nothing would be NaN, which spreads.
            visible = visible & (keys >= self.padding[:, None, None]) | (keys == queries)
        return visible.view(-1, 1, *visible.shape[-2:])


@dataclass
class DecoderLayer:
    """Attention and feed-forward, each behind a norm and inside a residual connection.

    The linears are any callables of x: `Linear` or `QuantLinear`. q, k and v are one projection, and
    so are gate and up, since each group reads the same input.
    """

    index: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    input_layernorm: RMSNorm
    qkv_proj: object
    o_proj: object
    post_attention_layernorm: RMSNorm  # Llama's name for the one before the feed-forward
    gate_up_proj: object
    down_proj: object
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    window: int | None = None

    def __call__(self, h, positions, cache):
        """h [B, T, D] to h [B, T, D]; writes K and V of the step's tokens into this layer's slots."""
        h = h + self.attention(self.input_layernorm(h), positions, *cache.layer(self.index))
        return h + self.feed_forward(self.post_attention_layernorm(h))

    def attention(self, x, positions, k_cache, v_cache):
        B, T, _ = x.shape
        H, K = self.n_heads, self.n_kv_heads
        qkv = self.qkv_proj(x).view(B, T, H + 2 * K, self.head_dim).transpose(1, 2)  # (B, H + 2K, T, head_dim)
        q, k, v = qkv.split((H, K, K), dim=1)
        self._store(k, v, positions, k_cache, v_cache)
        if self.q_norm:
            q = self.q_norm(q)
        q = rotate(q, positions.cos, positions.sin)
        if positions.query_scale is not None:
            q = q * positions.query_scale

        # The H / K query heads of a kv head become more rows of one attention, so that K and V are
        # read once and never copied for them.
        q = q.reshape(B, K, H // K * T, self.head_dim)
        seen = slice(positions.first_visible(self.window), positions.end)
        k, v = k_cache[:, :, seen], v_cache[:, :, seen]  # (B, K, S, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=positions.mask(H // K, self.window))
        y = y.view(B, H, T, self.head_dim).transpose(1, 2).reshape(B, T, H * self.head_dim)
        return self.o_proj(y)

    def feed_forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, intermediate) each
        return self.down_proj(F.silu(gate) * up)

    def write_keys_values(self, h, positions, cache):
        """Write the K and V that this layer would write if `h` [B, T, D] were its input; returns `h` as it is."""
        B, T, _ = h.shape
        kv = self.kv_proj(self.input_layernorm(h)).view(B, T, 2 * self.n_kv_heads, self.head_dim).transpose(1, 2)
        self._store(*kv.chunk(2, dim=1), positions, *cache.layer(self.index))
        return h

    def _store(self, k, v, positions, k_cache, v_cache):
        if self.k_norm:
            k = self.k_norm(k)
        k_cache[:, :, positions.start : positions.end] = rotate(k, positions.cos, positions.sin)
        v_cache[:, :, positions.start : positions.end] = v

    @functools.cached_property
    def kv_proj(self):
        """The rows of `qkv_proj` that give K and V."""
        return self.qkv_proj.rows_from(self.n_heads * self.head_dim)

    @property
    def nbytes(self):
        """Bytes of weights that one token reads on its way through."""
        return sum(tensor.nbytes for tensor in self.tensor_list())

    def parts(self):
        """What holds this layer's tensors, norms and linears: a list of (field name, part)."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, part) for name, part in fields if hasattr(part, "tensor_list")]

    def tensor_list(self):
        """All its tensors, in a fixed order."""
        return [tensor for _, part in self.parts() for tensor in part.tensor_list()]

    def with_tensors(self, tensors):
        """The same layer over other tensors, as many and in the order of `tensor_list`."""
        rest = iter(tensors)
        replaced = {name: part.with_tensors([next(rest) for _ in part.tensor_list()]) for name, part in self.parts()}
        return dataclasses.replace(self, **replaced)


@dataclass
class Llama:
    """Embedding, decoder layers, final norm and LM head of one checkpoint: the backbone.

    `embed_tokens` is [vocab, D]; `lm_head` is a `Linear` over the same tensor where the checkpoint
    ties them.
    """

    config: object
    embed_tokens: torch.Tensor
    layers: list
    norm: RMSNorm
    lm_head: object

    def __post_init__(self):
        self.rope = Rope(self.config.rope, self.device)

    @property
    def device(self):
        return self.embed_tokens.device

    @property
    def dtype(self):
        return self.embed_tokens.dtype

    def embed(self, tokens):
        """Token ids [B, T] to hidden states [B, T, D]."""
        return F.embedding(tokens, self.embed_tokens)

    def logits(self, h):
        """Hidden states [B, T, D] after the last layer to float32 logits [B, T, vocab]."""
        return self.lm_head(self.norm(h)).float()
