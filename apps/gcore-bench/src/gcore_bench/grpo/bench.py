"""`gcore-bench grpo`: the contenders of each workload and the floor, in turn, in new processes."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console

from gcore_bench.grpo.measure import StepFigures
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
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a process failed; the message names its log.
    """
    with Session(options, console, notes=notes(options), unit="workload") as session:
        for name in WORKLOADS if options.workload == "all" else (options.workload,):
            runs = _run_rounds(WORKLOADS[name], options, say=session.say)
            summary = summarise_steps(runs)
            session.add(name, tables=[table(WORKLOADS[name], summary)], summary=asdict(summary), runs=runs)


def _run_rounds(workload: Workload, options: GrpoOptions, *, say: Callable[[str], object]) -> list[StepRun]:
    """Run every contender, and the floor of the steps that they have made, in turn."""
    model = options.work_dir / f"{workload.model}-model"
    if not model.is_dir():
        say(f"{workload.name}: making the model")
        _run(MODEL, Task(workload=workload, model=model, steps=0, threads=options.threads, seed=0), options)
    runs: list[StepRun] = []
    lengths: dict[int, tuple[int, ...]] = {}
    for turn in Rounds(workload.name, options.rounds, say=say).turns((*options.running, FLOOR)):
        is_floor = turn.contender == FLOOR
        if is_floor and turn.round not in lengths:
            # No contender of this round has reported the lengths of its responses.
            continue
        num_steps = options.warmup_steps + (_FLOOR_STEPS if is_floor else options.steps or workload.steps)
        task = Task(workload=workload, model=model, steps=num_steps, threads=options.threads, seed=options.seed)
        steps, footprint = _run(turn.contender, task, options, lengths=lengths.get(turn.round, ()))
        if len(steps) != num_steps:
            raise BenchError(f"{turn.contender} made {len(steps)} steps of {num_steps} on workload {workload.name}")
        measured = steps[options.warmup_steps :]
        if measured[-1].lengths:
            lengths[turn.round] = measured[-1].lengths
        runs.append(
            StepRun(
                part=workload.name,
                contender=turn.contender,
                round=turn.round,
                load=turn.load,
                footprint=footprint,
                steps=measured,
            )
        )
        say(f"{turn.where} {median(step.wall_s for step in measured):.3f} s a step, load {turn.load:.1f}")
    return runs


def _run(
    contender: str, task: Task, options: GrpoOptions, *, lengths: tuple[int, ...] = ()
) -> tuple[list[StepFigures], Footprint]:
    logs = options.work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"{task.workload.name}-{contender}"
    program = _program(contender, task, options, logs / f"{name}.json", lengths)
    footprint = run_program(program, name=f"{contender} on workload {task.workload.name}", log=logs / f"{name}.log")
    steps = program.read()
    if steps and isinstance(steps[0], dict):
        steps = [StepFigures(**{**step, "lengths": tuple(step["lengths"])}) for step in steps]
    return steps, footprint


def _program(contender: str, task: Task, options: GrpoOptions, output: Path, lengths: tuple[int, ...]) -> Program:
    folder = options.work_dir / f"{task.workload.name}-{contender}"
    # Imported here, so that options are checked, and other contenders run, without these libraries.
    if contender == "gcore-ray":
        from gcore_bench.grpo.contenders import gcore_ray

        return gcore_ray.program(task, folder=folder)
    if contender == "verl":
        from gcore_bench.grpo.contenders import verl

        return verl.program(task, python=options.python_of_verl(), folder=folder)
    spec = Spec(
        work="gcore_bench.grpo.work",
        part=task.workload.name,
        contender=contender,
        folder=str(output.parent),
        options={"model": str(task.model), "steps": task.steps, "seed": task.seed, "lengths": list(lengths)},
        threads=task.threads,
    )
    environment = _VLLM_ENVIRONMENT if contender.endswith("vllm") else {}
    return child_program(spec, output, {"OMP_NUM_THREADS": str(task.threads), **environment})
