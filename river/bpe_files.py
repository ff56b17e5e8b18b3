"""The files that describe a byte-level BPE: tokenizer.json, tekken.json and Meta's tokenizer.model.

Each reader returns a `ByteLevelModel`. What a file asks for and this project does not implement is an
error that names it: a wrong split gives plausible ids that the model has never seen.
"""

import base64
import functools
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import regex

from .bpe import BYTE_OF, GPT2_PATTERN, Merges, compile_pattern, rank_merges, splitter, token_bytes
from .errors import RiverError
from .files import read_json

# Meta's tokenizer.model says nothing of these two: they are part of Meta's code.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS = (
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>"
    " <|finetune_right_pad_id|> <|step_id|> <|start_header_id|> <|end_header_id|>"
    " <|eom_id|> <|eot_id|> <|python_tag|>"
).split()
LLAMA3_SPECIALS += [f"<|reserved_special_token_{i}|>" for i in range(2, 2 + 256 - len(LLAMA3_SPECIALS))]

# What the first tekken files (Mistral Nemo's) leave out, in order of rank: it is part of Mistral's code.
TEKKEN_SPECIALS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
    " [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX]"
).split()
MOST_SPECIALS = 1 << 20  # of a tekken file; the released ones have 1000

REQUIRED = object()


@dataclass(frozen=True)
class AddedToken:
    """A token that is looked for in the text itself, ahead of BPE; the flags are tokenizer.json's."""

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class ByteLevelModel:
    """What a file says.

    `steps` are functions that cut a string into pieces, to be applied one after the other; `merge`
    turns a piece into ids; `bytes_of` turns an id (of no added token) into bytes.
    """

    added: list[AddedToken]
    n_vocab: int
    bos_id: int | None
    steps: list[Callable]
    merge: Callable
    bytes_of: Callable
    normalize: Callable = lambda text: text


def field(content, key, kind, path, default=REQUIRED):
    """Return content[key], which must be a `kind`; `default`, if given, stands for a missing or null one.

    Raises:
        RiverError: naming the file `path` and the key.
    """
    value = content.get(key) if isinstance(content, dict) else None
    if value is None and default is not REQUIRED:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        wanted = {str: "string", int: "number", list: "list", dict: "object", bool: "boolean"}[kind]
        shown = str(value)[:60]
        raise RiverError(f"{path}: {key} should be a JSON {wanted}, not {shown!r}; download the file again")
    return value


def read_added_token(entry, path):
    """Return the AddedToken that `entry`, an object with an id of the file `path`, describes."""
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    content, i = field(entry, "content", str, path), field(entry, "id", int, path)
    if not content or i < 0:
        raise RiverError(f"{path}: the added token {entry!r} lacks content or id; download the file again")
    return AddedToken(content, i, **{flag: field(entry, flag, bool, path, False) for flag in flags})


def is_byte_level(path, content):
    """Tell whether `content`, of the tokenizer.json `path`, is a BPE over bytes rather than characters."""
    model, pre_tokenizer = content.get("model"), content.get("pre_tokenizer")
    if not isinstance(model, dict) or not isinstance(pre_tokenizer, dict):
        return False
    kinds = [step["type"] for step in sequence(pre_tokenizer, "pretokenizers", path)]
    return model.get("type", "BPE") == "BPE" and "ByteLevel" in kinds


def sequence(spec, key, path):
    """Return the objects that `spec`, which may be null, one of them or a Sequence of them, consists of."""
    if spec is None:
        return []
    if field(spec, "type", str, path) != "Sequence":
        return [spec]
    inner = field(spec, key, list, path)
    for part in inner:
        field(part, "type", str, path)
    return inner


