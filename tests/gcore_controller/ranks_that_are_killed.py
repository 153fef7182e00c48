"""A program of `test_rank_errors.py`: prints the errors of calls of a group of which a rank ends or hangs, as JSON.

Its arguments are what happens to the rank, and the folder of the ranks' logs.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from gcore_controller import LocalTrainerGroup, RankError, TrainerSpec

NCCL = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"


def enter(rank: int) -> None:
    log = os.open(Path(sys.argv[2], f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    print(f"process {os.getpid()} begins", file=sys.stderr, flush=True)


def make_worker(device: str) -> Any:
    """A rank without models, which knows its process."""
    del device
    return SimpleNamespace(
        roles=["actor"], replica=lambda _: (0, 1), num_updates=os.getpid(), score=score
    )


def wait_for_ever() -> None:
    while True:
        time.sleep(0.1)


def score(role: str, micro_batches: Any, *, with_routing: bool) -> list[list[str]]:
    """Do what the samples say."""
    del role, with_routing
    [[what]] = micro_batches
    if what == "hang" and dist.get_rank() == 0:
        wait_for_ever()
    if what == "abort" and dist.get_rank() == 0:
        # As the process group of torch does.
        os.write(2, f"{NCCL}\nframe #0: c10::Error\n".encode())
        os.abort()
    dist.barrier()
    return [[what]]


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
    group = LocalTrainerGroup[list[str]](spec, cost_of=lambda _: 1.0)
    pid = group.num_updates
    what = sys.argv[1]
    asyncio.run(group.score("actor", [["nothing"]]))
    if what.startswith("SIG"):
        os.kill(pid, signal.Signals[what])
    errors: list[str] = []
    start_s = time.monotonic()
    seconds: list[float] = []
    for call in (
        lambda: asyncio.run(group.score("actor", [[what]])),
        lambda: group.num_updates,
        lambda: list(group.export_weights()),
        lambda: group.num_updates,
    ):
        try:
            call()
        except RankError as error:
            errors.append(str(error))
        seconds.append(time.monotonic() - start_s)
    print(json.dumps({"pid": pid, "errors": errors, "seconds": seconds}))


if __name__ == "__main__":
    main()
