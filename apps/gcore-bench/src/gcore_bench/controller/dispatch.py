"""The part dispatch: steps of every payload under every contender, in turn."""

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from gcore_bench.controller.cluster import lack, local_cluster, object_store_bytes
from gcore_bench.controller.figures import WARMUP_STEPS, ControlFigures, copy_seconds, step_row
from gcore_bench.controller.options import ContenderName, ControllerOptions
from gcore_bench.controller.workload import Payload
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds, Run

MEMCPY, ALONE = "memcpy", "work alone"

_VERL_ENVIRONMENT = {"verl": {}, "verl-numpy": {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}}


def part_name(payload_mb: int) -> str:
    """Return the name of the part that measures one payload."""
    return f"dispatch {payload_mb} MB"


async def run_rounds(options: ControllerOptions, *, say: Callable[[str], object]) -> list[Run]:
    """Measure all payloads, smallest first; those that do not fit into memory are reported and left out.

    Raises:
        BenchError: a contender failed, or its features arrived with other bytes.
    """
    runs: list[Run] = []
    for payload_mb in sorted(set(options.payload_mb)):
        store_bytes = object_store_bytes(options, payload_mb)
        # A new cluster each time, because a store keeps every page that it has used.
        with local_cluster(store_bytes):
            runs += await _rounds_of(payload_mb, options, store_bytes, say=say)
    return runs


async def _rounds_of(
    payload_mb: int, options: ControllerOptions, store_bytes: int, *, say: Callable[[str], object]
) -> list[Run]:
    payload = Payload.of(nbytes=payload_mb << 20, num_samples=options.samples, seed=options.seed)
    part = part_name(payload_mb)
    fitting: list[ContenderName] = []
    for contender in options.contenders:
        if missing := lack(contender, payload.nbytes, store_bytes):
            say(f"{part}: {contender} is left out; it needs {missing}")
        else:
            fitting.append(contender)
    rounds = Rounds(part, options.rounds, say=say)
    if not fitting:
        return []
    contenders = _Contenders(options, fitting)
    names = [MEMCPY, ALONE, *(name for contender in fitting for name in contenders.rows(contender))]
    for turn in rounds.turns(names):
        try:
            row = await contenders.measure(turn.contender, payload)
        except _OutOfMemoryError:
            say(f"{turn.where} is left out from now on; it ran out of memory")
            names.remove(turn.contender)
            continue
        turn.done({turn.contender: row}, f"{row['step_s']:.3f} s")
    return rounds.runs


class _OutOfMemoryError(Exception):
    """Ray ended a contender's processes before the machine ran out of memory."""


class _Contenders:
    """The actors of contenders, except gcore's controllers, which exist only while they are measured."""

    def __init__(self, options: ControllerOptions, names: Sequence[ContenderName]) -> None:
        from gcore_bench.controller.contenders.gcore import start_workers

        self._options = options
        self._workers = start_workers(options.workers)
        self._drivers = {
            name: _start_driver(environment, options.workers)
            for name, environment in _VERL_ENVIRONMENT.items()
            if name in names
        }

    def rows(self, contender: str) -> list[str]:
        """Return the names of the rows of a contender."""
        if contender == "gcore":
            return [f"gcore-{count}" for count in self._options.controllers]
        return [contender]

    async def measure(self, name: str, payload: Payload) -> Figures:
        """Return the figures of one turn."""
        if name == MEMCPY:
            return {"step_s": copy_seconds(payload.nbytes)}
        if name == ALONE:
            return {"step_s": await self._alone(payload)}
        try:
            return step_row(await self._steps(name, payload))
        except BenchError:
            raise
        except Exception as error:
            if "running low on memory" in str(error):
                raise _OutOfMemoryError from error
            # The rest of Ray's message is hundreds of lines about all processes of the machine.
            reason = str(error).strip().partition("\n")[0]
            raise BenchError(f"{name} failed at {payload.nbytes / 2**20:,.0f} MB: {reason}") from error

    async def _steps(self, name: str, payload: Payload) -> list[ControlFigures]:
        steps = self._options.steps
        if name in self._drivers:
            return [await _result(self._drivers[name].run.remote(payload, steps))]
        from gcore_bench.controller.contenders.gcore import run_controllers

        count = int(name.rpartition("-")[2])
        return await run_controllers(self._workers, payload, num_controllers=count, num_steps=steps)

    async def _alone(self, payload: Payload) -> float:
        """Return the median seconds of a step that makes the features and reads them where they are."""
        parts = payload.parts(len(self._workers))
        seconds: list[float] = []
        for _ in range(WARMUP_STEPS + self._options.steps):
            start_s = time.perf_counter()
            pairs = zip(self._workers, parts, strict=True)
            await asyncio.gather(*(worker.only_make.remote(payload, part) for worker, part in pairs))
            await asyncio.gather(*(worker.only_read.remote() for worker in self._workers))
            seconds.append(time.perf_counter() - start_s)
        await asyncio.gather(*(worker.forget.remote() for worker in self._workers))
        return median(seconds[WARMUP_STEPS:])


class _DriverProcess:
    """The actor of verl's driver; this process and its workers are the only ones that import verl."""

    def __init__(self, num_workers: int) -> None:
        from gcore_bench.controller.contenders.verl import VerlDriver

        self._driver = VerlDriver(num_workers)

    def run(self, payload: Payload, num_steps: int) -> Any:
        return self._driver.run(payload, num_steps)


def _start_driver(environment: dict[str, str], num_workers: int) -> Any:
    import ray

    remote: Any = ray.remote(_DriverProcess)
    return remote.options(num_cpus=1, runtime_env={"env_vars": environment}).remote(num_workers)


async def _result(call: Any) -> Any:
    """Await a call; raise the error that the actor raised."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except RayTaskError as error:
        raise error.cause from None
