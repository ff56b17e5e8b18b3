"""Token ids, texts and streams against fixtures whose ids come from the reference libraries.

The fixtures are seven small tokenizers, one for each kind of file and set of rules; see
fixtures/tokenizers/FORMAT.md. Their ids come from `tokenizers` and from sentencepiece itself.
"""

import base64
import hashlib
import json
import random
import shutil
import time
from pathlib import Path

import pytest

from river.bpe import CHARACTER_OF
from river.errors import RiverError
from river.tokenizer import load_tokenizer

ROOT = Path(__file__).parent / "fixtures" / "tokenizers"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
HARD = {"qwen_like": 6, "smol_like": 2}


def fixture(folder, name):
    return json.loads((ROOT / folder / name).read_text(encoding="utf-8"))


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def changed_copy(tmp_path, folder, change, name="tokenizer.json"):
    """Write `folder`'s file `name`, changed by the function `change`, into an empty folder; return that."""
    content = fixture(folder, name)
    change(content)
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module", params=[*FOLDERS, "tekken_like alone"])
def fixed(request, tmp_path_factory):
    """Return (folder name, tokenizer) for every fixture; the last has tekken.json only."""
    folder = request.param.split()[0]
    if folder == request.param:
        return folder, load_tokenizer(ROOT / folder)
    alone = tmp_path_factory.mktemp("tekken")
    shutil.copy(ROOT / folder / "tekken.json", alone)
    return folder, load_tokenizer(alone)


def test_every_case_gives_the_reference_ids_and_text(fixed):
    """All cases, the ones with special tokens in the text and the ones with BOS included.

    The cases marked "hard" are the only ones that may differ, and these are all of them: code
    points newer than the Unicode tables of `tokenizers`, whose NFC leaves what Python's reorders
    or composes (Qwen), and digits that its digit step knows but its regex does not (SmolLM2).
    """
    folder, tokenizer = fixed
    wrong, hard = [], 0
    for case in fixture(folder, "cases.json"):
        text = case["text"] if "text" in case else case["repeat"][0] * case["repeat"][1]
        ids = tokenizer.encode(text, case.get("add_special_tokens", False), case.get("specials", False))
        if case.get("hard"):
            hard += 1
            tokenizer.decode(ids)
        elif "repeat" in case:
            found = len(ids), ids[:6], sha256(",".join(map(str, ids))), sha256(tokenizer.decode(ids))
            if found != (case["n_ids"], case["ids_head"], case["ids_sha256"], case["decoded_sha256"]):
                wrong.append(case)
        elif ids != case["ids"] or tokenizer.decode(ids) != case["decoded"]:
            wrong.append((case, ids))
    assert wrong == []
    assert hard == HARD.get(folder, 0) == fixture(folder, "meta.json")["n_hard"]


def test_text_parts_recognise_no_token_at_all(fixed):
    folder, tokenizer = fixed
    for case in fixture(folder, "cases.json"):
        if "ids_plain" in case:
            assert tokenizer.encode_parts([case["text"]]) == case["ids_plain"]


def test_decoding_any_ids(fixed):
    folder, tokenizer = fixed
    for case in fixture(folder, "decode.json"):
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        if "decoded_skip_special" in case:
            assert tokenizer.decode(case["ids"], skip_special=True) == case["decoded_skip_special"]


def test_vocabulary_size_and_bos(fixed):
    folder, tokenizer = fixed
    meta = fixture(folder, "meta.json")
    # Meta's file has no special tokens; Meta's code adds 256, the fixture's meta.json counts 16.
    missing = 256 - 16 if folder == "llama3_meta" else 0
    assert tokenizer.n_vocab == meta["vocab_size"] + missing
    assert tokenizer.bos_id == (meta["bos_id"] if meta["adds_bos"] else None)


def test_bos_comes_once_in_front_or_not_at_all(fixed):
    _, tokenizer = fixed
    front = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert tokenizer.encode("hello", bos=True) == front + tokenizer.encode("hello")


