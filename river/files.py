"""Reading and writing files, such that nobody meets half of one.

Everything the project writes (converted checkpoints, rivers, downloads) appears under its final
name only when it is complete: it is written beside its target and renamed, which POSIX and Windows
both do in one step.
"""

import ctypes
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import RiverError


@contextmanager
def complete_or_absent(path):
    """Yield a temporary path beside `path` that becomes `path` if the block succeeds.

    Two processes that write the same target have a temporary path each, so that they cannot mix their
    bytes: the last to finish wins, and both results are whole.

    Raises:
        RiverError: the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = unfinished(path)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise RiverError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # not there, or on a disk that went read-only: nothing to tidy
            if temporary:
                temporary.unlink()


def unfinished(path):
    """A hidden path beside `path` for this process's work on it; what killed processes left there is removed.

    Its name has the host in it, since on a shared disk only processes of our own are known to be gone.
    """
    ours = f".{path.name}.{platform.node()}."
    for old in path.parent.glob(f"{glob.escape(ours)}*.part"):
        process = old.name.removeprefix(ours).removesuffix(".part")
        if process.isdecimal() and (int(process) == os.getpid() or not _runs(int(process))):
            with suppress(OSError):  # another process has just removed it
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    return path.with_name(f"{ours}{os.getpid()}.part")


def _runs(process):
    """Whether a process with this id runs on this host, as far as can be told."""
    if os.name != "posix":  # os.kill would end it there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no id at all
        return True
    return True


def digest_of_sources(names=None):
    """A hash of this package's source files of these names (None: of all): what a kept result was made by.

    Whoever changes the code would otherwise be given what the code before had made.
    """
    folder = Path(__file__).parent
    paths = sorted(folder.glob("*.py")) if names is None else [folder / name for name in names]
    return hashlib.sha256("\n".join(path.read_text(encoding="utf-8") for path in paths).encode()).hexdigest()


LARGEST = 1 << 28  # bytes of a file that is read whole; a tokenizer.json has some 35 MB, an index a few


def refuse_pipe(path):
    """Raise a RiverError for what is no file but a pipe, a socket or a device, and might never end."""
    mode = Path(path).stat().st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
        raise RiverError(f"{path} is no regular file")


def read_bytes(path):
    """The contents of a file of a checkpoint that is read whole.

    Raises:
        RiverError: the file is absent or unreadable, or larger than any such file is.
    """
    try:
        refuse_pipe(path)
        if (size := Path(path).stat().st_size) > LARGEST:
            raise RiverError(f"{path} has {size} bytes, more than such a file ever has: see what it is")
        return Path(path).read_bytes()
    except OSError as error:
        raise RiverError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path):
    """Return the JSON object in the file `path`.

    Raises:
        RiverError: the file cannot be read (see `read_bytes`), is not JSON, or holds no object.
    """
    data = read_bytes(path)
    try:
        content = json.loads(data)
        if re.search(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]", data):
            json.dumps(content, ensure_ascii=False).encode()  # half a character is none, and no name of a file
    except (ValueError, RecursionError) as error:
        raise RiverError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RiverError(f"{path} should hold a JSON object, not {type(content).__name__}")
    return content


class SafetensorsFile:
    """A safetensors file, memory-mapped: all its tensors are views of one storage, read when they are used.

    The library checks the file; the views are made here, because the library gives every tensor a
    storage of its own, and tensors that lie side by side could not be seen as one (linear.py does).

    Raises:
        RiverError: the file is absent, damaged, cut short or a Git LFS pointer.
    """

    def __init__(self, path):
        path = Path(path)
        try:
            refuse_pipe(path)
            with open(path, "rb") as file:
                length = file.read(8)
                if length == b"version ":
                    raise RiverError(
                        f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`, or download it"
                    )
                with safe_open(path, framework="pt"):  # raises on whatever does not hold together
                    self._start = 8 + int.from_bytes(length, "little")
                self._entries = json.loads(file.read(self._start - 8))
            self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        except FileNotFoundError:
            raise RiverError(f"{path} is missing: the checkpoint is incomplete, download it again") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise RiverError(f"{path} is damaged or cut short ({error}): download it again") from error
        self.metadata = self._entries.pop("__metadata__", {})
        self.path = path

    def names(self):
        """The names of the tensors."""
        return self._entries.keys()

    def tensor(self, name):
        """The tensor `name`, mapped; a RiverError if its dtype is not one that PyTorch can hold here."""
        entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise RiverError(f"{self.path}: tensor {name!r} is {entry['dtype']}, which is not supported")
        dtype = DTYPES[entry["dtype"]]
        first, last = (self._start + offset for offset in entry["data_offsets"])
        raw = self._bytes[first:last]
        if first % dtype.itemsize:  # written without alignment, as the format allows
            raw = raw.clone()
        return raw.view(dtype).view(entry["shape"])


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
ALIGNMENT = 64  # bytes, a cache line: kernels read tensors that start elsewhere some 10% slower


def save_safetensors(path, tensors, metadata=None):
    """Write `tensors` (name to tensor, any device) to the safetensors file `path`, whole or not at all.

    The library's writer would need numpy, and does not align the data.

    Args:
        path: the target; replaced if it exists.
        tensors: a dict of name to tensor.
        metadata: a dict of string to string for the file's header.

    Raises:
        RiverError: the file cannot be written.
    """
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Data follows data without a gap, so what would put the next tensor off its alignment comes last.
    order = sorted(dense, key=lambda name: dense[name].nbytes % ALIGNMENT != 0)
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name in order:
        start, end = end, end + dense[name].nbytes
        header[name] = {
            "dtype": spelled[dense[name].dtype],
            "shape": list(dense[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with complete_or_absent(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if dense[name].nbytes:
                file.write((ctypes.c_char * dense[name].nbytes).from_address(dense[name].data_ptr()))
