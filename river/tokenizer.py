"""Tokenizers: text to token ids and back, whole or as a stream, and chat prompts.

Three kinds of file are read: tokenizer.json (byte-level BPE), tekken.json, and tokenizer.model, which
is a sentencepiece model or Meta's list of ranks. Whatever differs between families (patterns, flags,
special tokens, BOS) comes from the file.
"""

import functools
import itertools
import re
from pathlib import Path

import regex
import sentencepiece

from . import chat
from .bpe_files import AddedToken, field, is_byte_level, read_added_token, read_meta, read_tekken, read_tokenizer_json
from .errors import RiverError
from .files import read_bytes, read_json
from .streams import ByteStream, PieceStream

CACHED_PIECES = 1 << 16  # text repeats its words, so almost every piece has been merged before

# Unicode's White_Space; str.strip() alone would also take the separators \x1c to \x1f.
WHITE_SPACE = "".join(chr(i) for i in range(0x3001) if regex.match(r"\p{White_Space}", chr(i)))
SPACES = regex.compile(r"\p{White_Space}*+")
WORD = regex.compile(r"\w")


class Tokenizer:
    """What all kinds of tokenizer share: added tokens, BOS, chat.

    Attributes:
        n_vocab: the highest id plus one.
        bos_id: the id that raw text gets in front; None where the family adds none.
        chat_format: the name of the checkpoint's chat format; None if it has none or an unknown one.
        has_chat_template: whether the checkpoint came with a chat template, known or not.
    """

    def __init__(self, path, added, n_vocab, bos_id, normalize=lambda text: text):
        self.path = path
        self.n_vocab = max(n_vocab, *(token.id + 1 for token in added), 0)
        self.bos_id = bos_id
        self.added = {token.content: token for token in added}
        self.added_by_id = {token.id: token for token in added}
        self._normalize = normalize
        # `normalized` tokens are looked for in normalized text, in a second pass.
        self._raw_matcher = matcher({t.content: t for t in added if not t.normalized})
        self._normalized_matcher = matcher({normalize(t.content): t for t in added if t.normalized})
        self.chat, self.chat_format, self.has_chat_template = None, None, False

    def special_id(self, name):
        """Return the id of the added token `name`; a RiverError if there is none."""
        if name not in self.added:
            needed = f"; choose another chat format than {self.chat_format!r}" if self.chat else ""
            raise RiverError(f"{self.path} has no token {name!r}{needed}")
        return self.added[name].id

    def encode(self, text, bos=False, specials=False):
        """Return the ids of `text`.

        Args:
            text: any string; a lone surrogate, which has no encoding, counts as U+FFFD.
            bos: begin with BOS, if the family's texts do.
            specials: names of special tokens in `text` stand for the tokens; otherwise they are text.
                Added tokens that are not special, such as <think>, are recognised either way.
        """
        ids = [self.bos_id] if bos and self.bos_id is not None else []
        for stretch in self._find_added(encodable(text), self._raw_matcher, specials):
            if isinstance(stretch, AddedToken):
                ids.append(stretch.id)
                continue
            for inner in self._find_added(self._normalize(stretch), self._normalized_matcher, specials):
                ids += [inner.id] if isinstance(inner, AddedToken) else self._encode_text(inner)
        return ids

    def encode_parts(self, parts, continuing=False):
        """Return the ids of a list of chat.Special tokens and texts, in which no token is recognised.

        Args:
            parts: see the module chat.
            continuing: the first part follows other text, rather than starting a new stretch of it.

        Raises:
            RiverError: a special token that the vocabulary lacks.
        """
        joined = []  # tokens, and texts as long as possible between them
        for special, run in itertools.groupby(parts, lambda part: isinstance(part, chat.Special)):
            joined += [self.added_by_id[self.special_id(name)] for name in run] if special else ["".join(run)]
        ids = []
        for before, part, after in zip([None, *joined], joined, [*joined[1:], None]):
            if isinstance(part, AddedToken):
                ids.append(part.id)
                continue
            if before is not None and before.rstrip:
                part = part.lstrip(WHITE_SPACE)
            if after is not None and after.lstrip:
                part = part.rstrip(WHITE_SPACE)
            ids += self._encode_text(self._normalize(encodable(part)), continuing and before is None)
        return ids

    def decode(self, ids, skip_special=False):
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        stream = self.stream(skip_special)
        return "".join([stream.feed(i) for i in ids]) + stream.flush()

    def chat_prompt(self, messages):
        """Return the ids of a conversation, up to where the assistant is to continue.

        Args:
            messages: a list of {"role", "content"}: [system,] user, assistant, ..., user.

        Raises:
            RiverError: there is no chat format, or `messages` is not such a list.
        """
        return self.encode_parts(self._require_chat().prompt(messages))

    def chat_turn(self, user):
        """Return the ids that follow the assistant's own in a running chat, up to its next answer.

        They begin with the token that ends the assistant's turn, which must not be among the
        assistant's own. The result continues a chat_prompt exactly, except that the answer's
        tokens stay as they were generated: an answer that starts with white space might be encoded
        together with the header before it, and Qwen3's template would take out the empty thought.
        """
        return self.encode_parts(self._require_chat().next_turn(user), continuing=True)

    def _require_chat(self):
        if self.chat is None:
            what = "a chat template of unknown kind" if self.has_chat_template else "no chat template"
            known = ", ".join(chat.FORMATS)
            raise RiverError(f"{self.path.parent} has {what}; choose one of the chat formats {known}")
        return self.chat

    def _find_added(self, text, found_by, specials):
        """Yield the added tokens in `text` (leftmost, then longest) and the stretches between them."""
        pattern, by_content = found_by
        done = 0
        for match in pattern.finditer(text):
            token, (start, end) = by_content[match.group()], match.span()
            if start < done or (token.special and not specials):
                continue
            if token.single_word and (WORD.match(text[start - 1 : start]) or WORD.match(text[end : end + 1])):
                continue
            if token.lstrip:
                start = done + len(text[done:start].rstrip(WHITE_SPACE))
            if token.rstrip:
                end = SPACES.match(text, end).end()
            if done < start:
                yield text[done:start]
            yield token
            done = end
        if done < len(text):
            yield text[done:]


