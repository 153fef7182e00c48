"""What the ranks do in `test_tiers.py`, on machines that are a name and a folder each."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank import Rank

from gcore_ckpt import CheckpointError, PerRank, Shard, Tier, TieredCheckpointer
from gcore_ckpt.saving.host_memory import allocate
from gcore_ckpt.storage.local import LocalStorage
from gcore_ckpt.tiers import transfer

TIMEOUT_S = 60.0
ROWS = 60


def tiered(
    rank: Rank,
    root: str,
    *,
    machines: Sequence[int] = range(9),
    replicas: int = 1,
    every: int = 5,
    slow: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> TieredCheckpointer:
    """`machines` are those of each rank, `slow` is the path of the second tier, `environment` says how to get there."""
    os.environ.update(environment or {})
    machine = f"machine-{machines[rank.number]}"
    tiers = [
        Tier(f"{root}/{machine}", keep=2, replicas=replicas),
        Tier(slow or f"{root}/shared", every=every, keep=2),
    ]
    return TieredCheckpointer(tiers, machine=machine, timeout_s=TIMEOUT_S)


def state_at(step: int, rank: Rank) -> dict[str, Any]:
    """The state after a step, of which this rank holds its rows, on any number of ranks."""
    size = dist.get_world_size()
    first, last = rank.number * ROWS // size, (rank.number + 1) * ROWS // size
    rows = torch.arange(first, last, dtype=torch.float64)[:, None] + torch.linspace(
        0, 1, 50, dtype=torch.float64
    )
    return {
        "step": step,
        "rows": Shard(global_shape=(ROWS, 50), offset=(first, 0), tensor=torch.sin(rows * step)),
        "everywhere": torch.full((1000,), float(step)),
        "rng": PerRank(step + rank.number, otherwise=lambda number, _: step + number),
    }


def checked_load(checkpointer: TieredCheckpointer, rank: Rank, step: int | None = None) -> int:
    """The step that was loaded; every bit of the state is what it was after that step."""
    template = state_at(0, rank)
    template["rows"].tensor.fill_(7.0)
    loaded = checkpointer.load(template, step="latest" if step is None else step)
    expected = state_at(loaded["step"], rank)
    assert torch.equal(loaded["rows"].tensor, expected["rows"].tensor)
    assert torch.equal(loaded["everywhere"], expected["everywhere"])
    return loaded["step"]


def save_in_tiers(rank: Rank, root: str, steps: list[int], options: dict[str, Any]) -> list[int]:
    with tiered(rank, root, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_at(step, rank))
        checkpointer.wait()
        return checkpointer.steps()


def load_from_tiers(
    rank: Rank, root: str, step: int | None, options: dict[str, Any]
) -> tuple[int, list[int]]:
    checkpointer = tiered(rank, root, **options)
    return checked_load(checkpointer, rank, step), checkpointer.steps()


def train_in_tiers(rank: Rank, root: str, log: str, options: dict[str, Any]) -> None:
    """Continues after the newest step for ever; rank 0 logs where it resumes and each step whose save has returned."""

    def note(*words: object) -> None:
        with Path(log).open("a") as file:
            print(*words, file=file)

    with tiered(rank, root, **options) as checkpointer:
        try:
            step = checked_load(checkpointer, rank) if checkpointer.steps() else 0
        except AssertionError:
            note("wrong")
            raise
        if rank.number == 0:
            note("resumed", step)
        while True:
            step += 1
            state = state_at(step, rank)
            checkpointer.save(step, state)
            state["everywhere"].zero_()
            if rank.number == 0:
                note("saved", step)


def die_in_save(
    rank: Rank, root: str, moment: str, dying: list[int], options: dict[str, Any]
) -> str:
    """Saves steps 1 to 5; some ranks die while they save the fifth, and the others return what they hear."""

    def deadly(function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **kwargs: Any) -> Any:
            result = function(*arguments, **kwargs) if after else None
            if rank.number in dying and is_fifth:
                os._exit(9)
            return result if after else function(*arguments, **kwargs)

        return wrapped

    deaths: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "writing": lambda: patch.object(
            LocalStorage, "write_file", deadly(LocalStorage.write_file)
        ),
        "copying": lambda: patch.object(transfer, "allocate", deadly(allocate)),
        "committing": lambda: patch.object(LocalStorage, "commit", deadly(LocalStorage.commit)),
        "committed": lambda: patch.object(
            LocalStorage, "commit", deadly(LocalStorage.commit, after=True)
        ),
    }
    is_fifth = False
    with deaths[moment]() if moment else nullcontext():
        try:
            with tiered(rank, root, **options) as checkpointer:
                for step in range(1, 5):
                    checkpointer.save(step, state_at(step, rank)).wait()
                is_fifth = True
                checkpointer.save(5, state_at(5, rank)).wait()
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def save_while_one_disk_is_full(rank: Rank, root: str, full: int) -> list[str]:
    """The copies that one rank gets cannot be written in step 2; what each hears of steps 1 to 3."""
    heard: list[str] = []
    write_file = LocalStorage.write_file

    def fail(storage: LocalStorage, attempt: str, name: str, parts: list[memoryview]) -> None:
        if rank.number == full and f"data-{rank.number:05d}" not in name:
            raise OSError("no space left")
        write_file(storage, attempt, name, parts)

    with tiered(rank, root) as checkpointer:
        for step in (1, 2, 3):
            with patch.object(LocalStorage, "write_file", fail) if step == 2 else nullcontext():
                try:
                    checkpointer.save(step, state_at(step, rank)).wait()
                    heard.append("")
                except CheckpointError as error:
                    heard.append(str(error))
        assert checkpointer.steps() == [1, 3]
    return heard


def die_while_others_read(rank: Rank, root: str, dying: int) -> str:
    """One rank dies when another asks it for a file; what this one hears."""

    def die(*_: object) -> None:
        os._exit(9)

    with patch.object(transfer.PeerFiles, "_reply", die) if rank.number == dying else nullcontext():
        try:
            checked_load(tiered(rank, root), rank)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def go_back_in_tiers(rank: Rank, root: str) -> tuple[list[int], list[int]]:
    with tiered(rank, root) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save(step, state_at(step, rank))
        later = checkpointer.rollback(5)
        checkpointer.save(6, state_at(6, rank)).wait()
        assert checked_load(checkpointer, rank) == 6
        return later, checkpointer.steps()
