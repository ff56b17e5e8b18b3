"""How far a download has come, on standard error."""

import sys
import time


def in_bytes(count):
    """Return `count` bytes in words: 269.1 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


class Progress:
    """One line on stderr about a download of `total` bytes: redrawn on a terminal, now and then elsewhere."""

    def __init__(self, total):
        self.total, self.finished, self.fresh = total, 0, 0
        self.line_is_open = False
        self.terminal = sys.stderr.isatty()
        self.clear = "\r\033[K" if self.terminal else ""
        self.started = self.shown = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.line_is_open:  # what comes next, an error perhaps, gets a line of its own
            print(file=sys.stderr)
            self.line_is_open = False

    def show(self, name, position, fresh):
        """Say that `position` bytes of the file `name` are here, `fresh` of them new."""
        self.fresh += fresh
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 20):
            return
        self.shown = now
        done, rate = self.finished + position, self.fresh / (now - self.started)
        left = int((self.total - done) / rate) if rate else 0
        line = (
            f"{name}  {in_bytes(done)} of {in_bytes(self.total)}  {100 * done // max(self.total, 1)}%"
            f"  {in_bytes(rate)}/s  {left // 60}:{left % 60:02} left"
        )
        print(f"{self.clear}{line}", end="" if self.terminal else "\n", file=sys.stderr, flush=True)
        self.line_is_open = self.terminal

    def finish(self, file):
        """Say that `file` is whole."""
        self.line_is_open = False
        self.finished += file.size
        seconds = max(time.monotonic() - self.started, 1e-3)
        line = f"{file.name}  {in_bytes(file.size)}  ({in_bytes(self.finished)} of {in_bytes(self.total)}"
        print(f"{self.clear}{line}, {in_bytes(self.fresh / seconds)}/s)", file=sys.stderr, flush=True)
