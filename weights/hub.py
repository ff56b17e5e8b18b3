"""Files of one model on the Hugging Face hub, fetched safely with the standard library.

HTTPS only, except to a hub on this machine; the token goes to the hub itself and to no host that it
redirects to; a file gets its name only when its size and hash are what the hub lists.
"""

import hashlib
import json
import os
import queue
import re
import threading
import time
from http.client import HTTPException
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener, getproxies

from river.errors import RiverError
from weights.progress import in_bytes

try:
    import fcntl
except ImportError:  # Windows: two downloads of one file at a time end in a hash error there
    fcntl = None

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
SILENCE = 30.0  # seconds without a byte after which a connection counts as cut
RETRY_WAITS = (1.0, 2.0, 4.0, 8.0)
BLOCK = 1 << 20
LARGEST = 1 << 50  # bytes of a file


class Unreachable(RiverError):
    """The hub, or the host that it sends downloads to, cannot be reached now."""


class HubFile(NamedTuple):
    """What the hub lists of a file; `digest` is its sha256 if it is large, else its git blob id."""

    name: str
    size: int
    digest: str

    def hasher(self):
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def part(self, folder):
        """The file's place until it is whole; named after the content, so a file that changes starts anew."""
        return folder / f".{self.name}.{self.digest[:16]}.part"

    def is_at(self, path):
        """Return whether `path` is this file, byte for byte."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        digest = self.hasher()
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest() == self.digest


class Hub:
    """One revision of one model on the hub that HF_ENDPOINT names, with the rights of HF_TOKEN.

    Raises:
        RiverError: HF_ENDPOINT or HF_TOKEN cannot be used.
    """

    def __init__(self, repository, revision):
        self.repository, self.revision = repository, revision
        self.endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
        self.token = os.environ.get("HF_TOKEN", "").strip()
        if not re.fullmatch(r"[!-~]*", self.token):  # http.client would print it when it complains
            raise RiverError("HF_TOKEN holds characters that no token has")
        try:
            self.origin = urlsplit(self.endpoint)
            self.host = self.origin.hostname
        except ValueError:
            self.host = None
        self.plain = self.host in LOOPBACK and self.origin.scheme == "http"
        if not self.host or "@" in self.origin.netloc or not (self.plain or self.origin.scheme == "https"):
            raise RiverError("HF_ENDPOINT must be an https:// address (http:// only for 127.0.0.1)")
        # Plain http is for this machine only: through http_proxy it would cross the network, token and all.
        proxies = {scheme: proxy for scheme, proxy in getproxies().items() if scheme != "http"}
        self.opener = build_opener(_Redirects(self), ProxyHandler(proxies))

    def files(self, patience=SILENCE):
        """Return the files of the revision's top folder: a dict of name to HubFile.

        Args:
            patience: seconds to wait for the answer, all in all.

        Raises:
            Unreachable: no answer.
            RiverError: the hub refuses, or answers with something else.
        """
        url = f"{self.endpoint}/api/models/{self.repository}/tree/{quote(self.revision, safe='')}"
        answer = _within(patience, lambda: self._listing(url), self.host)
        found = {}
        try:
            for entry in json.loads(answer):
                if entry["type"] == "file":
                    large = entry.get("lfs") or entry
                    file = HubFile(entry["path"], large["size"], large["oid"])
                    if type(file.size) is not int or not 0 <= file.size < LARGEST or not DIGEST.fullmatch(file.digest):
                        raise ValueError(file)
                    found[file.name] = file
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RiverError(f"{url} did not answer with a list of files; is HF_ENDPOINT a hub?") from error
        return found

    def _listing(self, url):
        with self.open(url) as answer:
            return _read(answer, 1 << 24)

    def url(self, name):
        return f"{self.endpoint}/{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(name)}"

    def open(self, url, position=0):
        """Return the open answer of `url`; it starts at the byte `position` if the server can do that.

        Raises:
            Unreachable: no connection, or the server is overloaded.
            RiverError: any other refusal, or a redirect to an address that is not https.
        """
        request = Request(url, headers={"User-Agent": "river-llm", "Accept-Encoding": "identity"})
        if position:
            request.add_header("Range", f"bytes={position}-")
        try:
            return self.opener.open(self.authorise(request), timeout=SILENCE)
        except HTTPError as error:
            raise self._refusal(error.code) from error
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a redirect to no address
            reason = getattr(error, "reason", "") or error
            raise Unreachable(f"cannot reach {urlsplit(url).hostname} ({reason})") from error

    def authorise(self, request):
        """Return `request`, with the token if it is for the hub; refuse it if its address is not safe."""
        address = urlsplit(request.full_url)
        if address.scheme != "https" and not (self.plain and address.scheme == "http" and address.hostname in LOOPBACK):
            raise RiverError(f"{self.host} redirects to {address.hostname} without https: refused")
        if self.token and address[:2] == self.origin[:2]:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        return request

    def _refusal(self, status):
        page = f"{self.endpoint}/{self.repository}"
        if status in (401, 403):
            return RiverError(
                f"the hub refuses access to {self.repository} (HTTP {status}): check the name; if the model"
                f" asks for a licence, accept it at {page} and set HF_TOKEN to a token of that account"
            )
        if status == 404:
            return RiverError(f"not found on the hub: {page}, revision {self.revision!r}")
        if status == 429 or status >= 500:
            return Unreachable(f"{self.host} is not serving downloads now (HTTP {status})")
        return RiverError(f"the hub answers HTTP {status} for {page}")


class _Redirects(HTTPRedirectHandler):
    def __init__(self, hub):
        self.hub = hub

    def redirect_request(self, *arguments):
        request = super().redirect_request(*arguments)
        return request and self.hub.authorise(request)


def _within(seconds, call, host):
    """Return `call()`, but wait for it no longer than `seconds`.

    A socket's timeout is not enough: looking a name up has none, and it starts anew for every address
    of a host, so that a network that swallows packets would hold the user for a minute.
    """
    results = queue.SimpleQueue()

    def run():
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise Unreachable(f"{host} did not answer within {seconds:.0f} seconds") from None
    if error:
        raise error
    return result


def _read(answer, count):
    try:
        return answer.read(count)
    except (OSError, HTTPException) as error:
        raise Unreachable(f"the connection was cut ({error or type(error).__name__})") from error


def download(hub, file, folder, progress):
    """Fetch `file` into its part in `folder`, continuing what an earlier try has left, and check it.

    `progress`, a `Progress`, hears of every block.

    Raises:
        Unreachable: the connection was cut again and again.
        RiverError: the hub refuses, or what it sends has another size or hash than it lists.
        OSError: the part cannot be written.
    """
    part = file.part(folder)
    for old in folder.glob(f".{file.name}.{'[0-9a-f]' * 16}.part"):
        if old != part:
            old.unlink()
    with progress:
        with open(part, "a+b") as out:
            _lock(out, folder / file.name)
            digest = _receive_with_patience(hub, file, out, progress)
        if digest != file.digest:
            part.unlink()
            raise RiverError(f"{hub.url(file.name)} does not have the hash that the hub lists: run it again")
        progress.finish(file)


def _lock(out, target):
    """Keep other processes from writing to the same part as long as `out` is open."""
    try:
        if fcntl:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RiverError(f"another process is fetching {target}: wait for it") from None
    except OSError:  # a network file system without locks
        pass


def _receive_with_patience(hub, file, out, progress):
    waits = list(RETRY_WAITS)
    while True:
        before = out.seek(0, os.SEEK_END)
        try:
            return _receive(hub, file, out, progress)
        except Unreachable:
            if out.seek(0, os.SEEK_END) >= before + BLOCK:  # a bad line that moves is not given up
                waits = list(RETRY_WAITS)
            if not waits:
                raise
            time.sleep(waits.pop(0))


def _receive(hub, file, out, progress):
    """Append to `out` what it lacks of `file`; return the hash of the whole."""
    digest = file.hasher()
    position = out.seek(0)
    while block := out.read(BLOCK):
        digest.update(block)
        position += len(block)
    if position < file.size:
        with hub.open(hub.url(file.name), position) as answer:
            start, total = _extent(answer)
            if total not in (None, file.size) or start not in (0, position):
                raise RiverError(f"{hub.url(file.name)} has {total} bytes, the hub lists {file.size}")
            if start != position:  # the server does not continue files
                out.truncate(0)
                digest, position = file.hasher(), 0
            progress.show(file.name, position, fresh=0)
            while position <= file.size and (block := _read(answer, BLOCK)):
                out.write(block)
                out.flush()
                digest.update(block)
                position += len(block)
                progress.show(file.name, position, fresh=len(block))
    if position < file.size:
        raise Unreachable(f"the connection was cut after {in_bytes(position)} of {file.name}")
    return digest.hexdigest()


def _extent(answer):
    """Return the first byte that `answer` holds and the size of the whole file, None if unknown."""
    span = re.fullmatch(r"bytes (\d{1,18})-\d+/(\d{1,18})", answer.headers.get("Content-Range", ""))
    if span:
        return int(span[1]), int(span[2])
    length = re.fullmatch(r"\d{1,18}", answer.headers.get("Content-Length", ""))
    return 0, int(length[0]) if length else None
