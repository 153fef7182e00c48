"""The part sync: updates of weights in idle engines and in engines with running samples, in turn with a memcpy."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds, Run
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import Processes
from gcore_bench.rollout.step_clock import Source, StepClock, make_engine
from gcore_bench.rollout.workload import sync_request
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
    """One way to update the weights of an engine."""

    engine: Engine
    clocks: Sequence[StepClock]
    """The clock of each process."""
    update: Callable[[int], Awaitable[object]]
    """Updates the weights to the given version."""
    starts_inside: bool = False
    """True if the measured call is made in the engine's process."""


async def run_rounds(
    options: RolloutOptions, folder: Path, processes: Processes, *, say: Callable[[str], object]
) -> list[Run]:
    """Measure the copy and every way in turn.

    Raises:
        BenchError: a way failed, or the versions of its tokens contradict their times.
    """
    # Copies in this process use as many threads as those in the others.
    torch.set_num_threads(options.threads)
    state = {name: tensor.clone() for name, tensor in load_file(folder / "sync-model" / "model.safetensors").items()}
    rounds = Rounds("sync", options.rounds, say=say)
    async with AsyncExitStack() as stack:
        ways = await _ways(state, options, folder, processes, stack)
        versions = count(1)
        for way in ways.values():
            await way.update(next(versions))
        copy = {name: tensor.clone() for name, tensor in state.items()}
        for turn in rounds.turns((MEMCPY, *ways)):
            name = turn.contender
            if name == MEMCPY:
                size_bytes = float(sum(tensor.nbytes for tensor in state.values()))
                row = {"wall_s": memcpy_seconds(copy, state), "size_bytes": size_bytes}
            else:
                try:
                    row = await _idle(ways[name], next(versions))
                    row |= await busy_figures(ways[name], next(versions), sync_request(options))
                except Exception as error:
                    raise BenchError(f"{name} failed: {error}") from error
            turn.done({name: row}, f"{row['wall_s']:.3f} s")
    return rounds.runs


async def _ways(
    state: State, options: RolloutOptions, folder: Path, processes: Processes, stack: AsyncExitStack
) -> dict[str, Way]:
    file = folder / "weights.safetensors"
    max_num_seqs = sync_request(options).n

    async def start(name: str, source: Source) -> tuple[Engine, StepClock]:
        clock = folder / f"clock-{name}"
        made = StepClock(clock)
        factory = partial(make_engine, folder / "sync-model", clock, source, file, max_num_seqs=max_num_seqs)
        engine = await processes.start(name, factory)
        stack.push_async_callback(engine.close)
        return engine, made

    def way(engine: Engine, *clocks: StepClock, given: State = state) -> Way:
        return Way(engine=engine, clocks=clocks, update=lambda v: engine.update_weights(given.items(), version=v))

    several = [await start(f"replica-{number}", "caller") for number in range(2)]
    replicas = EngineReplicas([engine for engine, _ in several])
    stack.push_async_callback(replicas.close)
    files = way(*await start("files", "file"), given={})

    async def through_file(version: int) -> None:
        save_file(dict(state), file)
        await files.update(version)

    return {
        "in-process": replace(way(*await start("in-process", "here"), given={}), starts_inside=True),
        "process": way(*await start("process", "caller")),
        "2 processes": way(replicas, *(clock for _, clock in several)),
        "files": replace(files, update=through_file),
    }


def memcpy_seconds(copy: State, state: State) -> float:
    """Copy tensor by tensor into existing memory; return the median of a few times."""
    walls: list[float] = []
    for _ in range(_MEMCPY_TIMES):
        start_s = time.perf_counter()
        for name, tensor in state.items():
            copy[name].copy_(tensor)
        walls.append(time.perf_counter() - start_s)
    return median(walls)


async def _idle(way: Way, version: int) -> Figures:
    start_s, end_s = await _timed_update(way, version)
    return {
        "wall_s": end_s - start_s,
        "before_copy_s": max(0.0, min(clock.update_start_s for clock in way.clocks) - start_s),
        "copy_s": max(clock.update_end_s - clock.update_start_s for clock in way.clocks),
    }


async def _timed_update(way: Way, version: int) -> tuple[float, float]:
    start_s = time.perf_counter()
    await way.update(version)
    clock = way.clocks[0]
    return (clock.update_start_s, clock.update_end_s) if way.starts_inside else (start_s, time.perf_counter())


async def busy_figures(way: Way, version: int, request: Request) -> Figures:
    """Measure an update while samples run, which are aborted some steps later."""
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
        raise BenchError(f"tokens {sorted(found)} carry version {version} first, but by their times {firsts} do")
    pairs = list(zip(way.clocks, firsts, strict=True))
    intervals = [(np.diff(clock.passes_s), first - 1) for clock, first in pairs]
    steps = [float(np.median(np.delete(each, at))) for each, at in intervals]
    gaps = [float(each[at]) - step_s for (each, at), step_s in zip(intervals, steps, strict=True)]
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
    """Wait until every engine has made so many steps."""
    async with asyncio.timeout(_TIMEOUT_S):
        while any(clock.num_passes < num_passes for clock in clocks):
            if running.done():
                raise BenchError(f"all {len(running.result())} samples ended before the weights changed")
            await asyncio.sleep(_POLL_S)