def read_tokenizer_json(path, content, config):
    """Return the ByteLevelModel of the tokenizer.json `content`, read from `path`.

    `config` is what tokenizer_config.json says; of it, only the wish for a BOS counts.

    Raises:
        RiverError: the file is malformed or asks for something that is not implemented.
    """
    added = [read_added_token(entry, path) for entry in field(content, "added_tokens", list, path, [])]
    decoder = field(field(content, "decoder", dict, path), "type", str, path)
    if decoder != "ByteLevel":
        raise RiverError(f"{path}: decoder {decoder!r} is not supported")
    model = field(content, "model", dict, path)
    vocab = read_vocab(model, path)
    ranks = read_merges(model, vocab, path)
    tokens = {i: token for token, i in vocab.items()}
    for token in added:
        if token.special:  # text never turns into one, not even as a whole piece
            vocab.pop(token.content, None)
    unknown = field(model, "unk_token", str, path, None)
    if unknown is not None and not vocab.keys() >= BYTE_OF.keys():
        raise RiverError(f"{path}: model.unk_token = {unknown!r} is not supported where bytes lack a token")
    return ByteLevelModel(
        added=added,
        n_vocab=max(tokens, default=-1) + 1,
        bos_id=read_bos(content, added, config, path),
        steps=read_pre_tokenizer(content["pre_tokenizer"], path),
        merge=Merges(vocab, ranks, field(model, "ignore_merges", bool, path, False)),
        bytes_of=lambda i: token_bytes(tokens.get(i, "")),
        normalize=read_normalizer(content.get("normalizer"), path),
    )


def read_vocab(model, path):
    """Return the dict of token to id of a BPE `model` whose options are all implemented."""
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise RiverError(f"{path}: model.{key} = {model[key]!r} is not supported")
    vocab = field(model, "vocab", dict, path)
    if not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise RiverError(f"{path}: model.vocab has an id that is no number; download it again")
    return vocab


def read_merges(model, vocab, path):
    """Return the dict of "left right" to rank; older files have such strings, newer ones lists of two."""
    ranks = {}
    for rank, merge in enumerate(field(model, "merges", list, path)):
        try:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            known = left in vocab and right in vocab and left + right in vocab
        except (TypeError, ValueError):
            known = False
        if not known:
            raise RiverError(f"{path}: model.merges[{rank}] = {merge!r} is not two tokens; download it again")
        ranks[f"{left} {right}"] = rank
    return ranks


def read_pre_tokenizer(spec, path):
    """Return the functions that cut text into pieces, in order."""
    steps = []
    kept = {("Isolated", False): (True, True), ("Isolated", True): (True, True),
            ("Removed", False): (False, True), ("Removed", True): (True, False)}  # fmt: skip
    parts = sequence(spec, "pretokenizers", path)
    for part in parts:
        kind, is_last = part["type"], part is parts[-1]
        behavior = (str(part.get("behavior")), bool(part.get("invert")))
        if kind == "Split" and behavior in kept:
            pattern = field(part, "pattern", dict, path)
            literal = field(pattern, "String", str, path, None)
            text = field(pattern, "Regex", str, path) if literal is None else regex.escape(literal)
            steps.append(splitter(compile_pattern(text, path, "pre_tokenizer pattern"), *kept[behavior]))
        elif kind == "Digits":
            one_by_one = field(part, "individual_digits", bool, path, False)
            steps.append(splitter(regex.compile(r"\p{N}" if one_by_one else r"\p{N}+")))
        elif kind == "ByteLevel" and is_last and not part.get("add_prefix_space"):
            if field(part, "use_regex", bool, path, True):
                steps.append(splitter(regex.compile(GPT2_PATTERN)))
        else:
            raise RiverError(f"{path}: the pre_tokenizer step {part!r} is not supported")
    return steps


def read_normalizer(spec, path):
    """Return the function on strings that the normalizer is."""
    forms = [part["type"] for part in sequence(spec, "normalizers", path)]
    for form in forms:
        if form not in ("NFC", "NFD", "NFKC", "NFKD"):
            raise RiverError(f"{path}: the normalizer {form!r} is not supported")
    return lambda text: functools.reduce(lambda done, form: unicodedata.normalize(form, done), forms, text)


