"""Run by `preloaded_client.py`: forks processes that need torch, transformers and Ray, which it has imported once."""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from preloaded_client import FOLDER, STATUS

PRELOADED = (
    "ray._private.node",
    "ray._private.runtime_env.setup_hook",
    "ray.actor",
    "gcore_controller.runtimes.local",
    "gcore_controller.runtimes.ray",
    "gcore_rollout.engines.hf.engine",
    "gcore_rollout.engines.remote.ray_engine",
    "gcore_rollout.engines.remote.fork_server",
    "gcore_runs.on_ray",
    "gcore_runs.loop.supervisor",
    "gcore_trainer.trainer",
    "gcore_trainer.torch.frozen_model",
    "gcore_llm.training",
    "multiprocessing.forkserver",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
)
_NO_JOB = "ffffffff"
"""Ray's workers read the job, and the raylet whose end they look for, once on import.

With this job they wait for a task's; their raylet is the owner here, and the process that asked ends them with theirs.
"""
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Asks the driver's management library for devices on import: CUDA itself cannot be used after a fork."""


@dataclass(frozen=True)
class Start:
    """A request: what a process was started as."""

    request: dict[str, Any]
    descriptors: list[int]
    """Those of the process, as they are numbered here."""


def receive(client: socket.socket) -> Start:
    size, ancillary, _, _ = client.recvmsg(STATUS.size, socket.CMSG_SPACE(253 * 4))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    message = client.recv(STATUS.unpack(size)[0], socket.MSG_WAITALL)
    return Start(json.loads(message), list(descriptors))


def serve(listener: socket.socket, owner: int) -> Start:
    """Fork a child for each request until the owner has ended; return what a child was started as, in the child."""
    folder = Path(os.environ[FOLDER])
    children: dict[int, tuple[int, socket.socket, Path]] = {}
    clients: dict[int, int] = {}
    while True:
        ready = select.select([listener, owner, *children, *clients], [], [])[0]
        if owner in ready:
            os._exit(0)
        for pidfd in children.keys() & set(ready):
            pid, client, note = children.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            clients.pop(client.fileno(), None)
            note.unlink(missing_ok=True)
            with client, contextlib.suppress(OSError):
                client.send(STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(pidfd)
        for number in clients.keys() & set(ready):
            # It says nothing more: it has been killed.
            signal.pidfd_send_signal(clients.pop(number), signal.SIGKILL)
        if listener in ready:
            client = listener.accept()[0]
            try:
                start = receive(client)
            except (OSError, ValueError, struct.error):
                client.close()
                continue
            pid = os.fork()
            if pid == 0:
                for pidfd, (_, other, _) in children.items():
                    os.close(pidfd)
                    other.close()
                for mine in (listener, client):
                    mine.close()
                os.close(owner)
                return start
            for number in start.descriptors:
                os.close(number)
            note = folder / f"{start.request['pid']}.fork"
            note.write_text(str(pid))
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, client, note)
            clients[client.fileno()] = pidfd
            with contextlib.suppress(OSError):
                client.send(STATUS.pack(pid))


def become(start: Start) -> None:
    """Make this process one that was started so."""
    request = start.request
    try:
        os.setpgid(0, request["group"])
    except OSError:  # it is in another session
        os.setpgid(0, 0)
    os.setpriority(os.PRIO_PROCESS, 0, request["priority"])
    _place(dict(zip(request["descriptors"], start.descriptors, strict=True)))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=request["unbuffered"])  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # a text stream
    interrupt = signal.SIG_IGN if request["ignores_interrupts"] else signal.default_int_handler
    signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.path[:] = request["path"]
    own, getppid, parent = os.getpid(), os.getppid, request["parent"]
    # The process that asked is its parent's child; forks of this one have this one.
    os.getppid = lambda: parent if os.getpid() == own else getppid()
    tempfile.tempdir = None
    numpy: Any = sys.modules["numpy"]
    numpy.random.seed()


def _place(number_of: dict[int, int]) -> None:
    """Give descriptors their numbers; several may be another's number now."""
    import fcntl

    free = 1 + max([*number_of, *number_of.values(), 3])
    moved = {wanted: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for wanted, number in number_of.items()}
    for number in number_of.values():
        os.close(number)
    for wanted, number in moved.items():
        os.dup2(number, wanted)
        os.close(number)


def run(command: list[str]) -> None:
    """Run what Python was called with."""
    first, *others = command
    if first == "-c":
        program, *arguments = others
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
        return
    sys.argv = command
    sys.path.insert(0, str(Path(first).parent))
    runpy.run_path(first, run_name="__main__")


def main() -> None:
    path = Path(sys.argv[1])
    owner_pid = (path.parent / "owner").read_text()
    owner = os.pidfd_open(int(owner_pid))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1000)
        os.environ |= {_CUDA_CHECK: "1", "RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": owner_pid}
        for module in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        gc.collect()
        gc.freeze()
        start = serve(listener, owner)
    become(start)
    run(start.request["command"])


if __name__ == "__main__":
    main()
