"""`gcore-bench diffusion`: its parts, their tables, and the file with every figure."""

from dataclasses import asdict
from functools import partial

from rich.console import Console

from gcore_bench.diffusion.loop import run_loop
from gcore_bench.diffusion.options import DiffusionBenchOptions
from gcore_bench.diffusion.simulation import run_simulation
from gcore_bench.diffusion.table import loop_aims, loop_table, simulation_table
from gcore_bench.figures_file import write_figures


def run(options: DiffusionBenchOptions, console: Console) -> None:
    """Measure, print, and write what ``options`` asks for.

    Raises:
        BenchError: a run failed.
    """
    options = options.sized()
    say = partial(console.print, markup=False, soft_wrap=True)
    parts: list[dict[str, object]] = []
    for part in dict.fromkeys(options.parts):
        if part == "loop":
            rows = run_loop(options, say=say)
            console.print(loop_table(rows))
            for line in loop_aims(rows):
                say(line)
            parts.append({"part": part, "rows": [asdict(row) for row in rows], "aims": loop_aims(rows)})
        else:
            found = run_simulation(options)
            console.print(simulation_table(found))
            figures = [
                {
                    "trace": comparison.name,
                    "strategy": run.strategy,
                    "step_s": run.step_s,
                    "idle": run.idle_share,
                    "moves": run.num_moves,
                }
                for comparison in found
                for run in comparison.runs
            ]
            parts.append({"part": part, "rows": figures})
    write_figures(options.json, options, parts)
