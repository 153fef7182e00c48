"""`gcore-bench trainer`: the contenders of each part, in turn, in forked processes."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import Rounds, Rows, Session, plain, summarise
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.report import aims, notes, part_table, tokens_table
from gcore_bench.trainer.workload import BALANCE_RANKS, context_layouts, deals, make_samples, token_rows

_TOLERANCE = 1e-4


def run(options: TrainerOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not compute the same.
    """
    with Session(options, console, notes=notes(options)) as session:
        start_server(options.threads)
        run_processes(_specs("setup", "setup", 1, options, session.folder))
        samples = make_samples(options)
        dealt = deals(options, samples)
        for part in dict.fromkeys(options.parts):
            if part == "tokens":
                rows = token_rows(options, samples)
                session.add(part, tables=[tokens_table(rows)], summary={"rows": rows})
                continue
            rounds = Rounds(part, options.rounds, say=session.say)
            contenders = _contenders(part, options)
            for turn in rounds.turns(contenders):
                world_size = contenders[turn.contender]
                found = run_processes(_specs(part, turn.contender, world_size, options, session.folder))
                turn.done(found, " and ".join(f"{figures['step_s']:.2f} s" for figures in found.values()))
            summary = summarise(part, rounds.runs)
            figures: dict[str, Any] = {"summary": asdict(summary), "runs": rounds.runs}
            if part == "balance":
                figures["imbalance"] = {name: found.imbalance for name, found in dealt.items()}
            found_aims = aims(summary, options)
            session.add(
                part, tables=[part_table(summary, options, dealt)], lines=found_aims, **figures, aims=found_aims
            )
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


def _contenders(part: str, options: TrainerOptions) -> dict[str, int]:
    """Return the number of ranks of each contender of a part, in the order in which they run."""
    match part:
        case "step":
            return dict.fromkeys(options.contenders, 1)
        case "balance":
            return {"round-robin": BALANCE_RANKS, "balanced": BALANCE_RANKS}
        case "log-probs":
            return {"chunked": 1, "naive": 1}
        case "memory":
            return {"tiles": 1, "masks": 1}
        case "context":
            return {name: size for name, (size, _) in context_layouts(options.context_sizes).items()}
        case _:
            return {"gcore": 1}


def _specs(part: str, contender: str, world_size: int, options: TrainerOptions, folder: Path) -> list[Spec]:
    return [
        Spec(
            work="gcore_bench.trainer.parts",
            part=part,
            contender=contender,
            folder=str(folder),
            options=plain(options),
            rank=rank,
            world_size=world_size,
            threads=options.threads,
        )
        for rank in range(world_size)
    ]
