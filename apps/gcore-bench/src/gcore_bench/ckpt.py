"""`gcore-bench ckpt`: saves and loads of the same bytes under gcore-ckpt and its peers, and the machine's limits.

Each contender runs in turn, in new processes whose memory is watched.
"""

import math
import mmap
import os
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import psutil

from gcore_bench.contenders.ckpt_libraries import LIBRARIES, InPlaceLibrary, Library, State
from gcore_bench.harness.processes import (
    Array,
    Spec,
    copy_seconds,
    highest_bytes,
    run_child,
    seconds_of,
    settle,
    timed,
)
from gcore_bench.harness.report import (
    BenchError,
    BenchOptions,
    BenchSession,
    Figures,
    Rounds,
    Row,
    verdict,
)
from gcore_runs import at_least

if TYPE_CHECKING:
    import torch

ContenderName = Literal["gcore", "dcp", "dcp-async", "torch.save", "safetensors"]

LIMITS = "limits"
"""The contender that measures memory and disk alone, in a process of its own too."""
METRICS = ("stall", "durable", "load_cold", "load_warm", "in_place_cold", "in_place_warm")
"""Seconds that are measured."""
_POLL_S = 0.2
"""Reading the memory of gigabytes takes some ten milliseconds."""
_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "PYTHONWARNINGS": "ignore",
}
_CORES = os.cpu_count() or 1
_WIDTH = 1024
_TINY_BYTES = 4096
_PERIOD = 4_194_301
"""Number of elements after which values repeat: a prime, so that no two pages of a tensor are equal."""
_PIECE_BYTES = 16 << 20
_BLOCK_BYTES = 4096
"""Alignment of direct reads and writes."""

_NOTE = (
    "A process for each run, the same bytes for all, one save before the measured one. stall: until the state may be "
    "changed. durable: until all files are synced; what a library leaves unsynced the bench syncs and counts. Cold: "
    "files are out of the page cache; warm: in it. Loads are into fresh memory or in place, and compared bitwise. (x): "
    "over the fastest limit, which is a copy in memory, a raw write or a raw read. extra MB: highest resident memory "
    "of all processes while saving, less that before."
)


@dataclass(frozen=True, kw_only=True)
class CkptOptions(BenchOptions):
    """Measure saves and loads of the same bytes under gcore-ckpt and its peers, in turn, each in its own process.

    The physical limits (memcpy, raw writes, raw reads) are measured in every round too.
    """

    contenders: tuple[ContenderName, ...] = get_args(ContenderName)
    """Contenders in the order in which they run in every round."""
    size_gb: Annotated[float, at_least(0.001)] = 2.0
    """Size of the state, in units of 10^9 bytes."""
    tensors: Annotated[int, at_least(3)] = 200
    """Number of tensors of the state."""
    dir: Path = Path(".gcore-bench")
    """Folder, on the disk to measure, in which a fresh one is made for the files; it is removed at the end."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "size_gb": 0.01,
        "tensors": 20,
    }


def run(options: CkptOptions, session: BenchSession) -> None:
    """Measure and print the figures that ``options`` asks for."""
    rounds = session.start_rounds("ckpt")
    with _scratch_folder(options.dir) as folder:
        for turn in rounds.turns((LIMITS, *options.contenders)):
            try:
                turn.rows = _measure_turn(turn.contender, options, folder)
            except BenchError as error:
                turn.fail(str(error))
    rows, lines = compare(rounds)
    columns = {f"{metric.replace('_', ' ')} s": f"{metric} s" for metric in METRICS}
    columns["extra MB"] = "peak_bytes MB"
    title = f"{options.size_gb:g} GB in {options.tensors} tensors"
    session.report(title, columns, rows, rounds.runs, lines=[*lines, _NOTE])


def _measure_turn(contender: str, options: CkptOptions, folder: Path) -> dict[str, Figures]:
    """Return the figures of one turn."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        spec = Spec(
            work="gcore_bench.ckpt:measure",
            contender=contender,
            folder=Path(scratch),
            options=options,
            threads=_CORES,
        )
        value, sizes = run_child(
            spec,
            environment=_ENVIRONMENT,
            poll_s=_POLL_S,
            timeout_s=3600.0,
        )
    rows: dict[str, Figures] = value["rows"]
    if contender != LIMITS:
        # The highest memory while it saved, less that before.
        start_s, end_s = value["saving_s"]
        saving = [size for size in sizes if start_s <= size[0] <= end_s]
        peak_bytes = highest_bytes(saving) - value["before_bytes"]
        rows[contender]["peak_bytes"] = float(max(0, peak_bytes))
    return rows


