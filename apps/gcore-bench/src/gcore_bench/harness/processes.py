"""Processes that measure, and the time and memory of work in them.

A process is either a new interpreter whose memory is watched (`run_children`), or forked from a server that has
imported torch and transformers once (`run_processes`). Its result returns as JSON in a file, and it ends with all that
it has started.
"""

import ctypes
import gc
import json
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import psutil

from gcore_bench.harness.report import BenchError

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

_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "gcore_trainer.torch.packed_model",
    "gcore_trainer.trainer",
]
_POLL_S = 2.0
"""Reading the memory of thirty processes takes a tenth of a second of a core."""
_FORKED_TIMEOUT_S = 3600
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_SMALLEST_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 25

_Rows: TypeAlias = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The work of one process."""

    work: str
    """Name of the module whose ``run(spec)`` does it, or ``module:function``."""
    part: str = ""
    contender: str
    folder: str
    """Scratch folder, which the ranks of a contender share."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    rank: int = 0
    world_size: int = 1
    threads: int = 1
    """Threads of torch."""

    def of_ranks(self) -> "list[Spec]":
        """Return the same work for each rank."""
        return [replace(self, rank=rank) for rank in range(self.world_size)]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command that measures something."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to that of this process and to `QUIET`."""
    folder: Path
    """Working directory."""
    read: Callable[[], Any] = list
    """Returns the figures once the command has ended."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Size of all processes of a contender; over time, the maximum of each figure."""

    pss_bytes: int
    """Resident memory; pages that several processes share count once (proportional set size)."""
    num_processes: int


_Footprints: TypeAlias = list[tuple[float, Footprint]]


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

    store = Path(spec.folder) / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=spec.rank, world_size=spec.world_size
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_program(program: Program, *, name: str, log: Path) -> Footprint:
    """Run a program to its end; no process that it has started is left."""
    codes, footprints = _run([program], log, poll_s=_POLL_S)
    if any(codes):
        raise BenchError(f"{name} failed: {_last_line(log)} (see {log})")
    return Footprint(
        pss_bytes=max((size.pss_bytes for _, size in footprints), default=0),
        num_processes=max((size.num_processes for _, size in footprints), default=0),
    )


def child_program(spec: Spec, output: Path, environment: Mapping[str, str]) -> Program:
    """Return the command of a new process that does a spec's work; `read` returns the result."""
    output.unlink(missing_ok=True)
    return Program(
        command=[
            sys.executable,
            "-m",
            "gcore_bench.harness.processes",
            json.dumps(asdict(spec)),
            str(output),
        ],
        environment=environment,
        folder=Path.cwd(),
        read=lambda: json.loads(output.read_text())["result"],
    )


def run_children(
    spec: Spec,
    *,
    environment: Mapping[str, str] | None = None,
    poll_s: float = _POLL_S,
    timeout_s: float = math.inf,
) -> tuple[list[Any], _Footprints]:
    """Run a new process for each rank of a spec, and wait for all of them.

    Returns:
        The results by rank, and the sizes of all processes by time on the monotonic clock.
    """
    specs = spec.of_ranks()
    log = Path(spec.folder) / "log"
    outputs = _make_outputs(specs)
    programs: list[Program] = []
    for rank_spec, output in zip(specs, outputs, strict=True):
        programs.append(child_program(rank_spec, output, environment or {}))
    _, footprints = _run(programs, log, poll_s=poll_s, timeout_s=timeout_s)
    return _read_results(outputs, otherwise=_last_line(log)), footprints


def start_server(threads: int) -> None:
    """Start the server that `run_processes` forks; later calls do nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    with environment(OMP_NUM_THREADS=str(threads)):
        forkserver.ensure_running()


def run_processes(specs: Sequence[Spec]) -> _Rows:
    """Fork a process for each spec, one a rank, and return the rows of all ranks together (see `merge_ranks`)."""
    outputs = _make_outputs(specs)
    context = multiprocessing.get_context("forkserver")
    # A rank that fails ends its process, and the pool then ends the others, which would wait for that one.
    with ProcessPoolExecutor(len(specs), context) as pool, suppress(BrokenProcessPool):
        list(pool.map(_work_forked, specs, outputs))
    try:
        rows = _read_results(
            outputs, otherwise=f"a process was killed, or did not end within {_FORKED_TIMEOUT_S} s"
        )
    except BenchError as error:
        raise BenchError(
            f"{specs[0].contender} failed in part {specs[0].part or specs[0].work}: {error}"
        ) from None
    return merge_ranks(rows)


def merge_ranks(ranks: Sequence[_Rows]) -> _Rows:
    """Return the highest of every figure over the ranks; ``total_cpu_s`` is the sum of their processors' seconds."""
    rows: _Rows = {}
    for row, figures in ranks[0].items():
        rows[row] = {metric: max(rank[row][metric] for rank in ranks) for metric in figures}
        if "cpu_s" in figures:
            rows[row]["total_cpu_s"] = sum(rank[row]["cpu_s"] for rank in ranks)
    return rows


