"""The part dispatch: steps of every payload under every contender, in turn."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from gcore_bench.controller.cluster import lack, local_cluster, object_store_bytes
from gcore_bench.controller.figures import WARMUP_STEPS, ControlFigures, step_row
from gcore_bench.controller.memory import copy_seconds
from gcore_bench.controller.options import Contender, ControllerOptions
from gcore_bench.controller.workload import Payload
from gcore_bench.grpo.errors import BenchError
from gcore_bench.trainer.figures import Run

MEMCPY, ALONE = "memcpy", "work alone"

_VERL_ENVIRONMENT = {"verl": {}, "verl-numpy": {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}}


def part_name(payload_mb: int) -> str:
    """Of the runs of one payload."""
    return f"dispatch {payload_mb} MB"


async def run_rounds(options: ControllerOptions, *, say: Callable[[str], object]) -> list[Run]:
    """All payloads, smallest first; what does not fit into memory is said and left out.

    Raises:
        BenchError: a contender failed, or its features did not arrive as they were made.
    """
    runs: list[Run] = []
    for payload_mb in sorted(set(options.payload_mb)):
        store_bytes = object_store_bytes(options, payload_mb)
        # A store keeps every page that it has ever used.
        with local_cluster(store_bytes):
            runs += await _rounds_of(payload_mb, options, store_bytes, say=say)
    return runs


async def _rounds_of(
    payload_mb: int, options: ControllerOptions, store_bytes: int, *, say: Callable[[str], object]
) -> list[Run]:
    payload = Payload.of(nbytes=payload_mb << 20, num_samples=options.samples, seed=options.seed)
    part = part_name(payload_mb)
    fitting: list[Contender] = []
    for contender in options.contenders:
        if missing := lack(contender, payload.nbytes, store_bytes):
            say(f"{part}: {contender} is left out: it needs {missing}")
        else:
            fitting.append(contender)
    runs: list[Run] = []
    if not fitting:
        return runs
    contenders = _Contenders(options, fitting)
    names = [MEMCPY, ALONE, *(name for contender in fitting for name in contenders.rows(contender))]
    for number in range(1, options.rounds + 1):
        for name in tuple(names):
            load = os.getloadavg()[0]
            try:
                row = await contenders.measure(name, payload)
            except _OutOfMemoryError:
                say(f"{part}, round {number} of {options.rounds}: {name} is left out from here on: it had no memory")
                names.remove(name)
                continue
            runs.append(Run(part=part, contender=name, round=number, load=load, rows={name: row}))
            say(f"{part}, round {number} of {options.rounds}: {name} {row['step_s']:.3f} s, load {load:.1f}")
    return runs


class _OutOfMemoryError(Exception):
    """Ray ended a contender's processes before the machine ran out of memory."""


class _Contenders:
    """The actors of contenders; but for gcore's controllers, which come and go."""

    def __init__(self, options: ControllerOptions, names: Sequence[Contender]) -> None:
        from gcore_bench.controller.services import start_workers

        self._options = options
        self._workers = start_workers(options.workers)
        self._drivers = {
            name: _start_driver(environment, options.workers)
            for name, environment in _VERL_ENVIRONMENT.items()
            if name in names
        }

    def rows(self, contender: str) -> list[str]:
        """Names of the rows of a contender."""
        if contender == "gcore":
            return [f"gcore-{count}" for count in self._options.controllers]
        return [contender]

    async def measure(self, name: str, payload: Payload) -> dict[str, float]:
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
            # Ray says how all processes of the machine were in hundreds of lines.
            reason = str(error).strip().partition("\n")[0]
            raise BenchError(f"{name} failed at {payload.nbytes / 2**20:,.0f} MB: {reason}") from error

    async def _steps(self, name: str, payload: Payload) -> list[ControlFigures]:
        steps = self._options.steps
        if name in self._drivers:
            return [await _result(self._drivers[name].run.remote(payload, steps))]
        from gcore_bench.controller.gcore_contender import run_controllers

        count = int(name.rpartition("-")[2])
        return await run_controllers(self._workers, payload, num_controllers=count, num_steps=steps)

    async def _alone(self, payload: Payload) -> float:
        """Seconds of making the features and reading them where they are: the median of all steps that count."""
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
    """The actor of verl's driver, the one process here that imports verl, beside its workers."""

    def __init__(self, num_workers: int) -> None:
        from gcore_bench.controller.verl_driver import VerlDriver

        self._driver = VerlDriver(num_workers)

    def run(self, payload: Payload, num_steps: int) -> Any:
        return self._driver.run(payload, num_steps)


def _start_driver(environment: dict[str, str], num_workers: int) -> Any:
    import ray

    remote: Any = ray.remote(_DriverProcess)
    return remote.options(num_cpus=1, runtime_env={"env_vars": environment}).remote(num_workers)


async def _result(call: Any) -> Any:
    """With the error that was raised over there."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except RayTaskError as error:
        raise error.cause from None