class ByteLevelTokenizer(Tokenizer):
    """BPE over bytes, from a ByteLevelModel."""

    def __init__(self, path, model):
        super().__init__(path, model.added, model.n_vocab, model.bos_id, model.normalize)
        self._steps = model.steps
        self._merge = functools.lru_cache(CACHED_PIECES)(model.merge)
        self._bytes_of = model.bytes_of

    def _encode_text(self, text, continuing=False):
        pieces = [text]
        for step in self._steps:
            pieces = itertools.chain.from_iterable(map(step, pieces))
        return list(itertools.chain.from_iterable(map(self._merge, pieces)))

    def token_bytes(self, i):
        """Return the bytes of the token with id `i`; none for an unknown id."""
        return self.added_by_id[i].content.encode() if i in self.added_by_id else self._bytes_of(i)

    def stream(self, skip_special=True):
        """Return a ByteStream: feed(id) and flush() give text as soon as it is complete."""
        return ByteStream(self, skip_special)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model.

    Tokens that a checkpoint adds behind the model's own come from tokenizer_config.json.
    """

    def __init__(self, path, content, config):
        self.model = sentencepiece.SentencePieceProcessor()
        try:
            self.model.load_from_serialized_proto(content)
            for index in range(self.model.get_piece_size()):
                self.model.id_to_piece(index)  # may be no text
        except Exception as error:  # the library raises RuntimeError or its own types
            raise RiverError(f"{path} is not a sentencepiece model; download it again") from error
        size = self.model.get_piece_size()
        own = [i for i in range(size) if self.model.is_control(i) or self.model.is_unknown(i)]
        added = [AddedToken(self.model.id_to_piece(i), i) for i in own]
        config_path = path.with_name("tokenizer_config.json")
        for key, entry in field(config, "added_tokens_decoder", dict, config_path, {}).items():
            if key.isdecimal() and int(key) >= size:
                token = {"id": int(key), "content": field(entry, "content", str, config_path)}
                added.append(read_added_token(entry | token, config_path))
        adds_bos = field(config, "add_bos_token", bool, config_path, True) and self.model.bos_id() >= 0
        bos_id = self.model.bos_id() if adds_bos else None
        super().__init__(path, added, size, bos_id)
        # What encoding puts in front of every text, decoding takes away again.
        self.drops_first_space = self.model.decode_pieces(["▁a"]) == "a"

    def _encode_text(self, text, continuing=False):
        if not continuing:
            return self.model.encode(text)
        # Behind a line break there is no dummy space in front, and nothing merges with the break.
        return self.model.encode("\n" + text)[len(self.model.encode("\n")) :]

    def stream(self, skip_special=True):
        """Return a PieceStream: feed(id) and flush() give text as soon as it is complete."""
        return PieceStream(self, skip_special)


def encodable(text):
    """Return `text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def matcher(by_content):
    """Return a pattern that finds the longest key at each place, and the dict `by_content` itself."""
    longest_first = sorted(by_content, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"), by_content


def load_tokenizer(folder, chat_format=None):
    """Read the tokenizer of the checkpoint in `folder`.

    Args:
        folder: a Path or string.
        chat_format: a name in chat.FORMATS to use in place of what the chat template is found to be.

    Raises:
        RiverError: no tokenizer file, a malformed one, a feature that is not implemented, or an
            unknown `chat_format`.
    """
    folder = Path(folder)
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    tokenizer, family_format = read_tokenizer(folder, config)
    template = read_template(folder, config)
    tokenizer.has_chat_template = bool(template)
    detected = chat.detect(template, tokenizer.added) if template else family_format
    tokenizer.chat_format = chat_format or detected
    if tokenizer.chat_format is not None:
        tokenizer.chat = chat.make_format(tokenizer.chat_format, template)
    return tokenizer


def read_tokenizer(folder, config):
    """Return the Tokenizer in `folder`, and the chat format that the kind of file implies, or None."""
    names = ("tokenizer.json", "tekken.json", "tokenizer.model")
    as_json, as_tekken, as_model = (folder / name for name in names)
    if as_json.exists():
        content = read_json(as_json)
        if is_byte_level(as_json, content):
            return ByteLevelTokenizer(as_json, read_tokenizer_json(as_json, content, config)), None
    if as_tekken.exists():
        tokenizer = ByteLevelTokenizer(as_tekken, read_tekken(as_tekken))
        return tokenizer, "ministral3" if "[SYSTEM_PROMPT]" in tokenizer.added else "mistral-v3"
    if as_model.exists():
        content = read_bytes(as_model)
        if content.startswith(b"version https://git-lfs"):
            raise RiverError(f"{as_model} is only a Git LFS pointer; download the file itself")
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content):
            return ByteLevelTokenizer(as_model, read_meta(as_model, content)), "llama3"
        return SentencePieceTokenizer(as_model, content, config), None
    if as_json.exists():
        raise RiverError(f"{as_json} is no byte-level BPE; download the checkpoint's tokenizer.model as well")
    raise RiverError(f"{folder} has none of {', '.join(names)}; download the checkpoint's")


def read_template(folder, config):
    """Return the text of the checkpoint's chat template, "" if it has none."""
    if (folder / "chat_template.jinja").exists():
        return read_bytes(folder / "chat_template.jinja").decode("utf-8", "replace")
    if (folder / "chat_template.json").exists():
        config = read_json(folder / "chat_template.json")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""
