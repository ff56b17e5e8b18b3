"""Byte-level BPE: from a stretch of text to token ids.

A tokenizer.json has a list of merges, and two neighbours may merge only if they are on it; `Merges`
does exactly that. Meta's tokenizer.model and Mistral's tekken.json have a list of ranks instead: any
two neighbours may merge whose bytes together are a token. That is tiktoken's rule, so `rank_merges`
leaves it to tiktoken. Turning one into the other is not exact: tiktoken would also produce tokens
that no merge leads to.
"""

import heapq

import regex
import tiktoken

from .errors import RiverError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet():
    """Return GPT-2's dict of byte to the printable character that stands for it in a vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


CHARACTER_OF = byte_alphabet()
BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}


def token_bytes(token):
    """Return the bytes that the vocabulary entry `token` stands for."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:  # an entry that is not in the byte alphabet means itself
        return token.encode()


def splitter(pattern, keep_matches=True, keep_gaps=True):
    """Return a function that cuts a string into the matches of `pattern` and the gaps between them."""

    def split(text):
        end = 0
        for match in pattern.finditer(text):
            if keep_gaps and end < match.start():
                yield text[end : match.start()]
            end = match.end()
            if keep_matches and match.start() < end:
                yield match.group()
        if keep_gaps and end < len(text):
            yield text[end:]

    return split


class Merges:
    """The BPE of a tokenizer.json: called with a piece of text, it returns the token ids.

    Args:
        vocab: dict of token, in the byte alphabet, to id.
        ranks: dict of "left right" to rank; all parts and products are in `vocab`.
        whole_first: a piece that is a token is taken whole, even where merging would not build it.
    """

    def __init__(self, vocab, ranks, whole_first):
        self.vocab, self.ranks, self.whole_first = vocab, ranks, whole_first

    def __call__(self, piece):
        symbols = piece.encode().decode("latin-1").translate(CHARACTER_OF)
        if self.whole_first and symbols in self.vocab:
            return [self.vocab[symbols]]
        # A byte without a token disappears here, after the split, so its neighbours may merge.
        return [self.vocab[part] for part in self.merge([c for c in symbols if c in self.vocab])]

    def merge(self, parts):
        """Return `parts` with neighbours merged, lowest rank first and then leftmost, until none can be.

        The heap makes it n log n, for ten thousand spaces in a row are one piece.
        """
        parts, size = list(parts), len(parts)
        before, after = list(range(-1, size - 1)), list(range(1, size + 1))

        def rank_at(i):
            """The rank of part i and its right neighbour; None if they are no pair."""
            return self.ranks.get(f"{parts[i]} {parts[after[i]]}") if after[i] < size else None

        heap = [(rank, i) for i in range(size) if (rank := rank_at(i)) is not None]
        heapq.heapify(heap)
        while heap:
            rank, i = heapq.heappop(heap)
            if rank_at(i) != rank:  # one of the two has merged with its other neighbour since
                continue
            absorbed = after[i]
            parts[i], parts[absorbed] = parts[i] + parts[absorbed], ""
            after[i] = after[absorbed]
            if after[i] < size:
                before[after[i]] = i
            for left in (before[i], i):
                if left >= 0 and (rank := rank_at(left)) is not None:
                    heapq.heappush(heap, (rank, left))
        return [part for part in parts if part]


def rank_merges(ranks, path, first_id):
    """Return the BPE of a list of ranks: a function from a piece of text to token ids.

    Args:
        ranks: dict of token bytes to rank.
        path: the file it is from, for the error message.
        first_id: the id of rank 0.

    Raises:
        RiverError: a byte has no rank, or two tokens have the same; tiktoken would panic over either.
    """
    complete = all(bytes([byte]) in ranks for byte in range(256))
    if not complete or len(set(ranks.values())) < len(ranks) or max(ranks.values()) >= 1 << 31:
        raise RiverError(f"{path}: a byte has no rank, or a rank is repeated or too high; download it again")
    # The text is cut up before: tiktoken's own splitting overflows its stack on a million spaces.
    encoding = tiktoken.Encoding("ranks", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    return lambda piece: [first_id + rank for rank in encoding.encode_ordinary(piece)]


def compile_pattern(pattern, path, key):
    """Return `pattern`, the value of `key` in the file `path`, compiled; a RiverError if it is none."""
    try:
        # VERSION1 reads nested sets and && the way the engine these patterns are written for does.
        return regex.compile(pattern, regex.VERSION1)
    except regex.error as error:
        raise RiverError(f"{path}: {key} = {pattern!r} is not a usable pattern: {error}") from error
