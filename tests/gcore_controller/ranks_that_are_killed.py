"""A program of `test_rank_errors.py`: prints the errors of calls of a group of which a rank gets a signal, as JSON."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gcore_controller import LocalTrainerGroup, RankError, TrainerSpec


def enter(rank: int) -> None:
    del rank


def make_worker(device: str) -> Any:
    """A rank without models, which knows its process."""
    del device
    return SimpleNamespace(roles=["actor"], replica=lambda _: (0, 1), num_updates=os.getpid())


def write(weights: Any, path: Path) -> None:
    raise AssertionError(f"{weights} are written to {path}")


def open_memory() -> Any:
    """A memory for weights, which is written to before any rank is asked."""
    return SimpleNamespace(write=lambda weights: weights.write_to(Path()), close=lambda: None)


def main() -> None:
    # By the name that the processes of ranks know: this file is `__main__` only here.
    import ranks_that_are_killed as program

    spec = TrainerSpec(
        make_worker=program.make_worker,
        num_ranks=2,
        device="cpu",
        num_threads=1,
        enter_process=program.enter,
        write_weights=program.write,
        open_memory=program.open_memory,
        heartbeat_timeout_s=2.0,
        preload=[program.__name__],
    )
    group = LocalTrainerGroup[list[int]](spec, cost_of=lambda _: 1.0)
    pid = group.num_updates
    os.kill(pid, signal.Signals[sys.argv[1]])
    errors: list[str] = []
    for call in (
        lambda: group.num_updates,
        lambda: asyncio.run(group.score("actor", [[1]])),
        lambda: list(group.export_weights()),
        lambda: group.num_updates,
    ):
        try:
            call()
        except RankError as error:
            errors.append(str(error))
    print(json.dumps({"pid": pid, "errors": errors}))


if __name__ == "__main__":
    main()
