"""What the command lines of this package have in common."""

import argparse
import os
import re
import sys
from pathlib import Path

from .errors import RiverError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
MODEL_HELP = "a folder, or ORG/NAME to download (default: the default model)"


class Parser(argparse.ArgumentParser):
    """Answers a wrong option with one line, as every other mistake is."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message} (see --help)\n")


def exit_status(name, run, args):
    """Run a command; returns its exit status (0 for None), a mistake or Ctrl-C having been answered by one line."""
    prepare_streams()
    try:
        status = run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RiverError, OSError) as error:
        what = getattr(error, "filename", None) or "cannot write the output"  # standard output has no name
        said = error if isinstance(error, RiverError) else f"{what}: {error.strerror or error}"
        one_line = re.sub(r"[\x00-\x1f\x7f]+", " ", str(said))  # whatever a file or a server has put into it
        print(f"{name}: {one_line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130


def prepare_streams():
    """Give streams that the shell has closed (`>&-`) a place that keeps nothing, and any character to the others."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another


def find_model(name):
    """The folder of a model given as a folder or as ORG/NAME, which is downloaded if need be.

    Raises:
        RiverError: it is neither, or cannot be downloaded.
    """
    from weights.download import REPOSITORY, fetch, is_complete  # which import this package

    if str(name) and Path(name).is_dir():
        return Path(name)
    if not REPOSITORY.fullmatch(str(name)):
        raise RiverError(f"there is no folder {str(name)!r}, and it is not the name of a model (ORG/NAME) either")
    folder = WEIGHTS / name
    return folder if is_complete(folder) else fetch(name, folder)


def log(line, done):
    """Progress of slow work, of which only the end is worth a line here."""
    if done:
        print(line, file=sys.stderr)


def warn_if_busy():
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"warning: something else uses the processor (load {busy:.1f}): expect noise", file=sys.stderr)
