"""Replicas of an engine in processes of this machine."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.engines.registry import PRELOAD_HF
from gcore_rollout.engines.remote.process import EngineProcess
from gcore_rollout.engines.replicas import EngineReplicas


async def start_replicas(
    factory: Callable[[int], Callable[[], Engine[Any, Any]]],
    num_replicas: int,
    *,
    num_threads: int,
    preload: tuple[str, ...] = PRELOAD_HF,
    gpus: Sequence[str] = (),
    wrap: Callable[[Engine[Any, Any], int], Engine[Any, Any]] = lambda engine, _: engine,
    announce: Callable[[str], None] | None = None,
    num_lent: int = 0,
) -> EngineReplicas[Any, Any]:
    """Start an engine in each of ``num_replicas`` processes.

    Args:
        factory: returns what makes the engine of a place, from 0 to ``num_replicas - 1``, in its process; picklable.
        num_threads: of each process; see `EngineProcess.start`, as for `preload`.
        gpus: as CUDA_VISIBLE_DEVICES names them; each process sees one, by its place. Empty: they see what this one
            sees.
        wrap: called with each engine and its place; returns the replica.
        num_lent: how many of them, the last ones, are lent; see `EngineReplicas`.

    Raises:
        Exception: a process did not start; the others are closed.
    """
    pids: dict[int, int] = {}
    """Process ids by the number of the replica; one that is being replaced has none."""

    async def start(number: int) -> Engine[Any, Any]:
        env: dict[str, str] = {}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        engine: EngineProcess[Any, Any] = await EngineProcess.start(
            factory(number), num_threads=num_threads, env=env, preload=preload
        )
        pids[number] = engine.pid
        return wrap(engine, number)

    async def restart() -> Engine[Any, Any]:
        # Of several dead ones, one that is not lent: the replacements of these do not wait.
        number = min(pids, key=lambda number: (Path(f"/proc/{pids[number]}").exists(), number))
        dead = pids.pop(number)
        try:
            return await start(number)
        except BaseException:
            pids[number] = dead
            raise

    outcomes = await asyncio.gather(*map(start, range(num_replicas)), return_exceptions=True)
    engines = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    for error in outcomes:
        if isinstance(error, BaseException):
            await asyncio.gather(*(engine.close() for engine in engines))
            raise error
    lent = engines[num_replicas - num_lent :]
    return EngineReplicas(engines, restart=restart, announce=announce, lent=lent or None)


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them; none for a device that is no GPU."""
    if not device.startswith("cuda"):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    return [str(i) for i in range(torch.cuda.device_count())]
