"""Processes that measure, and the time and memory of work in them.

A process is either a new interpreter whose memory is watched (`run_child`), or forked from a server that has imported
torch and transformers once (`run_processes`). It ends with all that it has started.
"""

import ctypes
import gc
import json
import logging
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import psutil

from gcore_bench.harness.report import BenchError, Figures

if TYPE_CHECKING:
    from gcore_runs import Display

QUIET: dict[str, str] = {
    # Idle OpenMP threads spin by default, which slows down contenders at random when other work is on the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    # The server that is forked imports modules that look for CUDA, which would keep it from the forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of every contender's process."""

_TRAINING = (
    "torch._dynamo torch.distributed.fsdp transformers.models.auto.modeling_auto "
    "transformers.models.qwen2.modeling_qwen2 gcore_trainer.torch.packed_model gcore_trainer.trainer"
)
_POLL_S = 2.0
"""Reading the memory of thirty processes takes a tenth of a second of a core."""
_FORKED_TIMEOUT_S = 3600

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The work of one process."""

    work: str
    """Name of the module whose ``run(spec)`` does it, or ``module:function``."""
    part: str = ""
    contender: str
    folder: Path
    """Scratch folder, which the ranks of a contender share."""
    options: Any = None
    """The work's settings, which can be pickled."""
    rank: int = 0
    world_size: int = 1
    threads: int = 1
    """Threads of torch."""

    def of_ranks(self) -> "list[Spec]":
        """Return the same work for each rank."""
        return [replace(self, rank=rank) for rank in range(self.world_size)]

    @property
    def result_file(self) -> Path:
        """The file of the work's result; its log and its pickled spec are next to it."""
        return self.folder / f"{self.contender}-{self.rank}.json"


Sizes: TypeAlias = list[tuple[float, int]]
"""Bytes of all processes of a contender, by time on the monotonic clock.

Resident memory; pages that several processes share count once (proportional set size).
"""


@contextmanager
def environment(**values: str) -> Generator[None]:
    """Add `QUIET` and ``values`` to this process's environment, which processes that start meanwhile inherit."""
    before = os.environ.copy()
    os.environ.update(QUIET, **values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def stderr_to(log: Path) -> Generator[None]:
    """Send stderr of this process, and of processes that start meanwhile, to a file."""
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextmanager
def joined_world(spec: Spec) -> Generator[None]:
    """Join the gloo group of all ranks of a contender, which meet in a file of their folder."""
    import torch.distributed as dist

    method = f"file://{spec.folder}/store"
    dist.init_process_group(
        "gloo",
        init_method=method,
        rank=spec.rank,
        world_size=spec.world_size,
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_program(
    command: Sequence[str],
    *,
    name: str,
    folder: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    poll_s: float = _POLL_S,
    timeout_s: float = math.inf,
) -> Sizes:
    """Run a command in a folder until it ends, and return its size over time; no process that it has started is left.

    Its environment is that of this process, with `QUIET` and ``environment``.

    Raises:
        BenchError: it failed, or did not end within ``timeout_s``.
    """
    seen: set[psutil.Process] = set()
    sizes: Sizes = []
    end_s = time.monotonic() + timeout_s
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | QUIET | dict(environment or {}),
            cwd=folder,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                if time.monotonic() > end_s:
                    raise BenchError(f"{name} did not end within {timeout_s:.0f} s")
                sizes.append((time.monotonic(), _measure_size(process.pid, seen)))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(poll_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for member in seen:
                # May be in a session of its own; psutil kills no process that has reused the number of a dead one.
                with suppress(psutil.NoSuchProcess):
                    member.kill()
    if process.returncode:
        raise BenchError(f"{name} failed: {_last_line(log)} (see {log})")
    return sizes


def run_child(
    spec: Spec, *, environment: Mapping[str, str] | None = None, **options: Any
) -> tuple[Any, Sizes]:
    """Do a spec's work in a new interpreter, with options of `run_program`; return its result, and its size over time.

    Its log is ``CONTENDER-RANK.log`` in the spec's folder.

    Raises:
        BenchError: it failed, or did not end within ``timeout_s``.
    """
    file = spec.result_file.with_suffix(".spec")
    file.write_bytes(pickle.dumps(spec))
    sizes = run_program(
        [sys.executable, "-m", "gcore_bench.harness.processes", str(file)],
        name=spec.contender,
        folder=Path.cwd(),
        log=file.with_suffix(".log"),
        environment={"OMP_NUM_THREADS": str(spec.threads), **(environment or {})},
        **options,
    )
    return json.loads(spec.result_file.read_text()), sizes


def run_training(
    app: str, options: Sequence[str], *, name: str, folder: Path, environment: Mapping[str, str]
) -> list[dict[str, float]]:
    """Run ``APP train`` in a folder from its first step on, with its log in ``NAME.log``.

    Returns:
        The metrics of each step.
    """
    run = folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", app, "train", "--name", name, *options]
    log = folder / f"{name}.log"
    run_program(
        command,
        name=name,
        folder=folder,
        log=log,
        environment=environment,
    )
    return read_steps(run)


def train_here(words: Sequence[str], *, display: "Display | None" = None) -> list[dict[str, float]]:
    """Run ``gcore-llm train`` with these options in this process, from its first step on.

    Returns:
        The metrics of each step.
    """
    from rich.console import Console

    from gcore_llm.cli import parse_train
    from gcore_llm.training import train
    from gcore_runs import Display

    config = parse_train(words)
    # A run of this name would be resumed.
    shutil.rmtree(Path(config.runs_dir) / config.name, ignore_errors=True)
    with display or Display(Console(quiet=True)) as open_display:
        return read_steps(train(config, open_display).run)


def read_steps(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a run, without those of evaluations."""
    from gcore_runs import read_jsonl

    return [row for row in read_jsonl(run / "metrics.jsonl") if "timing_s/step" in row]


def highest_bytes(sizes: Sizes) -> int:
    """Return the highest of some sizes; 0 if there are none."""
    return max((size_bytes for _, size_bytes in sizes), default=0)


def start_server(threads: int, *, preload: Sequence[str] = (), **variables: str) -> None:
    """Start the server that `run_processes` forks, with modules and environment variables; later calls do nothing."""
    modules: list[str] = [*preload] or [*_TRAINING.split()]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    with environment(OMP_NUM_THREADS=str(threads), **variables):
        forkserver.ensure_running()


def run_processes(specs: Sequence[Spec]) -> Figures:
    """Fork a process for each spec, one a rank, and return the highest of every figure over the ranks."""
    folder = specs[0].folder
    # Those of a run before are no result of this one.
    for stale in (folder / "store", folder / "failure"):
        stale.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_work_forked, args=(spec,)) for spec in specs]
    try:
        for process in processes:
            process.start()
        # If one fails, the others would wait for it.
        running = processes
        while running and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in running])
            running = [process for process in processes if process.exitcode is None]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(process.exitcode for process in processes):
        reason = f"a process was killed, or did not end within {_FORKED_TIMEOUT_S} s"
        with suppress(FileNotFoundError):
            reason = (folder / "failure").read_text()
        raise BenchError(f"{specs[0].contender} failed: {reason}")
    ranks = [json.loads(spec.result_file.read_text()) for spec in specs]
    return {metric: max(figures[metric] for figures in ranks) for metric in ranks[0]}


def _work_forked(spec: Spec) -> None:
    """Do the work of a spec in a forked process, whose stdout and stderr go to a log, and which ends in time."""
    signal.alarm(_FORKED_TIMEOUT_S)
    with spec.result_file.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _work(spec)


def _work(spec: Spec) -> None:
    """Write the result of a spec's work; if it fails, the process ends, and ``failure`` in its folder says why."""
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    module, _, function = spec.work.partition(":")
    try:
        torch.set_num_threads(spec.threads)
        result = getattr(import_module(module), function or "run")(spec)
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        (spec.folder / "failure").write_text(reason)
        print(reason, file=sys.stderr, flush=True)
        # Destructors of process groups would wait for ranks that are still at work.
        os._exit(1)
    spec.result_file.write_text(json.dumps(result))


def _measure_size(pid: int, seen: set[psutil.Process]) -> int:
    """Return the bytes of a process and all its descendants, which are added to ``seen``."""
    size_bytes = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        members = [root]
        members.extend(root.children(recursive=True))
        seen.update(members)
        for member in members:
            with suppress(psutil.Error):  # it has ended
                size_bytes += member.memory_full_info().pss
    return size_bytes


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2] or "it printed nothing"


def settle() -> None:
    """Collect garbage and give freed memory back to the system, so that later work has to allocate its pages."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status_bytes(name: str) -> int:
    """Return a size of this process from ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def measure_work(work: Callable[[], object], *, times: int) -> dict[str, float]:
    """Call ``work`` once for its memory and then ``times`` times for its time; its results are dropped.

    Returns:
        Medians of ``step_s`` and of ``cpu_s``, which is the sum over all threads; ``peak_bytes`` of one call, less the
        memory in use before it.
    """
    _return_blocks_from(1 << 16)
    settle()
    # The kernel's mark is reset; `getrusage` cannot be: it would count imports and the loading of weights.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    work()
    peak_bytes = max(0, status_bytes("VmHWM") - before_bytes)
    _return_blocks_from(1 << 25)
    runs: list[Figures] = []
    for _ in range(times):
        with timed() as figures:
            work()
        runs.append(figures)
    return {
        "step_s": median(figures["wall_s"] for figures in runs),
        "cpu_s": median(figures["cpu_s"] for figures in runs),
        "peak_bytes": float(peak_bytes),
    }


def _return_blocks_from(size_bytes: int) -> None:
    """Let malloc return freed blocks of this size to the system at once, and keep smaller ones."""
    # With a low size, resident memory is memory in use. glibc raises its own threshold to the high one over time.
    libc = ctypes.CDLL(None)
    mmap_threshold = -3
    trim_threshold = -1
    libc.mallopt(mmap_threshold, size_bytes)
    libc.mallopt(trim_threshold, 2 * size_bytes)


def make_model(
    folder: Path,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    vocab_size: int,
    max_length: int,
    seed: int,
) -> None:
    """Write a random Qwen2 in float32 whose next-token distributions are neither flat nor certain.

    Its feed-forward layers are three times as wide, and two query heads share a key-value head.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=vocab_size,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)


def copy_seconds(target: Array, source: Array, *, threads: int) -> float:
    """Return the least wall time of three copies in memory by so many threads, each with an equal part."""
    targets = np.array_split(target, threads)
    sources = np.array_split(source, threads)
    with ThreadPoolExecutor(threads) as pool:
        return min(
            seconds_of(lambda: list(pool.map(np.copyto, targets, sources))) for _ in range(3)
        )


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    with timed() as figures:
        work()
    return figures["wall_s"]


@contextmanager
def timed() -> Generator[Figures]:
    """Yield figures that have ``wall_s`` and ``cpu_s``, of all threads of this process, after the block."""
    figures: Figures = {}
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    yield figures
    figures["wall_s"] = time.perf_counter() - start_s
    figures["cpu_s"] = time.process_time() - start_cpu_s


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time that processes have taken so far, without that of their children."""
    seconds = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        seconds += times.user + times.system
    return seconds


def draw_length(
    rng: np.random.Generator, median: float, longest: int, *, sigma: float = 1.0
) -> int:
    """Draw a lognormal length of at least one token, cut at the longest."""
    length = round(median * float(np.exp(sigma * rng.normal())))
    return min(max(length, 1), longest)


if __name__ == "__main__":
    _work(pickle.loads(Path(sys.argv[1]).read_bytes()))
