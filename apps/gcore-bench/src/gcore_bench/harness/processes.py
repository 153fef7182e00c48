"""New processes of a contender: started and watched together, and ended with all that they have started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from gcore_bench.harness.child import Spec
from gcore_bench.harness.environment import QUIET
from gcore_bench.harness.errors import BenchError

_POLL_S = 2.0
"""Reading the memory of thirty processes takes a tenth of a second of a core."""
_GRACE_S = 5.0
"""Seconds that the other ranks have to report after one has failed."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command that measures something."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to that of this process and to `QUIET`."""
    folder: Path
    """Working directory."""
    read: Callable[[], Any] = list
    """Returns the figures once the command has ended."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Size of all processes of a contender; over time, the maximum of each figure."""

    pss_bytes: int
    """Resident memory; pages that several processes share count once (proportional set size)."""
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the children of one measurement."""

    values: list[Any]
    """Results by rank."""
    footprints: list[tuple[float, Footprint]]
    """Sizes of all of them together, by time on the monotonic clock."""


def run_program(program: Program, *, name: str, log: Path) -> Footprint:
    """Run a program to its end; no process that it has started is left.

    Raises:
        BenchError: it failed; the message names its log.
    """
    codes, footprints = _run([program], log, poll_s=_POLL_S)
    if any(codes):
        raise BenchError(f"{name} failed: {_last_line(log)} (see {log})")
    found = [footprint for _, footprint in footprints]
    return Footprint(
        pss_bytes=max(footprint.pss_bytes for footprint in found),
        num_processes=max(footprint.num_processes for footprint in found),
    )


def child_program(spec: Spec, output: Path, environment: Mapping[str, str]) -> Program:
    """Return the command of a new process that does a spec's work; `read` returns the result."""
    output.unlink(missing_ok=True)
    return Program(
        command=[sys.executable, "-m", "gcore_bench.harness.child", json.dumps(asdict(spec)), str(output)],
        environment=environment,
        folder=Path.cwd(),
        read=lambda: json.loads(output.read_text())["result"],
    )


def run_children(
    specs: Sequence[Spec],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    poll_s: float = _POLL_S,
    timeout_s: float | None = None,
) -> Outcome:
    """Run a new process for each spec, one a rank, and wait for all of them.

    Raises:
        BenchError: one failed, or they did not end in time.
    """
    (folder / "store").unlink(missing_ok=True)
    outputs, log = [folder / f"figures-{spec.rank}.json" for spec in specs], folder / "log"
    programs = [child_program(spec, output, environment or {}) for spec, output in zip(specs, outputs, strict=True)]
    codes, footprints = _run(programs, log, poll_s=poll_s, timeout_s=timeout_s)
    if any(codes):
        raise BenchError(failure_of(outputs) or _last_line(log))
    return Outcome(values=[program.read() for program in programs], footprints=footprints)


def failure_of(outputs: Sequence[Path]) -> str:
    """Return the first failure that a child wrote down; empty if none did."""
    found = (json.loads(output.read_text()).get("failure", "") for output in outputs if output.exists())
    return next(filter(None, found), "")


def _run(
    programs: Sequence[Program], log: Path, *, poll_s: float, timeout_s: float | None = None
) -> tuple[list[int], list[tuple[float, Footprint]]]:
    """Return exit codes, and sizes over time."""
    processes: list[subprocess.Popen[bytes]] = []
    seen: set[psutil.Process] = set()
    with log.open("wb") as file:
        try:
            processes.extend(_start(program, file) for program in programs)
            footprints = _watch(processes, seen, poll_s, timeout_s)
        finally:
            _end(processes, seen)
    return [process.returncode for process in processes], footprints


def _start(program: Program, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        program.command,
        env={**os.environ, **QUIET, **program.environment},
        cwd=program.folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _watch(
    processes: Sequence["subprocess.Popen[bytes]"], seen: set[psutil.Process], poll_s: float, timeout_s: float | None
) -> list[tuple[float, Footprint]]:
    """Wait until all have ended, or for a moment after one has failed."""
    footprints: list[tuple[float, Footprint]] = []
    end_s = time.monotonic() + timeout_s if timeout_s else float("inf")
    has_failed = False
    while alive := [process for process in processes if process.poll() is None]:
        if not has_failed and any(process.returncode for process in processes):
            has_failed, end_s = True, min(end_s, time.monotonic() + _GRACE_S)
        if time.monotonic() > end_s:
            if has_failed:
                break
            raise BenchError(f"it did not end within {timeout_s:.0f} s")
        footprints.append((time.monotonic(), _footprint(processes, seen)))
        with suppress(subprocess.TimeoutExpired):
            alive[0].wait(poll_s)
    return footprints or [(time.monotonic(), Footprint(pss_bytes=0, num_processes=0))]


def _footprint(processes: Sequence["subprocess.Popen[bytes]"], seen: set[psutil.Process]) -> Footprint:
    sizes: list[int] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            members = [root, *root.children(recursive=True)]
            seen.update(members)
            sizes += [size for member in members if (size := _pss_bytes(member))]
    return Footprint(pss_bytes=sum(sizes), num_processes=len(sizes))


def _pss_bytes(process: psutil.Process) -> int:
    """Return the proportional set size; 0 of a process that has ended."""
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def _end(processes: Sequence["subprocess.Popen[bytes]"], seen: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for member in seen:
        # These may be in sessions of their own; psutil kills no process that has reused the number of a dead one.
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
