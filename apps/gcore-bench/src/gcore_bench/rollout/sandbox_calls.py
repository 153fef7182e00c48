"""The part sandbox: the shortest program, in a sandbox and in a bare interpreter, in turn."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gcore_bench.grpo.errors import BenchError
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.trainer.figures import Run
from gcore_rollout import Isolation, Sandbox, SandboxError

BARE = "bare"
_COMMAND = [sys.executable, "-I", "-S", "-c", "pass"]
_ISOLATIONS: tuple[Isolation, ...] = ("limits", "namespaces")

Call = Callable[[], Awaitable[object]]


async def run_rounds(options: RolloutOptions, *, say: Callable[[str], object]) -> list[Run]:
    """Every way in turn, ``options.rounds`` times; an isolation that this machine does not give is left out.

    Raises:
        BenchError: a program did not end as it should.
    """
    cores = os.cpu_count() or 1
    runs: list[Run] = []
    with ThreadPoolExecutor(cores) as pool:
        ways: dict[str, tuple[Call, Call]] = {BARE: (_bare, partial(_bare_in, pool))}
        for isolation in _ISOLATIONS:
            try:
                sandbox = Sandbox(isolation=isolation, max_concurrency=cores)
            except SandboxError as error:
                say(f"sandbox: {error}")
                continue
            ways[isolation] = (partial(_sandboxed, sandbox), partial(_sandboxed, sandbox))
        for alone, together in ways.values():
            await alone()
            await asyncio.gather(*(together() for _ in range(cores)))
        for number in range(1, options.rounds + 1):
            for name, (alone, together) in ways.items():
                load = os.getloadavg()[0]
                row = await _figures(alone, together, options.calls)
                runs.append(Run(part="sandbox", contender=name, round=number, load=load, rows={name: row}))
                say(f"sandbox, round {number} of {options.rounds}: {name} {row['alone_ms']:.1f} ms, load {load:.1f}")
    return runs


async def _figures(alone: Call, together: Call, calls: int) -> dict[str, float]:
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    for _ in range(calls):
        await alone()
    alone_s, cpu_s = time.perf_counter() - start_s, _cpu_s() - start_cpu_s
    start_s = time.perf_counter()
    await asyncio.gather(*(together() for _ in range(calls)))
    together_s = time.perf_counter() - start_s
    return {
        "alone_ms": 1000 * alone_s / calls,
        "cpu_ms": 1000 * cpu_s / calls,
        "together_ms": 1000 * together_s / calls,
    }


async def _bare() -> None:
    subprocess.run(_COMMAND, check=True)


async def _bare_in(pool: ThreadPoolExecutor) -> None:
    run = partial(subprocess.run, _COMMAND, check=True)
    await asyncio.get_running_loop().run_in_executor(pool, run)


async def _sandboxed(sandbox: Sandbox) -> None:
    result = await sandbox.run("pass")
    if result.outcome != "finished":
        raise BenchError(f"a sandboxed program {result.outcome}: {result.stderr}")


def _cpu_s() -> float:
    """Of this process and of those that it has waited for, with those that they have waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
