"""Decoding ids one by one: each feed gives the text that is now certain, never half a character.

Joined, what `feed` and `flush` return is the text that decoding all ids at once would give, U+FFFD
for broken bytes included. The two kinds of tokenizer differ in what they make of broken bytes.
"""

import codecs


class ByteStream:
    """Text from ids one by one. What feed and flush return, joined, is the tokenizer's decode."""

    def __init__(self, tokenizer, skip_special):
        self._tokenizer = tokenizer
        self._skipped = {i for i, token in tokenizer.added_by_id.items() if token.special and skip_special}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, i):
        """Return the text that the token with id `i` completes."""
        return "" if i in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(i))

    def flush(self):
        """Return what is left: U+FFFD if the last character is not complete."""
        return self._utf8.decode(b"", final=True)


class PieceStream:
    """Text from sentencepiece ids one by one. What feed and flush return, joined, is sentencepiece's decode.

    Its rules: byte pieces in a row form characters, each byte that does not becomes U+FFFD; <s> and
    </s> have no text; one space at the very start is dropped.
    """

    def __init__(self, tokenizer, skip_special):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._bytes = b""
        self._at_start = tokenizer.drops_first_space

    def feed(self, i):
        """Return the text that the token with id `i` completes."""
        model, added = self._tokenizer.model, self._tokenizer.added_by_id
        if 0 <= i < model.get_piece_size() and model.is_byte(i):
            self._bytes += bytes([int(model.id_to_piece(i)[3:5], 16)])  # <0xE2>
            return self._characters(final=False)
        text = self._characters(final=True)
        if i in added:
            return text + ("" if self._skip_special and added[i].special else self._added_text(i))
        if not 0 <= i < model.get_piece_size():
            return text
        piece = model.id_to_piece(i)
        if self._at_start:
            piece, self._at_start = piece.removeprefix("▁"), False
        return text + piece.replace("▁", " ")

    def flush(self):
        """Return what is left: U+FFFD for each byte of an incomplete character."""
        return self._characters(final=True)

    def _added_text(self, i):
        model = self._tokenizer.model
        text = model.decode([i]) if i < model.get_piece_size() else self._tokenizer.added_by_id[i].content
        self._at_start = self._at_start and not text
        return text

    def _characters(self, final):
        """Take the complete characters off the bytes that wait; all of them if `final`."""
        text = ""
        while self._bytes:
            try:
                more, used = codecs.utf_8_decode(self._bytes, "strict", final)
                text, self._bytes = text + more, self._bytes[used:]
                break
            except UnicodeDecodeError as error:
                text += self._bytes[: error.start].decode() + "\ufffd"
                self._bytes = self._bytes[error.start + 1 :]
        self._at_start = self._at_start and not text
        return text
