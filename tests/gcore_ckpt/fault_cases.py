"""What the ranks do in `test_faults.py`: save, while the test process kills them or takes their disk away."""

import os
import resource
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank import Rank

import gcore_ckpt.saving.pipeline
from gcore_ckpt import Checkpointer, CheckpointError, CheckpointNotFoundError, PerRank, Shard
from gcore_ckpt.loading.reader import StepReader
from gcore_ckpt.ranks.group import TorchGroup
from gcore_ckpt.saving.staging import Stager

TIMEOUT_S = 60.0
"""Longer than any test waits: a rank that learns of a death only by this has hung."""


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """A state of which every element is the number of the step; its shapes are random, and known from the step."""
    rng = torch.Generator().manual_seed(step)
    rows: list[int] = torch.randint(0, 400, (size,), generator=rng).tolist()
    replicas: list[int] = torch.randint(0, 30_000, (4,), generator=rng).tolist()
    mine = torch.full((rows[rank], 100), float(step))
    return {
        "step": step,
        "rows": rows,
        "sharded": Shard(global_shape=(sum(rows), 100), offset=(sum(rows[:rank]), 0), tensor=mine),
        "replicated": [torch.full((length,), step) for length in replicas],
        "rng": PerRank(torch.full((3,), rank)),
    }


def save_for_ever(rank: Rank, path: str, log: str, options: dict[str, Any]) -> None:
    """Logs, at rank 0, each step that was committed; ends when a save fails."""
    size = dist.get_world_size()
    with Checkpointer(
        path, timeout_s=TIMEOUT_S, keep=2, max_in_flight=2, **options
    ) as checkpointer:
        step = (checkpointer.steps() or [0])[-1]
        previous = None
        while True:
            step += 1
            state = state_of(step, rank.number, size)
            handle = checkpointer.save(step, state)
            for tensor in (state["sharded"].tensor, *state["replicated"]):
                tensor.zero_()
            if previous is not None:
                previous.wait()
                if rank.number == 0:
                    with Path(log).open("a") as file:
                        print(step - 1, file=file)
            previous = handle


def save_when_one_is_asked(rank: Rank, path: str, asked: int) -> tuple[int, bool, bool]:
    """One rank gets SIGTERM in its fifth step; return the step that was saved, and whether the signal came here."""
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        stop, step = checkpointer.stop_on(signal.SIGTERM, signal.SIGUSR1), 0
        while not stop():
            step += 1
            if step == 5 and rank.number == asked:
                os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.save(step, state_of(step, rank.number, dist.get_world_size())).wait()
    is_restored = (
        signal.getsignal(signal.SIGTERM) == before
        and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    )
    return step, stop.received == signal.SIGTERM, is_restored


def save_steps(rank: Rank, path: str, steps: list[int], options: dict[str, Any]) -> None:
    with Checkpointer(path, timeout_s=TIMEOUT_S, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step, rank.number, dist.get_world_size())).wait()


def save_after_loading(
    rank: Rank, path: str, loaded: int, saved: int, goes_back: bool
) -> list[int]:
    size = dist.get_world_size()
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.load(state_of(loaded, rank.number, size), step=loaded)
        later = checkpointer.rollback(loaded) if goes_back else []
        checkpointer.save(saved, state_of(saved, rank.number, size)).wait()
    return later


def roll_back(rank: Rank, path: str, step: int) -> None:
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.rollback(step)


