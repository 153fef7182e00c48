"""Limits of sandboxed programs, and their results."""

from dataclasses import dataclass, fields
from typing import Literal, TypedDict

from gcore_rollout.errors import SandboxError

Outcome = Literal["finished", "failed", "timed_out", "output_limit"]
"""Exit status 0; any other or a signal; killed at ``wall_s`` or ``cpu_s``; killed for writing too much."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program. Beyond a limit its call fails or it is killed; neither passes a test."""

    wall_s: float = 10.0
    """Seconds from the start to the end of the program, waiting included."""
    cpu_s: int = 10
    """Seconds of CPU time, of each process."""
    memory_bytes: int = 1 << 30
    """Address space, of each process."""
    disk_bytes: int = 16 << 20
    """Largest size of a file in its folder, and with namespaces of all files."""
    output_bytes: int = 1 << 20
    """Largest output on each of stdout and stderr."""
    open_files: int = 64
    """Open files, of each process."""
    processes: int = 16
    """Processes and threads at one time, the program's own among them. Held with namespaces only."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise SandboxError(f"{field.name} is {value}; expected more than 0")


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


class Setup(TypedDict):
    """The settings of the sandboxed process."""

    isolation: str
    control_fd: int
    """A socket: the program and its tests go in, lines that say how far it got come out."""
    report_fd: int
    """A pipe for the watcher's `Report`; the program never holds it."""
    import_paths: list[str]
    wall_s: float
    cpu_s: int
    memory_bytes: int
    disk_bytes: int
    open_files: int
    processes: int


class Report(TypedDict):
    """The watcher's report of the end of the program."""

    exit_code: int
    timed_out: bool
    cpu_s: float
