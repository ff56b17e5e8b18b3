"""Running Python code that nobody has read: the programs a model writes for a benchmark.

The code runs in a process of its own, `python -I -S` on this very file, in an empty temporary folder that is also its
HOME. Several layers confine it; each system gives those that it has:

* Linux and macOS: a wall-clock limit, after which the process and its group are killed; bounded output; no inherited
  environment, file descriptors or input; limits on memory (not on macOS), processor time, file size and open files;
  and an audit hook. By the hook Python code gets a PermissionError for other processes, signals, sockets, ctypes and
  files outside the temporary folder, of which it may only read Python's library. This stops accidents, not an
  attacker: the hook sees only what Python reports to it. On macOS it is all there is.
* Linux on x86-64 and 64-bit ARM: a seccomp filter. No code whatsoever, root's included, can start, signal or
  trace a process, change its priority or processors, open a socket, or change the mode, owner, times or attributes of
  a file.
* Linux 5.13 and newer, where Landlock is on: the same for reading, writing, creating and deleting files. Names, sizes
  and times can still be looked up; before 6.2, code that gets around the hook can cut files short.
* Linux: root loses its privileges, and the code does not outlive this process.

The kernel is shared, and code that searches Python's frames for the proof of `run_python` finds it.
"""

import os
import struct
import sys
from typing import NamedTuple

if __name__ != "__main__":  # the process that runs the code would take twice as long to start with these
    import selectors
    import signal
    import subprocess
    import tempfile
    import time
    from contextlib import suppress

    from .errors import RiverError

READY = b"ready\n"  # the code is confined: whatever fails from here on is its own fault
PROOF_BYTES = 32
REPORT_BYTES = 4096
FILE_BYTES, WRITES, OPEN_FILES = 16 << 20, 64, 64  # a file's size, and how often one may be opened for writing

LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
GROUPS_REFUSED = ("ctypes.", "pty.", "resource.", "socket.", "sqlite3.", "subprocess.", "syslog.")
REFUSED = {
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
    *("os.kill", "os.killpg", "signal.pthread_kill", "sys._current_frames"),
    *("os.chflags", "os.chmod", "os.chown", "os.removexattr", "os.setxattr", "os.utime"),
    *("os.link", "os.mkdir", "os.rmdir", "os.symlink"),  # the folder stays flat, and so can always be removed
}
READS, CHANGES = {"os.listdir", "os.scandir"}, {"os.remove": 1, "os.rename": 2, "os.truncate": 1}  # and their paths

# By machine: its number, those of clone and prlimit64, and those of the refused calls: exec and fork; signals; sockets,
# and io_uring, which gets around filters; truncate, chmod, chown, utime and the extended attributes; what changes how
# another process runs, or looks into it; other namespaces; memory that no limit counts.
CALLS = {
    "x86_64": (0xC000003E, 56, 302, [57, 58, 59, 322, 62, 129, 200, 234, 297, 424, 41, 53, 425]
               + [76, 90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466]
               + [101, 141, 142, 144, 203, 251, 310, 311, 314, 434, 438, 272, 308, 29, 319, 447]),
    "aarch64": (0xC00000B7, 220, 261, [221, 281, 129, 130, 131, 138, 240, 424, 198, 199, 425]
                + [45, 5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452, 463, 466]
                + [117, 140, 118, 119, 122, 30, 270, 271, 274, 434, 438, 97, 268, 194, 279, 447]),
}  # fmt: skip
CLONE3, CLONE_THREAD = 435, 0x10000
WRITE, READ, LIST, REMOVE, CREATE, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))  # Landlock's rights


class Result(NamedTuple):
    """How a run ended: whether the code came to its end, and if it did not, why, in one line."""

    passed: bool
    reason: str