def test_streaming_gives_the_decoded_text_and_never_takes_anything_back(fixed):
    """Text that is out is final: at every step it begins the text that all ids together give.

    That is where decoding token by token goes wrong: half a character comes out as U+FFFD, and the
    next token would have completed it.
    """
    folder, tokenizer = fixed
    choice = random.Random(folder)
    texts = ["aé世界😀 \ufffd", "👩‍👧 naïve", " two  spaces", "e\u0301\u0338\x00 x"]
    for _ in range(1500):
        ids = [choice.randrange(tokenizer.n_vocab + 2) for _ in range(choice.randrange(8))]
        ids += tokenizer.encode(choice.choice(texts))[choice.randrange(3) : choice.randrange(3, 30)]
        for skip in (False, True):
            whole = tokenizer.decode(ids, skip)
            stream, out = tokenizer.stream(skip), ""
            for i in ids:
                out += stream.feed(i)
                assert whole.startswith(out)
            assert out + stream.flush() == whole


def test_a_character_is_held_back_until_its_last_byte():
    tokenizer = load_tokenizer(ROOT / "llama3_like")
    stream = tokenizer.stream()
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    assert [stream.feed(i) for i in ids] == [""] * (len(ids) - 1) + ["😀"]
    stream.feed(ids[0])
    assert stream.flush() == "\ufffd"


def test_sentencepiece_streams_what_sentencepiece_decodes():
    """Byte pieces, control pieces and the dropped first space follow sentencepiece's own decode."""
    tokenizer = load_tokenizer(ROOT / "spm_llama2_like")
    model, choice = tokenizer.model, random.Random(1)
    of_bytes = [i for i in range(model.get_piece_size()) if model.is_byte(i)]
    for _ in range(3000):
        pools = [range(model.get_piece_size()), of_bytes, of_bytes[128:], [0, 1, 2, model.piece_to_id("▁")]]
        ids = [choice.choice(choice.choice(pools)) for _ in range(choice.randrange(10))]
        assert tokenizer.decode(ids) == model.decode(ids)


@pytest.mark.parametrize("text", [" " * 1_000_000, "ab" * 200_000, "\n" * 300_000 + "x", "é" * 100_000])
def test_a_huge_run_is_encoded_without_overflow(text):
    """A million spaces overflow the stack of tiktoken's splitter, and a panic is no Exception."""
    for folder in ("llama3_like", "llama3_meta", "spm_llama2_like"):
        tokenizer = load_tokenizer(ROOT / folder)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogates_become_replacement_characters(fixed):
    """The command line turns undecodable bytes into lone surrogates, which no UTF-8 can hold."""
    _, tokenizer = fixed
    assert tokenizer.encode("a\udc80 b") == tokenizer.encode("a\ufffd b")
    assert tokenizer.encode_parts(["\ud83d\ude00"]) == tokenizer.encode_parts(["😀"])


def with_token(content, i, **flags):
    """Return a change of a tokenizer.json that adds the token `content` with the id `i`."""
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return lambda file: file["added_tokens"].append(token | {"id": i, "content": content} | flags)


@pytest.mark.parametrize(
    "flags, text, around",
    [
        ({"lstrip": True}, "a \u3000<t> b", ("a", " b")),
        ({"rstrip": True}, "a <t> \n b", ("a ", "b")),
        ({"rstrip": True}, "a <t>\x1cb", ("a ", "\x1cb")),  # space to str.isspace, not to Unicode
        ({"lstrip": True, "rstrip": True}, " <t> ", ("", "")),
        ({"single_word": True}, "a <t>.", ("a ", ".")),
    ],
)
def test_flags_of_added_tokens_decide_what_they_take_along(tmp_path, flags, text, around):
    tokenizer = load_tokenizer(changed_copy(tmp_path, "qwen_like", with_token("<t>", 677, **flags)))
    before, after = (tokenizer.encode(part) for part in around)
    assert tokenizer.encode(text) == [*before, 677, *after]


def test_a_single_word_token_is_not_found_inside_a_word(tmp_path):
    tokenizer = load_tokenizer(changed_copy(tmp_path, "qwen_like", with_token("ee", 677, single_word=True)))
    assert 677 in tokenizer.encode("x ee y")
    assert 677 not in tokenizer.encode("see eee")


def test_normalized_tokens_are_found_in_normalized_text_only(tmp_path):
    def change(file):
        with_token("[\u00e9]", 677, normalized=True)(file)
        with_token("[\u00e8]", 678)(file)

    tokenizer = load_tokenizer(changed_copy(tmp_path, "qwen_like", change))
    assert tokenizer.encode("[e\u0301]") == [677]
    assert 678 not in tokenizer.encode("[e\u0300]")


