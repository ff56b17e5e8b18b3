"""Turn a GGUF file of a small llama-architecture chat model into a Hugging Face checkpoint folder.

It is a llama with a byte-level BPE tokenizer, as the default model's mirror is (see download.py); all
else is refused by name.
"""

import json
from pathlib import Path

from river.errors import RiverError
from river.files import complete_or_absent, save_safetensors
from weights.gguf import dequantise, read

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The llama settings that the conversion understands. Any other (a rotary scaling, experts) would change
# the maths, so it is refused.
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
NORMAL, CONTROL = 1, 3  # the token types that a byte-level BPE vocabulary has


def convert(path, folder, note=""):
    """Write the Hugging Face folder `folder` that holds the model and tokenizer of the GGUF file `path`.

    Weights become bfloat16. `model.safetensors` is written last, so that an interrupted conversion is
    seen as incomplete.

    Args:
        path: the GGUF file.
        folder: created if absent; its files of the same names are replaced.
        note: where the weights come from; kept in the header of `model.safetensors`.

    Raises:
        RiverError: the file is malformed or holds something that is not supported, or `folder` cannot
            be written.
    """
    metadata, tensors = read(path)
    config, expected = describe(path, metadata, tied="output.weight" not in tensors)
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())[0]
        raise RiverError(f"{path}: tensor {odd} is {'unexpected' if odd in tensors else 'missing'}")
    vocabulary, tokenizer_config = tokenizer(path, metadata, config)

    weights = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, (new_name, shape) in expected.items():
        weight = dequantise(path, name, *tensors[name])
        if tuple(weight.shape) != shape:
            raise RiverError(f"{path}: tensor {name} is {tuple(weight.shape)}, its settings say {shape}")
        kind = name.split(".")[-2]
        weights[new_name] = unpermute(weight, heads[kind]) if kind in heads else weight

    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("tokenizer.json", vocabulary),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
        ("config.json", config),
    ):
        with complete_or_absent(Path(folder) / name) as temporary:
            temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_safetensors(Path(folder) / "model.safetensors", weights, {"source": note} if note else None)


def unpermute(weight, heads):
    """Return the q or k projection `weight` with its rows in Hugging Face's order.

    llama.cpp rotates neighbouring rows of a head, Hugging Face rotates row i with row i + head_dim/2,
    so the converter to GGUF interleaves the halves of every head. Without this the model still speaks
    fluently, and nonsense.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def describe(path, metadata, tied):
    """Return the config.json of the model, and its tensors: GGUF name to (Hugging Face name, shape).

    Raises:
        RiverError: the settings are missing, impossible or not those of a plain llama.
    """
    if metadata.get("general.architecture") != "llama":
        raise RiverError(f"{path}: architecture {metadata.get('general.architecture')!r} is not supported")
    settings = {key[6:]: value for key, value in metadata.items() if key.startswith("llama.")}
    odd = sorted(settings.keys() ^ CONFIG_KEYS.keys())
    if odd:
        problem = "not supported" if odd[0] in settings else "missing"
        raise RiverError(f"{path}: setting llama.{odd[0]} is {problem}")
    config = {new: settings[key] for key, new in CONFIG_KEYS.items()}
    for key, new in CONFIG_KEYS.items():
        wanted = float if new in ("rope_theta", "rms_norm_eps") else int
        if type(config[new]) is not wanted or not 0 < config[new] < 1 << 31:
            raise RiverError(f"{path}: setting llama.{key} is {config[new]!r}")
    # GGUF keeps float32: seven digits give back the number that was meant (1e-05).
    config.update({new: float(f"{config[new]:.7g}") for new in ("rope_theta", "rms_norm_eps")})
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    if heads * width != hidden or heads % kv_heads or width % 2:
        raise RiverError(f"{path}: {heads} heads ({kv_heads} kv) of {width} do not fit the size {hidden}")
    if config["num_hidden_layers"] > 1 << 12:
        raise RiverError(f"{path}: {config['num_hidden_layers']} layers are too many")
    tokens = {}
    for key in ("bos", "eos", "padding"):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is not int or not 0 <= token < vocabulary:
            raise RiverError(f"{path}: tokenizer.ggml.{key}_token_id is {token!r}")
        tokens[f"{key[:3]}_token_id"] = token

    expected = {"token_embd.weight": ("model.embed_tokens.weight", (vocabulary, hidden))}
    shapes = dict.fromkeys(LAYER_NAMES, (hidden, hidden))
    shapes.update(attn_norm=(hidden,), ffn_norm=(hidden,), ffn_gate=(inner, hidden), ffn_up=(inner, hidden))
    shapes.update(ffn_down=(hidden, inner))
    shapes.update(attn_k=(kv_heads * width, hidden), attn_v=(kv_heads * width, hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, new in LAYER_NAMES.items():
            expected[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{new}.weight", shapes[name])
    expected["output_norm.weight"] = ("model.norm.weight", (hidden,))
    if not tied:
        expected["output.weight"] = ("lm_head.weight", (vocabulary, hidden))
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    tail = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None}
    return {**head, **config, **tail, "tie_word_embeddings": tied, **tokens}, expected


def tokenizer(path, metadata, config):
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        RiverError: the vocabulary is not a byte-level BPE with SmolLM's rules, or contradicts itself.
    """
    _check_tokenizer(path, metadata, config["vocab_size"])
    texts, kinds, merges = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": texts[i], **flags} for i, kind in enumerate(kinds) if kind == CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {**bpe, "vocab": {text: token for token, text in enumerate(texts)}, "merges": merges},
    }
    names = {f"{key}_token": texts[config[f"{key}_token_id"]] for key in ("bos", "eos", "pad")}
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **names,
        "chat_template": metadata["tokenizer.chat_template"],
        "added_tokens_decoder": {str(token.pop("id")): token for token in map(dict, added)},
    }
    return content, settings


def _check_tokenizer(path, metadata, vocab_size):
    """Raise a RiverError unless the tokenizer's metadata is all there, of the kind that we know, and consistent."""
    rules = {"model": "gpt2", "pre": "smollm", "add_bos_token": False, "add_space_prefix": False}
    for key, wanted in rules.items():
        if (found := metadata.get(f"tokenizer.ggml.{key}")) != wanted:
            raise RiverError(f"{path}: tokenizer.ggml.{key} is {found!r}; only {wanted!r} is supported")
    lists = {"tokens": str, "token_type": int, "merges": str}
    for key, wanted in lists.items():
        items = metadata.get(f"tokenizer.ggml.{key}")
        if type(items) is not list or {type(item) for item in items} != {wanted}:
            raise RiverError(f"{path}: tokenizer.ggml.{key} is missing or of the wrong type")
    if type(metadata.get("tokenizer.chat_template")) is not str:
        raise RiverError(f"{path}: tokenizer.chat_template is missing")
    texts, kinds, merges = (metadata[f"tokenizer.ggml.{key}"] for key in lists)
    vocabulary = set(texts)
    if not len(vocabulary) == len(texts) == len(kinds) == vocab_size:
        raise RiverError(
            f"{path}: {len(vocabulary)} different tokens and {len(kinds)} types for a vocabulary of {vocab_size}"
        )
    if set(kinds) - {NORMAL, CONTROL}:
        raise RiverError(f"{path}: token type {max(kinds)} is not supported")
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary:
            raise RiverError(f"{path}: merge {merge!r} names a token that does not exist")
