"""Isolated Python programs in other processes, under limits, without blocking the event loop: what starts them."""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from gcore_rollout.errors import RolloutError, require
from gcore_rollout.sandbox.child import HOME, READY_FOR_TESTS, SET_UP
from gcore_rollout.sandbox.syscall_filter import build_syscall_filter

Isolation = Literal["namespaces", "limits"]
"""The isolation of a program from the machine; see `Sandbox`."""

Outcome = Literal["finished", "failed", "timed_out", "output_limit"]
"""Exit status 0; any other or a signal; killed at ``wall_s`` or ``cpu_s``; killed for writing too much."""

CHILD = Path(__file__).with_name("child.py")
GRACE_S = 60.0
"""Time after a program's limit, at which its watcher kills it, until the watcher itself is killed."""
KILLED = 128 + signal.SIGKILL
LEFT_OPEN_S = 1.0
"""Time to wait for the end of output that an escaped process may hold open (``limits`` only)."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a program. Sets are iterated in the same order each time."""


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The result of one program."""

    outcome: Outcome
    exit_code: int
    """128 + n if signal n ended it."""
    stdout: str
    stderr: str
    passed: tuple[bool, ...]
    """For each of the tests, whether it ran to its end without an exception."""
    cpu_s: float
    """Seconds of CPU time of the program and the children that it waited for."""
    wall_s: float
    """Seconds from the call to the end, the time in the queue included."""


class Sandbox:
    """Runs untrusted Python programs, each in a new interpreter with the standard library.

    With ``namespaces`` a program has no network, not even loopback; sees the interpreter and the system's libraries,
    read-only, and an empty folder that goes away with it; sees no other process, and none of its own outlives it; has
    no capabilities; and is an unprivileged user if this process is root.

    In both a seccomp filter denies the system calls that Python programs do not need: those of keyrings, mounts,
    namespaces, System V memory, message queues, files in memory, tracing, bpf, io_uring and their like.

    With ``limits`` it has the network, the files and the rights of this process: memory, CPU and wall time, output and
    the size of a file are bounded, but it may read, write, send and signal what this process may, and a child that
    makes a session of its own outlives it. Use that where the machine itself is thrown away.

    Not protected against in either: bugs of the kernel; memory outside of an address space (files in its folder, up to
    ``disk_bytes``, and buffers of pipes and sockets); ``processes`` times the limits of memory and CPU time, as those
    are of each process.

    Beyond a limit of a program its call fails or it is killed; neither passes a test.

    Args:
        isolation: tried once here; a `RolloutError` if this machine cannot enforce it.
        max_concurrency: most programs at one time; default: as many as there are CPUs.
        import_paths: folders to import from besides the standard library, absolute; the program can read them.
        wall_s: seconds from the start to the end of the program, waiting included.
        cpu_s: seconds of CPU time, of each process.
        memory_bytes: address space, of each process.
        disk_bytes: largest size of a file in its folder, and with namespaces of all files.
        output_bytes: largest output on each of stdout and stderr.
        open_files: open files, of each process.
        processes: processes and threads at one time, the program's own among them. Held with namespaces only.

    Example:
        >>> sandbox = Sandbox(isolation="limits")
        >>> result = asyncio.run(sandbox.run("print(int(input()) + 1)", stdin="41"))
        >>> result.outcome, int(result.stdout)
        ('finished', 42)
        >>> asyncio.run(sandbox.run("x = 3", tests=["assert x == 3", "assert x > 5"])).passed
        (True, False)
        >>> short = Sandbox(isolation="limits", wall_s=5.0, output_bytes=1000)
        >>> asyncio.run(short.run("print('a' * 10_000)")).outcome
        'output_limit'
    """

    def __init__(
        self,
        *,
        isolation: Isolation = "namespaces",
        max_concurrency: int | None = None,
        import_paths: Sequence[str | Path] = (),
        wall_s: float = 10.0,
        cpu_s: int = 10,
        memory_bytes: int = 1 << 30,
        disk_bytes: int = 16 << 20,
        output_bytes: int = 1 << 20,
        open_files: int = 64,
        processes: int = 16,
    ) -> None:
        self._limits = {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "memory_bytes": memory_bytes,
            "disk_bytes": disk_bytes,
            "output_bytes": output_bytes,
            "open_files": open_files,
            "processes": processes,
        }
        for name, value in self._limits.items():
            require(name, value, value > 0, "more than 0", RolloutError)
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        self._output_bytes = output_bytes
        accepted = get_args(Isolation)
        require(
            "isolation",
            isolation,
            isolation in accepted,
            f"one of {', '.join(accepted)}",
            RolloutError,
        )
        if max_concurrency is None:
            max_concurrency = os.cpu_count() or 1
        require(
            "max_concurrency", max_concurrency, max_concurrency >= 1, "at least 1", RolloutError
        )
        for path in map(Path, import_paths):
            if not path.is_absolute() or not path.is_dir():
                raise RolloutError(
                    f"import_paths holds {str(path)!r}; expected an absolute path of a folder"
                )
        self._isolation: Isolation = isolation
        self._import_paths = [str(path) for path in import_paths]
        self._syscall_filter = build_syscall_filter(os.uname().machine).hex()
        self._slots = asyncio.Semaphore(max_concurrency)
        self._try_isolation()

    async def run(
        self, program: str, *, stdin: str = "", tests: Sequence[str] = ()
    ) -> SandboxResult:
        """Run a program to its end, and then, if it did not exit, the tests among its variables.

        Without tests it is ``__main__``; with tests it is the module ``solution``, as those may import it. A test
        passed if a token came back that was sent, with the tests, only after the program's own text had run: leaving
        early by any way passes nothing. Still, a test shares the process with what it tests: a program that looks for
        the harness among its frames can take the token, and an object equal to everything satisfies an assertion.
        What must not be forged is compared outside: give ``stdin``, look at ``stdout``. A `RolloutError` if the program
        could not be started.
        """
        start_s = time.monotonic()
        tokens = [secrets.token_hex(16) for _ in tests]
        heard: list[bytes] = []
        async with self._slots:
            with ExitStack() as stack:
                start_folder = "/"
                home = HOME
                if self._isolation == "limits":
                    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="gcore-sandbox-"))
                    start_folder = home
                text = stack.enter_context(os.fdopen(os.memfd_create("stdin"), "w+b", buffering=0))
                text.write(stdin.encode("utf-8", "surrogatepass"))
                text.seek(0)
                stdout = stack.enter_context(_OutputPipe(self._output_bytes))
                stderr = stack.enter_context(_OutputPipe(self._output_bytes))
                report = stack.enter_context(_OutputPipe(1 << 16))
                ours, theirs = socket.socketpair()
                stack.enter_context(ours)
                process = self._start(
                    theirs,
                    report.write_end,
                    stdin=text,
                    stdout=stdout.write_end,
                    stderr=stderr.write_end,
                    cwd=start_folder,
                    env=ENVIRONMENT | {"HOME": home, "TMPDIR": home},
                )
                works = (
                    _talk(ours, program, tests, tokens, heard),
                    stdout.read(on_too_much=process.terminate),
                    stderr.read(on_too_much=process.terminate),
                )
                tasks = [asyncio.create_task(work) for work in works]
                try:
                    async with asyncio.timeout(self._wall_s + GRACE_S):
                        await report.read()
                    # Without a namespace that ends with the program, a process that got away may hold them open.
                    await asyncio.wait(tasks, timeout=LEFT_OPEN_S)
                except TimeoutError:
                    raise RolloutError(
                        f"a program's watcher is silent {GRACE_S} s after the time limit"
                    ) from None
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    await _stop(process)
        error = stderr.data.decode(errors="replace")
        if heard[:1] != [SET_UP] or not report.data:
            message = b"".join(heard[:1]).decode(errors="replace")
            raise RolloutError(
                f"a program could not be started: {message or error or process.returncode}"
            )
        end = json.loads(report.data)
        outcome: Outcome = "finished"
        if stdout.too_much or stderr.too_much:
            outcome = "output_limit"
        # The kernel's count at the kill, in ticks, and the one reported differ a little.
        elif end["timed_out"] or (end["exit_code"] == KILLED and end["cpu_s"] > 0.9 * self._cpu_s):
            outcome = "timed_out"
        elif end["exit_code"]:
            outcome = "failed"
        return SandboxResult(
            outcome=outcome,
            exit_code=end["exit_code"],
            stdout=stdout.data.decode(errors="replace"),
            stderr=error,
            passed=tuple(token.encode() in heard for token in tokens),
            cpu_s=end["cpu_s"],
            wall_s=time.monotonic() - start_s,
        )

    def _start(
        self, control: socket.socket, report: IO[bytes], **options: Any
    ) -> "subprocess.Popen[bytes]":
        """Start a child with one end of a socket, which is closed here, and the write end of the report's pipe."""
        setup = {
            "isolation": self._isolation,
            "syscall_filter": self._syscall_filter,
            "control_fd": control.fileno(),
            "report_fd": report.fileno(),
            "import_paths": self._import_paths,
            **self._limits,
        }
        # Bare: no site-packages, none of the user's, no folder of the script, and no .pyc written.
        python = str(Path(sys.executable).resolve())
        command = [python, "-s", "-S", "-P", "-B", str(CHILD), json.dumps(setup)]
        with control:
            return subprocess.Popen[bytes](
                command, pass_fds=(control.fileno(), report.fileno()), **options
            )

    def _try_isolation(self) -> None:
        """Start a child that gets no program."""
        ours, theirs = socket.socketpair()
        with ours, _OutputPipe(1) as report:
            ours.settimeout(GRACE_S)
            child = self._start(
                theirs,
                report.write_end,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
            )
            answer = ours.recv(4096)
        stderr = child.communicate(timeout=GRACE_S)[1]
        if answer != SET_UP:
            reason = answer.decode().strip() or stderr.decode(errors="replace").strip()
            raise RolloutError(
                f"isolation is {self._isolation!r}, which this machine does not give ({reason}): allow unprivileged "
                "user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_"
                "userns=0; in a container a seccomp profile that allows unshare and mount, or --privileged), on Linux "
                "5.12 or later, or take isolation='limits' where the machine is thrown away afterwards"
            )


