"""Runs of the contenders in processes of their own, in turns."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from gcore_bench.diffusion.options import DiffusionBenchOptions
from gcore_bench.diffusion.plain_loop import Spec
from gcore_bench.grpo.processes import Program, run_program
from gcore_diffusion.config import DemoConfig
from gcore_diffusion.demo.pretraining import pretrained_pipeline
from gcore_runs.display import Display
from gcore_runs.run_folder import read_jsonl

STAGES = ("gen", "reward", "prepare", "train", "sync")

PLAIN = ("plain loop, 1 thread", "plain loop, 2 threads")
LIMIT = "two plain loops at once"
"""Of one thread each, which have nothing to do with each other: what two cores give at best."""
GCORE: dict[str, tuple[str, ...]] = {
    "gcore, 1 controller": ("--threads", "1"),
    "gcore, 2 controllers, 2 engines": ("--threads", "1", "--controllers", "2", "--rollout.num-processes", "2"),
    "gcore on Ray, 2 controllers, 2 engines, 2 ranks": (
        *("--runtime", "ray", "--threads", "2", "--controllers", "2", "--trainer.num-processes", "2"),
    ),
}
"""Options beside those of the embedded run."""


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """A contender: medians over all its measured steps."""

    name: str
    step_s: float
    images_per_s: float
    stage_s: dict[str, float]
    load: float
    """Of the machine when its runs began, the most."""


def run_loop(options: DiffusionBenchOptions, *, say: Callable[[str], object]) -> list[LoopRow]:
    """Make all runs.

    Raises:
        BenchError: one of them failed; the message says where its log is.
    """
    folder = Path(tempfile.mkdtemp(prefix="gcore-bench-diffusion-"))
    # What the model has learned changes no time.
    demo = DemoConfig(num_steps=1, cache_dir=str(folder))
    with Display(Console(quiet=True)) as display:
        model = pretrained_pipeline(demo, seed=0, display=display)
    steps: dict[str, list[dict[str, float]]] = {}
    loads: dict[str, float] = {}
    for number in range(options.rounds):
        for name in (*PLAIN, LIMIT, *GCORE):
            loads[name] = max(loads.get(name, 0.0), os.getloadavg()[0])
            if name == LIMIT:
                with ThreadPoolExecutor() as pool:
                    runs = list(pool.map(partial(_plain, PLAIN[0], model, options), ("first", "second")))
            elif name in PLAIN:
                runs = [_plain(name, model, options, "only")]
            else:
                runs = [_gcore(name, model, options, number)]
            found = [step for run in runs for step in run[options.warmup :]]
            steps.setdefault(name, []).extend(found)
            step_s = _median(found, "step")
            say(f"loop, round {number + 1} of {options.rounds}: {name}: {step_s:.3f} s")
    return [_row(name, of_one, options, loads[name]) for name, of_one in steps.items()]


def _plain(name: str, model: Path, options: DiffusionBenchOptions, which: str) -> list[dict[str, float]]:
    threads, folder = PLAIN.index(name) + 1, model.parent
    spec = Spec(
        model=str(model),
        prompts=options.prompts,
        n=options.n,
        steps=options.warmup + options.steps,
        threads=threads,
        seed=options.seed,
    )
    figures = folder / f"plain-{which}.json"
    command = [sys.executable, "-m", "gcore_bench.diffusion.plain_loop", json.dumps(asdict(spec)), str(figures)]
    program = Program(command=command, environment={"OMP_NUM_THREADS": str(threads)}, folder=folder, read=list)
    run_program(program, name=name, log=folder / f"plain-{which}.log")
    return json.loads(figures.read_text())


def _gcore(name: str, model: Path, options: DiffusionBenchOptions, number: int) -> list[dict[str, float]]:
    folder, run = model.parent, f"run-{number}-{list(GCORE).index(name)}"
    steps = str(options.warmup + options.steps)
    command = [
        *(sys.executable, "-c", "from gcore_diffusion.cli import main; main()"),
        *("train", "--name", run, "--device", "cpu", "--seed", str(options.seed)),
        *("--demo.num-steps", "1", "--demo.cache-dir", str(folder), "--data.val-size", "0", "--reward.held-out", ""),
        *("--data.train-batch-size", str(options.prompts), "--rollout.n", str(options.n)),
        *("--trainer.total-training-steps", steps, "--trainer.save-freq", "1000", "--trainer.tensorboard", "False"),
        *("--algorithm.filter-groups", "False", "--actor.loss.kl-loss-coef", "0", *GCORE[name]),
    ]
    program = Program(command=command, environment={"OMP_NUM_THREADS": "1"}, folder=folder, read=list)
    run_program(program, name=name, log=folder / f"{run}.log")
    return [
        {stage: row.get(f"timing_s/{stage}", 0.0) for stage in ("step", *STAGES)}
        for row in read_jsonl(folder / "runs" / run / "metrics.jsonl")
        if "timing_s/step" in row
    ]


def _row(name: str, steps: Sequence[dict[str, float]], options: DiffusionBenchOptions, load: float) -> LoopRow:
    step_s = _median(steps, "step")
    return LoopRow(
        name=name,
        step_s=step_s,
        images_per_s=options.prompts * options.n / step_s * (2 if name == LIMIT else 1),
        stage_s={stage: _median(steps, stage) for stage in STAGES},
        load=load,
    )


def _median(steps: Sequence[dict[str, float]], name: str) -> float:
    return median(step.get(name, 0.0) for step in steps)