def _make_outputs(specs: Sequence[Spec]) -> list[Path]:
    """Return the file of each rank's result; files of former processes are removed."""
    folder = Path(specs[0].folder)
    (folder / "store").unlink(missing_ok=True)
    for stale in folder.glob("figures-*"):
        stale.unlink()
    return [folder / f"figures-{spec.rank}.json" for spec in specs]


def _read_results(outputs: Sequence[Path], *, otherwise: str) -> list[Any]:
    """Return the results that children wrote; `BenchError` with a failure, or ``otherwise`` if one wrote nothing."""
    results: list[Any] = []
    reason = otherwise
    for output in outputs:
        content = json.loads(output.read_text()) if output.exists() else {}
        if "result" in content:
            results.append(content["result"])
        reason = content.get("failure", reason)
    if len(results) < len(outputs):
        raise BenchError(reason)
    return results


def _work_forked(spec: Spec, output: Path) -> None:
    """Do the work of a spec in a forked process, whose stdout and stderr go to a log, and which ends in time."""
    signal.alarm(_FORKED_TIMEOUT_S)
    with output.with_name(f"log-{spec.rank}").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _work(spec, output)


def _work(spec: Spec, output: Path) -> None:
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    module, _, function = spec.work.partition(":")
    try:
        torch.set_num_threads(spec.threads)
        result = getattr(import_module(module), function or "run")(spec)
    except Exception as error:
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}".split()
        output.write_text(json.dumps({"failure": " ".join(words)}))
        # Destructors of process groups would wait for ranks that are still at work.
        os._exit(1)
    output.write_text(json.dumps({"result": result}))


def _run(
    programs: Sequence[Program], log: Path, *, poll_s: float, timeout_s: float = math.inf
) -> tuple[list[int], _Footprints]:
    """Run programs until all have ended or one has failed; return exit codes, and sizes over time."""
    processes: list[subprocess.Popen[Any]] = []
    seen: set[psutil.Process] = set()
    footprints: _Footprints = []
    end_s = time.monotonic() + timeout_s
    with log.open("wb") as file:
        try:
            for program in programs:
                process = subprocess.Popen(
                    program.command,
                    env=os.environ | QUIET | dict(program.environment),
                    cwd=program.folder,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                processes.append(process)
            while not _have_ended(processes):
                if time.monotonic() > end_s:
                    raise BenchError(f"it did not end within {timeout_s:.0f} s")
                footprints.append((time.monotonic(), _measure_footprint(processes, seen)))
                alive = next(process for process in processes if process.returncode is None)
                with suppress(subprocess.TimeoutExpired):
                    alive.wait(poll_s)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for member in seen:
                # May be in a session of its own; psutil kills no process that has reused the number of a dead one.
                with suppress(psutil.NoSuchProcess):
                    member.kill()
    return [process.returncode for process in processes], footprints


def _have_ended(processes: Sequence["subprocess.Popen[Any]"]) -> bool:
    """Return whether all processes have ended, or one has failed."""
    codes = [process.poll() for process in processes]
    return None not in codes or any(codes)


def _measure_footprint(
    processes: Sequence["subprocess.Popen[Any]"], seen: set[psutil.Process]
) -> Footprint:
    """Return the size of processes and all their descendants, which are added to ``seen``."""
    sizes: list[int] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            members = [root]
            members.extend(root.children(recursive=True))
            seen.update(members)
            for member in members:
                with suppress(psutil.Error):  # it has ended
                    sizes.append(member.memory_full_info().pss)
    return Footprint(pss_bytes=sum(sizes), num_processes=len(sizes) - sizes.count(0))


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


def measured(work: Callable[[], object], *, times: int) -> dict[str, float]:
    """Call ``work`` once for its memory and then ``times`` times for its time; its results are dropped.

    Returns:
        Medians of ``step_s`` and of ``cpu_s``, which is the sum over all threads; ``peak_bytes`` of one call, less the
        memory in use before it.
    """
    _return_blocks_from(_SMALLEST_BYTES)
    settle()
    # The kernel's mark is reset; `getrusage` cannot be: it would count imports and the loading of weights.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    work()
    peak_bytes = max(0, status_bytes("VmHWM") - before_bytes)
    _return_blocks_from(_LARGEST_BYTES)
    walls_s: list[float] = []
    cpus_s: list[float] = []
    for _ in range(times):
        start_s = time.perf_counter()
        start_cpu_s = time.process_time()
        work()
        walls_s.append(time.perf_counter() - start_s)
        cpus_s.append(time.process_time() - start_cpu_s)
    return {"step_s": median(walls_s), "cpu_s": median(cpus_s), "peak_bytes": float(peak_bytes)}


def _return_blocks_from(size_bytes: int) -> None:
    """Let malloc return freed blocks of this size to the system at once, and keep smaller ones."""
    # With a low size, resident memory is memory in use. glibc raises its own threshold to the high one over time.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, size_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * size_bytes)


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


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    _work(Spec(**json.loads(sys.argv[1])), Path(sys.argv[2]))
