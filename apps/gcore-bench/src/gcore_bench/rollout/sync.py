"""The part sync: new weights into engines at rest and into engines with samples running, in turn with a memcpy."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gcore_bench.grpo.errors import BenchError
from gcore_bench.rollout import clocked_process
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import Processes
from gcore_bench.rollout.step_clock import StepClock
from gcore_bench.rollout.workload import sync_request
from gcore_bench.trainer.figures import Run
from gcore_rollout import Completion, Engine, EngineReplicas, Request

MEMCPY = "memcpy"
_MEMCPY_TIMES = 3
_PASSES_AROUND = 4
"""Steps of the samples before the update, and after it."""
_POLL_S = 0.005
_TIMEOUT_S = 120.0

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way for weights to reach an engine."""

    engine: Engine
    clocks: list[StepClock]
    """Of each process."""
    update: Callable[[int], Awaitable[object]]
    """To this version."""
    starts_inside: bool = False
    """The call that counts is made in the engine's process."""


async def run_rounds(
    options: RolloutOptions, folder: Path, processes: Processes, *, say: Callable[[str], object]
) -> list[Run]:
    """The copy, and every way, in turn, ``options.rounds`` times.

    Raises:
        BenchError: one failed, or its tokens carry other versions than their times say.
    """
    # What is copied in this process is copied with as many threads as in the others.
    torch.set_num_threads(options.threads)
    state = {name: tensor.clone() for name, tensor in load_file(folder / "sync-model" / "model.safetensors").items()}
    runs: list[Run] = []
    async with AsyncExitStack() as stack:
        ways = await _ways(state, options, folder, processes, stack)
        versions = count(1)
        for way in ways.values():
            await way.update(next(versions))
        copy = {name: tensor.clone() for name, tensor in state.items()}
        for number in range(1, options.rounds + 1):
            for name in (MEMCPY, *ways):
                load = os.getloadavg()[0]
                if name == MEMCPY:
                    row = _memcpy(copy, state)
                else:
                    try:
                        row = await _idle(ways[name], next(versions))
                        row |= await busy_figures(ways[name], next(versions), sync_request(options))
                    except Exception as error:
                        raise BenchError(f"{name} failed: {error}") from error
                runs.append(Run(part="sync", contender=name, round=number, load=load, rows={name: row}))
                say(f"sync, round {number} of {options.rounds}: {name} {row['wall_s']:.3f} s, load {load:.1f}")
    return runs


async def _ways(
    state: State, options: RolloutOptions, folder: Path, processes: Processes, stack: AsyncExitStack
) -> dict[str, Way]:
    file = folder / "weights.safetensors"
    max_num_seqs = sync_request(options).n

    async def start(name: str, source: clocked_process.Source) -> tuple[Engine, StepClock]:
        clock = folder / f"clock-{name}"
        made = StepClock(clock)
        factory = partial(clocked_process.make, folder / "sync-model", clock, source, file, max_num_seqs=max_num_seqs)
        engine = await processes.start(name, factory)
        stack.push_async_callback(engine.close)
        return engine, made

    here, here_clock = await start("in-process", "here")
    one, one_clock = await start("process", "caller")
    several = [await start(f"replica-{number}", "caller") for number in range(2)]
    replicas = EngineReplicas([engine for engine, _ in several])
    stack.push_async_callback(replicas.close)
    reader, reader_clock = await start("files", "file")

    async def through_file(version: int) -> None:
        save_file(dict(state), file)
        await reader.update_weights([], version=version)

    return {
        "in-process": Way(
            engine=here,
            clocks=[here_clock],
            update=lambda version: here.update_weights([], version=version),
            starts_inside=True,
        ),
        "process": Way(
            engine=one,
            clocks=[one_clock],
            update=lambda version: one.update_weights(state.items(), version=version),
        ),
        "2 processes": Way(
            engine=replicas,
            clocks=[clock for _, clock in several],
            update=lambda version: replicas.update_weights(state.items(), version=version),
        ),
        "files": Way(engine=reader, clocks=[reader_clock], update=through_file),
    }


def _memcpy(copy: State, state: State) -> dict[str, float]:
    """Tensor by tensor, into memory that is there."""
    walls: list[float] = []
    for _ in range(_MEMCPY_TIMES):
        start_s = time.perf_counter()
        for name, tensor in state.items():
            copy[name].copy_(tensor)
        walls.append(time.perf_counter() - start_s)
    return {"wall_s": median(walls), "size_bytes": float(sum(tensor.nbytes for tensor in state.values()))}


async def _idle(way: Way, version: int) -> dict[str, float]:
    start_s, end_s = await _timed_update(way, version)
    return {
        "wall_s": end_s - start_s,
        "before_copy_s": max(0.0, min(clock.update_start_s for clock in way.clocks) - start_s),
        "copy_s": max(clock.update_end_s - clock.update_start_s for clock in way.clocks),
    }


async def _timed_update(way: Way, version: int) -> tuple[float, float]:
    start_s = time.perf_counter()
    await way.update(version)
    end_s = time.perf_counter()
    (clock, *_) = way.clocks
    return (clock.update_start_s, clock.update_end_s) if way.starts_inside else (start_s, end_s)


async def busy_figures(way: Way, version: int, request: Request) -> dict[str, float]:
    """An update while samples run, which are aborted some steps later."""
    for clock in way.clocks:
        clock.reset()
    running = asyncio.create_task(_collect(way.engine, request))
    await _until_passes(way.clocks, _PASSES_AROUND, running)
    start_s, end_s = await _timed_update(way, version)
    await _until_passes(way.clocks, max(clock.num_passes for clock in way.clocks) + _PASSES_AROUND, running)
    await way.engine.abort()
    completions = await running
    firsts = [int(np.searchsorted(clock.passes_s, clock.update_end_s)) for clock in way.clocks]
    found = {int(np.argmax(c.weight_versions == version)) for c in completions}
    if found != set(firsts):
        raise BenchError(f"tokens {sorted(found)} are the first of version {version}: by their times {firsts} are")
    pairs = list(zip(way.clocks, firsts, strict=True))
    gaps: list[float] = []
    steps: list[float] = []
    for clock, first in pairs:
        intervals = np.diff(clock.passes_s)
        steps.append(float(np.median(np.delete(intervals, first - 1))))
        gaps.append(float(intervals[first - 1]) - steps[-1])
    return {
        "busy_s": end_s - start_s,
        "no_token_s": max(0.0, *gaps),
        "step_s": max(steps),
        "old_steps": float(max(first - int(np.searchsorted(c.passes_s, start_s)) for c, first in pairs)),
        "first_token_s": min(float(clock.passes_s[first]) - start_s for clock, first in pairs),
    }


async def _collect(engine: Engine, request: Request) -> list[Completion]:
    return [completion async for completion in engine.generate([request])]


async def _until_passes(
    clocks: Sequence[StepClock], num_passes: int, running: "asyncio.Task[list[Completion]]"
) -> None:
    """Until every engine has made so many steps."""
    async with asyncio.timeout(_TIMEOUT_S):
        while any(clock.num_passes < num_passes for clock in clocks):
            if running.done():
                raise BenchError(f"all {len(running.result())} samples ended before their weights were changed")
            await asyncio.sleep(_POLL_S)
