"""Processes that do not answer: how long they may take, and what they do meanwhile. Linux only."""

import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DUMP_S = 2.0
"""How long stacks and collectives take to be written: torch looks at its pipe once a second."""
_MIN_HEARTBEATS = 5
_MAX_FACTOR = 10
_TAIL_LINES = 3
_NCCL_TIMEOUT = "Watchdog caught collective operation timeout"
_PIPES = Path(tempfile.gettempdir())


def limit_s(stage: str, longest_s: Mapping[str, float], heartbeat_timeout_s: float) -> float:
    """Return how long a call may take: ten times the longest of its stage so far, and at least five heartbeat timeouts.

    The first call of a stage, in which models load and kernels compile, may take fifty.
    """
    least_s = _MIN_HEARTBEATS * heartbeat_timeout_s
    return max(least_s, _MAX_FACTOR * longest_s.get(stage, least_s))


def record_collectives() -> None:
    """Have torch keep the last collectives of NCCL, and write them next to this process's log if one does not end.

    The file is ``nccl_RANK``, in the format of torch's flight recorder. Variables that are set stay.
    """
    pid = os.getpid()
    variables = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{Path(log_of(pid)).parent}/nccl_",
        # torch makes a pipe of this name and the rank, and writes the file when it reads something from it.
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{_PIPES}/gcore-{pid}-",
    }
    os.environ.update(variables | os.environ)


def log_of(pid: int) -> str:
    """Return the name of what a process of this machine has as standard error."""
    return str(Path(f"/proc/{pid}/fd/2").readlink())


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped, as by SIGSTOP or a debugger."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def inspect_process(pid: int) -> str:
    """Have a process of this machine write its stacks and its collectives; say where, or that it is stopped."""
    host = socket.gethostname()
    try:
        os.kill(pid, signal.SIGUSR1)
        log = log_of(pid)
    except OSError:
        return f"it has ended on {host}"
    if is_stopped(pid):
        return f"it is stopped on {host}, by /proc/{pid}/stat; its log is {log}"
    for pipe in _PIPES.glob(f"gcore-{pid}-*"):
        # Opened for both, it waits for no reader.
        with pipe.open("r+b", 0) as file:
            file.write(b"1")
    return f"its stacks are on {host} in {log}"


def describe_end(log: str, pid: int | str) -> str:
    """Return what a process has logged last, and first the line by which NCCL has ended it; empty: it has no log."""
    if not Path(log).is_file():
        return ""
    # Processes before this one have logged to the same file; each starts with its number.
    text = Path(log).read_text(errors="replace").rpartition(f"process {pid} ")[2]
    lines = text.strip().splitlines()
    causes = [line for line in lines if _NCCL_TIMEOUT in line]
    return f"; {log} ends with: {' | '.join(causes[:1] + lines[-_TAIL_LINES:])}"