class _OutputPipe(AbstractContextManager["_OutputPipe"]):
    """A pipe whose write end another process is given, and which this event loop reads, up to ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        read_end, write_end = os.pipe()
        self._read_end = os.fdopen(read_end, "rb", 0)
        self.write_end = os.fdopen(write_end, "wb", 0)
        self.data = bytearray()
        self.too_much = False

    def __exit__(self, *_: object) -> None:
        self.write_end.close()
        self._read_end.close()

    async def read(self, *, on_too_much: Callable[[], None] | None = None) -> None:
        """Read to the end, or to ``max_bytes``. Call it once the other process has its own copy of the write end."""
        self.write_end.close()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._read_end
        )
        try:
            while part := await reader.read(1 << 16):
                self.data += part[: self._max_bytes - len(self.data)]
                if len(self.data) == self._max_bytes:
                    self.too_much = True
                    if on_too_much is not None:
                        on_too_much()
                    return
        finally:
            transport.close()


async def _talk(
    ours: socket.socket,
    program: str,
    tests: Sequence[str],
    tokens: Sequence[str],
    heard: list[bytes],
) -> None:
    """Send a program, and then its tests, each with the token that says it passed; add the answers to ``heard``."""
    reader, writer = await asyncio.open_connection(sock=ours)

    async def say(message: object) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()

    # The program may close its end or write anything: then the tokens do not come, and only they count.
    try:
        with suppress(ConnectionError, ValueError):
            heard.append(await reader.readline())
            if heard == [SET_UP]:
                await say({"program": program, "tests": bool(tests)})
                if tests and await reader.readline() == READY_FOR_TESTS:
                    await say({"tests": list(zip(tests, tokens, strict=True))})
                    for _ in tests:
                        line = await reader.readline()
                        heard.append(line.strip())
    finally:
        writer.close()


async def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Have the watcher kill its program, if it has not ended, and wait for the watcher."""
    process.terminate()
    try:
        await asyncio.to_thread(process.wait, GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)