def run_python(source, timeout_s=10.0, memory_bytes=1 << 30, output_bytes=64 << 10):
    """Run the Python program `source`, confined as this module describes, and return a Result.

    `passed` means that its last statement was executed, within the limits. To leave earlier is a failure, whatever
    the exit status: the end is proved by a random token that the program is not told. Nothing is left of a run.

    Args:
        source: the program, a str; it is run as a module called `solution` and has the standard library only.
        timeout_s: seconds of wall-clock time, the start of Python (some 0.02 s) included.
        memory_bytes: address space of the process, of which Python itself takes some 20 MiB. No limit on macOS.
        output_bytes: what it may print, standard output and standard error together. Nothing of it is kept.

    Raises:
        RiverError: this is Windows, or Python does not start.
    """
    if os.name != "posix":
        raise RiverError("running generated code needs Linux or macOS: this system cannot confine it")
    deadline, proof = time.monotonic() + timeout_s, os.urandom(PROOF_BYTES // 2).hex().encode()
    folders = tempfile.TemporaryDirectory(prefix="river-", ignore_cleanup_errors=True)
    with folders as folder, tempfile.TemporaryFile() as program:
        program.write(proof + source.encode(errors="surrogatepass"))
        program.seek(0)
        limits = [str(int(timeout_s) + 2), str(memory_bytes)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", os.path.abspath(__file__), *limits],
            stdin=program,
            stdout=subprocess.PIPE,  # the report; the code's own output becomes that on standard error
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        with process:
            try:
                report, printed, broken = _watch(process, deadline, output_bytes)
            finally:
                with suppress(ProcessLookupError, PermissionError):  # nobody is left: macOS says it the second way
                    os.killpg(process.pid, signal.SIGKILL)
    if broken:
        return Result(False, broken)
    if not report.startswith(READY):
        line = (printed.decode(errors="replace").strip() or f"exit status {process.returncode}").splitlines()[-1]
        raise RiverError(f"cannot start Python for generated code: {line}")
    said = report[len(READY) :]
    if process.returncode < 0:
        return Result(False, f"killed by signal {-process.returncode}")
    if said == proof and process.returncode == 0:
        return Result(True, "")
    line = " ".join(said.decode(errors="replace").split()).rstrip(":")
    return Result(False, line or f"exit status {process.returncode} before the end")


def _watch(process, deadline, output_bytes):
    """Read what the process says until it ends: its report, its output, and which limit it broke, or ""."""
    report, printed = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, report)
        selector.register(process.stderr, selectors.EVENT_READ, printed)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return report, printed, "timeout"
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fileobj)
            if len(printed) > output_bytes or len(report) > REPORT_BYTES:
                return report, printed, "output"
    try:
        process.wait(max(0, deadline - time.monotonic()))  # it may have closed its output and gone on
    except subprocess.TimeoutExpired:
        return report, printed, "timeout"
    return report, printed, ""


