"""Lets a server that has imported torch, transformers and Ray fork the processes that would import these first.

Every process of the tests runs this at its start, see `sitecustomize.py`. One that is to be a worker of Ray, or the
server from which engines or training ranks are forked, asks for a fork that takes its place: with its descriptors,
environment, folder, arguments and signals, and with its exit code. It stays as long as the fork lives, so that both end
together, and a signal to it reaches the fork.
"""

import array
import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

FOLDER = "GCORE_TESTS_PRELOADED"
"""The variable that names the folder of the servers' sockets; without it, each process imports by itself."""

STATUS = struct.Struct("!i")
"""The answers to a request: the pid of the fork, then its exit code."""

_READ_AT_IMPORT = (
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "TOKENIZERS_", "TQDM_", "TORCH", "TRITON_", "ACCELERATE_"),
    *("OMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON", "PATH", "HOME", "XDG_", "RAY_"),
)
"""The beginnings of the variables that libraries read when they are imported: one server for each set of values."""
_READ_LATER = (
    "RAY_RAYLET_PID",
    "RAY_JOB_ID",
    "RAY_ADDRESS",
    "RAY_AUTH",
    "RAY_LD_PRELOAD",
    "PYTHONBREAKPOINT",
    "PYTHONUNBUFFERED",
)
_START_TIMEOUT_S = 300.0
_PARENT_ENDED_S = 2.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def hand_over() -> None:
    """Be replaced by a fork, and end as it does; return if this process is of another kind, or no server starts."""
    folder = os.environ.get(FOLDER, "")
    options, command = _split(sys.orig_argv[1:])
    if not os.path.isdir(folder) or not _imports_much(command):  # noqa: PTH112 - pathlib is not imported yet
        return
    with contextlib.suppress(OSError), _connected(folder) as server:
        parent = os.pidfd_open(os.getppid())
        descriptors = _open_descriptors({server.fileno(), parent})
        request = {
            "command": command,
            "descriptors": descriptors,
            "environment": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109
            "path": sys.path,
            "unbuffered": "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED")),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "group": os.getpgrp(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignores_interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        }
        message = json.dumps(request).encode()
        server.sendmsg(
            [STATUS.pack(len(message))],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))],
        )
        server.sendall(message)
        pid = _receive(server)
        if pid is not None:
            _end_with(pid, server, descriptors, parent)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return Python's own options without values, and what is run."""
    count = next((i for i, argument in enumerate(arguments) if argument not in ("-u", "-B")), len(arguments))
    return arguments[:count], arguments[count:]


def _imports_much(command: list[str]) -> bool:
    if len(command) < 2:
        return False
    if command[0] == "-c":
        program = command[1]
        is_engines = "from gcore_rollout.engines.remote.fork_server import serve" in program
        is_ranks = "from multiprocessing.forkserver import main" in program and "'gcore_controller." in program
        # vLLM sets its process up in its own way.
        return (is_engines or is_ranks) and "vllm" not in program
    return command[0].endswith("/ray/_private/workers/default_worker.py")


def _connected(folder: str) -> socket.socket:
    """Connect to the server of processes with such an environment, which is started if there is none."""
    read = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)
    )
    name = hashlib.sha256(json.dumps([sys.executable, read]).encode()).hexdigest()[:16]
    path = f"{folder}/{name}.socket"
    with open(f"{folder}/{name}.lock", "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return _connection(path)
        _start_server(path)
        end = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                return _connection(path)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


def _connection(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _start_server(path: str) -> None:
    """Start a server that is no child of this process, nor of the one that has started it."""
    if (pid := os.fork()) == 0:
        try:
            os.setpgid(0, 0)
            if os.fork() == 0:
                null = os.open(os.devnull, os.O_RDWR)
                log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                for number, stream in ((null, 0), (log, 1), (log, 2)):
                    os.dup2(number, stream)
                os.closerange(3, 4096)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                server = os.path.join(os.path.dirname(__file__), "preloaded_server.py")  # noqa: PTH118, PTH120
                # Ray writes the titles of its workers over the arguments.
                os.execv(sys.executable, [sys.executable, server, path, "-" * 200])
        finally:
            os._exit(1)
    os.waitpid(pid, 0)


def _open_descriptors(own: set[int]) -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        number = int(name)
        with contextlib.suppress(OSError):
            if number not in own and os.get_inheritable(number):
                found.append(number)
    return sorted(found)


def _receive(server: socket.socket) -> int | None:
    data = server.recv(STATUS.size, socket.MSG_WAITALL)
    return STATUS.unpack(data)[0] if len(data) == STATUS.size else None


def _end_with(pid: int, server: socket.socket, descriptors: list[int], parent: int) -> None:
    """Hold nothing that the fork may close, end as it ends, and end it with the parent of this process."""
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    null = os.open(os.devnull, os.O_RDWR)
    for number in descriptors:
        if number > 2:
            os.close(number)
        else:
            os.dup2(null, number)
    if server not in select.select([server, parent], [], [])[0]:
        # It may notice by itself.
        select.select([server], [], [], _PARENT_ENDED_S)
        os._exit(1)
    code = _receive(server)
    if code is None or code < 0:
        number = signal.SIGKILL if code is None else -code
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code or 0)
