"""`gcore-bench controller`: steps of every payload under every contender, in turn, and simulated clusters."""

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any

import psutil
from rich.console import Console

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.report import (
    NOTES,
    aims,
    dispatch_rows,
    dispatch_table,
    run_sizes,
    scaling_table,
    write_page,
)
from gcore_bench.controller.workload import ALONE, MEMCPY, WARMUP_STEPS, Payload, copy_seconds, step_row
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import environment, stderr_to
from gcore_bench.harness.report import Figures, Rounds, Run, Session

NEEDS = {"gcore": 3.0, "verl": 6.0, "verl-numpy": 6.0}
"""Peak memory over the payload: objects of this step and the last one; under verl also the serialised copies of
workers and those of the driver, up to four."""

_IN_STORE = 2.0
_SPARE_BYTES = 128 << 20
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # If the command was started by `uv run`, Ray would build its environment again for every process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns of four times as many processes; as many start before they are needed.
    "RAY_worker_maximum_startup_concurrency": "8",
}
_VERL_ENVIRONMENT = {"verl": {}, "verl-numpy": {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}}


def run(options: ControllerOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or features arrived with other bytes.
    """
    options = options.sized()
    with Session(options, console, notes=[NOTES[part] for part in NOTES if part in options.parts]) as session:
        for part in dict.fromkeys(options.parts):
            if part == "dispatch":
                runs: list[Run] = []
                with stderr_to(session.folder / "log"):
                    for payload_mb in sorted(set(options.payload_mb)):
                        runs += asyncio.run(_rounds_of(payload_mb, options, session.say))
                rows = dispatch_rows(runs)
                table = dispatch_table(rows, options, fmean(run.load for run in runs))
                session.add(part, tables=[table], lines=aims(rows), rows=rows, runs=runs, aims=aims(rows))
                continue
            sizes = run_sizes(options, say=session.say)
            session.add(part, tables=[scaling_table(sizes)], rows=sizes)
            if options.html is not None:
                write_page(options.html, sizes)


def object_store_bytes(options: ControllerOptions, payload_mb: int) -> int:
    """Return the size of Ray's object store for a payload."""
    if options.object_store_mb:
        return options.object_store_mb << 20
    wanted = int(2.25 * (payload_mb << 20)) + _SPARE_BYTES
    return min(wanted, int(0.45 * psutil.virtual_memory().available))


@contextmanager
def _local_cluster(store_bytes: int) -> Generator[Any]:
    """Start a new Ray cluster of this machine alone, and yield Ray."""
    with environment(**_ENVIRONMENT):
        import ray

        # verl reserves ten cores for each worker; nothing here is scheduled by cores.
        options: dict[str, Any] = {"num_cpus": 1000, "object_store_memory": store_bytes, "include_dashboard": False}
        ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
        try:
            yield ray
        finally:
            ray.shutdown()


async def _rounds_of(payload_mb: int, options: ControllerOptions, say: Callable[[str], object]) -> list[Run]:
    """Measure a payload; contenders that lack the memory for it are reported and left out."""
    store_bytes = object_store_bytes(options, payload_mb)
    payload = Payload.of(nbytes=payload_mb << 20, num_samples=options.samples, seed=options.seed)
    part = f"dispatch {payload_mb} MB"
    names: list[str] = []
    rounds = Rounds(part, options.rounds, say=say)
    # A new cluster each time, because a store keeps every page that it has used.
    with _local_cluster(store_bytes) as ray:
        from gcore_bench.controller.contenders.gcore import BenchWorker

        for contender in options.contenders:
            if missing := lack(contender, payload.nbytes, store_bytes):
                say(f"{part}: {contender} is left out; it needs {missing}")
            else:
                names += [f"gcore-{n}" for n in options.controllers] if contender == "gcore" else [contender]
        if not names:
            return []
        driver = ray.remote(_DriverProcess)
        drivers = {
            name: driver.options(num_cpus=1, runtime_env={"env_vars": variables}).remote(options.workers)
            for name, variables in _VERL_ENVIRONMENT.items()
            if name in names
        }
        workers = [ray.remote(BenchWorker).options(num_cpus=1).remote() for _ in range(options.workers)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        names = [MEMCPY, ALONE, *names]
        for turn in rounds.turns(names):
            row = await _measure(turn.contender, payload, workers, drivers, options.steps)
            if row is None:
                say(f"{turn.where} is left out from now on; it ran out of memory")
                names.remove(turn.contender)
            else:
                turn.done({turn.contender: row}, f"{row['step_s']:.3f} s")
    return rounds.runs


def lack(contender: str, payload_bytes: int, store_bytes: int) -> str:
    """Return what a payload lacks to fit, or an empty string."""
    if _IN_STORE * payload_bytes > store_bytes:
        return f"{_IN_STORE * payload_bytes / 2**20:,.0f} MB of the object store, which has {store_bytes / 2**20:,.0f}"
    needed, free = NEEDS[contender] * payload_bytes, psutil.virtual_memory().available
    if needed > free:
        return f"about {needed / 2**20:,.0f} MB of memory, of which {free / 2**20:,.0f} are free"
    return ""


async def _measure(
    name: str, payload: Payload, workers: Sequence[Any], drivers: Mapping[str, Any], num_steps: int
) -> Figures | None:
    """Return the figures of one turn; None: Ray ended processes before the machine ran out of memory."""
    from gcore_bench.controller.contenders.gcore import dispatch_program, run_alone
    from gcore_controller import run_ray

    if name == MEMCPY:
        return {"step_s": copy_seconds(payload.nbytes)}
    if name == ALONE:
        return {"step_s": await run_alone(workers, payload, num_steps=num_steps)}
    try:
        if name in drivers:
            return step_row([await drivers[name].run.remote(payload, num_steps)])
        program = partial(dispatch_program, payload=payload, num_steps=WARMUP_STEPS + num_steps)
        return step_row(await run_ray(program, roles=[*workers], world_size=int(name.rpartition("-")[2])))
    except Exception as raised:
        # Ray's own error of an actor's error holds hundreds of lines about all processes of the machine.
        error = getattr(raised, "cause", None) or raised
        if isinstance(error, BenchError):
            raise error from None
        if "running low on memory" in str(error):
            return None
        reason = str(error).strip().partition("\n")[0]
        raise BenchError(f"{name} failed at {payload.nbytes / 2**20:,.0f} MB: {reason}") from error


class _DriverProcess:
    """The actor of verl's driver; this process and its workers are the only ones that import verl."""

    def __init__(self, num_workers: int) -> None:
        from gcore_bench.controller.contenders.verl import VerlDriver

        self._driver = VerlDriver(num_workers)

    def run(self, payload: Payload, num_steps: int) -> Any:
        return self._driver.run(payload, num_steps)
