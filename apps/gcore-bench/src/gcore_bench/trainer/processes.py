"""The processes of one contender: started together, waited for, and ended together."""

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gcore_bench.environment import QUIET
from gcore_bench.grpo.errors import BenchError
from gcore_bench.trainer import child
from gcore_bench.trainer.figures import Spec

_POLL_S = 0.05
_TIMEOUT_S = 3600.0


def start_server(threads: int) -> None:
    """Start the process that contenders' processes are forked from: torch and transformers are imported once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gcore_bench.trainer.preload"])
    before = os.environ.copy()
    os.environ.update(QUIET, OMP_NUM_THREADS=str(threads))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_processes(specs: Sequence[Spec]) -> dict[str, dict[str, float]]:
    """Run a process for each spec; of several ranks' figures the highest, and the sum of their processors' seconds.

    Raises:
        BenchError: one failed, or they did not end in time.
    """
    folder = Path(specs[0].folder)
    for stale in (*folder.glob("store-*"), *folder.glob("figures-*")):
        stale.unlink()
    outputs = [folder / f"figures-{spec.rank}.json" for spec in specs]
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=child.main, args=(spec, output, folder / f"log-{spec.rank}"), daemon=True)
        for spec, output in zip(specs, outputs, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    found: list[dict[str, Any]] = [json.loads(path.read_text()) if path.exists() else {} for path in outputs]
    if failures := [one["failure"] for one in found if "failure" in one]:
        raise BenchError(f"{specs[0].contender} failed in part {specs[0].part}: {failures[0]}")
    if not all(found):
        codes = ", ".join(str(process.exitcode) for process in processes)
        raise BenchError(f"{specs[0].contender} failed in part {specs[0].part}: its processes ended with {codes}")
    return _together([one["rows"] for one in found])


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Until all have ended or one has failed, without which the others would wait for it."""
    end_s = time.monotonic() + _TIMEOUT_S
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            return
        if time.monotonic() > end_s:
            raise BenchError(f"a contender did not end within {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _together(found: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for row, figures in found[0].items():
        rows[row] = {metric: max(one[row][metric] for one in found) for metric in figures}
        if "cpu_s" in figures:
            rows[row]["total_cpu_s"] = sum(one[row]["cpu_s"] for one in found)
    return rows
