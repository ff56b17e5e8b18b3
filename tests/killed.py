"""For test_files.py: does a piece of work again and again, each time killed at another moment, and then to its end.

    python tests/killed.py download|convert|river|program FOLDER

Ends with status 0 and the number of kills if, after every one of them, the next run left exactly the files that a run
without a kill leaves. With `together`, two processes build one river at the same time.
"""

import itertools
import os
import resource
import signal
import sys
import traceback
import zipfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import river  # noqa: F401  isort: skip  (before torch, for its warning filter)

import torch  # all imports before the first fork, and no computing: its threads would not be there after it

from river import programs
from river.checkpoint import load_model
from river.exits import load_river
from weights import convert, download


def build_program(folder):
    """programs.py with a compiler that is there at once."""

    def built(exported, package_path, inductor_configs):
        with zipfile.ZipFile(package_path, "w") as package:
            package.writestr("step/step.so", bytes(50_000))
        return package_path

    os.environ["XDG_CACHE_HOME"] = str(folder)
    torch.export = SimpleNamespace(export=lambda *args, **kwargs: None)
    torch._inductor = SimpleNamespace(aoti_compile_and_package=built)
    programs._load = lambda path: path
    programs._package(None, (torch.zeros(1, 1, 8), []), None, "a signature", lambda line, done: None)


WORK = {
    "download": lambda folder: download.fetch("some-org/Some.Model-1B", folder, log=lambda line: None),
    "convert": lambda folder: convert.convert(folder.parent / "m.gguf", folder),
    "river": lambda folder: load_river(load_model(folder), folder),
    "program": build_program,
}


def in_a_process(work, prepare=lambda: None):
    """Start `work()` in a forked process; returns its id."""
    process = os.fork()
    if process:
        return process
    try:
        torch.set_num_threads(1)
        prepare()
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def end_of(process):
    """Wait for a process; returns whether it was killed. Any other failure ends us."""
    status = os.waitpid(process, 0)[1]
    if not os.WIFSIGNALED(status) and status:
        sys.exit("the work failed")
    return os.WIFSIGNALED(status)


def kill_before_change(number, folder):
    """Have this process killed before its change `number` (from 0) of what is in `folder`."""
    changes = itertools.count()

    def watch(event, args):
        if event == "open":
            changing = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            changing = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
        if changing and str(args[0]).startswith(str(folder)) and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def kill_at_byte(number):
    """Have this process killed when it writes the byte `number` (from 0) of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kill_at_every_moment(work, folder):
    before = files_in(folder)

    def go_back():
        for name in files_in(folder).keys() - before.keys():
            (folder / name).unlink()

    end_of(in_a_process(work))
    expected = files_in(folder)
    expected_weights = {name: content for name, content in expected.items() if name.startswith("model")}
    kills = 0

    def kill_and_go_on(prepare):
        nonlocal kills
        go_back()
        was_killed = end_of(in_a_process(work, prepare))
        if was_killed:
            kills += 1
            if download.is_complete(folder) and not files_in(folder).items() >= expected_weights.items():
                sys.exit(f"after kill {kills} the folder passes for a checkpoint, and is none")
            end_of(in_a_process(work))
        if files_in(folder) != expected:
            sys.exit(f"after kill {kills} there is {sorted(files_in(folder))} and not {sorted(expected)}")
        return was_killed

    for number in itertools.count():
        if not kill_and_go_on(lambda: kill_before_change(number, folder)):
            break
    for number in (0, 500, 40_000):
        kill_and_go_on(lambda: kill_at_byte(number))
    print(kills)


def together(work):
    """Two processes do the work, and both have written what they made before one of them gives it its name."""
    ready, go = os.pipe(), os.pipe()
    replace = os.replace

    def wait():
        def replace_when_both_are_ready(source, target):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            replace(source, target)

        os.replace = replace_when_both_are_ready

    processes = [in_a_process(work, wait) for _ in range(2)]
    for _ in processes:
        os.read(ready[0], 1)
    os.write(go[1], b"xx")
    for process in processes:
        end_of(process)


def fail_unless_saved(line, done):
    if done and "saved" not in line:
        raise AssertionError(line)


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "together":
        together(lambda: load_river(load_model(folder), folder, log=fail_unless_saved))
    else:
        kill_at_every_moment(lambda: WORK[kind](folder), folder)
