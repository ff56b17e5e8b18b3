"""Read GGUF, the one-file format of llama.cpp: its settings, and its tensors as bfloat16.

The project reads it for one reason: a copy of the default model that can be had without the hub is kept
in it (see download.py). So this reads the tensor types that such a file holds (4-bit, 8-bit and float)
and refuses all else by name; a file is never half understood.

Layout: "GGUF", version, tensor count, metadata count; the metadata as (key, type, value); for every
tensor its name, dimensions (fastest first), type and offset; then, aligned, the tensors' bytes.
"""

import math
import mmap
import struct

import torch

from river.errors import RiverError

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
