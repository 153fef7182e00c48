"""Run by the `fork_server` fixture: forks a process per request line, `[function, path, log]`, and answers its pid."""

import atexit
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import IO, NoReturn

import torch

from gcore_ckpt import Checkpointer, CheckpointWriteError


def save_for_ever(path: Path, log: IO[str]) -> None:
    """Saves steps whose every element is the number of the step; logs each that was committed."""
    torch.manual_seed(os.getpid())
    with Checkpointer(path, keep=2, max_in_flight=2) as checkpointer:
        step = (checkpointer.steps() or [0])[-1]
        previous = None
        while True:
            step += 1
            sizes: list[int] = torch.randint(0, 60_000, (8,)).tolist()
            tensors = [torch.full((size,), step) for size in sizes]
            handle = checkpointer.save(step, {"step": step, "sizes": sizes, "tensors": tensors})
            for tensor in tensors:
                tensor.zero_()
            if previous is not None:
                previous.wait()
                _log_step(step - 1, log)
            previous = handle


def save_until_stopped(path: Path, log: IO[str]) -> None:
    """Saves until a signal; logs `exited` when the interpreter has ended all threads that it waits for."""
    _log_exit(log)
    try:
        save_for_ever(path, log)
    except KeyboardInterrupt:
        sys.exit(0)


def save_until_stopped_and_leave_open(path: Path, log: IO[str]) -> None:
    """The same without closing the Checkpointer."""
    _log_exit(log)
    checkpointer = Checkpointer(path, keep=2, max_in_flight=2)
    step = (checkpointer.steps() or [0])[-1]
    try:
        while True:
            step += 1
            tensors = [torch.full((size,), step) for size in (60_000, 5)]
            handle = checkpointer.save(
                step, {"step": step, "sizes": [60_000, 5], "tensors": tensors}
            )
            if step % 3 == 0:
                handle.wait()
                _log_step(step, log)
    except KeyboardInterrupt:
        sys.exit(0)


def save_when_asked(path: Path, log: IO[str]) -> None:
    """Makes steps until SIGTERM, and saves the last one; logs each, `saved`, and `exited`."""
    _log_exit(log)
    with Checkpointer(path) as checkpointer:
        stop = checkpointer.stop_on(signal.SIGTERM)
        step, tensor = 0, torch.zeros(60_000)
        while not stop():
            step += 1
            for row in tensor.view(100, 600):  # between two rows it is no step's
                row += 1
            time.sleep(0.001)
            _log_step(step, log)
        checkpointer.save(step, {"step": step, "sizes": [60_000], "tensors": [tensor]}).wait()
        print("saved", file=log, flush=True)
        while path.with_name("again").exists():
            time.sleep(0.001)
    sys.exit(0)


def _log_step(step: int, log: IO[str]) -> None:
    """Write a whole line at once: a signal between its parts would leave half of it in a buffer."""
    os.write(log.fileno(), f"{step}\n".encode())


def _log_exit(log: IO[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, lambda number, _: sys.exit(0) if number == signal.SIGTERM else _interrupt()
        )
    copy = os.fdopen(os.dup(log.fileno()), "w")
    atexit.register(lambda: print("exited", file=copy, flush=True))


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def hold_the_lock(path: Path, log: IO[str]) -> None:
    checkpointer = Checkpointer(path)
    checkpointer.save(1, {"x": torch.ones(3)}).wait()
    print("holding", file=log, flush=True)
    time.sleep(60)


def hold_the_lock_and_fork(path: Path, log: IO[str]) -> None:
    checkpointer = Checkpointer(path)
    checkpointer.save(1, {"x": torch.ones(3)}).wait()
    if os.fork() == 0:
        try:
            checkpointer.save(2, {})
        except Exception as error:
            print(f"{os.getpid()} {error}", file=log, flush=True)
    time.sleep(60)


def fill_the_disk(path: Path, log: IO[str]) -> None:
    """Files may not grow beyond 1 MB: what a full disk does, at a size of our choice."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    small, large = {"x": torch.ones(10)}, {"x": torch.ones(1_000_000)}
    checkpointer = Checkpointer(path)
    checkpointer.save(1, small).wait()
    try:
        checkpointer.save(2, large).wait()
    except CheckpointWriteError as error:
        print("handle:", error, file=log)
    checkpointer.save(3, large)
    checkpointer.save(4, large)
    try:
        checkpointer.save(5, small)
    except CheckpointWriteError as error:
        print("third save:", error, file=log)
    checkpointer.save(5, small).wait()
    checkpointer.save(6, large)
    checkpointer.save(7, small)
    try:
        checkpointer.close()
    except CheckpointWriteError as error:
        print("close:", error, file=log)


def lose_the_last_save(path: Path, log: IO[str]) -> None:
    """Ends a process that has not closed its Checkpointer and whose last save fails; logs its output and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        checkpointer = Checkpointer(path)
        checkpointer.save(1, {"x": torch.ones(10)})
        checkpointer.save(2, {"x": torch.ones(1_000_000)})
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    print("exit code", os.waitstatus_to_exitcode(status), file=log, flush=True)


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead children leave no zombies
    for line in sys.stdin:
        function, path, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with Path(log).open("w") as file:
                globals()[function](Path(path), file)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
