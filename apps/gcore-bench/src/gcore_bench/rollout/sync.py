"""The part sync: updates of weights in idle engines and in engines with running samples, in turn with a memcpy."""

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds
from gcore_bench.rollout.engines import start_engine
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import sync_request
from gcore_rollout import Completion, Engine, EngineReplicas, Request

MEMCPY = "memcpy"
_MEMCPY_TIMES = 3
_PASSES_AROUND = 4
"""Steps of the samples before the update, and after it."""
_POLL_S = 0.005
_TIMEOUT_S = 120.0
_MOST_PASSES = 4096

State = Mapping[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]


class StepClock:
    """Times of an engine's forward passes since `reset`, and of its last update, in a file that processes map.

    `time.perf_counter` is the same clock in all processes of a Linux machine. Clocks of one file share their times.
    """

    def __init__(self, path: Path) -> None:
        values = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=(3 + _MOST_PASSES,))
        self._num_passes, self._update_s, self._passes_s = values[:1], values[1:3], values[3:]

    def reset(self) -> None:
        """Delete the recorded passes."""
        self._num_passes[0] = 0

    def note_pass(self) -> None:
        number = self.num_passes
        if number < _MOST_PASSES:
            self._passes_s[number] = time.perf_counter()
            self._num_passes[0] = number + 1

    @contextmanager
    def updating(self) -> Generator[None]:
        """Record when an update of weights starts and ends."""
        self._update_s[0] = time.perf_counter()
        yield
        self._update_s[1] = time.perf_counter()

    @property
    def num_passes(self) -> int:
        return int(self._num_passes[0])

    @property
    def passes_s(self) -> NDArray[np.float64]:
        """End times of the passes, [P]."""
        return self._passes_s[: self.num_passes].copy()

    @property
    def update_s(self) -> tuple[float, float]:
        """Start and end of the last update."""
        return float(self._update_s[0]), float(self._update_s[1])


def _make_engine(model: Path, clock: Path, max_num_seqs: int, file: Path | None, is_read_once: bool) -> Engine:
    """Make an `HFEngine` that records its times, in its process: it imports transformers.

    Args:
        clock: path of the `StepClock`.
        file: safetensors with new weights; None: the caller gives them.
        is_read_once: keep the weights of ``file`` in this process, instead of reading it in each update.
    """
    from gcore_rollout import HFEngine

    times = StepClock(clock)
    kept = {name: tensor.clone() for name, tensor in load_file(file).items()} if file and is_read_once else None

    class ClockedHFEngine(HFEngine):
        async def update_weights(self, weights: Weights, *, version: int) -> None:
            with times.updating():
                own = weights if file is None else (kept or load_file(file)).items()
                await super().update_weights(own, version=version)

        async def update_weights_in_place(self, weights: Weights, *, version: int) -> bool:
            if file is not None:
                # This engine does not keep the tensors after the update.
                await self.update_weights(weights, version=version)
                return False
            with times.updating():
                return await super().update_weights_in_place(weights, version=version)

        def record_passes(self) -> None:
            # Pass i makes token i of a request, if there is no other request.
            self._model.register_forward_hook(lambda *_: times.note_pass())

    engine = ClockedHFEngine.from_pretrained(model, eos_token_ids=[], max_num_seqs=max_num_seqs)
    # Not before: passes that load the engine do not count.
    engine.record_passes()
    return engine


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to update the weights of an engine."""

    engine: Engine
    clocks: Sequence[StepClock]
    """The clock of each process."""
    weights: Callable[[], Weights]
    """Returns the new weights that the caller gives."""
    starts_inside: bool = False
    """True if the measured call is made in the engine's process."""


