"""What the command lines of this package have in common."""

import argparse
import os
import sys
from pathlib import Path

from .errors import RiverError

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "weights" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"


class Parser(argparse.ArgumentParser):
    """Answers a wrong option with one line, as every other mistake is."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message} (see --help)\n")


def exit_status(name, run, args):
    """Run a command; returns its exit status (0 for None), a mistake or Ctrl-C having been answered by one line."""
    try:
        return run(args) or 0
    except RiverError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130


def log(line, done):
    """Progress of slow work, of which only the end is worth a line here."""
    if done:
        print(line, file=sys.stderr)


def warn_if_busy():
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"warning: something else uses the processor (load {busy:.1f}): expect noise", file=sys.stderr)
