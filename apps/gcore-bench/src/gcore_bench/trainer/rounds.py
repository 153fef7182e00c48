"""Rounds of contenders, alternating, each in processes of its own."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gcore_bench.trainer.figures import Run, Spec
from gcore_bench.trainer.layouts import kinds
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.processes import run_processes, start_server
from gcore_bench.trainer.shapes import step_workload
from gcore_bench.trainer.workload import Deal, deal, packed_batches, padded_batches, shared_batches
from gcore_trainer import Sample

BALANCE_RANKS = 2
"""Of the part balance."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who runs, as how many processes, and what each is handed."""

    name: str
    world_size: int = 1
    batches: list[list[list[int]]] | None = None
    """Of each rank."""


def step_batches(options: TrainerOptions, samples: Sequence[Sample], contender: str) -> list[list[int]]:
    """The micro-batches that a contender makes of the step; verl is handed those of gcore-packed."""
    shape = step_workload(options)
    if contender in ("trl", "gcore-padded"):
        return padded_batches(samples, options.padded_micro_batches)
    if contender == "gcore-shared":
        return shared_batches(samples, shape, options.max_tokens, n=options.n)
    return packed_batches(samples, shape, options.max_tokens)


def deals(options: TrainerOptions, samples: Sequence[Sample]) -> dict[str, Deal]:
    """How the two contenders of the part balance share the step out."""
    return {
        name: deal(
            samples,
            step_workload(options),
            options.max_tokens,
            n=options.n,
            ranks=BALANCE_RANKS,
            balanced=name == "balanced",
        )
        for name in ("round-robin", "balanced")
    }


def contenders(part: str, options: TrainerOptions, samples: Sequence[Sample]) -> list[Contender]:
    """Of a part, in the order in which they run."""
    match part:
        case "step":
            return [
                Contender(name=name, batches=[step_batches(options, samples, name)])
                for name in dict.fromkeys(options.contenders)
            ]
        case "balance":
            return [
                Contender(name=name, world_size=BALANCE_RANKS, batches=found.batches)
                for name, found in deals(options, samples).items()
            ]
        case "log-probs":
            return [Contender(name="chunked"), Contender(name="naive")]
        case "context":
            return [Contender(name=name, world_size=size) for name, (size, _) in kinds(options.context_sizes).items()]
        case _:
            return [Contender(name="gcore")]


def run_rounds(
    part: str, options: TrainerOptions, samples: Sequence[Sample], folder: Path, *, say: Callable[[str], object]
) -> list[Run]:
    """Every contender of a part in turn, ``options.rounds`` times.

    Raises:
        BenchError: a process failed.
    """
    runs: list[Run] = []
    for number in range(1, options.rounds + 1):
        for contender in contenders(part, options, samples):
            load = os.getloadavg()[0]
            rows = run_processes(
                [
                    Spec(
                        part=part,
                        contender=contender.name,
                        folder=str(folder),
                        options=plain(options),
                        rank=rank,
                        world_size=contender.world_size,
                        batches=contender.batches[rank] if contender.batches else [],
                    )
                    for rank in range(contender.world_size)
                ]
            )
            runs.append(Run(part=part, contender=contender.name, round=number, load=load, rows=rows))
            say(f"{part}, round {number} of {options.rounds}: {contender.name} {_seconds(rows)}, load {load:.1f}")
    return runs


def set_up(options: TrainerOptions, folder: Path) -> None:
    """Make what the contenders share."""
    start_server(options.threads)
    run_processes([Spec(part="setup", contender="setup", folder=str(folder), options=plain(options))])


def plain(options: TrainerOptions) -> dict[str, Any]:
    """As JSON has it; ``json`` itself is left out."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items() if k != "json"}


def _seconds(rows: Mapping[str, Mapping[str, float]]) -> str:
    return " and ".join(f"{figures['step_s']:.2f} s" for figures in rows.values())
