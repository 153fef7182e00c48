"""`gcore-bench placement`: its parts, their tables, and the file with every figure."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from gcore_bench.placement.balancer import run_balancer
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.table import aims, balancer_table


def run(options: PlacementOptions, console: Console) -> None:
    """Measure, print, and write what ``options`` asks for."""
    options = options.sized()
    say = partial(console.print, markup=False, soft_wrap=True)
    rows = run_balancer(options, say=say)
    console.print(balancer_table(rows))
    lines = aims(rows)
    for line in lines:
        say(line)
    if options.json is not None:
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}
        plain = {k: v for k, v in plain.items() if not isinstance(v, Path)}
        part = {"part": "balancer", "rows": [asdict(row) for row in rows], "aims": lines}
        options.json.write_text(json.dumps({"options": plain, "parts": [part]}, indent=1) + "\n")
