"""`gcore-bench diffusion`: plain loops and gcore in turn, in new processes; and the simulated cluster."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from gcore_bench.diffusion.options import DiffusionBenchOptions
from gcore_bench.diffusion.report import GCORE, LIMIT, PLAIN, STAGES, LoopRow, loop_aims, loop_table, simulation_table
from gcore_bench.diffusion.simulation import run_simulation
from gcore_bench.harness.processes import Program, Spec, child_program, run_program
from gcore_bench.harness.report import Figures, Rounds, Session
from gcore_diffusion.config import DemoConfig
from gcore_diffusion.demo.pretraining import pretrained_pipeline
from gcore_runs.display import Display
from gcore_runs.run_folder import read_jsonl


def run(options: DiffusionBenchOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a run failed; the message names its log.
    """
    options = options.sized()
    with Session(options, console) as session:
        for part in dict.fromkeys(options.parts):
            if part == "loop":
                rows = _run_loop(options, say=session.say)
                session.add(part, tables=[loop_table(rows)], lines=loop_aims(rows), rows=rows, aims=loop_aims(rows))
                continue
            found = run_simulation(options)
            figures = [
                {
                    "trace": comparison.name,
                    "strategy": simulated.strategy,
                    "step_s": simulated.step_s,
                    "idle": simulated.idle_share,
                    "moves": simulated.num_moves,
                }
                for comparison in found
                for simulated in comparison.runs
            ]
            session.add(part, tables=[simulation_table(found)], rows=figures)


@dataclass(kw_only=True)
class _Steps:
    """Measured steps of a contender, over all rounds."""

    figures: list[Figures]
    load: float = 0.0


def _run_loop(options: DiffusionBenchOptions, *, say: Callable[[str], object]) -> list[LoopRow]:
    # The folder is kept, because error messages name logs in it.
    folder = Path(tempfile.mkdtemp(prefix="gcore-bench-diffusion-"))
    # The result of pretraining does not affect times.
    demo = DemoConfig(num_steps=1, cache_dir=str(folder))
    with Display(Console(quiet=True)) as display:
        model = pretrained_pipeline(demo, seed=0, display=display)
    found: dict[str, _Steps] = {}
    for turn in Rounds("loop", options.rounds, say=say).turns((*PLAIN, LIMIT, *GCORE)):
        name = turn.contender
        if name == LIMIT:
            with ThreadPoolExecutor() as pool:
                runs = list(pool.map(partial(_plain, PLAIN[0], model, options), ("first", "second")))
        elif name in PLAIN:
            runs = [_plain(name, model, options, "only")]
        else:
            runs = [_gcore(name, model, options, turn.round)]
        steps = [step for figures in runs for step in figures[options.warmup :]]
        of_all = found.setdefault(name, _Steps(figures=[]))
        of_all.figures += steps
        of_all.load = max(of_all.load, turn.load)
        say(f"{turn.where}: {_median(steps, 'step'):.3f} s, load {turn.load:.1f}")
    return [_row(name, steps, options) for name, steps in found.items()]


def _plain(name: str, model: Path, options: DiffusionBenchOptions, which: str) -> list[Figures]:
    threads, folder = PLAIN.index(name) + 1, model.parent
    spec = Spec(
        work="gcore_bench.diffusion.plain_loop",
        part="loop",
        contender=name,
        folder=str(folder),
        options={
            "model": str(model),
            "prompts": options.prompts,
            "n": options.n,
            "steps": options.warmup + options.steps,
            "seed": options.seed,
        },
        threads=threads,
    )
    program = child_program(spec, folder / f"plain-{which}.json", {"OMP_NUM_THREADS": str(threads)})
    run_program(program, name=name, log=folder / f"plain-{which}.log")
    return program.read()


def _gcore(name: str, model: Path, options: DiffusionBenchOptions, number: int) -> list[Figures]:
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


def _row(name: str, steps: _Steps, options: DiffusionBenchOptions) -> LoopRow:
    step_s = _median(steps.figures, "step")
    return LoopRow(
        name=name,
        step_s=step_s,
        images_per_s=options.prompts * options.n / step_s * (2 if name == LIMIT else 1),
        stage_s={stage: _median(steps.figures, stage) for stage in STAGES},
        load=steps.load,
    )


def _median(steps: Sequence[Figures], name: str) -> float:
    return median(step.get(name, 0.0) for step in steps)
