"""The sandboxed process: it isolates itself, runs the program, and watches it.

It is started by path in a bare interpreter, so it imports only modules of the standard library that import quickly:
each program waits for them. Its one argument is JSON, a `Setup`: the limits of `Sandbox`; ``isolation``;
``syscall_filter``, in hexadecimal; ``control_fd``, a socket into which the program and its tests come, and out of which
lines say how far it got; ``report_fd``, a pipe for the watcher's report, which the program never holds; and
``import_paths``.

It makes three processes: the watcher, which stays outside; the first process of the namespaces, which lives as long as
the program and reaps its children; and the program.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Setup = dict[str, Any]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
SYS_MOUNT_SETATTR = 442
"""This number is the same on every architecture; glibc has the name since 2.36."""
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
UNPRIVILEGED_ID = 65534
"""The user and group that have no rights on Linux systems."""

HOME = "/sandbox"
"""The folder in which a program starts and to which it may write."""
NEW_ROOT = "/proc"
"""Mount point of the program's file system while it is assembled: every Linux has it, and its files are hidden."""
SET_UP = b"set up\n"
"""Message of the program's process before the program."""
READY_FOR_TESTS = b"ready for tests\n"
"""Message of the program's process between the program and its tests."""
VISIBLE = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]

_libc = ctypes.CDLL(None, use_errno=True)
# Programs may replace functions of os: those needed after one has run are kept here.
_read = os.read
_write = os.write
_leave = os._exit


