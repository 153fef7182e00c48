"""Processes that are forked from a server which has imported torch and transformers once."""

import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from gcore_bench.harness import child
from gcore_bench.harness.child import Spec
from gcore_bench.harness.environment import environment
from gcore_bench.harness.errors import BenchError
from gcore_bench.harness.processes import failure_of
from gcore_bench.harness.rounds import Figures

_PRELOAD = "gcore_bench.trainer.preload"
_POLL_S = 0.05
_TIMEOUT_S = 3600.0


def start_server(threads: int) -> None:
    """Start the server; later calls do nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOAD])
    with environment(OMP_NUM_THREADS=str(threads)):
        forkserver.ensure_running()


def run_processes(specs: Sequence[Spec]) -> dict[str, Figures]:
    """Run a process for each spec, one a rank, and return the rows of all ranks together (see `merge_ranks`).

    Raises:
        BenchError: one failed, or they did not end in time.
    """
    first = specs[0]
    folder = Path(first.folder)
    for stale in (folder / "store", *folder.glob("figures-*")):
        stale.unlink(missing_ok=True)
    outputs = [folder / f"figures-{spec.rank}.json" for spec in specs]
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=child.forked_main, args=(spec, output, folder / f"log-{spec.rank}"), daemon=True)
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
    reason = failure_of(outputs)
    if not reason and not all(path.exists() for path in outputs):
        reason = f"its processes ended with {', '.join(str(process.exitcode) for process in processes)}"
    if reason:
        raise BenchError(f"{first.contender} failed in part {first.part or first.work}: {reason}")
    return merge_ranks([json.loads(path.read_text())["result"] for path in outputs])


def merge_ranks(ranks: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Return the highest of every figure over the ranks; ``total_cpu_s`` is the sum of their processors' seconds."""
    rows: dict[str, Figures] = {}
    for row, figures in ranks[0].items():
        rows[row] = {metric: max(one[row][metric] for one in ranks) for metric in figures}
        if "cpu_s" in figures:
            rows[row]["total_cpu_s"] = sum(one[row]["cpu_s"] for one in ranks)
    return rows


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended or one has failed; the others would wait for that one."""
    end_s = time.monotonic() + _TIMEOUT_S
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            return
        if time.monotonic() > end_s:
            raise BenchError(f"a contender did not end within {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