def _interrupted_at(owner: Any, name: str) -> AbstractContextManager[object]:
    """Raises KeyboardInterrupt in the main thread, where SIGTERM does, at the first call of a method."""
    function = getattr(owner, name)
    handled = threading.Event()

    def handle(*_: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not handled.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            assert handled.wait(TIMEOUT_S)
        return function(*args, **kwargs)

    return patch.object(owner, name, wrapped)


def save_while_one_is_interrupted(rank: Rank, path: str, moment: str, interrupted: int) -> str:
    """Saves steps 1, 2 and 3; what this rank heard of step 2."""
    size = dist.get_world_size()
    owner, name = {
        "planning": (gcore_ckpt.saving.pipeline, "collect"),
        "copying": (Stager, "_copy"),
    }[moment]
    heard = ""
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.save(1, state_of(1, rank.number, size)).wait()
        try:
            with _interrupted_at(owner, name) if rank.number == interrupted else nullcontext():
                checkpointer.save(2, state_of(2, rank.number, size)).wait()
        except (CheckpointError, KeyboardInterrupt) as error:
            heard = str(error) or type(error).__name__
        checkpointer.save(3, state_of(3, rank.number, size)).wait()
    return heard


def load_while_one_is_interrupted(rank: Rank, path: str, interrupted: int) -> str:
    size = dist.get_world_size()
    heard = ""
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.save(1, state_of(1, rank.number, size)).wait()
        try:
            with (
                _interrupted_at(StepReader, "read") if rank.number == interrupted else nullcontext()
            ):
                checkpointer.load(state_of(1, rank.number, size) | {"rows": None, "step": None})
        except (CheckpointError, KeyboardInterrupt) as error:
            heard = str(error) or type(error).__name__
        assert checkpointer.load(state_of(1, rank.number, size))["step"] == 1
        checkpointer.save(2, state_of(2, rank.number, size))
    return heard


def save_while_one_is_late(rank: Rank, path: str, late: int) -> list[str]:
    """One rank comes to the second save after the others have given up on it; the errors of two saves of each."""
    size = dist.get_world_size()
    heard: list[str] = []
    with Checkpointer(path, timeout_s=5.0) as checkpointer:
        checkpointer.save(1, state_of(1, rank.number, size)).wait()
        if rank.number == late:
            dist.barrier()
        for _ in range(2):
            try:
                checkpointer.save(2, state_of(2, rank.number, size)).wait()
            except CheckpointError as error:
                heard.append(f"{type(error).__name__}: {error}")
        if rank.number != late:
            dist.barrier()
    dist.barrier()
    save_steps(rank, path, [3], {})
    return heard


def leave_while_waiting(rank: Rank, path: str, interrupted: int) -> str:
    """One rank is interrupted in a save that the others have not come to, and closes; then they come to it."""
    size = dist.get_world_size()
    checkpointer = Checkpointer(path, timeout_s=5.0)
    checkpointer.save(1, state_of(1, rank.number, size)).wait()
    if rank.number == interrupted:
        try:
            with _interrupted_at(TorchGroup, "gather"):
                checkpointer.save(2, state_of(2, rank.number, size))
        except KeyboardInterrupt:
            checkpointer.close()
        dist.barrier()
        dist.barrier()
        return "left"
    dist.barrier()
    heard = ""
    try:
        with checkpointer:
            checkpointer.save(2, state_of(2, rank.number, size)).wait()
    except CheckpointError as error:
        heard = f"{type(error).__name__}: {error}"
    dist.barrier()
    return heard


def exit_while_saving(rank: Rank, path: str, interrupted: int) -> None:
    """One rank is stopped in its second save and exits, as after a signal of the scheduler."""
    size = dist.get_world_size()
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.save(1, state_of(1, rank.number, size)).wait()
        with _interrupted_at(Stager, "_copy") if rank.number == interrupted else nullcontext():
            checkpointer.save(2, state_of(2, rank.number, size)).wait()
        checkpointer.save(3, state_of(3, rank.number, size)).wait()


def save_once_connected(rank: Rank, path: str, timeout_s: float) -> None:
    with Checkpointer(path, timeout_s=timeout_s) as checkpointer:
        checkpointer.save(1, {})


def load_own_values_elsewhere(rank: Rank, path: str) -> list[Any]:
    """The first two ranks save what is their own, and three load it, by each policy; the last by none."""
    size = dist.get_world_size()
    if 2 in rank.groups:
        with Checkpointer(path, process_group=rank.groups[2], timeout_s=TIMEOUT_S) as saver:
            saver.save(
                1,
                {"rng": PerRank({"state": torch.full((3,), rank.number + 7), "step": rank.number})},
            )
    dist.barrier()
    policies: list[Any] = [
        "first",
        lambda rank, size: {"state": None, "step": 10 * size + rank},
        None,
    ]
    with Checkpointer(path, timeout_s=TIMEOUT_S) as loader:
        found: list[Any] = []
        for otherwise in policies:
            template = {"rng": PerRank({"state": torch.zeros(3), "step": 0}, otherwise=otherwise)}
            try:
                own = loader.load(template)["rng"]
            except CheckpointError as error:
                found.append(str(error))
            else:
                found.append(
                    [own["state"] if own["state"] is None else own["state"].tolist(), own["step"]]
                )
    assert size == 3
    return found


def load_step(rank: Rank, path: str, step: int) -> bool:
    """Whether a step is what was saved by as many ranks, this rank's own part too."""
    size = dist.get_world_size()
    template = state_of(step + 1, rank.number, size) | state_of(step, rank.number, size)
    for tensor in (template["sharded"].tensor, *template["replicated"]):
        tensor.zero_()
    found = Checkpointer(path, timeout_s=TIMEOUT_S).load(template, step=step)
    tensors = [found["sharded"].tensor, *found["replicated"]]
    return bool(torch.equal(found["rng"], torch.full((3,), rank.number))) and all(
        (t == step).all() for t in tensors
    )


def fill_the_disk(rank: Rank, path: str, ballast: str | None) -> dict[str, str]:
    """Saves what is too large until rank 0 removes the ballast; without one, this process may write no large files."""
    if ballast is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    rows = torch.ones(100_000)
    large = {
        "x": Shard(
            global_shape=(len(rows) * dist.get_world_size(),),
            offset=(len(rows) * rank.number,),
            tensor=rows,
        )
    }
    small = {"x": torch.arange(10)}
    heard: dict[str, str] = {}
    with Checkpointer(path, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.save(1, small).wait()
        try:
            checkpointer.save(2, large).wait()
        except CheckpointError as error:
            heard["handle"] = str(error)
        checkpointer.save(3, large).join()
        checkpointer.save(4, large).join()
        try:
            checkpointer.save(5, small)
        except CheckpointError as error:
            heard["third save"] = str(error)
        checkpointer.save(5, small).wait()
        dist.barrier()
        if ballast is None:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
        elif rank.number == 0:
            Path(ballast).unlink()
        dist.barrier()
        checkpointer.save(6, large).wait()
    return heard


def save_as(rank: Rank, path: str, step: int, user: int) -> None:
    """Saves as another user, where root may write everywhere."""
    os.seteuid(user)
    try:
        save_steps(rank, path, [step], {})
    finally:
        os.seteuid(os.getuid())


def save_where_one_rank_is_elsewhere(rank: Rank, path: str, elsewhere: str, lost: int) -> str:
    with Checkpointer(
        elsewhere if rank.number == lost else path, timeout_s=TIMEOUT_S
    ) as checkpointer:
        try:
            checkpointer.save(1, state_of(1, rank.number, dist.get_world_size())).wait()
        except CheckpointError as error:
            return str(error)
    return ""


def load_where_one_rank_is_elsewhere(rank: Rank, path: str, elsewhere: str, lost: int) -> None:
    Checkpointer(elsewhere if rank.number == lost else path, timeout_s=TIMEOUT_S).load()


def two_groups_save(rank: Rank, path: str) -> str:
    """The first two ranks save to the path, the others try to, and can once the first are done."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank.number // 2]
    assert isinstance(group, dist.ProcessGroup)
    first = rank.number < 2
    checkpointer = Checkpointer(path, timeout_s=TIMEOUT_S, process_group=group)
    if first:
        checkpointer.save(1, {"x": torch.ones(3)}).wait()
    dist.barrier()
    message = ""
    if not first:
        try:
            checkpointer.save(2, {"x": torch.zeros(3)})
        except CheckpointError as error:
            message = f"{type(error).__name__}: {error}"
    dist.barrier()
    if first:
        checkpointer.save(3, {"x": torch.ones(3)})
        checkpointer.close()
    dist.barrier()
    if not first:
        checkpointer.save(4, {"x": torch.zeros(3)})
        checkpointer.close()
    return message


def load_while_saving(rank: Rank, path: str, seconds: float) -> int:
    """Loads the latest step again and again; gives how many different ones it has seen."""
    seen: set[int] = set()
    reader = Checkpointer(path, process_group=None)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = reader.load(only=["step", "sharded", "replicated"])
        except CheckpointNotFoundError:
            continue
        assert all(
            (tensor == state["step"]).all() for tensor in (state["sharded"], *state["replicated"])
        )
        seen.add(state["step"])
    return len(seen)
