"""What happens to files when a process is killed, the disk is full, the folder cannot be written, or two write at once."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_checkpoint
from test_download import REPO, SHARDS, SMALL, FakeHub, index_of
from test_gguf import write_model

from river import RiverError, exits, files, load
from river.checkpoint import load_model
from river.exits import load_river, quantized_path
from river.files import SafetensorsFile, complete_or_absent, save_safetensors, unfinished
from weights import convert, download

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def killed(kind, folder, **environment):
    """Run tests/killed.py; returns the number of kills."""
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), kind, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent), **environment}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    return int(result.stdout or 0)


@needs_fork
def test_after_a_kill_at_any_moment_of_a_download_the_next_one_completes_it(tmp_path):
    hub = FakeHub()
    hub.files = {**SMALL, **SHARDS, "model.safetensors.index.json": index_of(*SHARDS)}
    (tmp_path / "model").mkdir()
    kills = killed("download", tmp_path / "model", HF_ENDPOINT=f"http://127.0.0.1:{hub.port}", HF_TOKEN="")
    hub.close()
    assert kills > 15


@needs_fork
def test_after_a_kill_at_any_moment_of_a_conversion_the_next_one_completes_it(tmp_path):
    write_model(tmp_path / "m.gguf")
    (tmp_path / "model").mkdir()
    assert killed("convert", tmp_path / "model") > 10


@needs_fork
def test_after_a_kill_at_any_moment_of_quantising_the_next_start_builds_the_same_river(tmp_path):
    """And what the killed process had written is gone: a half of every river would fill the disk in time."""
    folder = write_tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1, vocab_size=64)
    assert killed("river", folder) > 4


@needs_fork
def test_after_a_kill_at_any_moment_of_compiling_the_next_start_has_a_program(tmp_path):
    (tmp_path / "cache").mkdir()
    assert killed("program", tmp_path / "cache") > 4


@needs_fork
def test_two_processes_that_build_one_river_at_once_both_have_it_whole(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1, vocab_size=64)
    before = set(os.listdir(folder))
    killed("together", folder)
    (river,) = set(os.listdir(folder)) - before
    assert river.startswith("river-")
    load_river(load_model(folder), folder, log=lambda line, done: pytest.fail(line))


def test_unfinished_work_of_a_process_that_still_runs_is_left_alone(tmp_path):
    target = tmp_path / "a [strange] name"
    own = unfinished(target)
    running, ended, elsewhere = (
        own.with_name(own.name.replace(f".{os.getpid()}.", f".{process}.")) for process in (1, 2**22 + 1, "2x")
    )
    other_host = own.with_name(own.name.replace(".part", ".other.part"))
    for path in (own, running, ended, elsewhere, other_host):
        path.write_text("")
    with complete_or_absent(target) as temporary:
        assert temporary == own
        temporary.write_text("whole")
    assert set(tmp_path.iterdir()) == {target, running, elsewhere, other_host} and target.read_text() == "whole"


class FullDisk:
    """Stands in for `open`: files are made, and no byte goes into them."""

    def __init__(self, error=errno.ENOSPC):
        self.error = error

    def __call__(self, path, mode="r", **options):
        if "w" not in mode:
            return open(path, mode, **options)
        file = open(path, mode, **options)
        file.write = self.fail
        return file

    def fail(self, data):
        raise OSError(self.error, os.strerror(self.error))


def test_a_disk_that_fills_up_while_the_river_is_written_costs_a_rebuild_only(tiny_folder, monkeypatch, capsys):
    before = sorted(os.listdir(tiny_folder))
    lines = []
    monkeypatch.setattr(files, "open", FullDisk(), raising=False)
    llm = load(tiny_folder, device="cpu", log=lambda line, done: lines.append(line))
    assert "No space left on device" in lines[-1] and "built again next time" in lines[-1]
    assert len(list(llm.generate("Hello", max_new_tokens=3))) == 3
    assert sorted(os.listdir(tiny_folder)) == before, "nor does a piece of it stay"


def test_a_disk_that_fills_up_during_a_conversion_is_one_clear_error_and_no_checkpoint(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf")
    monkeypatch.setattr(files, "open", FullDisk(), raising=False)
    with pytest.raises(RiverError, match="cannot write.*model.safetensors: No space left"):
        convert.convert(tmp_path / "m.gguf", tmp_path / "model")
    assert not download.is_complete(tmp_path / "model") and "model.safetensors" not in os.listdir(tmp_path / "model")


def test_a_weights_folder_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    """Here a file is where a folder should be: the super-user, whom no permission stops, meets that too."""
    hub = FakeHub()
    hub.files = {**SMALL, "model.safetensors": b"w"}
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}")
    (tmp_path / "weights").write_text("not a folder")
    with pytest.raises(RiverError, match="cannot write .*weights"):
        download.fetch(REPO, tmp_path / "weights" / "model", log=print)
    hub.close()
    with pytest.raises(RiverError, match="cannot write .*weights"):
        save_safetensors(tmp_path / "weights" / "x.safetensors", {"x": torch.zeros(1)})


def test_a_model_in_a_read_only_folder_answers_at_every_start(tiny_folder, monkeypatch):
    """A checkpoint on a disk that is mounted read-only, as shared ones are; nothing can be opened for writing."""

    def read_only(path, mode="r", **options):
        if "r" not in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open(path, mode, **options)

    monkeypatch.setattr(files, "open", read_only, raising=False)
    before = sorted(os.listdir(tiny_folder))
    texts = set()
    for _ in range(2):
        lines = []
        llm = load(tiny_folder, device="cpu", log=lambda line, done, lines=lines: lines.append(line))
        assert "Read-only file system" in lines[-1]
        run = llm.generate("Hello", max_new_tokens=4)
        list(run)
        texts.add(run.texts[0])
    assert len(texts) == 1 and sorted(os.listdir(tiny_folder)) == before


def test_a_river_packed_for_one_kind_of_device_is_never_given_to_another(tiny_folder, monkeypatch):
    """The kernels of CPU and GPU lay codes out differently: the bytes would fit, and the weights be noise."""
    model = load_model(tiny_folder)
    load_river(model, tiny_folder)
    path = quantized_path("river", model, tiny_folder, "hqq", 64, 4)
    elsewhere = load_model(tiny_folder, device="meta")
    there = quantized_path("river", elsewhere, tiny_folder, "hqq", 64, 4)
    assert there != path
    shutil.copy(path, there)
    settings = tiny_folder, "hqq", 64, 4, None
    assert exits._stored_tensors(path, exits._identity(*settings, "cpu", model.dtype))
    for device in ("cuda", "meta"):
        assert exits._stored_tensors(there, exits._identity(*settings, device, model.dtype)) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert exits._stored_tensors(path, exits._identity(*settings, "cpu", model.dtype)) is None


@pytest.mark.parametrize("group_size", (64, 128, 256))
def test_the_river_takes_at_most_three_tenths_of_the_layers_in_bfloat16(tmp_path, group_size):
    """Scales and zeros included; only the file's header comes on top."""
    folder = write_tiny_checkpoint(tmp_path / "tiny", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    model = load_model(folder)
    load_river(model, folder, group_size=group_size)
    file = SafetensorsFile(quantized_path("river", model, folder, "hqq", group_size, 4))
    stored = sum(file.tensor(name).nbytes for name in file.names())
    layers = sum(getattr(layer, name).nbytes for layer in model.layers for name in exits.LINEARS)
    assert stored <= 0.3 * layers
    assert file.path.stat().st_size - stored < 20_000


def test_an_error_holds_no_control_characters():
    """Names in a file, or a server's answer, could steer the terminal that the error is printed on."""
    error = RiverError("tensor \x1b]0;title\x07 in\n\n two \x9b31m lines")
    assert str(error) == "tensor  ]0;title  in  two  31m lines"


@pytest.mark.parametrize("name", ("config.json", "tokenizer.json", "model.safetensors"))
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    signal.alarm(30)
    try:
        with pytest.raises(RiverError, match=f"{name} is no regular file"):
            load(folder, device="cpu")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