def _run_program():
    """The process that runs the code: read it, give up what it must not do, run it and report."""
    report, write, leave = os.dup(1), os.write, os._exit  # the code may change what the module os says
    text = sys.stdin.buffer.read()
    proof, source = text[:PROOF_BYTES], text[PROOF_BYTES:]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    _confine(cpu_s=int(sys.argv[1]), memory_bytes=int(sys.argv[2]))
    module = type(sys)("solution")
    sys.modules["solution"], sys.argv = module, ["solution"]
    write(report, READY)
    # The one place of this project that runs code which is not its own. What leads here is `run_python`, which only
    # `river.evaluate humaneval --allow-code-execution` calls; the process has been confined above.
    try:
        exec(compile(source.decode(errors="surrogatepass"), "solution", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        write(report, f"{type(error).__name__}: {error}"[:300].encode(errors="replace"))
        leave(1)
    write(report, proof)
    leave(0)  # neither atexit functions nor threads have a say any more


def _confine(cpu_s, memory_bytes):
    """Give up, for good, what the code must not do, by all the layers that this system has."""
    import resource

    folder = os.path.realpath(os.getcwd())
    library = [os.path.realpath(path) for path in (*sys.path, sys.base_exec_prefix + "/lib", *LIBRARIES)]
    limits = {"CORE": 0, "CPU": cpu_s, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "AS": memory_bytes}
    if sys.platform == "linux":
        _drop_privileges()
        _restrict_files(folder, library)
    if sys.platform != "linux" or not _restrict_calls():
        limits["NPROC"] = 0  # does nothing for root; on Linux it forbids threads as well
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (ValueError, OSError):  # the limit in force is lower, or macOS does not take it
            pass
    _add_hook(folder, library)


def _call(name, *arguments):
    """Call the C library's function `name`; ints go as longs, which `syscall` and `prctl` read."""
    import ctypes

    longs = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    return getattr(ctypes.CDLL(None), name)(*longs)


def _drop_privileges():
    """Die with the parent, gain nothing from set-uid files, and of root's privileges keep at most to read all files."""
    _call("prctl", 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the other layers need
    for kept in (1 << 2, 0):  # CAP_DAC_READ_SEARCH, for a Python in another user's folder; containers may lack it
        if _call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)) == 0:
            break


def _restrict_files(folder, library):
    """By Landlock, where there is one, leave plain files in `folder`, and those below `library` to read."""
    version = _call("syscall", 444, None, 0, 1)  # landlock_create_ruleset
    if version < 1:
        return
    handled = (1 << min(12 + version, 15)) - 1  # rights that a kernel does not know it does not take
    ruleset = _call("syscall", 444, struct.pack("Q", handled), 8, 0)
    rules = [(path, READ | LIST) for path in library]
    rules += [(folder, READ | LIST | WRITE | REMOVE | CREATE | TRUNCATE), (os.devnull, READ | WRITE | TRUNCATE)]
    for path, rights in rules:
        if os.path.exists(path):
            rights &= handled if os.path.isdir(path) else handled & ~LIST  # the library may be a zip file
            target = os.open(path, os.O_PATH)
            _call("syscall", 445, ruleset, 1, struct.pack("=Qi", rights, target), 0)  # landlock_add_rule
            os.close(target)
    _call("syscall", 446, ruleset, 0)  # landlock_restrict_self
    os.close(ruleset)


def _restrict_calls():
    """Refuse CALLS by a seccomp filter. False where there is none, or on a machine whose numbers are not known."""
    import ctypes

    if os.uname().machine not in CALLS or struct.calcsize("P") != 8:
        return False
    architecture, clone, prlimit, refused = CALLS[os.uname().machine]
    load, equal, at_least, has_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06  # code, skip if so, skip if not, operand
    allow, refuse, unknown = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x50001), (end, 0, 0, 0x50026)  # EPERM, ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse]  # 32-bit calls have other numbers
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), refuse]  # and so have those of x32
    for call in refused:
        program += [(equal, 0, 1, call), refuse]
    program += [(equal, 0, 3, prlimit), (load, 0, 0, 16), (equal, 1, 0, 0), refuse, (load, 0, 0, 0)]  # of others
    # A filter cannot see the flags of clone3; the C library then falls back on clone, which may make threads.
    program += [(equal, 0, 1, CLONE3), unknown, (equal, 0, 3, clone), (load, 0, 0, 16)]
    program += [(has_bit, 1, 0, CLONE_THREAD), refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    return _call("prctl", 22, 2, struct.pack("HP", len(program), ctypes.addressof(code)), 0, 0) == 0


def _add_hook(folder, library):
    """Make Python itself refuse what the code must not do, as far as it reports what it does."""
    writes, realpath, devices = 0, os.path.realpath, (os.devnull, "/dev/urandom")
    inside, readable = (folder + os.sep,), tuple(path + os.sep for path in (folder, *library))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def below(path, roots):
        if isinstance(path, int):  # an open file, whose path has been checked before
            return True
        path = realpath(os.fsdecode("." if path is None else path))
        return path in devices or (path + os.sep).startswith(roots)

    def hook(event, arguments):
        nonlocal writes
        allowed = event not in REFUSED and not event.startswith(GROUPS_REFUSED)
        if event == "open":
            path, _, flags = arguments
            writes += bool(flags & writing)
            allowed = below(path, inside if flags & writing else readable) and writes <= WRITES
        elif event in READS:
            allowed = below(arguments[0], readable)
        elif event in CHANGES:  # a path may be relative to an open folder, and it is not said to which
            allowed = all(below(path, inside) for path in arguments[: CHANGES[event]])
            allowed &= event == "os.truncate" or set(arguments[CHANGES[event] :]) == {-1}
        if not allowed:
            raise PermissionError(f"{event} is refused to generated code")

    sys.addaudithook(hook)


if __name__ == "__main__":
    _run_program()
