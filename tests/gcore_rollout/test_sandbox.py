"""Programs that misbehave, and what comes of it."""

import asyncio
import errno
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from gcore_rollout import RolloutError, Sandbox
from gcore_rollout.sandbox import sandbox as implementation
from gcore_rollout.sandbox.sandbox import Isolation
from gcore_rollout.sandbox.syscall_filter import build_syscall_filter

QUICK: dict[str, Any] = {
    "wall_s": 60,
    "memory_bytes": 256 << 20,
    "disk_bytes": 1 << 20,
    "output_bytes": 10_000,
    "open_files": 32,
    "processes": 8,
}
"""Limits of the sandboxes of tests that have none of their own."""


def make(isolation: Isolation = "namespaces", **options: Any) -> Sandbox:
    try:
        if not options.keys() & {*QUICK, "cpu_s"}:
            options |= QUICK
        return Sandbox(isolation=isolation, **options)
    except RolloutError as error:
        if isolation == "namespaces" and "which this machine does not give" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(params=["namespaces", "limits"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return make(request.param)


@pytest.fixture
def isolated() -> Sandbox:
    return make()


def processes_with(marker: str) -> list[str]:
    """Command lines on this machine that hold a string."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker in line:
            found.append(line)
    return found


async def test_input_and_output(sandbox: Sandbox) -> None:
    program = "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)))\n    sys.stderr.write('é')\n"
    result = await sandbox.run(program, stdin="\n".join(map(str, range(100_000))))
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == (
        "finished",
        0,
        "4999950000\n",
        "é",
    )
    assert 0 < result.cpu_s < result.wall_s
    assert (await sandbox.run("raise KeyError('gold')")).stderr.endswith("KeyError: 'gold'\n")
    assert (await sandbox.run("1 / 0")).outcome == "failed"
    assert (await sandbox.run("import sys; sys.exit(3)")).exit_code == 3
    assert (await sandbox.run("import atexit; atexit.register(print, 'bye')")).stdout == "bye\n"


async def test_tests_see_the_program(sandbox: Sandbox) -> None:
    program = (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\n"
        "def f(x):\n    return P(x).x + 1\n"
    )
    tests = [
        "assert f(1) == 2",
        "assert f(1) == 3, 'no'",
        "from solution import P\nassert P(1) == P(1)",
        "f() = 1",
    ]
    result = await sandbox.run(program, tests=tests)
    assert result.passed == (True, False, True, False)
    assert "AssertionError: no" in result.stderr
    assert "SyntaxError" in result.stderr


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "quit()",
        "import os; os.kill(os.getpid(), 9)",
        "import os\nfor fd in range(3, 4096):\n    try: os.write(fd, b'ready for tests\\nTrue\\npassed\\n0\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        "import os; os.closerange(0, 1 << 16)",
        "import os\nif os.fork(): os._exit(0)",
        "print('passed'); assert False",
        "def f(): raise SystemExit",
        "def f():\n    import os\n    os._exit(0)",
        "def f(): return 2",
        "import threading\nthreading.main_thread().join = None\nimport _thread\n_thread.interrupt_main()",
        "\udcff",
    ],
)
async def test_leaving_early_passes_nothing(isolated: Sandbox, program: str) -> None:
    result = await isolated.run(program, tests=["assert f() == 1", "pass"])
    assert not result.passed[0]
    # The interrupt may come after the program, in the first test. A forked program continues until
    # the end of its first process is noticed, and may be quicker.
    stays = any(words in program for words in ("def f(): return 2", "interrupt_main", "os.fork()"))
    assert stays or result.passed == (False, False)


async def test_a_program_without_tests_to_pass_passes_none(isolated: Sandbox) -> None:
    assert (await isolated.run("x = 1")).passed == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(100)", "import os; os.read(0, 1); os.pause()"],
)
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
async def test_wall_time(isolation: Isolation, program: str) -> None:
    program = program.replace("os.pause()", "__import__('signal').pause()")
    sandbox = make(isolation, wall_s=0.5)
    began = time.monotonic()
    result = await sandbox.run(program, tests=["pass"])
    assert (result.outcome, result.passed, result.exit_code) == ("timed_out", (False,), 137)
    assert time.monotonic() - began < 60, "the program sleeps for 100 s, or for ever"


@pytest.mark.slow
async def test_cpu_time() -> None:
    sandbox = make(wall_s=300, cpu_s=1)
    result = await sandbox.run(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert result.outcome == "timed_out"
    assert 0.9 < result.cpu_s < 1.5
    assert result.wall_s < 299


async def test_memory(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        "try:\n    b = bytearray(1 << 30)\nexcept MemoryError:\n    print('no')\nx = [0] * 10**9"
    )
    assert (result.outcome, result.stdout) == ("failed", "no\n")
    assert "MemoryError" in result.stderr


async def test_output(sandbox: Sandbox) -> None:
    result = await sandbox.run("while True: print('x' * 1000)")
    assert (result.outcome, len(result.stdout)) == ("output_limit", QUICK["output_bytes"])
    result = await sandbox.run(
        "import sys\nwhile True: sys.stderr.write('x' * 1000)", tests=["pass"]
    )
    assert (result.outcome, len(result.stderr), result.passed) == (
        "output_limit",
        QUICK["output_bytes"],
        (False,),
    )


async def test_files(sandbox: Sandbox) -> None:
    """The size of a file, how many are open, and an empty folder to work in that is gone afterwards."""
    program = (
        "import os, tempfile\nprint(os.listdir())\nopen('mine', 'w').write('x')\n"
        "try:\n    f = open('big', 'wb', 0)\n    for _ in range(9): f.write(bytes(1 << 18))\n"
        "except OSError as e: print(e.errno)\n"
        "try: [open('/dev/null') for _ in range(99)]\nexcept OSError as e: print(e.errno)\n"
    )
    for _ in range(2):
        result = await sandbox.run(program)
        assert result.stdout.splitlines()[0] == "[]"
        assert result.stdout.splitlines()[-1] == "24"
        assert result.stdout.splitlines()[1] in ("27", "28"), "file too large, no space left"


async def test_environment(isolated: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "secret")
    result = await isolated.run(
        "import os, sys\nprint(os.environ.get('PASSWORD'), sys.argv, [p for p in sys.path if 'site-packages' in p])\n"
        "print(os.getuid() == 0, os.getpid(), os.path.exists('/proc/self'), sorted(os.listdir('/dev')))\n"
    )
    assert result.stdout == (
        "None ['solution.py'] []\nFalse 2 False ['null', 'random', 'urandom', 'zero']\n"
    )


async def test_the_machine_cannot_be_written_or_looked_at(
    isolated: Sandbox, tmp_path: Path
) -> None:
    target = tmp_path / "precious"
    target.write_text("data")
    target.chmod(0o666)
    program = f"""
import ctypes, glob, os, shutil, sys
for path in ({str(target)!r}, {str(target.parent)!r}, {__file__!r}):
    print(os.path.exists(path))
shutil.rmtree("/etc", ignore_errors=True)
shutil.rmtree({str(target.parent)!r}, ignore_errors=True)
writable = []
for folder in ["/", "/usr", "/usr/lib", "/etc", "/dev", sys.base_prefix, os.path.dirname(os.__file__)]:
    try:
        open(folder + "/gcore-was-here", "w")
        writable.append(folder)
    except OSError as error:
        assert error.errno in (30, 13), error
print(writable)
libc = ctypes.CDLL(None, use_errno=True)
# A remount, and the same as root of a user namespace of its own.
for _ in range(2):
    print(libc.mount(None, b"/", None, ctypes.c_ulong(0x20 | 0x1000), None), ctypes.get_errno())
    libc.unshare(0x10020000)
"""
    result = await isolated.run(program)
    assert result.stderr == ""
    assert result.stdout == "False\nFalse\nFalse\n[]\n-1 1\n-1 1\n"
    assert target.read_text() == "data"


KEY_CALLS = {"x86_64": (248, 250), "aarch64": (217, 219)}
"""The numbers of `add_key` and `keyctl`, by the kernel's headers."""
CALLS_OF_PROGRAMS = f"""
import ctypes, os
ADD_KEY, KEYCTL = {KEY_CALLS[platform.machine()]}
CLONE = {56 if platform.machine() == "x86_64" else 220}
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(number), *longs)
"""


async def test_keyrings_are_not_shared(sandbox: Sandbox) -> None:
    """A program that leaves a key in the session's keyring, and a later program that searches for it there."""
    name = f"gcore-{os.getpid()}"
    leave = f'print(call(ADD_KEY, b"user", b"{name}", b"answer", 6, -3), ctypes.get_errno())'
    find = f'print(call(KEYCTL, 10, -3, b"user", b"{name}", 0), ctypes.get_errno())'
    for program in (leave, find):
        result = await sandbox.run(CALLS_OF_PROGRAMS + program)
        assert result.stdout == f"-1 {errno.EPERM}\n", result.stderr


async def test_system_v_memory_is_denied(sandbox: Sandbox) -> None:
    """Segments that are not attached are in no address space, so they would be outside of `memory_bytes`."""
    program = "print([(libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600), ctypes.get_errno()) for _ in range(2)])"
    assert (await sandbox.run(CALLS_OF_PROGRAMS + program)).stdout == f"{[(-1, errno.EPERM)] * 2}\n"
    program = "import os\nos.memfd_create('x')"
    assert "PermissionError" in (await sandbox.run(program)).stderr


async def test_namespaces_do_not_nest(sandbox: Sandbox) -> None:
    program = """
print(libc.unshare(0x10000000), ctypes.get_errno())
child = call(CLONE, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
print(child, ctypes.get_errno())
print(call(435, ctypes.create_string_buffer(88), 88), ctypes.get_errno())
"""
    result = await sandbox.run(CALLS_OF_PROGRAMS + program)
    assert result.stdout == f"-1 {errno.EPERM}\n-1 {errno.EPERM}\n-1 {errno.ENOSYS}\n", (
        result.stderr
    )


async def test_what_programs_use_is_allowed(sandbox: Sandbox) -> None:
    program = """
import asyncio, multiprocessing, os, socket, subprocess, sys, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
print(list(ThreadPoolExecutor(2).map(abs, [-1, -2])))
print(subprocess.check_output(["echo", "hello"], text=True).strip())
context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
child = context.Process(target=theirs.send, args=(3,))
child.start()
print(ours.recv())
child.join()
async def nap():
    await asyncio.sleep(0.001)
    return await asyncio.to_thread(os.getpid) == os.getpid()
print(asyncio.run(nap()))
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
print(len(socket.socketpair()))
"""
    result = await sandbox.run(program)
    assert result.stdout == "[1, 2]\nhello\n3\nTrue\n2\n", result.stderr


def filter_result(code: bytes, architecture: int, number: int, argument: int) -> int:
    """Return what a filter answers to a call, by an interpreter of the instructions of classic BPF in it."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", code))
    accumulator = 0
    position = 0
    while True:
        operation, if_true, if_false, operand = instructions[position]
        position += 1
        match operation:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                accumulator = struct.unpack_from("=I", data, operand)[0]
            case 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
                position += if_true if accumulator == operand else if_false
            case 0x35:  # BPF_JMP | BPF_JGE | BPF_K
                position += if_true if accumulator >= operand else if_false
            case 0x45:  # BPF_JMP | BPF_JSET | BPF_K
                position += if_true if accumulator & operand else if_false
            case _:  # BPF_RET | BPF_K
                assert operation == 0x06
                return operand


X86_64, AARCH64, I386, ARM = 0xC000003E, 0xC00000B7, 0x40000003, 0x40000028
"""AUDIT_ARCH numbers of linux/audit.h."""
ALLOWED, DENIED, MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "argument", "expected"),
    [
        pytest.param("x86_64", X86_64, 0, 0, ALLOWED, id="read"),
        pytest.param("x86_64", X86_64, 250, 0, DENIED, id="keyctl"),
        pytest.param("x86_64", X86_64, 153, 0, DENIED, id="vhangup-the-last-of-the-table"),
        pytest.param(
            "x86_64", X86_64, 219, 0, ALLOWED, id="restart_syscall-keyctl-of-the-other-machine"
        ),
        pytest.param("x86_64", X86_64, 56, 0x003D0F00, ALLOWED, id="a-thread"),
        pytest.param("x86_64", X86_64, 56, 0x10000011, DENIED, id="clone-of-a-user-namespace"),
        pytest.param("x86_64", X86_64, 56, 0x00020011, DENIED, id="clone-of-a-mount-namespace"),
        pytest.param("x86_64", X86_64, 435, 0, MISSING, id="clone3"),
        pytest.param("x86_64", X86_64, 41, 2, ALLOWED, id="socket-of-the-internet"),
        pytest.param("x86_64", X86_64, 41, 40, DENIED, id="socket-of-a-hypervisor"),
        pytest.param("x86_64", X86_64, 53, 30, DENIED, id="socketpair-of-TIPC"),
        pytest.param("x86_64", X86_64, 0x40000000 | 250, 0, MISSING, id="keyctl-of-x32"),
        pytest.param("x86_64", X86_64, 467, 0, MISSING, id="open_tree_attr"),
        pytest.param("x86_64", I386, 288, 0, DENIED, id="keyctl-of-i386"),
        pytest.param("x86_64", I386, 3, 0, DENIED, id="read-of-i386"),
        pytest.param("aarch64", AARCH64, 63, 0, ALLOWED, id="arm-read"),
        pytest.param("aarch64", AARCH64, 219, 0, DENIED, id="arm-keyctl"),
        pytest.param("aarch64", AARCH64, 97, 0, DENIED, id="arm-unshare"),
        pytest.param(
            "aarch64", AARCH64, 220, 0x10000011, DENIED, id="arm-clone-of-a-user-namespace"
        ),
        pytest.param("aarch64", AARCH64, 220, 0x11, ALLOWED, id="arm-fork"),
        pytest.param(
            "aarch64", AARCH64, 56, 0x10000011, ALLOWED, id="arm-openat-clone-of-the-other-machine"
        ),
        pytest.param("aarch64", AARCH64, 198, 40, DENIED, id="arm-socket-of-a-hypervisor"),
        pytest.param("aarch64", ARM, 63, 0, DENIED, id="arm-32-bit"),
    ],
)
def test_syscall_filter(
    machine: str, architecture: int, number: int, argument: int, expected: int
) -> None:
    assert filter_result(build_syscall_filter(machine), architecture, number, argument) == expected


def test_another_machine_has_no_filter() -> None:
    with pytest.raises(RolloutError, match="machine is 'riscv64'; expected x86_64 or aarch64"):
        build_syscall_filter("riscv64")


async def test_no_network(isolated: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0gcore-sandbox-test")
        local.listen()
        program = f"""
import socket
for family, address in [(socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("8.8.8.8", 53)),
                        (socket.AF_UNIX, "\\0gcore-sandbox-test")]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            socket.socket(family, kind).connect(address)
            print("connected", family, address)
        except OSError as error:
            print(error.errno)
"""
        assert (await isolated.run(program)).stdout == "101\n101\n101\n101\n111\n111\n", (
            "no network, no listener"
        )
        host = await make("limits").run(program)
        assert "connected" in host.stdout, "the server does listen"


async def test_fork_bomb(isolated: Sandbox) -> None:
    """No more processes than allowed, counted from outside."""
    marker = f"gcore-bomb-{os.getpid()}"
    program = f"""
import ctypes, os, time
libc = ctypes.CDLL(None)
name = {marker!r}.encode()[:15]
libc.prctl(15, name, 0, 0, 0)
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
"""
    task = asyncio.create_task(make(wall_s=2, processes=8).run(program))
    most = 0
    while not task.done():
        await asyncio.sleep(0.1)
        most = max(most, processes_named(marker[:15]))
    assert (await task).outcome == "timed_out"
    assert 1 < most <= 8
    assert processes_named(marker[:15]) == 0


def processes_named(name: str) -> int:
    found = 0
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += file.read_text().strip() == name
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_threads_are_bounded_too() -> None:
    program = (
        "import threading, time\nn = 0\ntry:\n    for n in range(100):\n"
        "        threading.Thread(target=time.sleep, args=(0.2,)).start()\nexcept RuntimeError:\n    print(n)\n"
    )
    sandbox = make(processes=8)
    assert (await sandbox.run(program)).stdout == "7\n", "and the first one is the program's"


@pytest.mark.parametrize("session", [True, False])
async def test_an_orphaned_child_is_killed(isolated: Sandbox, session: bool) -> None:
    marker = f"31{os.getpid()}.{session:d}"
    program = f"import subprocess\nsubprocess.Popen(['sleep', '{marker}'], start_new_session={session})\nprint('left')"
    result = await isolated.run(program)
    assert (result.outcome, result.stdout) == ("finished", "left\n")
    assert not processes_with(marker)


async def test_with_limits_only_the_group_is_killed() -> None:
    marker = f"32{os.getpid()}.5"
    result = await make("limits").run(
        f"import subprocess\nsubprocess.Popen(['sleep', '{marker}'])\nprint('left')"
    )
    assert result.stdout == "left\n"
    assert not processes_with(marker)


async def test_signals_reach_no_other_process(isolated: Sandbox) -> None:
    result = await isolated.run(
        f"import os\nfor pid in (-1, {os.getpid()}):\n    try: os.kill(pid, 9)\n    except OSError as e: print(e.errno)"
    )
    assert result.stdout == "3\n3\n", "no such process"


async def test_a_cancelled_call_leaves_nothing(sandbox: Sandbox) -> None:
    marker = f"33{os.getpid()}.7"
    task = asyncio.create_task(
        sandbox.run(f"import subprocess\nsubprocess.run(['sleep', '{marker}'])")
    )
    async with asyncio.timeout(300):
        while not processes_with(marker):
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not processes_with(marker)
    assert (await sandbox.run("print(1)")).stdout == "1\n", "its place is free again"


@pytest.mark.slow
async def test_the_loop_stays_free_and_calls_are_bounded() -> None:
    sandbox = make(max_concurrency=2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticker = asyncio.create_task(tick())
    program = "import time\nprint(time.monotonic())\ntime.sleep(0.3)\nprint(time.monotonic())"
    results = await asyncio.gather(*(sandbox.run(program) for _ in range(6)))
    ticker.cancel()
    spans = [tuple(map(float, r.stdout.split())) for r in results]
    at_once = [sum(b <= start < e for b, e in spans) for start, _ in spans]
    assert max(at_once) == 2
    assert ticks > 20, "with a loop that waits there would be one for every program"


def children() -> set[int]:
    """Of this process, those that have ended and were not waited for among them."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.mark.slow
async def test_many_leave_no_descriptor_and_no_child(sandbox: Sandbox) -> None:
    before, others = len(list(Path("/proc/self/fd").iterdir())), children()
    running = [
        asyncio.create_task(sandbox.run("import time; time.sleep(0.5)", tests=["pass"]))
        for _ in range(8)
    ]
    await asyncio.sleep(0.3)
    assert children() - others
    await asyncio.gather(*running)
    await asyncio.sleep(0.05)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    assert not children() - others


async def test_import_paths(tmp_path: Path) -> None:
    (tmp_path / "helpful.py").write_text("VALUE = 7\n")
    tmp_path.chmod(0o755)
    for isolation in ("namespaces", "limits"):
        result = await make(isolation, import_paths=[tmp_path]).run(
            "import helpful\nprint(helpful.VALUE)"
        )
        assert result.stdout == "7\n", result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrency": 0}, "max_concurrency is 0; expected at least 1"),
        (
            {"import_paths": ["relative"]},
            "import_paths holds 'relative'; expected an absolute path of a folder",
        ),
        ({"isolation": "magic"}, "isolation is 'magic'; expected one of namespaces, limits"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        Sandbox(**options)


@pytest.mark.parametrize(
    "field",
    ["wall_s", "cpu_s", "memory_bytes", "disk_bytes", "output_bytes", "open_files", "processes"],
)
def test_bad_limits(field: str) -> None:
    limits: dict[str, Any] = {field: 0}
    with pytest.raises(RolloutError, match=f"{field} is 0; expected more than 0"):
        Sandbox(**limits)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "CLONE_NEWUSER = 0x10000000",
            "CLONE_NEWUSER = 0x1",
            "unshare: Invalid argument",
        ),
        (
            "SYS_MOUNT_SETATTR = 442",
            "SYS_MOUNT_SETATTR = 100000",
            "mount_setattr /proc: Function not implemented",
        ),
        ("SECCOMP_MODE_FILTER = 2", "SECCOMP_MODE_FILTER = 9", "seccomp filter: Invalid argument"),
    ],
)
def test_a_machine_that_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, why: str
) -> None:
    """A kernel that refuses is refused at once, with what to do."""
    text = implementation.CHILD.read_text()
    assert old in text
    other = tmp_path / "child.py"
    other.write_text(text.replace(old, new))
    make()
    monkeypatch.setattr(implementation, "CHILD", other)
    with pytest.raises(
        RolloutError,
        match=rf"isolation is 'namespaces', which .* \(.*{why}\): allow .* isolation='limits'",
    ):
        Sandbox()


async def test_an_interpreter_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox = make("limits")
    monkeypatch.setattr(implementation, "CHILD", tmp_path / "nowhere.py")
    with pytest.raises(RolloutError, match=r"a program could not be started: .*nowhere\.py"):
        await sandbox.run("print(1)")


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """The watcher ends its program when the process that asked is killed."""
    marker = f"34{os.getpid()}.3"
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio, subprocess\nfrom gcore_rollout import Sandbox\n"
        f'program = \'import subprocess; subprocess.run(["sleep", "{marker}"])\'\n'
        "asyncio.run(Sandbox(isolation='limits').run(program))\n"
    )
    owner = subprocess.Popen([sys.executable, script])
    try:
        wait_until(lambda: bool(processes_with(marker)))
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not processes_with(marker))
