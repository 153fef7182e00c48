"""`gcore-bench trainer`: the contenders of each part, in turn, in forked processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import Rounds, Rows, Session, plain, summarise
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.report import notes, part_table, tokens_table
from gcore_bench.trainer.workload import (
    Deal,
    context_layouts,
    deals,
    make_samples,
    step_batches,
    token_rows,
)
from gcore_trainer import Sample

_TOLERANCE = 1e-4

_Ranks = list[list[list[int]]]
"""Micro-batches of samples of each process of a contender; no batches where its work has none."""


def run(options: TrainerOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not compute the same.
    """
    with Session(options, console, notes=notes(options)) as session:
        start_server(options.threads)
        run_processes(_specs("setup", "setup", [[]], options, session.folder))
        samples = make_samples(options)
        dealt = deals(options, samples)
        for part in dict.fromkeys(options.parts):
            if part == "tokens":
                rows = token_rows(options, samples)
                session.add(part, tables=[tokens_table(rows)], summary={"rows": rows})
                continue
            rounds = Rounds(part, options.rounds, say=session.say)
            contenders = _contenders(part, options, samples, dealt)
            for turn in rounds.turns(contenders):
                ranks = contenders[turn.contender]
                found = run_processes(_specs(part, turn.contender, ranks, options, session.folder))
                turn.done(found, " and ".join(f"{figures['step_s']:.2f} s" for figures in found.values()))
            summary = summarise(part, rounds.runs)
            figures: dict[str, Any] = {"summary": asdict(summary), "runs": rounds.runs}
            if part == "balance":
                figures["imbalance"] = {name: found.imbalance for name, found in dealt.items()}
            session.add(part, tables=[part_table(summary, options, dealt)], **figures)
            check_agreement(part, summary.rows)


def check_agreement(part: str, rows: Rows) -> None:
    """Check that contenders computed the same losses, log-probs and gradient norms from the same tokens.

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


def _contenders(
    part: str, options: TrainerOptions, samples: Sequence[Sample], dealt: Mapping[str, Deal]
) -> dict[str, _Ranks]:
    """Return the contenders of a part in the order in which they run."""
    match part:
        case "step":
            return {name: [step_batches(options, samples, name)] for name in options.contenders}
        case "balance":
            return {name: found.batches for name, found in dealt.items()}
        case "log-probs":
            return {"chunked": [[]], "naive": [[]]}
        case "context":
            return {name: [[]] * size for name, (size, _) in context_layouts(options.context_sizes).items()}
        case _:
            return {"gcore": [[]]}


def _specs(part: str, contender: str, ranks: _Ranks, options: TrainerOptions, folder: Path) -> list[Spec]:
    return [
        Spec(
            work="gcore_bench.trainer.parts",
            part=part,
            contender=contender,
            folder=str(folder),
            options={**plain(options), **({"batches": batches} if batches else {})},
            rank=rank,
            world_size=len(ranks),
            threads=options.threads,
        )
        for rank, batches in enumerate(ranks)
    ]
