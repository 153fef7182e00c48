"""A contender's processes: its command, watched with all that it starts."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gcore_bench.environment import QUIET
from gcore_bench.grpo.errors import BenchError
from gcore_bench.grpo.measure import StepFigures

_POLL_S = 2.0
"""A look at thirty processes takes a tenth of a second of a core."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command that makes steps."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Over that of this process."""
    folder: Path
    """Where it runs."""
    read: Callable[[], list[StepFigures]]
    """The figures of all its steps, once it has ended."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The most that was seen of a process and of all that it started, at one time."""

    pss_bytes: int
    """Resident memory; what several processes share counts once (proportional set size)."""
    num_processes: int


def run_program(program: Program, *, name: str, log: Path) -> Footprint:
    """Run a program to its end; nothing that it started outlives it.

    Raises:
        BenchError: it failed; the message says where its log is.
    """
    environment = {**os.environ, **QUIET, **program.environment}
    seen: set[psutil.Process] = set()
    with log.open("w") as file:
        process = subprocess.Popen(
            program.command,
            env=environment,
            cwd=program.folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            footprint = _watch(process, seen)
        finally:
            _end(process, seen)
    if process.returncode:
        raise BenchError(f"{name} failed: {_last_line(log)} (see {log})")
    return footprint


def _watch(process: "subprocess.Popen[bytes]", seen: set[psutil.Process]) -> Footprint:
    root = psutil.Process(process.pid)
    pss_bytes = num_processes = 0
    while True:
        try:
            members = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            members = []
        seen.update(members)
        sizes = [size for member in members if (size := _pss_bytes(member))]
        pss_bytes, num_processes = max(pss_bytes, sum(sizes)), max(num_processes, len(sizes))
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return Footprint(pss_bytes=pss_bytes, num_processes=num_processes)


def _pss_bytes(process: psutil.Process) -> int:
    """0 of one that has ended."""
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def _end(process: "subprocess.Popen[bytes]", seen: set[psutil.Process]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for member in seen:
        # Those in sessions of their own; psutil ends nothing that has a dead process's number by now.
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
