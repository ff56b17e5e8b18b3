"""Writing files so that a reader never meets half of one.

Everything the project writes (converted checkpoints, rivers, downloads) appears under its final
name only when it is complete: it is written beside its target and renamed, which POSIX and Windows
both do in one step.
"""

import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import TensorSpec, serialize_file

from .errors import RiverError


@contextmanager
def complete_or_absent(path):
    """Yield a temporary path beside `path` that becomes `path` if the block succeeds.

    The temporary file carries the process id, so that two processes that write the same target
    cannot mix their bytes: the last to finish wins, and both results are whole.

    Raises:
        RiverError: the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise RiverError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # not there, or on a disk that went read-only: nothing to tidy
            temporary.unlink()


def read_json(path):
    """Return the JSON object in the file `path`.

    Raises:
        RiverError: the file is absent or unreadable, is not JSON, or holds no object.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RiverError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RiverError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RiverError(f"{path} should hold a JSON object, not {type(content).__name__}")
    return content


def save_safetensors(path, tensors, metadata=None):
    """Write `tensors` (name to tensor, any device) to the safetensors file `path`, whole or not at all.

    `safetensors.torch.save_file` would do the same but imports numpy, which the project does
    without; the library's own writer takes plain addresses.

    Args:
        path: the target; replaced if it exists.
        tensors: a dict of name to tensor.
        metadata: a dict of string to string for the file's header.

    Raises:
        RiverError: the file cannot be written.
    """
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in dense.items()
    }
    with complete_or_absent(path) as temporary:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # the library's own files can be read by their owner only
            serialize_file(specs, str(temporary), metadata={"format": "pt", **(metadata or {})})
            temporary.chmod(mode)
        except Exception as error:  # the library raises its own type for a full disk
            raise RiverError(f"cannot write {path}: {error}") from error
