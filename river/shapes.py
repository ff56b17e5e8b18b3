"""Shapes of known models: what they take in memory, and models with random weights, as fast as the real ones."""

import torch

from .compile import compile_model
from .config import parse_config
from .linear import Linear, QuantLinear, layout_for
from .llm import RiverLLM, usable_device
from .model import DecoderLayer, Llama, RMSNorm

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0}
SHAPES = {
    "llama-3.2-1b": {
        **LLAMA, "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "phi-4-mini": {
        **LLAMA, "num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 200064, "tie_word_embeddings": True,
    },
    "ministral-3-8b": {
        **LLAMA, "num_hidden_layers": 34, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072, "tie_word_embeddings": False,
    },
}  # fmt: skip
DISTINCT_BYTES = 2 << 30  # of random layers; a larger shape repeats them, far beyond any processor's cache


def gigabytes(config, positions, offload):
    """Of weights and cache in bfloat16, by arithmetic, quantised in groups of 64: a dict, with the number of positions.

    "river": River with `offload` backbone layers kept in memory; "river_all": with all. "ratio": the former to
    full quantisation.
    """
    D, q, kv, ff, L = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size, config.n_layers
    linears = D * (2 * q + 2 * kv + 3 * ff)
    biases = (q + 2 * kv) * config.qkv_bias + D * config.o_bias + (2 * ff + D) * config.mlp_bias
    kept = 2 * (2 * D + 2 * config.head_dim * config.qk_norm + biases)  # norms and biases, which the river shares
    head = 2 * (config.vocab_size * D * (1 if config.tie_word_embeddings else 2) + D)  # with embedding and final norm
    full_4_bit = head + L * (linears / 2 + linears / 64 * 4 + kept)  # half a byte a weight, a pair a group
    cache = 2 * 2 * L * kv * positions
    nbytes = {
        "cache": cache,
        "backbone": head + L * (2 * linears + kept) + cache,
        "full_4_bit": full_4_bit + cache,
        "river": full_4_bit + 2 * linears * offload + cache,
        "river_all": full_4_bit + 2 * linears * L + cache,
    }
    ratio = nbytes["river"] / nbytes["full_4_bit"]
    return {"positions": positions, **{name: n / 1e9 for name, n in nbytes.items()}, "ratio": ratio}


def random_llm(values, compile, device, log):
    """A `RiverLLM` without tokenizer, of the shape in `values` (as in config.json), with random weights."""
    config = parse_config(values)
    device = usable_device(device)
    D, q, kv, ff = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    shapes = {"qkv_proj": (q + 2 * kv, D), "o_proj": (D, q), "gate_up_proj": (2 * ff, D), "down_proj": (D, ff)}

    def draw(*shape):
        # A strip of noise, repeated: what matters is that the bytes are there to be read.
        strip = torch.randn(min(shape[0], 64), *shape[1:]) * shape[-1] ** -0.5
        return strip.repeat(-(-shape[0] // len(strip)), *[1] * (len(shape) - 1))[: shape[0]].to(device, torch.bfloat16)

    def quantized(shape):
        layout = layout_for(shape, 64, torch.bfloat16, device)
        # Only the sizes matter here, and those are the kernel's: half a byte a weight, a pair a group.
        tensors = {"packed": torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, device=device)}
        tensors["scales_and_zeros"] = torch.rand(shape[1] // 64, shape[0], 2, device=device).bfloat16() * 1e-3
        return QuantLinear(tensors, layout, shape, 64)

    norm = RMSNorm(torch.ones(D, dtype=torch.bfloat16, device=device), config.rms_norm_eps)
    layer_bytes = 2 * sum(rows * columns for rows, columns in shapes.values())
    distinct = min(config.n_layers, max(2, DISTINCT_BYTES // layer_bytes))
    sets = [
        ({name: Linear([draw(*shape)]) for name, shape in shapes.items()},
         {name: quantized(shape) for name, shape in shapes.items()})
        for _ in range(distinct)
    ]  # fmt: skip

    def layers(which):
        return [
            DecoderLayer(
                index=index,
                n_heads=config.n_heads,
                n_kv_heads=config.n_kv_heads,
                head_dim=config.head_dim,
                input_layernorm=norm,
                post_attention_layernorm=norm,
                **sets[index % distinct][which],
            )
            for index in range(config.n_layers)
        ]

    embedding = draw(config.vocab_size, D)
    model = Llama(config, embedding, layers(0), norm, Linear([embedding]))
    river = layers(1)
    if compile:
        model, river = compile_model(model, river, log)
    return RiverLLM(model, river, None)
