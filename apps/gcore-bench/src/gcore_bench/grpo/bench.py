"""`gcore-bench grpo`: the contenders of each workload and the floor, in turn, in new processes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from gcore_bench.grpo.measure import Step
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.report import StepRun, notes, summarise_steps, table
from gcore_bench.grpo.workload import FLOOR, MODEL, WORKLOADS, Task, Workload
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Footprint, Program, Spec, child_program, run_program
from gcore_bench.harness.report import Rounds, Session

_FLOOR_STEPS = 10
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(options: GrpoOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for; `BenchError` if a process fails."""
    with Session(options, console, notes=notes(options), unit="workload") as session:
        for name in WORKLOADS if options.workload == "all" else (options.workload,):
            runs = _run_rounds(WORKLOADS[name], options, say=session.say)
            summary = summarise_steps(runs)
            session.add(name, tables=[table(WORKLOADS[name], summary)], summary=asdict(summary), runs=runs)


def _run_rounds(workload: Workload, options: GrpoOptions, *, say: Callable[[str], object]) -> list[StepRun]:
    """Run every contender, and the floor of the steps that they have made, in turn."""
    model = options.work_dir / f"{workload.model}-model"
    task = Task(contender=MODEL, workload=workload, model=model, steps=0, threads=options.threads, seed=options.seed)
    if not model.is_dir():
        say(f"{workload.name}: making the model")
        _run(task, options)
    runs: list[StepRun] = []
    lengths: dict[int, Sequence[int]] = {}
    for turn in Rounds(workload.name, options.rounds, say=say).turns((*options.running, FLOOR)):
        is_floor = turn.contender == FLOOR
        if is_floor and turn.round not in lengths:
            # No contender of this round has reported the lengths of its responses.
            continue
        num_steps = options.warmup_steps + (_FLOOR_STEPS if is_floor else options.steps or workload.steps)
        own = replace(task, contender=turn.contender, steps=num_steps, lengths=lengths.get(turn.round, ()))
        steps, footprint = _run(own, options)
        if len(steps) != num_steps:
            raise BenchError(f"{turn.contender} made {len(steps)} steps of {num_steps} on workload {workload.name}")
        measured = steps[options.warmup_steps :]
        if measured[-1]["lengths"]:
            lengths[turn.round] = measured[-1]["lengths"]
        place: dict[str, Any] = {"part": workload.name, "contender": turn.contender, "round": turn.round}
        runs.append(StepRun(**place, load=turn.load, footprint=footprint, steps=measured))
        say(f"{turn.where} {median(step['wall_s'] for step in measured):.3f} s a step, load {turn.load:.1f}")
    return runs


def _run(task: Task, options: GrpoOptions) -> tuple[list[Step], Footprint]:
    logs = options.work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"{task.workload.name}-{task.contender}"
    program = _program(task, options, options.work_dir / name, logs / f"{name}.json")
    log = logs / f"{name}.log"
    footprint = run_program(program, name=f"{task.contender} on workload {task.workload.name}", log=log)
    return program.read(), footprint


def _program(task: Task, options: GrpoOptions, folder: Path, output: Path) -> Program:
    if task.contender in ("gcore-ray", "verl"):
        # Imported here, so that options are checked, and other contenders run, without these libraries.
        from gcore_bench.grpo.contenders.commands import gcore_program, verl_program

        if task.contender == "gcore-ray":
            return gcore_program(task, folder=folder)
        return verl_program(task, python=options.python_of_verl(), folder=folder)
    spec = Spec(
        work="gcore_bench.grpo.measure",
        part=task.workload.name,
        contender=task.contender,
        folder=str(output.parent),
        options={"model": str(task.model), "steps": task.steps, "seed": task.seed, "lengths": list(task.lengths)},
        threads=task.threads,
    )
    environment = _VLLM_ENVIRONMENT if task.uses_vllm else {}
    return child_program(spec, output, {"OMP_NUM_THREADS": str(task.threads), **environment})
