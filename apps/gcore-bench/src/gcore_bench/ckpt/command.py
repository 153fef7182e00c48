"""`gcore-bench ckpt`: all parts, their tables, and the file with every figure."""

import json
from dataclasses import asdict
from functools import partial

from rich.console import Console

from gcore_bench.ckpt.machine import check_machine, scratch_folder
from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.ckpt.rounds import run_rounds
from gcore_bench.ckpt.summary import summarise
from gcore_bench.ckpt.table import notes, table
from gcore_bench.grpo.errors import BenchError


def run(options: CkptOptions, console: Console) -> None:
    """Measure, print, and write what ``options`` asks for.

    Raises:
        BenchError: the machine is too small, or no contender has figures.
    """
    results: list[dict[str, object]] = []
    figures = 0
    with scratch_folder(options.dir) as folder:
        check_machine(folder, options.size_bytes)
        for part in options.part_names:
            if not options.contenders_of(part):
                continue
            runs = run_rounds(part, options, folder, say=partial(console.print, markup=False, soft_wrap=True))
            summary = summarise(part, runs)
            console.print(table(summary, options))
            for contender, failure in summary.failures.items():
                console.print(f"{contender} failed: {failure}", soft_wrap=True, markup=False)
            figures += sum(bool(line.seconds) for line in summary.lines)
            results.append({"part": part, "summary": asdict(summary), "runs": [asdict(r) for r in runs]})
    for note in notes(options):
        console.print(note, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": _plain(options), "parts": results}, indent=1) + "\n")
    if not figures:
        raise BenchError("no contender has figures: see the failures above")


def _plain(options: CkptOptions) -> dict[str, object]:
    return {k: v if isinstance(v, int | float | tuple) else str(v) for k, v in asdict(options).items()}
