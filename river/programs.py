"""Compiled programs: a PyTorch module as native code, built once and kept.

On a CPU a program is built ahead of time by PyTorch's Inductor: native code, called with hardly any
Python between. Building it takes some seconds and a C++ compiler. It is kept in the user's own cache
folder and never beside a checkpoint, since loading it means running what is in it. On other devices a
program is torch.compile's.
"""

import hashlib
import itertools
import os
import platform
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch

from .errors import RiverError
from .files import complete_or_absent, digest_of_sources


def compile_module(module, arguments, sizes, signature, log):
    """Compile a module for calls like the one with `arguments`; returns a function of the same arguments.

    Args:
        module: a `torch.nn.Module`.
        arguments: a tuple of tensors and None, the last one a list of tensors.
        sizes: which of their sizes vary, as torch.export's `dynamic_shapes`.
        signature: all that the program depends on and `arguments` do not show, as text.
        log: called with (line, done).

    Raises:
        RiverError: on a CPU, there is no compiler, or no place to keep what it makes.
    """
    if not _is_cpu(arguments[0]):
        return torch.compile(module, dynamic=True)
    run = _package(module, arguments, sizes, signature, log)
    given = [argument is not None for argument in arguments[:-1]]

    def call(*arguments):  # a package takes its tensors as one flat list, and no None
        return run([*itertools.compress(arguments, given), *arguments[-1]])[0]

    return call


def _is_cpu(tensor):
    return tensor.device.type == "cpu"


def _package(module, arguments, sizes, signature, log):
    """Load the native code of a module, a function of a list of tensors; build it if there is none that fits.

    Raises:
        RiverError: there is no compiler, or no place to keep what it makes.
    """
    path = _cache_folder() / f"{_key(signature, arguments)}.so"
    if _is_whole(path):
        return _load(path)
    log("compiling for this shape of model, once (some 10 seconds)", True)
    try:
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, arguments, dynamic_shapes=sizes)
            options = {"cpp.enable_floating_point_contract_flag": "fast"}  # products and sums in one instruction
            built = torch._inductor.aoti_compile_and_package(
                exported, package_path=f"{scratch}/step.pt2", inductor_configs=options
            )
            with complete_or_absent(path) as temporary, zipfile.ZipFile(built) as package:
                code = package.read(next(name for name in package.namelist() if name.endswith(".so")))
                temporary.write_bytes(code + hashlib.sha256(code).digest())  # a linker ignores what follows
        return _load(path)
    except RiverError:
        raise
    except Exception as error:  # no compiler, no disk, or a PyTorch that cannot: all the same to the user
        raise RiverError(f"PyTorch cannot compile here ({str(error).strip().splitlines()[0][:120]})") from error


def _cache_folder():
    """Where programs are kept: a folder that only its owner, this user, can write to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "river-llm"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise RiverError(f"there is no cache folder for compiled code ({error}); set XDG_CACHE_HOME") from error
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise RiverError(f"{folder} can be written to by others, and what is in it would be run: chmod 700 your own")
    return folder


def _is_whole(path):
    """Whether `path` is a program as it was written: loading a damaged one would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _load(path):
    """The entry point of a program: a list of tensors to a list of tensors.

    What PyTorch documents, aoti_load_package, imports the compiler (two seconds), unpacks the package into
    a temporary folder at each start and wraps each call in Python; this is the loader below it.
    """
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run


def _key(signature, arguments):
    """A name for a program: everything that its native code depends on, hashed."""
    single, tensors = arguments[:-1], arguments[-1]
    # What is traced, and how it is compiled; a fork will change it.
    sources = ("model.py", "linear.py", "quantize.py", "rope.py", "compile.py", "programs.py")
    parts = [
        signature,
        *(str(argument if argument is None else (argument.shape[-1], argument.dtype)) for argument in single),
        str(len(tensors)),
        torch.__version__,
        platform.machine(),
        _processor(),
        str(torch.get_num_threads()),  # Inductor writes it into the code
        digest_of_sources(sources),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _processor():
    """What tells processors apart for a compiler that builds for the one it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return torch.backends.cpu.get_cpu_capability()
