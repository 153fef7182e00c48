"""Rounds of contenders, each in a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from gcore_bench.grpo.child import Spec
from gcore_bench.grpo.errors import BenchError
from gcore_bench.grpo.measure import StepFigures
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.workload import Workload

FLOOR = "floor"
_POLL_S = 0.1
_FLOOR_STEPS = 10
_ENVIRONMENT = {
    # Idle OpenMP threads spin by default: with a neighbour on the cores, every contender would suffer at random.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender in one round."""

    contender: str
    round: int
    load: float
    """Runnable processes on the machine, averaged over the minute before the run."""
    peak_rss_bytes: int
    """Of the process and its children."""
    steps: list[StepFigures]
    """The measured ones."""


def run_rounds(workload: Workload, options: GrpoOptions, *, say: Callable[[str], object]) -> list[Run]:
    """Run every contender, and the floor of what they computed, in turn, ``options.rounds`` times.

    Raises:
        BenchError: a process failed; the message says where its log is.
    """
    model = options.work_dir / f"{workload.model}-model"
    if not model.is_dir():
        say(f"{workload.name}: making the model")
        _in_process(
            Spec(role="model", workload=workload.name, model=str(model), steps=0, threads=options.threads), options
        )
    num_steps = options.warmup_steps + (options.steps or workload.steps)
    runs: list[Run] = []
    for number in range(1, options.rounds + 1):
        for contender in (*options.contenders, FLOOR):
            spec = Spec(
                role=contender,
                workload=workload.name,
                model=str(model),
                steps=options.warmup_steps + _FLOOR_STEPS if contender == FLOOR else num_steps,
                threads=options.threads,
                seed=options.seed,
                lengths=tuple(runs[-1].steps[-1].lengths) if contender == FLOOR else (),
            )
            load = os.getloadavg()[0]
            steps, peak_rss_bytes = _in_process(spec, options)
            measured = steps[options.warmup_steps :]
            runs.append(
                Run(contender=contender, round=number, load=load, peak_rss_bytes=peak_rss_bytes, steps=measured)
            )
            step_s = median(s.wall_s for s in measured)
            where = f"{workload.name}, round {number} of {options.rounds}"
            say(f"{where}: {contender} {step_s:.3f} s a step, load {load:.1f}")
    return runs


def _in_process(spec: Spec, options: GrpoOptions) -> tuple[list[StepFigures], int]:
    logs = options.work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log, output = (logs / f"{spec.workload}-{spec.role}.{ending}" for ending in ("log", "json"))
    environment = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(spec.threads)}
    if spec.role.endswith("vllm"):
        environment |= _VLLM_ENVIRONMENT
    command = [sys.executable, "-m", "gcore_bench.grpo.child", json.dumps(asdict(spec)), str(output)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            peak_rss_bytes = _watch(process)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise BenchError(f"{spec.role} failed on workload {spec.workload}: {_last_line(log)} (see {log})")
    return [StepFigures(**row) for row in json.loads(output.read_text())], peak_rss_bytes


def _watch(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process; the highest resident set of its tree."""
    root = psutil.Process(process.pid)
    peak = 0
    while process.poll() is None:
        total = 0
        try:
            for member in (root, *root.children(recursive=True)):
                total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        peak = max(peak, total)
        time.sleep(_POLL_S)
    return peak


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