def test_text_does_not_become_a_special_token_as_a_whole_piece(tmp_path):
    """With ignore_merges a piece that is a token is taken whole, and special tokens are tokens too."""

    def change(file):
        file["model"]["vocab"]["PADDING"] = 900
        with_token("PADDING", 900, special=True)(file)

    tokenizer = load_tokenizer(changed_copy(tmp_path, "llama3_like", change))
    assert 900 not in tokenizer.encode("PADDING")
    assert tokenizer.encode("PADDING", specials=True) == [900]


def test_tokens_without_a_merge_are_found_whole_but_never_built(tmp_path):
    """Ranks made from merges would let tiktoken build such a token inside a longer piece."""

    def change(file):
        vocab = file["model"]["vocab"]
        vocab["qzx"] = 900

    tokenizer = load_tokenizer(changed_copy(tmp_path, "llama3_like", change))
    assert tokenizer.encode("qzx") == [900]
    assert 900 not in tokenizer.encode("qzxqzx")


@pytest.mark.parametrize(
    "config, bos_id",
    [
        ({"add_bos_token": False, "bos_token": "<|begin_of_text|>"}, None),
        ({"add_bos_token": True, "bos_token": {"content": "<|end_of_text|>"}}, 851),
        ({}, 850),
    ],
)
def test_tokenizer_config_overrules_the_post_processor_about_bos(tmp_path, config, bos_id):
    shutil.copy(ROOT / "llama3_like" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).bos_id == bos_id


def test_tokens_added_behind_a_sentencepiece_model(tmp_path):
    """Fine-tunes add <|im_start|> and the like in tokenizer_config.json; tokenizer.model stays as it was."""
    shutil.copy(ROOT / "spm_llama2_like" / "tokenizer.model", tmp_path)
    extra = {"921": {"content": "<|im_start|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": extra}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.n_vocab, tokenizer.special_id("<|im_start|>")) == (922, 921)
    ids = [921, *tokenizer.encode("hi")]
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special=True)) == ("<|im_start|> hi", "hi")
    assert 921 not in tokenizer.encode("<|im_start|>")


