"""Rounds of contenders, each in processes of its own."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from gcore_bench.grpo.child import Spec
from gcore_bench.grpo.errors import BenchError
from gcore_bench.grpo.measure import StepFigures
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.processes import Footprint, Program, run_program
from gcore_bench.grpo.workload import Workload

FLOOR = "floor"
_FLOOR_STEPS = 10
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
    footprint: Footprint
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
        _run(Spec(role="model", workload=workload.name, model=str(model), steps=0, threads=options.threads), options)
    num_steps = options.warmup_steps + (options.steps or workload.steps)
    runs: list[Run] = []
    for number in range(1, options.rounds + 1):
        lengths: tuple[int, ...] = ()
        for contender in (*options.running, FLOOR):
            if contender == FLOOR and not lengths:
                # Nobody ran who tells them.
                continue
            spec = Spec(
                role=contender,
                workload=workload.name,
                model=str(model),
                steps=options.warmup_steps + _FLOOR_STEPS if contender == FLOOR else num_steps,
                threads=options.threads,
                seed=options.seed,
                lengths=lengths if contender == FLOOR else (),
            )
            load = os.getloadavg()[0]
            steps, footprint = _run(spec, options)
            if len(steps) != spec.steps:
                raise BenchError(f"{contender} made {len(steps)} steps of {spec.steps} on workload {workload.name}")
            measured = steps[options.warmup_steps :]
            lengths = measured[-1].lengths or lengths
            runs.append(Run(contender=contender, round=number, load=load, footprint=footprint, steps=measured))
            step_s = median(s.wall_s for s in measured)
            where = f"{workload.name}, round {number} of {options.rounds}"
            say(f"{where}: {contender} {step_s:.3f} s a step, load {load:.1f}")
    return runs


def _run(spec: Spec, options: GrpoOptions) -> tuple[list[StepFigures], Footprint]:
    logs = options.work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{spec.workload}-{spec.role}.log"
    program = _program(spec, options, logs)
    footprint = run_program(program, name=f"{spec.role} on workload {spec.workload}", log=log)
    return program.read(), footprint


def _program(spec: Spec, options: GrpoOptions, logs: Path) -> Program:
    if spec.role not in ("gcore-ray", "verl"):
        return _child(spec, logs / f"{spec.workload}-{spec.role}.json")
    # Imported here, so that options are checked and others run without them.
    from gcore_bench.grpo import gcore_ray_contender, verl_contender
    from gcore_bench.grpo.workload import WORKLOADS

    workload, model = WORKLOADS[spec.workload], Path(spec.model)
    folder = options.work_dir / f"{spec.workload}-{spec.role}"
    if spec.role == "gcore-ray":
        return gcore_ray_contender.program(
            workload, model, folder=folder, steps=spec.steps, threads=spec.threads, seed=spec.seed
        )
    return verl_contender.program(
        workload,
        model,
        python=options.python_of_verl(),
        folder=folder,
        steps=spec.steps,
        threads=spec.threads,
        seed=spec.seed,
    )


def _child(spec: Spec, output: Path) -> Program:
    return Program(
        command=[sys.executable, "-m", "gcore_bench.grpo.child", json.dumps(asdict(spec)), str(output)],
        environment={
            "OMP_NUM_THREADS": str(spec.threads),
            **(_VLLM_ENVIRONMENT if spec.role.endswith("vllm") else {}),
        },
        folder=Path.cwd(),
        read=lambda: [StepFigures(**row) for row in json.loads(output.read_text())],
    )
