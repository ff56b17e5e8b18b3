"""Any bytes give a checkpoint or one clear error: no other exception, no hang, no memory beyond a bound.

Each input is a valid file with a few seeded changes: bytes flipped, cut, repeated or inserted, and, in JSON, values
replaced by others of any kind. There are 24,800 inputs, and one more for each number in a JSON file, as a size that no
memory has. All are read under a limit to the address space, so that what takes too much memory fails here and now.
"""

import contextlib
import copy
import itertools
import json
import random
import resource
import time
from pathlib import Path

import pytest
from conftest import FIXTURES, write_tiny_checkpoint
from test_gguf import write_model

from river import RiverError
from river.checkpoint import load_model
from river.config import load_config, parse_config
from river.files import SafetensorsFile
from river.tokenizer import load_tokenizer
from weights import convert, gguf

FAR_MORE = 1 << 30  # bytes of memory that no small file may cost
HUGE = (10**8, 2**33, 2**62)
SECONDS = 5  # that no input may take

ODD_VALUES = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "0", "a" * 5000, "\ud800", "\x00", "..", "/etc/passwd", [], {}, [[]], [0] * 1000, {"": None}, [None], ["x", 1],
)  # fmt: skip


def broken_bytes(data, rng):
    """`data` with one to four changes, most of them near its beginning, where headers are."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = int(len(data) * rng.random() ** rng.choice((1, 3, 9)))
        kind = rng.randrange(6)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            del data[place : place + rng.randint(1, 16)]
        elif kind == 3:
            data[place:place] = rng.randbytes(rng.randint(1, 16))
        elif kind == 4:
            data[place : place + 8] = rng.choice((0, 1, 2**31, 2**62, 2**64 - 1, 8, 255)).to_bytes(8, "little")
        else:
            data[place:place] = data[place : place + rng.randint(1, 64)]
    return bytes(data)


def broken_json(content, rng):
    """A JSON value with one to three of its parts replaced, removed or renamed."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        place, parent, key = content, None, None
        while isinstance(place, (dict, list)) and place and (parent is None or rng.random() < 0.7):
            parent = place
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            place = place[key]
        if parent is None:
            return copy.deepcopy(rng.choice(ODD_VALUES))
        kind = rng.randrange(4)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[key + "_"] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return content


def inputs(path, rng):
    """Endless changed contents for a file that is there."""
    data = path.read_bytes()
    content = json.loads(data) if path.suffix == ".json" else None
    while True:
        if content is not None and rng.random() < 0.6:
            yield json.dumps(broken_json(content, rng)).encode("utf-8", "surrogatepass")
        else:
            yield broken_bytes(data, rng)


def huge_numbers(content):
    """`content` with each of its integers, one at a time, as each of HUGE; a long list's first and last alone."""
    children = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(children):
        if isinstance(content, list) and 0 < key < len(content) - 1:
            continue
        if isinstance(value, (dict, list)):
            for changed in huge_numbers(value):
                yield (
                    {**content, key: changed}
                    if isinstance(content, dict)
                    else [*content[:key], changed, *content[key + 1 :]]
                )
        elif isinstance(value, int) and not isinstance(value, bool):
            for huge in HUGE:
                yield (
                    {**content, key: huge} if isinstance(content, dict) else [*content[:key], huge, *content[key + 1 :]]
                )


@contextlib.contextmanager
def limited_memory(size):
    """Make what needs more than `size` bytes of address space beyond the present ones a MemoryError, on Linux."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if Path("/proc/self/statm").exists():
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(path, read, count, seed=0):
    """Put `count` changed contents into `path` and `read` each: anything but a result or a RiverError fails."""
    whole, refused = path.read_bytes(), 0
    contents = itertools.islice(inputs(path, random.Random(seed)), count)
    if path.suffix == ".json":
        sizes = (json.dumps(content).encode() for content in huge_numbers(json.loads(whole)))
        contents = itertools.chain(sizes, contents)
    for number, content in enumerate(contents):
        path.unlink()  # a file that is mapped must not change
        path.write_bytes(content)
        started = time.perf_counter()
        try:
            with limited_memory(FAR_MORE):
                read()
        except RiverError as error:
            refused += 1
            assert len(str(error)) < 2000, "an error is for people"
        except BaseException as error:
            raise AssertionError(
                f"{path.name}, input {number}: {type(error).__name__} for {content[:300]!r}"
            ) from error
        assert time.perf_counter() - started < SECONDS, f"{path.name}, input {number} takes too long"
    path.unlink()
    path.write_bytes(whole)
    assert refused > count // 20, "hardly any input was broken: this tests nothing"


def test_safetensors(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", vocab_size=64, num_hidden_layers=1)
    path = folder / "model.safetensors"

    def read():
        file = SafetensorsFile(path)
        for name in list(file.names()):
            assert file.tensor(name).shape is not None

    fuzz(path, read, 6000)
    fuzz(path, lambda: load_model(folder), 1000, seed=1)


def test_index(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", vocab_size=64, num_hidden_layers=1)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = list(SafetensorsFile(folder / "model-00001-of-00001.safetensors").names())
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fuzz(folder / "model.safetensors.index.json", lambda: load_model(folder), 2000)


@pytest.mark.parametrize(
    "family", sorted(path.name for path in (FIXTURES / "families").iterdir() if path.is_dir())[::3]
)
def test_config(family, family_folder, tmp_path):
    config = json.loads((family_folder(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    parse_config(config)
    fuzz(tmp_path / "config.json", lambda: load_config(tmp_path), 1000)


@pytest.mark.parametrize(
    "name, file",
    [
        ("smol_like", "tokenizer.json"),
        ("qwen_like", "tokenizer.json"),
        ("llama3_like", "tokenizer.json"),
        ("tekken_like", "tekken.json"),
        ("llama3_meta", "tokenizer.model"),
        ("spm_llama2_like", "tokenizer.model"),
        ("smol_like", "tokenizer_config.json"),
        ("phi4_like", "tokenizer_config.json"),
    ],
)
def test_tokenizer_files(name, file, tmp_path):
    for source in (FIXTURES / "tokenizers" / name).iterdir():
        if source.name in (file, "tokenizer_config.json") or (
            file == "tokenizer_config.json" and "token" in source.name
        ):
            (tmp_path / source.name).write_bytes(source.read_bytes())

    def read():
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.decode(tokenizer.encode("Any text, even 123 and ünïcode <|im_end|>"))

    fuzz(tmp_path / file, read, 600)


def test_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path)

    def read():
        metadata, _ = gguf.read(path)
        config, _ = convert.describe(path, metadata, tied=True)
        convert.tokenizer(path, metadata, config)

    fuzz(path, read, 4000)


def test_a_json_file_of_any_size_costs_no_more_than_a_look_at_it(tmp_path):
    """A server, or a disk image by another name, can put any number of bytes under the name of an index."""
    folder = write_tiny_checkpoint(tmp_path / "tiny", vocab_size=64, num_hidden_layers=1)
    (folder / "model.safetensors").unlink()
    with open(folder / "model.safetensors.index.json", "wb") as file:
        file.truncate(2 * FAR_MORE)  # a hole: it takes no disk
    with limited_memory(FAR_MORE), pytest.raises(RiverError, match=r"index\.json has 2147483648 bytes"):
        load_model(folder)
