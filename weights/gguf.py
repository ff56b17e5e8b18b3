"""Turn a GGUF file of a small llama-architecture chat model into a Hugging Face checkpoint folder.

GGUF is the one-file format of llama.cpp. The project reads it for one reason: a copy of the default
model that can be had without the hub is kept in it (see download.py). So this reads what that file
holds (4-bit, 8-bit and float weights of a llama, a byte-level BPE tokenizer) and refuses all else by
name; a file is never half understood.

Layout: "GGUF", version, tensor count, metadata count; the metadata as (key, type, value); for every
tensor its name, dimensions (fastest first), type and offset; then, aligned, the tensors' bytes.
"""

import json
import math
import mmap
import struct
from pathlib import Path

import torch

from river.errors import RiverError
from river.files import complete_or_absent, save_safetensors

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_ARRAY = 1 << 22  # far above any vocabulary; keeps the lists of a hostile file small

# GGUF's number for a tensor type: its name, elements per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}

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


def read(path):
    """Return what the GGUF file `path` holds, without copying the weights.

    Returns:
        (metadata, tensors): a dict of key to value, and a dict of tensor name to (type number, shape
        with the slowest dimension first, bytes as a flat uint8 tensor on the mapped file).

    Raises:
        RiverError: the file is absent, truncated or malformed, or has a tensor type that is not
            supported.
    """
    try:
        with open(path, "rb") as file:
            # A private map: torch wants writable memory, and nothing is ever written to the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise RiverError(f"cannot read {path}: {error}") from error
    cursor = _Cursor(path, data)
    if cursor.take(4) != b"GGUF":
        raise RiverError(f"{path} is not a GGUF file")
    version, tensor_count, metadata_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in (2, 3):
        raise RiverError(f"{path}: GGUF version {version} is not supported")

    metadata = {}
    for _ in range(metadata_count):  # a false count ends at the end of the file, with an error
        key = cursor.string()
        if key in metadata:
            raise RiverError(f"{path}: metadata key {key!r} appears twice")
        metadata[key] = cursor.value()
    infos = {}
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if name in infos or not 1 <= dimensions <= 4:
            raise RiverError(f"{path}: tensor {name!r} appears twice or has {dimensions} dimensions")
        shape = [cursor.scalar("Q") for _ in range(dimensions)][::-1]
        infos[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
        raise RiverError(f"{path}: general.alignment is {alignment!r}")
    start = math.ceil(cursor.position / alignment) * alignment
    left = len(data) - start  # no tensor's bytes count twice, so memory stays in proportion to the file
    tensors = {}
    for name, (shape, kind, offset) in infos.items():
        if kind not in TENSOR_TYPES:
            raise RiverError(f"{path}: tensor {name} has type {kind}, which is not supported")
        _, block, block_bytes = TENSOR_TYPES[kind]
        size = math.prod(shape) // block * block_bytes
        left -= size
        if size == 0 or shape[-1] % block or offset % alignment:
            raise RiverError(f"{path}: tensor {name} has an impossible shape or offset ({shape}, {offset})")
        if start + offset + size > len(data) or left < 0:
            raise RiverError(f"{path} is truncated: tensor {name} ends after the end of the file")
        raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start + offset)
        tensors[name] = (kind, tuple(shape), raw)
    return metadata, tensors


class _Cursor:
    """Reads little-endian values one after the other; never past the end."""

    def __init__(self, path, data):
        self.path, self.data, self.position = path, data, 0

    def take(self, count):
        if count > len(self.data) - self.position:
            raise RiverError(f"{self.path} is truncated: {count} bytes wanted at byte {self.position}")
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self):
        at = self.position
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise RiverError(f"{self.path}: the text at byte {at} is not UTF-8") from error

    def value(self):
        kind = self.scalar("I")
        if kind != ARRAY:
            return self._item(kind)
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ARRAY:
            raise RiverError(f"{self.path}: an array before byte {self.position} has {count} items")
        return [self._item(kind) for _ in range(count)]

    def _item(self, kind):
        if kind == STRING:
            return self.string()
        if kind not in SCALARS:  # arrays of arrays too: no model uses them
            raise RiverError(f"{self.path}: value type {kind} before byte {self.position} is not supported")
        return self.scalar(SCALARS[kind])


def dequantise(path, name, kind, shape, raw):
    """Return the tensor whose GGUF bytes are `raw` as bfloat16.

    A block of 32 elements shares a float16 scale d (and offset m). 4-bit values are packed two to a
    byte: the low halves are elements 0 to 15, the high halves elements 16 to 31.

    Raises:
        RiverError: a value is not finite.
    """
    type_name, _, block_bytes = TENSOR_TYPES[kind]
    blocks = raw.view(-1, block_bytes)

    def half(start):  # a copy, because a view of another element size needs aligned memory
        return blocks[:, start : start + 2].clone().view(torch.float16).float()

    def nibbles(start):
        packed = blocks[:, start:]
        return torch.cat((packed & 15, packed >> 4), dim=1).float()

    if type_name == "F32":
        values = raw.clone().view(torch.float32)
    elif type_name == "F16":
        values = raw.clone().view(torch.float16).float()
    elif type_name == "Q4_0":
        values = (nibbles(2) - 8) * half(0)
    elif type_name == "Q4_1":
        values = nibbles(4) * half(0) + half(2)
    else:  # Q8_0
        values = blocks[:, 2:].clone().view(torch.int8).float() * half(0)
    if not values.isfinite().all():
        raise RiverError(f"{path}: tensor {name} has values that are not finite")
    return values.to(torch.bfloat16).view(shape)


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
    rules = {"model": "gpt2", "pre": "smollm", "add_bos_token": False, "add_space_prefix": False}
    for key, wanted in rules.items():
        if (found := metadata.get(f"tokenizer.ggml.{key}")) != wanted:
            raise RiverError(f"{path}: tokenizer.ggml.{key} is {found!r}; only {wanted!r} is supported")
    lists = {"tokens": str, "token_type": int, "merges": str}
    for key, wanted in lists.items():
        items = metadata.get(f"tokenizer.ggml.{key}")
        if type(items) is not list or {type(item) for item in items} != {wanted}:
            raise RiverError(f"{path}: tokenizer.ggml.{key} is missing or of the wrong type")
    texts, kinds, merges = (metadata[f"tokenizer.ggml.{key}"] for key in lists)
    template = metadata.get("tokenizer.chat_template")
    if type(template) is not str:
        raise RiverError(f"{path}: tokenizer.chat_template is missing")
    vocabulary = {text: token for token, text in enumerate(texts)}
    if not len(vocabulary) == len(texts) == len(kinds) == config["vocab_size"]:
        raise RiverError(
            f"{path}: {len(vocabulary)} different tokens and {len(kinds)} types"
            f" for a vocabulary of {config['vocab_size']}"
        )
    if set(kinds) - {NORMAL, CONTROL}:
        raise RiverError(f"{path}: token type {max(kinds)} is not supported")
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise RiverError(f"{path}: merge {merge!r} names a token that does not exist")

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
        "model": {**bpe, "vocab": vocabulary, "merges": merges},
    }
    names = {f"{key}_token": texts[config[f"{key}_token_id"]] for key in ("bos", "eos", "pad")}
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **names,
        "chat_template": template,
        "added_tokens_decoder": {str(token.pop("id")): token for token in map(dict, added)},
    }
    return content, settings