async def measure(options: RolloutOptions, folder: Path, rounds: Rounds) -> None:
    """Measure the copy and every way in turn; the versions of tokens must agree with their times."""
    # Copies in this process use as many threads as those in the others.
    torch.set_num_threads(options.threads)
    state = {name: tensor.clone() for name, tensor in load_file(folder / "sync-model" / "model.safetensors").items()}
    async with AsyncExitStack() as stack:
        ways = await _ways(state, options, folder, stack)
        versions = count(1)
        for way in ways.values():
            await _timed_update(way, next(versions))
        copy = {name: tensor.clone() for name, tensor in state.items()}
        for turn in rounds.turns((MEMCPY, *ways)):
            name = turn.contender
            if name == MEMCPY:
                size_bytes = float(sum(tensor.nbytes for tensor in state.values()))
                row = {"wall_s": memcpy_seconds(copy, state), "size_bytes": size_bytes}
            else:
                try:
                    row = await _idle_figures(ways[name], next(versions))
                    row |= await busy_figures(ways[name], next(versions), sync_request(options))
                except Exception as error:
                    raise BenchError(f"{name} failed: {error}") from error
            turn.done({name: row}, f"{row['wall_s']:.3f} s")


async def _ways(state: State, options: RolloutOptions, folder: Path, stack: AsyncExitStack) -> dict[str, Way]:
    model, file = folder / "sync-model", folder / "weights.safetensors"

    async def start(name: str, read: Path | None = None) -> dict[str, Any]:
        path = folder / f"clock-{name}"
        clock = StepClock(path)
        factory = partial(_make_engine, model, path, sync_request(options).n, read, read != file)
        return {"engine": await start_engine(name, factory, options, stack), "clocks": [clock]}

    def written() -> Weights:
        save_file(dict(state), file)
        return ()

    several = [await start(f"replica-{number}") for number in range(2)]
    replicas = EngineReplicas([one["engine"] for one in several])
    stack.push_async_callback(replicas.close)
    clocks = [clock for one in several for clock in one["clocks"]]
    in_process = await start("in-process", model / "model.safetensors")
    return {
        "in-process": Way(**in_process, weights=tuple, starts_inside=True),
        "process": Way(**await start("process"), weights=state.items),
        "2 processes": Way(engine=replicas, clocks=clocks, weights=state.items),
        "files": Way(**await start("files", file), weights=written),
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


async def _timed_update(way: Way, version: int) -> tuple[float, float]:
    start_s = time.perf_counter()
    await way.engine.update_weights(way.weights(), version=version)
    return way.clocks[0].update_s if way.starts_inside else (start_s, time.perf_counter())


async def _idle_figures(way: Way, version: int) -> Figures:
    start_s, end_s = await _timed_update(way, version)
    copies_s = [clock.update_s for clock in way.clocks]
    return {
        "wall_s": end_s - start_s,
        "before_copy_s": max(0.0, min(copy_start_s for copy_start_s, _ in copies_s) - start_s),
        "copy_s": max(copy_end_s - copy_start_s for copy_start_s, copy_end_s in copies_s),
    }


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
    passes_s = [clock.passes_s for clock in way.clocks]
    firsts = [int(np.searchsorted(p, clock.update_s[1])) for p, clock in zip(passes_s, way.clocks, strict=True)]
    found = {int(np.argmax(c.weight_versions == version)) for c in completions}
    if found != set(firsts):
        raise BenchError(f"tokens {sorted(found)} carry version {version} first, but by their times {firsts} do")
    pairs = list(zip(passes_s, firsts, strict=True))
    steps = [float(np.median(np.delete(np.diff(p), first - 1))) for p, first in pairs]
    gaps = [float(p[first] - p[first - 1]) - step_s for (p, first), step_s in zip(pairs, steps, strict=True)]
    return {
        "busy_s": end_s - start_s,
        "no_token_s": max(0.0, *gaps),
        "step_s": max(steps),
        "old_steps": float(max(first - int(np.searchsorted(p, start_s)) for p, first in pairs)),
        "first_token_s": min(float(p[first]) - start_s for p, first in pairs),
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
