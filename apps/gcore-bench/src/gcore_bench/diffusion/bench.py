"""`gcore-bench diffusion`: plain loops and gcore in turn, in new processes; and the simulated cluster."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from gcore_bench.diffusion.options import DiffusionOptions
from gcore_bench.diffusion.simulation import NUM_DEVICES, run_simulation
from gcore_bench.harness.processes import Program, Spec, child_program, run_program
from gcore_bench.harness.report import Figures, Rounds, Session, figure, rows_table, verdict
from gcore_diffusion.config import DemoConfig
from gcore_diffusion.demo.pretraining import pretrained_pipeline
from gcore_placement import Comparison
from gcore_runs import STAGES, Display, read_jsonl

PLAIN = ("plain loop, 1 thread", "plain loop, 2 threads")
LIMIT = "two plain loops at once"
"""Two independent loops of one thread each: the most that two cores can do."""
GCORE: dict[str, tuple[str, ...]] = {
    "gcore, 1 controller": ("--threads", "1"),
    "gcore, 2 controllers, 2 engines, 2 ranks": (
        *("--threads", "2", "--controllers", "2", "--rollout.num-processes", "2", "--trainer.num-processes", "2"),
    ),
    "gcore on Ray, 2 controllers, 2 engines, 2 ranks": (
        *("--runtime", "ray", "--threads", "2", "--controllers", "2", "--trainer.num-processes", "2"),
    ),
}
"""Options in addition to those of the embedded run."""
AIM, AIM_OF_LIMIT = 1.5, 0.85
"""Images of a plain loop, or of what the machine can do at all: one of the two is to be reached."""

Row = dict[str, Any]
"""Figures of a contender or a strategy, and its name."""


def run(options: DiffusionOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a run failed; the message names its log.
    """
    options = options.sized()
    with Session(options, console) as session:
        for part in dict.fromkeys(options.parts):
            if part == "loop":
                rows = _run_loop(options, say=session.say)
                aims = _loop_aims(rows)
                session.add(part, tables=[_loop_table(rows)], lines=aims, rows=rows, aims=aims)
            else:
                rows = _simulated(run_simulation(options))
                session.add(part, tables=[_simulation_table(rows)], rows=rows)


def _run_loop(options: DiffusionOptions, *, say: Callable[[str], object]) -> list[Row]:
    """Return medians over all measured steps of each contender, and the highest load as its runs started."""
    # The folder is kept, because error messages name logs in it.
    folder = Path(tempfile.mkdtemp(prefix="gcore-bench-diffusion-"))
    # The result of pretraining does not affect times.
    demo = DemoConfig(num_steps=1, cache_dir=str(folder))
    with Display(Console(quiet=True)) as display:
        model = pretrained_pipeline(demo, seed=0, display=display)
    measured: dict[str, list[Figures]] = {name: [] for name in (*PLAIN, LIMIT, *GCORE)}
    loads = dict.fromkeys(measured, 0.0)
    for turn in Rounds("loop", options.rounds, say=say).turns(measured):
        name = turn.contender
        if name == LIMIT:
            with ThreadPoolExecutor() as pool:
                runs = list(pool.map(partial(_plain, PLAIN[0], model, options), ("first", "second")))
        elif name in PLAIN:
            runs = [_plain(name, model, options, "only")]
        else:
            runs = [_gcore(name, model, options, turn.round)]
        steps = [step for figures in runs for step in figures[options.warmup :]]
        measured[name] += steps
        loads[name] = max(loads[name], turn.load)
        say(f"{turn.where}: {_median(steps, 'step'):.3f} s, load {turn.load:.1f}")
    num_images = {name: options.prompts * options.n * (2 if name == LIMIT else 1) for name in measured}
    return [
        {
            "name": name,
            "step_s": _median(steps, "step"),
            "images_per_s": num_images[name] / _median(steps, "step"),
            "stage_s": {stage: _median(steps, stage) for stage in STAGES},
            "load": loads[name],
        }
        for name, steps in measured.items()
    ]


