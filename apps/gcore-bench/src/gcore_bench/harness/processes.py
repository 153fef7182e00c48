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
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import wait
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

_TRAINING = [
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

    store = Path(spec.folder) / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=spec.rank, world_size=spec.world_size
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
    spec: Spec,
    *,
    environment: Mapping[str, str] | None = None,
    poll_s: float = _POLL_S,
    timeout_s: float = math.inf,
) -> tuple[Any, Sizes]:
    """Do a spec's work in a new interpreter; return its result, and its size over time.

    Its log is ``CONTENDER-RANK.log`` in the spec's folder.

    Raises:
        BenchError: it failed, or did not end within ``timeout_s``.
    """
    output = _result_file(spec)
    module = "gcore_bench.harness.processes"
    command = [sys.executable, "-m", module, json.dumps(asdict(spec))]
    sizes = run_program(
        command,
        name=spec.contender,
        folder=Path.cwd(),
        log=output.with_suffix(".log"),
        environment={"OMP_NUM_THREADS": str(spec.threads)} | dict(environment or {}),
        poll_s=poll_s,
        timeout_s=timeout_s,
    )
    return json.loads(output.read_text()), sizes


def run_training(
    app: str, options: Sequence[str], *, name: str, folder: Path, environment: Mapping[str, str]
) -> tuple[list[dict[str, float]], int]:
    """Run ``APP train`` in a folder from its first step on, with its log in ``NAME.log``.

    Returns:
        The metrics of each step, and the highest size of all of its processes, in bytes.
    """
    from gcore_runs import read_jsonl

    run = folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", app, "train", "--name", name, *options]
    sizes = run_program(
        command, name=name, folder=folder, log=folder / f"{name}.log", environment=environment
    )
    steps = [row for row in read_jsonl(run / "metrics.jsonl") if "timing_s/step" in row]
    return steps, highest_bytes(sizes)


def highest_bytes(sizes: Sizes) -> int:
    """Return the highest of some sizes; 0 if there are none."""
    return max((size_bytes for _, size_bytes in sizes), default=0)


def start_server(threads: int, *, preload: Sequence[str] = _TRAINING, **variables: str) -> None:
    """Start the server that `run_processes` forks, with modules and environment variables; later calls do nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*preload])
    with environment(OMP_NUM_THREADS=str(threads), **variables):
        forkserver.ensure_running()


def run_processes(specs: Sequence[Spec]) -> _Rows:
    """Fork a process for each spec, one a rank, and return the rows of all ranks together (see `merge_ranks`)."""
    folder = Path(specs[0].folder)
    # Those of a run before are no result of this one.
    for stale in (folder / "store", folder / "failure", *map(_result_file, specs)):
        stale.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_work_forked, args=(spec,)) for spec in specs]
    try:
        for process in processes:
            process.start()
        running = processes
        # If one fails, the others would wait for it.
        while running and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in running])
            running = [process for process in processes if process.exitcode is None]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(process.exitcode for process in processes):
        failure = folder / "failure"
        reason = f"a process was killed, or did not end within {_FORKED_TIMEOUT_S} s"
        if failure.exists():
            reason = failure.read_text()
        raise BenchError(f"{specs[0].contender} failed: {reason}")
    ranks = [json.loads(_result_file(spec).read_text()) for spec in specs]
    return merge_ranks(ranks)


def merge_ranks(ranks: Sequence[_Rows]) -> _Rows:
    """Return the highest of every figure over the ranks; ``total_cpu_s`` is the sum of their processors' seconds."""
    rows: _Rows = {}
    for row, figures in ranks[0].items():
        rows[row] = {metric: max(rank[row][metric] for rank in ranks) for metric in figures}
        if "cpu_s" in figures:
            rows[row]["total_cpu_s"] = sum(rank[row]["cpu_s"] for rank in ranks)
    return rows


def _result_file(spec: Spec) -> Path:
    return Path(spec.folder) / f"{spec.contender}-{spec.rank}.json"


def _work_forked(spec: Spec) -> None:
    """Do the work of a spec in a forked process, whose stdout and stderr go to a log, and which ends in time."""
    signal.alarm(_FORKED_TIMEOUT_S)
    with _result_file(spec).with_suffix(".log").open("wb") as log:
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
        words = f"{type(error).__name__}: {error}".split()
        reason = " ".join(words)
        (Path(spec.folder) / "failure").write_text(reason)
        print(reason, file=sys.stderr, flush=True)
        # Destructors of process groups would wait for ranks that are still at work.
        os._exit(1)
    _result_file(spec).write_text(json.dumps(result))


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
    _work(Spec(**json.loads(sys.argv[1])))