def main() -> None:
    setup: Setup = json.loads(sys.argv[1])
    watched = {signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM}
    # Waited for, not handled: none can come between the fork and the moment its process id is known.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    outside = (os.getuid(), os.getgid())
    inside = outside
    if outside[0] == 0:
        inside = (UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    try:
        if setup["isolation"] == "namespaces":
            _enter_namespaces(outside, inside)
    except OSError as error:
        os.write(setup["control_fd"], f"{error}\n".encode())
        return
    signal.setitimer(signal.ITIMER_REAL, setup["wall_s"])
    first = os.fork()
    if first == 0:
        os.close(setup["report_fd"])
        _start_the_program(setup, inside)
    os.close(setup["control_fd"])
    report = _watch(first, watched)
    os.write(setup["report_fd"], json.dumps(report).encode())
    os._exit(0)


def _watch(first: int, watched: set[signal.Signals]) -> "dict[str, Any]":
    timed_out = False
    # A child that is stopped sends the same signal as one that ends.
    while os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        seen = signal.sigwait(watched)
        if seen != signal.SIGCHLD:
            timed_out = timed_out or seen == signal.SIGALRM
            os.kill(first, signal.SIGKILL)
    # Not reaped yet, so the group's number is still its own. In a process namespace all are dead by now.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(first, signal.SIGKILL)
    _, status, usage = os.wait4(first, 0)
    return {
        "exit_code": _exit_code(status),
        "timed_out": timed_out,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


def _exit_code(status: int) -> int:
    """Return the exit code as a shell does: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return 128 - code
    return code


def _enter_namespaces(outside: tuple[int, int], inside: tuple[int, int]) -> None:
    """Enter new namespaces; the next child is their first process.

    ``outside`` and ``inside`` are the user and group now and in the namespaces. Root becomes an unprivileged user: the
    kernel holds root to no limit of processes, and files of root stay out of reach. Only a process outside may map a
    second user, hence the helper.
    """
    go = os.pipe()
    done = os.pipe()
    watcher = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(go[1])
        os.read(go[0], 1)
        answer = b""
        try:
            for kind, outer, inner in zip(("uid", "gid"), outside, inside, strict=True):
                if kind == "gid" and outside[0] != 0:
                    Path(f"/proc/{watcher}/setgroups").write_text("deny")
                lines = f"{outer} {outer} 1\n"
                if inner != outer:
                    lines += f"{inner} {inner} 1\n"
                Path(f"/proc/{watcher}/{kind}_map").write_text(lines)
        except OSError as error:
            answer = str(error).encode()
        os.write(done[1], answer)
        os._exit(0)
    os.close(done[1])
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    try:
        _check(_libc.unshare(flags), "unshare")
    finally:
        os.write(go[1], b"x")
        answer = os.read(done[0], 4096)
        os.waitpid(helper, 0)
        for fd in (*go, done[0]):
            os.close(fd)
    if answer:
        raise OSError(answer.decode())
    # The helper's end is in the line, and only the program's may be.
    signal.sigwait({signal.SIGCHLD})


def _start_the_program(setup: "Setup", inside: tuple[int, int]) -> "NoReturn":
    """Drop every right that is not needed, then run the program that the control socket sends.

    The first process of a namespace gets no signal that it does not handle, a CPU limit's among them, so the program is
    the second.
    """
    control = setup["control_fd"]
    try:
        os.setsid()
        if setup["isolation"] == "namespaces":
            _see_only(setup)
            user, group = inside
            if os.getuid() != user:
                os.setgroups([])
                os.setresgid(group, group, group)
                os.setresuid(user, user, user)
            _check(
                _libc.capset(
                    (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
                ),
                "capset",
            )
            _limit(resource.RLIMIT_NPROC, setup["processes"] + 1)
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _limit(resource.RLIMIT_CPU, setup["cpu_s"])
        _limit(resource.RLIMIT_AS, setup["memory_bytes"])
        _limit(resource.RLIMIT_FSIZE, setup["disk_bytes"])
        _limit(resource.RLIMIT_NOFILE, setup["open_files"])
        _limit(resource.RLIMIT_CORE, 0)
        _filter_syscalls(bytes.fromhex(setup["syscall_filter"]))
    except (OSError, ValueError) as error:
        os.write(control, f"{error}\n".encode())
        os._exit(1)
    program = os.fork()
    if program:
        _reap_until(program)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    sys.path += setup["import_paths"]
    sys.argv = ["solution.py"]
    os.set_inheritable(control, False)
    os.write(control, SET_UP)
    task = _next_line(control)
    if task["tests"]:
        _run_with_tests(task["program"], control)
    else:
        os.close(control)
        _run(task["program"], "__main__")
    # As an interpreter that ends: threads are waited for, output is flushed.
    sys.exit(0)


def _reap_until(program: int) -> "NoReturn":
    # Close its ends of pipes, by which readers would believe that the program still runs.
    os.closerange(0, 1 << 16)
    while True:
        ended, status = os.wait()
        if ended == program:
            os._exit(_exit_code(status))


def _run_with_tests(program: str, control: int) -> "NoReturn":
    """Run the program, and only then ask for the tests, each with the token that says it passed."""
    names = _run(program, "solution")
    _write(control, READY_FOR_TESTS)
    status = 0
    for source, token in _next_line(control)["tests"]:
        try:
            exec(compile(source, "tests.py", "exec"), names)
        except Exception as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
            status = 1
        else:
            _write(control, f"{token}\n".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    _leave(status)


def _run(program: str, name: str) -> "dict[str, Any]":
    """Run a program as the module of that name, and return its variables."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(program, "solution.py", "exec"), module.__dict__)
    return module.__dict__


def _see_only(setup: "Setup") -> None:
    """Mount a read-only file system of the interpreter and the system's libraries, with an empty writable folder."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    # Longer paths later: one that lies in another is there already.
    for path in sorted(VISIBLE + DEVICES + [sys.base_prefix] + setup["import_paths"], key=len):
        _show(path)
    Path(NEW_ROOT + HOME).mkdir()
    _read_only(NEW_ROOT)
    size = f"size={setup['disk_bytes']},nr_inodes=4096,mode=1777"
    _mount("tmpfs", NEW_ROOT + HOME, "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(NEW_ROOT)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir(HOME)


def _show(path: str) -> None:
    source = Path(path)
    target = Path(NEW_ROOT + path)
    if target.exists() or target.is_symlink() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(path, str(target), None, MS_BIND | MS_REC)


def _read_only(path: str) -> None:
    # The fields of struct mount_attr: attr_set, attr_clr, propagation and userns_fd.
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        AT_FDCWD,
        path.encode(),
        AT_RECURSIVE,
        ctypes.byref(attributes),
        size,
    )
    _check(result, f"mount_setattr {path}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    source_bytes = source and source.encode()
    kind_bytes = kind and kind.encode()
    data_bytes = data and data.encode()
    result = _libc.mount(
        source_bytes, target.encode(), kind_bytes, ctypes.c_ulong(flags), data_bytes
    )
    _check(result, f"mount {target}")


class _FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_syscalls(instructions: bytes) -> None:
    """Deny system calls to this process and all that it starts, for good."""
    program = _FilterProgram(len(instructions) // 8, instructions)
    result = _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _check(result, "seccomp filter")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _next_line(fd: int) -> "Any":
    """Read the next message of the control socket, JSON on one line."""
    parts = [b""]
    while not parts[-1].endswith(b"\n"):
        part = _read(fd, 1 << 16)
        if not part:
            # The caller has ended.
            _leave(1)
        parts.append(part)
    return json.loads(b"".join(parts))


if __name__ == "__main__":
    main()