def _plain(name: str, model: Path, options: DiffusionOptions, which: str) -> list[Figures]:
    threads, folder = PLAIN.index(name) + 1, model.parent
    settings = {"prompts": options.prompts, "n": options.n, "steps": options.warmup + options.steps}
    spec = Spec(
        work="gcore_bench.diffusion.plain_loop",
        part="loop",
        contender=name,
        folder=str(folder),
        options={"model": str(model), "seed": options.seed, **settings},
        threads=threads,
    )
    program = child_program(spec, folder / f"plain-{which}.json", {"OMP_NUM_THREADS": str(threads)})
    run_program(program, name=name, log=folder / f"plain-{which}.log")
    return program.read()


def _gcore(name: str, model: Path, options: DiffusionOptions, number: int) -> list[Figures]:
    folder, run_name = model.parent, f"run-{number}-{list(GCORE).index(name)}"
    steps = str(options.warmup + options.steps)
    command = [
        *(sys.executable, "-c", "from gcore_diffusion.cli import main; main()"),
        *("train", "--name", run_name, "--device", "cpu", "--seed", str(options.seed)),
        *("--demo.num-steps", "1", "--demo.cache-dir", str(folder), "--data.val-size", "0", "--reward.held-out", ""),
        *("--data.train-batch-size", str(options.prompts), "--rollout.n", str(options.n)),
        *("--trainer.total-training-steps", steps, "--trainer.save-freq", "1000", "--trainer.tensorboard", "False"),
        *("--algorithm.filter-groups", "False", "--actor.loss.kl-loss-coef", "0", *GCORE[name]),
    ]
    program = Program(command=command, environment={"OMP_NUM_THREADS": "1"}, folder=folder)
    run_program(program, name=name, log=folder / f"{run_name}.log")
    return [
        {stage: row.get(f"timing_s/{stage}", 0.0) for stage in ("step", *STAGES)}
        for row in read_jsonl(folder / "runs" / run_name / "metrics.jsonl")
        if "timing_s/step" in row
    ]


def _median(steps: Sequence[Figures], name: str) -> float:
    return median(step.get(name, 0.0) for step in steps)


def _loop_table(rows: Sequence[Row]) -> Table:
    columns = [("images/s", figure("images_per_s", ".1f")), ("step s", figure("step_s", ".3f"))]
    columns += [(f"{stage} s", figure(stage, ".3f")) for stage in STAGES]
    by_name = {row["name"]: row | {stage: s for stage, s in row["stage_s"].items() if s} for row in rows}
    return rows_table("Flow-GRPO-Fast, seconds of a step", by_name, columns)


def _loop_aims(rows: Sequence[Row]) -> list[str]:
    """Return the limit of the machine, and whether gcore's aim is met."""
    plain, gcore, limit = (
        max((row for row in rows if row["name"] in names), key=lambda row: row["images_per_s"])
        for names in (PLAIN, tuple(GCORE)[1:], (LIMIT,))
    )
    most, ratio = (row["images_per_s"] / plain["images_per_s"] for row in (limit, gcore))
    is_met = ratio >= AIM or ratio >= AIM_OF_LIMIT * most
    return [
        f"two plain loops at once make {most:.2f} times the images of one: the most that the cores can do",
        f"aim: with 2 controllers at least {AIM} times the images of a plain loop, or {AIM_OF_LIMIT} of that limit: "
        f"{ratio:.2f} times, {ratio / most:.2f} of it ({gcore['name']}, against {plain['name']}; {verdict(is_met)})",
    ]


def _simulated(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return the figures of each strategy on each trace."""
    return [
        {
            "trace": comparison.name,
            "strategy": run.strategy,
            "step_s": run.step_s,
            "idle": run.idle_share,
            "moves": run.num_moves,
            **{f"over_{base}": comparison[base].seconds / run.seconds for base in ("colocated", "split")},
        }
        for comparison in comparisons
        for run in comparison.runs
    ]


def _simulation_table(rows: Sequence[Row]) -> Table:
    columns = [
        ("step s", figure("step_s", ".1f")),
        ("x colocated", figure("over_colocated", ".2f")),
        ("x best split", figure("over_split", ".2f")),
        ("moves", figure("moves", "d")),
        ("idle %", lambda row: f"{100 * row['idle']:.1f}"),
    ]
    title = f"simulated: {NUM_DEVICES} devices, samplers and a judge"
    return rows_table(title, {f"{row['trace']}: {row['strategy']}": row for row in rows}, columns)
