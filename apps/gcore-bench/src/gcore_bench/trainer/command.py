"""`gcore-bench trainer`: all parts, their tables, and the file with every figure."""

import json
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from gcore_bench.grpo.errors import BenchError
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.rounds import deals, plain, run_rounds, set_up
from gcore_bench.trainer.summary import summarise
from gcore_bench.trainer.table import notes, part_table, tokens_table
from gcore_bench.trainer.tokens import token_rows
from gcore_bench.trainer.workload import load_samples

_TOLERANCE = 1e-4


def run(options: TrainerOptions, console: Console) -> None:
    """Measure, print, and write what ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not compute the same.
    """
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as scratch:
        folder = Path(scratch)
        set_up(options, folder)
        samples = load_samples(folder / "samples.npz")
        dealt = deals(options, samples)
        for part in dict.fromkeys(options.parts):
            if part == "tokens":
                rows = token_rows(options, samples)
                console.print(tokens_table(rows))
                results.append({"part": part, "summary": {"rows": rows}})
                continue
            runs = run_rounds(part, options, samples, folder, say=partial(console.print, markup=False, soft_wrap=True))
            summary = summarise(part, runs)
            console.print(part_table(summary, options, dealt))
            results.append({"part": part, "summary": asdict(summary), "runs": [asdict(run) for run in runs]})
            if part == "balance":
                results[-1]["imbalance"] = {
                    name: {"ranks": found.rank_imbalance, "passes": found.pass_imbalance}
                    for name, found in dealt.items()
                }
            check_agreement(part, summary.rows)
    for note in notes(options):
        console.print(note, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": plain(options), "parts": results}, indent=1) + "\n")


def check_agreement(part: str, rows: dict[str, dict[str, float]]) -> None:
    """See that contenders computed the same losses, log-probs and gradient norms of the same tokens.

    Raises:
        BenchError: two of them differ by more than 1e-4, relative to 1 or the value.
    """
    for metric in ("loss", "grad_norm", "log_probs"):
        by_tokens: dict[float, list[tuple[str, float]]] = {}
        for name, row in rows.items():
            if metric in row:
                by_tokens.setdefault(row.get("tokens", 0.0), []).append((name, row[metric]))
        for (first, expected), *others in by_tokens.values():
            for name, value in others:
                if not abs(value - expected) <= _TOLERANCE * max(1.0, abs(expected)):
                    raise BenchError(f"part {part}: {metric} is {expected} for {first}, but {value} for {name}")
