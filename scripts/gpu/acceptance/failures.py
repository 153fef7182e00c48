"""Ranks that end, stop or run out of memory while they train with another one on the same device; and NCCL alone."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from acceptance.layouts import FSDP2, dtypes, make_trainer, train_step
from acceptance.ranks import Ranks, run
from acceptance.trial import Trial

_NCCL = "cpu:gloo,cuda:nccl"
_LIMIT_S = 120.0
_NCCL_TIMEOUT_S = 3.0
_SLEEP_CYCLES = 120_000_000_000
"""About a minute of a GPU."""
_MOST_LEFT_GB = 0.1


def kill(trial: Trial) -> None:
    """Kill a rank in training, and measure when the other notices and what is left on the device."""
    _lose_a_rank(trial, "kill", at_most_s=_timeout_s(trial))


def stop(trial: Trial) -> None:
    """Stop a rank in training (SIGSTOP): the other notices when its collective times out."""
    _lose_a_rank(trial, "stop", at_most_s=2 * _timeout_s(trial))


def out_of_memory(trial: Trial) -> None:
    """Let a rank in training take all memory of the device."""
    _lose_a_rank(trial, "out of memory", at_most_s=_timeout_s(trial))


def _lose_a_rank(trial: Trial, failure: str, *, at_most_s: float) -> None:
    before_gb = _used_gb(trial)
    with Ranks(trial, _train_and_fail, failure, size=2, timeout_s=_timeout_s(trial)) as ranks:
        result, error = ranks.outcome(0, _LIMIT_S)
        _, lost = ranks.outcome(1, 0.5)
    if error:
        raise RuntimeError(f"rank 0: {error}")
    seconds, noticed = result
    trial.note(f"{failure}: rank 1: {lost.splitlines()[-1]}; rank 0: {noticed}")
    trial.count(f"{failure}: until the other rank fails", seconds, "s", at_most=at_most_s)
    if trial.device == "cuda":
        left_gb = _used_gb(trial) - before_gb
        trial.count(f"{failure}: device memory that is left", left_gb, "GB", at_most=_MOST_LEFT_GB)


def _timeout_s(trial: Trial) -> float:
    """Return the limit of a collective, which is above the time by which ranks load a model and kernels apart."""
    return 5.0 if trial.is_small else 20.0


def _train_and_fail(trial: Trial, failure: str) -> tuple[float, str]:
    """Train a step, lose rank 1, and return the seconds until the next step of rank 0 fails, and its error."""
    trainer = make_trainer(trial, FSDP2, dtypes(trial)[-1])
    train_step(trial, trainer, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        _fail(failure)
    begin = time.monotonic()
    try:
        train_step(trial, trainer, 1)
        trial.synchronize()
    except RuntimeError as error:
        return time.monotonic() - begin, f"{type(error).__name__}: {error}"
    raise AssertionError("a step ended without rank 1")


def _fail(failure: str) -> None:
    if failure == "out of memory":
        blocks: list[torch.Tensor] = []
        while True:
            blocks.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    number = signal.SIGKILL if failure == "kill" else signal.SIGSTOP
    os.kill(os.getpid(), number)


def _used_gb(trial: Trial) -> float:
    """Return the memory in use on the device, the context of the process that asks included; 0 without a GPU."""
    if trial.device != "cuda":
        return 0.0
    [used_bytes] = run(trial, _used_bytes, size=1)
    return used_bytes / 1e9


def _used_bytes(trial: Trial) -> int:
    del trial
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def nccl(trial: Trial) -> None:
    """Start NCCL with its device, sum over one rank, and read the timeout that its group has."""
    [(wrong, seconds, timeout_s)] = run(trial, _all_reduce, size=1, backend=_NCCL, timeout_s=77.0)
    trial.count("NCCL of one rank: wrong entries of an all-reduce", wrong, at_most=0)
    trial.figure("NCCL of one rank: the first all-reduce", seconds, "s", at_most=10.0)
    trial.count("NCCL of one rank: timeout, set to 77", timeout_s, "s", at_least=77, at_most=77)


def _all_reduce(trial: Trial) -> tuple[int, float, float]:
    values = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    expected = values.clone()
    seconds = trial.measure_seconds(lambda: dist.all_reduce(values))
    world: Any = dist.group.WORLD
    timeout = world._get_backend(torch.device("cuda")).options._timeout
    return int((values != expected).sum()), seconds, timeout.total_seconds()


def nccl_timeout(trial: Trial) -> None:
    """Let a collective of NCCL wait for longer than its timeout: the process must end by itself."""
    with Ranks(trial, _late_all_reduce, size=1, backend=_NCCL, timeout_s=_NCCL_TIMEOUT_S) as ranks:
        begin = time.monotonic()
        _, error = ranks.outcome(0, _LIMIT_S)
    seconds = time.monotonic() - begin
    if "ended with" not in error and "timeout" not in error.lower():
        raise RuntimeError(error)
    trial.note(
        f"A collective that takes longer than {_NCCL_TIMEOUT_S:g} s: {error.splitlines()[-1]}."
    )
    trial.count(
        "NCCL's timeout: until the process ends", seconds, "s", at_least=_NCCL_TIMEOUT_S, at_most=45
    )


def _late_all_reduce(trial: Trial) -> None:
    values = torch.ones(1, device="cuda")
    dist.all_reduce(values)
    cuda: Any = torch.cuda
    cuda._sleep(_SLEEP_CYCLES)
    dist.all_reduce(values)
    trial.synchronize()
    raise AssertionError("the collective did not time out")
