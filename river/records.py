"""The answers of an evaluation on disk, from which a run that broke off goes on."""

import json

try:
    import fcntl
except ImportError:  # Windows: two runs on one file are not noticed there
    fcntl = None

from .errors import RiverError


class Records:
    """The records so far, one JSON object a line, behind a line that says what they are records of.

    `of` is a dict of (problem, setting) to record. The file is opened when the first record comes; a line that a
    killed run left half written is cut off then, and nothing else of the file is ever changed.

    Args:
        path: the file, which need not be there.
        described: what all its records have in common, a dict.

    Raises:
        RiverError: the file cannot be read, belongs to another run, or is no such file.
    """

    def __init__(self, path, described):
        self.path, self.described, self.file = path, described, None
        try:
            content = path.read_bytes() if path.exists() else b""
            self.whole = content.rfind(b"\n") + 1
            lines = [json.loads(line) for line in content[: self.whole].splitlines()]
            header, records = (lines[0], lines[1:]) if lines else (None, [])
            if content and not lines and not self._header().startswith(content):
                raise ValueError("it has one line, which is not ours")
            self.of = {(record["problem"], record["setting"]): record for record in records}
            if any(not isinstance(record["sums"], dict) or not record["count"] > 0 for record in records):
                raise ValueError("a record has no score")
        except OSError as error:
            raise RiverError(f"{path}: {error.strerror}; choose another --output") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RiverError(f"{path}: is no file of answers; choose another --output") from error
        if lines and header != described:
            theirs = header if isinstance(header, dict) else {}
            other = [f"{k} {theirs.get(k)!r} instead of {v!r}" for k, v in described.items() if theirs.get(k) != v]
            raise RiverError(f"{path}: is of another run ({', '.join(other)}); choose another --output")

    def add(self, problem, setting, record):
        """Keep one record, on disk as well."""
        self.of[problem, setting] = {"problem": problem, "setting": setting, **record}
        try:
            if self.file is None:
                self._open()
            self.file.write(json.dumps(self.of[problem, setting]).encode() + b"\n")
        except OSError as error:
            raise RiverError(f"{self.path}: cannot be written ({error.strerror}); choose another --output") from error

    def _open(self):
        self.file = open(self.path, "ab", buffering=0)  # what was added is there if the process is killed
        if fcntl:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RiverError(f"{self.path}: another run writes to it; choose another --output") from None
        self.file.truncate(self.whole)
        if not self.whole:
            self.file.write(self._header())

    def _header(self):
        return json.dumps(self.described).encode() + b"\n"