def read_bos(content, added, config, path):
    """Return the id that raw text gets in front, or None.

    tokenizer_config.json decides, where it says anything; otherwise the post-processor's template.
    """
    ids = {token.content: token.id for token in added}
    config_path = path.with_name("tokenizer_config.json")
    adds_bos = field(config, "add_bos_token", bool, config_path, None)
    if adds_bos is not None:
        token = config.get("bos_token")
        name = token.get("content") if isinstance(token, dict) else token
        if adds_bos and str(name) not in ids:
            raise RiverError(f"{config_path}: bos_token {name!r} is no added token of {path.name}")
        return ids[name] if adds_bos else None
    for part in sequence(content.get("post_processor"), "processors", path):
        if part["type"] == "TemplateProcessing":
            first = [*field(part, "single", list, path), {}][0]
            token = field(first, "SpecialToken", dict, path, None)
            return None if token is None else ids.get(field(token, "id", str, path))
        if part["type"] != "ByteLevel":
            raise RiverError(f"{path}: the post_processor {part['type']!r} is not supported")
    return None


def read_tekken(path):
    """Return the ByteLevelModel of the tekken.json `path`.

    Raises:
        RiverError: the file is malformed.
    """
    content = read_json(path)
    config = field(content, "config", dict, path)
    n_special = field(config, "default_num_special_tokens", int, path)
    if not 0 <= n_special <= MOST_SPECIALS:  # each gets a name, so a wrong number would take all memory
        raise RiverError(f"{path}: default_num_special_tokens is {n_special}; download the file again")
    # The file holds more entries than the vocabulary has room for.
    n_ranks = max(0, field(config, "default_vocab_size", int, path) - n_special)
    entries = field(content, "vocab", list, path)[:n_ranks]
    tokens = [from_base64(field(entry, "token_bytes", str, path), path) for entry in entries]
    names = {i: f"<SPECIAL_{i}>" for i in range(n_special)}
    oldest = [{"rank": rank, "token_str": name} for rank, name in enumerate(TEKKEN_SPECIALS)]
    for entry in field(content, "special_tokens", list, path, oldest):
        rank = field(entry, "rank", int, path)
        if rank not in names:
            raise RiverError(f"{path}: special_tokens has the rank {rank} of {n_special}; download it again")
        names[rank] = field(entry, "token_str", str, path)
    pattern = field(config, "pattern", str, path)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return model_of_ranks(path, ranks, pattern, names, bos="<s>", first_id=n_special)


def read_meta(path, content):
    """Return the ByteLevelModel of Meta's tokenizer.model: a line of base64 and rank for each token.

    Raises:
        RiverError: the file `path` is malformed.
    """
    ranks = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        token, _, rank = line.strip().partition(b" ")
        if rank.isdigit():
            ranks[from_base64(token, path)] = int(rank)
        elif token:
            raise RiverError(f"{path}: line {number} is not a token and a rank; download the file again")
    first = max(ranks.values(), default=-1) + 1
    names = {first + i: name for i, name in enumerate(LLAMA3_SPECIALS)}
    return model_of_ranks(path, ranks, LLAMA3_PATTERN, names, bos="<|begin_of_text|>", first_id=0)


def model_of_ranks(path, ranks, pattern, names, bos, first_id):
    """Return the ByteLevelModel of `ranks` (bytes to rank) and special tokens `names` (id to name)."""
    tokens = {first_id + rank: token for token, rank in ranks.items()}
    ids = {name: i for i, name in names.items()}
    return ByteLevelModel(
        added=[AddedToken(name, i) for i, name in names.items()],
        n_vocab=max(tokens, default=-1) + 1,
        bos_id=ids.get(bos),
        steps=[splitter(compile_pattern(pattern, path, "config.pattern"))],
        merge=rank_merges(ranks, path, first_id),
        bytes_of=lambda i: tokens.get(i, b""),
    )


def from_base64(text, path):
    """Return the bytes that the base64 `text`, from the file `path`, stands for."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RiverError(f"{path}: {text!r} is not base64; download the file again") from error