def compare(rounds: Rounds) -> tuple[dict[str, Row], list[str]]:
    """Return medians of limits and contenders with their ratios to the fastest limits, and lines about aims."""
    rows = rounds.summarise()
    fastest: Figures = {}
    lines: list[str] = []
    for run in rounds.runs:
        if run.contender == LIMITS:
            for name in run.rows:
                for metric, seconds in rows[name].items():
                    fastest[metric] = min(seconds, fastest.get(metric, math.inf))
        elif run.failure:
            lines.append(f"{run.contender} failed: {run.failure}")
    for row in rows.values():
        for metric in fastest.keys() & row.keys():
            row[f"{metric}_ratio"] = row[metric] / fastest[metric]
    ratio = rows.get("gcore", {}).get("stall_ratio")
    if ratio is not None:
        aim = "the stall of a save takes at most 1.15 times a copy of memory"
        lines.append(f"aim: {aim}: {ratio:.2f} ({verdict(ratio <= 1.15)})")
    return rows, lines


@contextmanager
def _scratch_folder(parent: Path) -> Generator[Path]:
    """Make a folder in ``parent``, which is made too; it is removed at the end, and the parent if it is empty then."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="ckpt-", dir=parent)
    except OSError as error:
        raise BenchError(
            f"dir is {parent}; expected a folder that can be written to: {error.strerror}"
        ) from error
    with scratch:
        yield Path(scratch.name).absolute()
    if not any(parent.iterdir()):
        parent.rmdir()


def make_state(size_bytes: int, num_tensors: int) -> State:
    """Make a state of at least ``size_bytes``: 2 % large tensors with 40 % of the bytes, 30 % tiny, the rest medium."""
    import torch

    num_large = max(1, num_tensors // 50)
    num_tiny = num_tensors * 3 // 10
    num_medium = num_tensors - num_large - num_tiny
    sizes = [0.4 * size_bytes / num_large] * num_large
    sizes += [0.6 * size_bytes / num_medium] * num_medium + [_TINY_BYTES] * num_tiny
    noise = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0))
    state: State = {}
    # Sizes alternate, as in a model.
    for number in sorted(range(num_tensors), key=lambda number: (number * 37) % num_tensors):
        dtype = torch.float32 if number % 2 else torch.bfloat16
        rows = math.ceil(sizes[number] / dtype.itemsize / _WIDTH)
        indices = torch.arange(rows * _WIDTH).add_(number * 1_234_577).remainder_(_PERIOD)
        state[f"layers.{number}"] = noise[indices].to(dtype).view(rows, _WIDTH)
    return state


def is_same(loaded: "torch.Tensor | None", expected: "torch.Tensor") -> bool:
    """Return whether dtype, shape and every bit are equal."""
    import torch

    if loaded is None or loaded.shape != expected.shape or loaded.dtype != expected.dtype:
        return False
    return torch.equal(_view_bytes(loaded), _view_bytes(expected))


def _view_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """View a tensor as bytes; it is copied only if it is not contiguous."""
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def measure(spec: Spec) -> dict[str, Any]:
    """Measure a contender, or the limits, in its own process.

    Returns:
        The seconds in ``rows``; of a contender also ``before_bytes``, resident memory before its saves, and
        ``saving_s``, when they were, on the monotonic clock, which is the same for all processes.
    """
    state = make_state(round(spec.options.size_gb * 1e9), spec.options.tensors)
    root = spec.folder / "files"
    root.mkdir(exist_ok=True)
    if spec.contender == LIMITS:
        parts = [_view_bytes(tensor).numpy() for tensor in state.values()]
        return {"rows": _measure_limits(parts, root)}
    library = LIBRARIES[spec.contender](root)
    before_bytes = psutil.Process().memory_full_info().pss
    start_s = time.monotonic()
    seconds = _measure_saves(library, root, state)
    saving_s = (start_s, time.monotonic())
    for metric in METRICS[2:]:
        way, _, temperature = metric.rpartition("_")
        if way == "load" or isinstance(library, InPlaceLibrary):
            seconds[metric] = _measure_load(library, root, state, way, temperature)
    library.close()
    return {
        "rows": {spec.contender: seconds},
        "before_bytes": before_bytes,
        "saving_s": saving_s,
    }


def _measure_saves(library: Library, root: Path, state: State) -> Figures:
    """Save twice, and return the seconds of the second save; the first allocates buffers and starts processes.

    They are those until the state may be changed, and until the save survives a crash of the machine.
    """
    library.save(root / "0", state)()
    _sync(library.find_unsynced(root / "0"))
    os.sync()
    settle()
    with timed() as durable:
        with timed() as stall:
            wait = library.save(root / "1", state)
        wait()
        _sync(library.find_unsynced(root / "1"))
    return {"stall": stall["wall_s"], "durable": durable["wall_s"]}


def _measure_load(library: Library, root: Path, state: State, way: str, temperature: str) -> float:
    """Load into fresh memory or over zeros, check every tensor, and return the seconds of the load."""
    import torch

    loaded: State = {}
    if way == "in_place":
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    _prepare_cache(root, temperature)
    settle()
    with timed() as figures:
        if isinstance(library, InPlaceLibrary) and loaded:
            library.load_into(root / "1", loaded)
        else:
            loaded = library.load(root / "1", state)
    for name, tensor in state.items():
        if not is_same(loaded.get(name), tensor):
            raise ValueError(
                f"tensor {name}, by {way}, was loaded with other bytes than were saved"
            )
    return figures["wall_s"]


def _measure_limits(parts: Sequence[Array], root: Path) -> dict[str, Figures]:
    """Measure a copy in memory, raw writes of one file and raw reads of it, without any library."""
    size_bytes = sum(part.size for part in parts)
    memory = _allocate(size_bytes)
    np.concatenate(parts, out=memory[:size_bytes])
    target = _allocate(memory.size)
    target.fill(0)
    copy_s = copy_seconds(target, memory, threads=_CORES)
    rows = {f"memcpy, {_CORES} threads": {"stall": copy_s}}
    path = root / "raw"
    for mode, flag in (("buffered", 0), ("direct", os.O_DIRECT)):
        path.unlink(missing_ok=True)
        os.sync()
        write = partial(_write_file, memory, path, flag)
        try:
            rows[f"raw write, {mode}"] = {"durable": seconds_of(write)}
        except OSError:
            # The file system has no direct access.
            continue
        seconds: Figures = {}
        for temperature in ("cold",) if flag else ("cold", "warm"):
            for way, place in (("load", None), ("in_place", target)):
                _prepare_cache(root, temperature)
                read = partial(_read_file, path, place, flag)
                seconds[f"{way}_{temperature}"] = seconds_of(read)
        rows[f"raw read, {mode}"] = seconds
    return rows


def _allocate(size_bytes: int) -> Array:
    """Return page-aligned memory of whole blocks, in huge pages where the machine has them."""
    memory = mmap.mmap(-1, -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _write_file(memory: Array, path: Path, flag: int) -> None:
    with _open(path, os.O_WRONLY | os.O_CREAT | flag) as descriptor:
        for start in range(0, memory.size, _PIECE_BYTES):
            os.pwrite(descriptor, memory.data[start : start + _PIECE_BYTES], start)
        os.fsync(descriptor)
    _sync([path.parent])


def _read_file(path: Path, memory: Array | None, flag: int) -> None:
    """Read a file into existing memory, or into new memory."""
    if memory is None:
        memory = _allocate(path.stat().st_size)
    with _open(path, os.O_RDONLY | flag) as descriptor:
        for start in range(0, memory.size, _PIECE_BYTES):
            os.preadv(descriptor, [memory.data[start : start + _PIECE_BYTES]], start)


@contextmanager
def _open(path: Path, flags: int) -> Generator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(paths: Sequence[Path]) -> None:
    """Sync files and folders, but not the files in the folders."""
    for path in paths:
        with _open(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)


def _prepare_cache(root: Path, temperature: str) -> None:
    """Remove every file below ``root`` from the page cache (cold), or read it into the cache (warm)."""
    for path in root.rglob("*"):
        if path.is_dir():
            continue
        with _open(path, os.O_RDONLY) as descriptor:
            if temperature == "cold":
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(descriptor, _PIECE_BYTES):
                    pass
