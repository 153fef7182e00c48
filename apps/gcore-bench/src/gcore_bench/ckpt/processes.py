"""The processes of one contender: started together, watched, and ended together."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gcore_bench.ckpt.figures import Figures, Spec

_POLL_S = 0.2
"""A look at gigabytes of resident memory takes some ten milliseconds."""
_LAST_WORDS_S = 5.0
"""After one rank has failed, for those that wait for it."""
_ENVIRONMENT = {
    # Idle OpenMP threads spin by default: with a neighbour on the cores, every contender would suffer at random.
    "OMP_WAIT_POLICY": "PASSIVE",
    "MASTER_ADDR": "127.0.0.1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


class ContenderError(Exception):
    """Why a contender has no figures, in a line."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all processes of a contender said."""

    rows: dict[str, dict[str, float]]
    peak_extra_bytes: int | None


def run_processes(specs: Sequence[Spec], folder: Path, *, timeout_s: float) -> Outcome:
    """Run a process for each spec and wait for all; of several, the slowest counts.

    Raises:
        ContenderError: one failed, or they did not end in time.
    """
    outputs = [folder / f"figures-{spec.rank}.json" for spec in specs]
    log = folder / "log"
    environment = {**os.environ, **_ENVIRONMENT}
    processes: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as file:
        try:
            for spec, output in zip(specs, outputs, strict=True):
                output.unlink(missing_ok=True)
                command = [sys.executable, "-m", "gcore_bench.ckpt.child", json.dumps(asdict(spec)), str(output)]
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                    )
                )
            samples = _watch(processes, timeout_s)
        finally:
            _end(processes)
    if any(process.returncode for process in processes):
        raise ContenderError(_reason(outputs, log))
    return _together([json.loads(output.read_text()) for output in outputs], samples)


def _watch(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> list[tuple[float, int]]:
    """Wait until all have ended, or one has failed: resident bytes of all of them over time."""
    samples: list[tuple[float, int]] = []
    end_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            end_s = min(end_s, time.monotonic() + _LAST_WORDS_S)
        if time.monotonic() > end_s:
            if any(process.returncode for process in processes):
                break
            raise ContenderError(f"it did not end within {timeout_s:.0f} s")
        samples.append((time.monotonic(), _resident_bytes(processes)))
        time.sleep(_POLL_S)
    return samples


def _resident_bytes(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Of all processes and of those that they started; what they share counts once."""
    total = 0
    for process in processes:
        try:
            root = psutil.Process(process.pid)
            for member in (root, *root.children(recursive=True)):
                total += member.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
    for process in processes:
        process.wait()


def _reason(outputs: Sequence[Path], log: Path) -> str:
    for output in outputs:
        if output.exists() and (failure := json.loads(output.read_text()).get("failure")):
            return " ".join(failure.split())
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it ended without a word"


def _together(found: Sequence[dict[str, Any]], samples: Sequence[tuple[float, int]]) -> Outcome:
    figures = [
        Figures(
            rows=one["rows"],
            before_bytes=one["before_bytes"],
            saving_s=tuple(one["saving_s"]) if one["saving_s"] else None,
        )
        for one in found
    ]
    rows = {
        row: {metric: max(one.rows[row][metric] for one in figures) for metric in seconds}
        for row, seconds in figures[0].rows.items()
    }
    return Outcome(rows=rows, peak_extra_bytes=_peak_extra(figures, samples))


def _peak_extra(figures: Sequence[Figures], samples: Sequence[tuple[float, int]]) -> int | None:
    before = [one.before_bytes for one in figures if one.before_bytes is not None]
    spans = [one.saving_s for one in figures if one.saving_s]
    if not before or not spans:
        return None
    start_s, end_s = min(start for start, _ in spans), max(end for _, end in spans)
    during = [resident for at_s, resident in samples if start_s <= at_s <= end_s]
    return max(0, max(during) - sum(before)) if during else None
