"""The processes of one contender: started together, waited for, and ended together."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gcore_bench.grpo.errors import BenchError
from gcore_bench.trainer.figures import Spec

_POLL_S = 0.05
_TIMEOUT_S = 3600.0
_ENVIRONMENT = {
    # Idle OpenMP threads spin by default: with a neighbour on the cores, every contender would suffer at random.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    # A freed block goes back to the system and a new one is seen: peaks are of memory in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


def run_processes(specs: Sequence[Spec]) -> dict[str, dict[str, float]]:
    """Run a process for each spec; of several ranks' figures the highest, and the sum of their processors' seconds.

    Raises:
        BenchError: one failed, or they did not end in time.
    """
    folder = Path(specs[0].folder)
    for stale in folder.glob("store-*"):
        stale.unlink()
    environment = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(specs[0].options["threads"])}
    outputs = [folder / f"figures-{spec.rank}.json" for spec in specs]
    logs = [folder / f"log-{spec.rank}" for spec in specs]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for spec, output, log in zip(specs, outputs, logs, strict=True):
            command = [sys.executable, "-m", "gcore_bench.trainer.child", json.dumps(asdict(spec)), str(output)]
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, spec, log in zip(processes, specs, logs, strict=True):
        if process.returncode:
            raise BenchError(f"{spec.contender} failed in part {spec.part}: {_reason(processes, logs, log)}")
    return _together([json.loads(output.read_text()) for output in outputs])


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Until all have ended or one has failed, without which the others would wait for it."""
    end_s = time.monotonic() + _TIMEOUT_S
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return
        if time.monotonic() > end_s:
            raise BenchError(f"a contender did not end within {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _reason(processes: Sequence["subprocess.Popen[bytes]"], logs: Sequence[Path], first: Path) -> str:
    """The last line of one that ended by itself; those that were killed say nothing."""
    own = [log for process, log in zip(processes, logs, strict=True) if process.returncode > 0]
    lines = (own or [first])[0].read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it ended without a word"


def _together(found: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for row, figures in found[0].items():
        rows[row] = {metric: max(one[row][metric] for one in found) for metric in figures}
        if "cpu_s" in figures:
            rows[row]["total_cpu_s"] = sum(one[row]["cpu_s"] for one in found)
    return rows
