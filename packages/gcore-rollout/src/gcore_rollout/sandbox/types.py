"""What a sandboxed program may use, and how it ended."""

from dataclasses import dataclass, fields
from typing import Literal, TypedDict

from gcore_rollout.errors import SandboxError

Outcome = Literal["finished", "failed", "timed_out", "output_limit"]
"""Exit status 0; any other or a signal; killed at ``wall_s`` or ``cpu_s``; killed for writing too much."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one program may use. Past a limit its call fails or it is killed; neither passes a test."""

    wall_s: float = 10.0
    """Seconds from the start to the end of the program, whatever it waits for."""
    cpu_s: int = 10
    """Seconds of CPU time, of each process."""
    memory_bytes: int = 1 << 30
    """Address space, of each process."""
    disk_bytes: int = 16 << 20
    """What it may write in its folder: of each file, and with namespaces of all."""
    output_bytes: int = 1 << 20
    """What it may write on stdout, and on stderr."""
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
    """How one program ended."""

    outcome: Outcome
    exit_code: int
    """128 + n if signal n ended it."""
    stdout: str
    stderr: str
    passed: tuple[bool, ...]
    """For each of the tests, whether it ran to its end without an exception."""
    cpu_s: float
    """Of the program and the children that it waited for."""
    wall_s: float
    """From the call, a place in the line included, to the end."""


class Setup(TypedDict):
    """What `Sandbox` hands to the other process."""

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
    """How the program ended, as its watcher saw it."""

    exit_code: int
    timed_out: bool
    cpu_s: float
