"""`gcore-bench trainer`: the contenders of each part, in turn, in forked processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import Rounds, Rows, Session, plain, summarise
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.report import notes, part_table, tokens_table
from gcore_bench.trainer.workload import (
    BALANCE_RANKS,
    Deal,
    context_layouts,
    deals,
    load_samples,
    step_batches,
    token_rows,
)
from gcore_trainer import Sample

_TOLERANCE = 1e-4


class Contender(NamedTuple):
    """A contender of a part: its number of processes, and the micro-batches of each of them."""

    name: str
    world_size: int = 1
    batches: list[list[list[int]]] | None = None


def run(options: TrainerOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not compute the same.
    """
    with Session(options, console, notes=notes(options)) as session:
        start_server(options.threads)
        run_processes(_specs("setup", Contender("setup"), options, session.folder))
        samples = load_samples(session.folder)
        dealt = deals(options, samples)
        for part in dict.fromkeys(options.parts):
            if part == "tokens":
                rows = token_rows(options, samples)
                session.add(part, tables=[tokens_table(rows)], summary={"rows": rows})
                continue
            rounds = Rounds(part, options.rounds, say=session.say)
            contenders = {found.name: found for found in _contenders(part, options, samples, dealt)}
            for turn in rounds.turns(contenders):
                found = run_processes(_specs(part, contenders[turn.contender], options, session.folder))
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
) -> list[Contender]:
    """Return the contenders of a part in the order in which they run."""
    match part:
        case "step":
            return [Contender(name, 1, [step_batches(options, samples, name)]) for name in options.contenders]
        case "balance":
            return [Contender(name, BALANCE_RANKS, found.batches) for name, found in dealt.items()]
        case "log-probs":
            return [Contender("chunked"), Contender("naive")]
        case "context":
            layouts = context_layouts(options.context_sizes)
            return [Contender(name, size) for name, (size, _) in layouts.items()]
        case _:
            return [Contender("gcore")]


def _specs(part: str, contender: Contender, options: TrainerOptions, folder: Path) -> list[Spec]:
    more = {} if contender.batches is None else {"batches": contender.batches}
    return [
        Spec(
            work="gcore_bench.trainer.parts",
            part=part,
            contender=contender.name,
            folder=str(folder),
            options=plain(options) | more,
            rank=rank,
            world_size=contender.world_size,
            threads=options.threads,
        )
        for rank in range(contender.world_size)
    ]
