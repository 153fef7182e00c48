"""The part sandbox: a program that does nothing, in a sandbox and in a bare interpreter, in turn."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds
from gcore_bench.rollout.options import RolloutOptions
from gcore_rollout import Isolation, Sandbox, SandboxError

BARE = "bare"
_COMMAND = [sys.executable, "-I", "-S", "-c", "pass"]
_ISOLATIONS: tuple[Isolation, ...] = ("limits", "namespaces")

Call = Callable[[], Awaitable[object]]


async def measure(options: RolloutOptions, folder: Path, rounds: Rounds) -> None:
    """Measure every isolation in turn; one that this machine does not support is left out."""
    del folder
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        ways: dict[str, tuple[Call, Call]] = {BARE: (_bare, partial(_bare_in, pool))}
        for isolation in _ISOLATIONS:
            try:
                sandbox = Sandbox(isolation=isolation, max_concurrency=cores)
            except SandboxError as error:
                rounds.say(f"sandbox: {error}")
                continue
            call = partial(_sandboxed, sandbox)
            ways[isolation] = (call, call)
        for alone, together in ways.values():
            await alone()
            await asyncio.gather(*(together() for _ in range(cores)))
        for turn in rounds.turns(ways):
            row = await _figures(*ways[turn.contender], options.calls)
            turn.done({turn.contender: row}, f"{row['alone_ms']:.1f} ms")


async def _figures(alone: Call, together: Call, calls: int) -> Figures:
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
    """Return CPU seconds of this process and of all its descendants that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