def test_a_large_vocabulary_loads_in_about_a_second(tmp_path):
    """As large as Llama 3's; anything quadratic in the vocabulary takes minutes."""
    choice = random.Random(0)
    tokens = [CHARACTER_OF[byte] for byte in range(256)]
    known, merges = set(tokens), []
    while len(tokens) < 128_000:
        left, right = choice.choice(tokens), choice.choice(tokens)
        if len(left + right) < 16 and left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")

    def change(file):
        file["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
        file["added_tokens"] = [token | {"id": 128_000 + i} for i, token in enumerate(file["added_tokens"])]

    folder = changed_copy(tmp_path, "llama3_like", change)
    start = time.perf_counter()
    tokenizer = load_tokenizer(folder)
    seconds = time.perf_counter() - start
    text = "".join(chr(choice.randrange(32, 1000)) for _ in range(10_000))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert seconds < 4  # about 0.5 on an idle core


def test_the_kind_of_tokenizer_file_is_chosen_by_content(tmp_path):
    """A Llama 2 tokenizer.json is BPE over characters, not bytes; tokenizer.model says the same exactly."""
    over_characters = {"model": {"type": "BPE", "byte_fallback": True}, "pre_tokenizer": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(over_characters))
    with pytest.raises(RiverError, match="download the checkpoint's tokenizer.model"):
        load_tokenizer(tmp_path)
    shutil.copy(ROOT / "spm_llama2_like" / "tokenizer.model", tmp_path)
    assert load_tokenizer(tmp_path).encode("hi") == load_tokenizer(ROOT / "spm_llama2_like").encode("hi")
    shutil.copy(ROOT / "qwen_like" / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).encode("hi") == load_tokenizer(ROOT / "qwen_like").encode("hi")


def setting(*path_and_value):
    """Return a function that sets a nested value of a file: keys, then the value."""
    *path, key, value = path_and_value

    def change(file):
        for step in path:
            file = file[step]
        file[key] = value

    return change


BROKEN = {
    "model.dropout = 0.1": ("llama3_like", setting("model", "dropout", 0.1)),
    "vocab should be": ("llama3_like", setting("model", "vocab", [])),
    "vocab has an id": ("llama3_like", setting("model", "vocab", "a", "1")),
    "merges should be": ("llama3_like", setting("model", "merges", None)),
    r"merges\[3\] = 'a b c'": ("llama3_like", setting("model", "merges", 3, "a b c")),
    r"merges\[0\] = \['no', 'such'\]": ("smol_like", setting("model", "merges", 0, ["no", "such"])),
    "ignore_merges should be": ("llama3_like", setting("model", "ignore_merges", "yes")),
    "normalizer 'Lowercase'": ("qwen_like", setting("normalizer", {"type": "Lowercase"})),
    "decoder 'WordPiece'": ("qwen_like", setting("decoder", {"type": "WordPiece"})),
    "post_processor 'BertProcessing'": ("smol_like", setting("post_processor", {"type": "BertProcessing"})),
    "step .*'Metaspace'": ("smol_like", setting("pre_tokenizer", "pretokenizers", 0, {"type": "Metaspace"})),
    "step .*MergedWithNext": (
        "qwen_like",
        setting("pre_tokenizer", "pretokenizers", 0, "behavior", "MergedWithNext"),
    ),
    "not a usable pattern": (
        "qwen_like",
        setting("pre_tokenizer", "pretokenizers", 0, "pattern", {"Regex": "(a"}),
    ),
    "step .*add_prefix_space": (
        "smol_like",
        setting("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", True),
    ),
    "unk_token = '<unk>'": ("smol_like", setting("model", "unk_token", "<unk>")),
    "content should be": ("qwen_like", setting("added_tokens", 0, {"id": 3})),
    "lacks content or id": ("qwen_like", setting("added_tokens", 0, {"id": -1, "content": "x"})),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_broken_or_not_implemented_is_named(tmp_path, message):
    """Never silently a different split: the model would have seen none of the resulting ids."""
    folder, change = BROKEN[message]
    with pytest.raises(RiverError, match=f"tokenizer.json.*{message}"):
        load_tokenizer(changed_copy(tmp_path, folder, change))


def test_the_first_tekken_files_leave_their_special_tokens_out(tmp_path):
    """Mistral Nemo's: what its ranks stand for is part of Mistral's code."""
    tokenizer = load_tokenizer(changed_copy(tmp_path, "tekken_like", setting("special_tokens", None), "tekken.json"))
    assert [tokenizer.special_id(name) for name in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")] == [0, 1, 2, 3, 4]
    assert tokenizer.chat_format == "mistral-v3"


@pytest.mark.parametrize(
    "message, change",
    [
        ("default_vocab_size should be", setting("config", "default_vocab_size", "many")),
        ("special_tokens should be", setting("special_tokens", 7)),
        ("is not base64", setting("vocab", 300, {"rank": 300, "token_bytes": "?"})),
        ("a byte has no rank", setting("vocab", 5, {"rank": 5, "token_bytes": "AAAA"})),
        ("special_tokens has the rank 100", setting("special_tokens", 0, "rank", 100)),
    ],
)
def test_a_broken_tekken_file_is_named(tmp_path, message, change):
    """tiktoken would answer some of these with a panic, which no `except Exception` catches."""
    with pytest.raises(RiverError, match=f"tekken.json.*{message}"):
        load_tokenizer(changed_copy(tmp_path, "tekken_like", change, "tekken.json"))


@pytest.mark.parametrize(
    "message, content",
    [
        ("Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ("not a sentencepiece model", b"\x0a\xff\xff\xff garbage"),
        ("not a sentencepiece model", b""),
        ("line 2 is not", b"IQ== 0\nnonsense\n"),
        ("a byte has no rank", b"IQ== 0\n"),
        ("rank is repeated", b"".join(b"%s 7\n" % base64.b64encode(bytes([i])) for i in range(256))),
    ],
)
def test_a_broken_tokenizer_model_is_named(tmp_path, message, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(RiverError, match=f"tokenizer.model.*{message}"):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_says_what_to_download(tmp_path):
    with pytest.raises(RiverError, match="none of tokenizer.json, tekken.json, tokenizer.model; download"):
        load_tokenizer(tmp_path)
