"""`gcore-bench controller`: the payload of steps under gcore's controllers and verl's single driver, in turn, on Ray.

One step: workers make the features of samples and report length, reward and checksum of each; rewards are centred;
samples are redistributed by length; the workers, as trainer ranks of the same devices, read every byte.
"""

import asyncio
import logging
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import psutil

from gcore_bench.harness.processes import (
    copy_seconds,
    draw_length,
    environment,
    status_bytes,
    stderr_to,
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
from gcore_controller import Context, Reference, run_ray
from gcore_placement import balance
from gcore_runs import Count, NonNegative

ContenderName = Literal["gcore", "verl", "verl-numpy"]
Features = np.ndarray[Any, np.dtype[Any]]

MEMCPY = "memcpy"
"""The contender that copies the payload into shared memory: a physical limit."""
ALONE = "work alone"
"""The contender whose workers make the same features and read them where they are."""
WARMUP_STEPS = 2
"""Steps of every contender in every round that are not measured; buffers, connections and pages are made in them."""

_VERL_ENVIRONMENT = {"verl": {}, "verl-numpy": {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}}
_RAY_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # If the command was started by `uv run`, Ray would build its environment again for every process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns of four times as many processes; as many start before they are needed.
    "RAY_worker_maximum_startup_concurrency": "8",
}
_MOST_COPIED_BYTES = 512 << 20
"""Larger copies have the same rate."""
_COLUMNS: dict[str, str] = {
    "step s": "step_s .3f",
    "overhead s": "overhead_s .3f",
    "of memcpy's rate": "over_memcpy x",
    "busiest process MB": "peak_bytes MB",
    "grown by MB": "grown_bytes MB",
}
_NOTE = (
    "overhead: step less making the same features and reading them where they are. Of memcpy's rate: payload a second "
    "of overhead over that of a copy into shared memory. Busiest process: resident memory of the largest control "
    "process (RssAnon), sampled every 5 ms, without the pages of the object store; grown: less that before the steps."
)


@dataclass(frozen=True, kw_only=True)
class ControllerOptions(BenchOptions):
    """Measure controllers that pass references against verl's single driver, which every byte passes through."""

    contenders: tuple[ContenderName, ...] = get_args(ContenderName)
    """Contenders in the order in which they run in every round."""
    payload_mb: tuple[Count, ...] = (64, 256, 1024, 4096)
    """Payloads of a step, in MiB."""
    controllers: tuple[Count, ...] = (1, 2, 4, 8)
    """Numbers of gcore's controllers; each is a contender of its own."""
    samples: Count = 64
    """Samples of a step, whose size grows with the payload: a multiple of the workers and of each number of
    controllers."""
    workers: Count = 4
    """Rollout workers, and as many trainer ranks."""
    steps: Count = 3
    """Measured steps of a contender in a round, after two warm-up steps."""
    seed: NonNegative = 0
    """Seed of lengths."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "payload_mb": (1, 4),
        "controllers": (1, 2),
        "samples": 8,
        "workers": 2,
        "steps": 1,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in (self.workers, *self.controllers):
            if self.samples % number:
                raise BenchError(f"samples is {self.samples}; expected a multiple of {number}")


def run(options: ControllerOptions, session: BenchSession) -> None:
    """Measure and print the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or features arrived with other bytes.
    """
    with stderr_to(session.folder / "log"):
        for payload_mb in sorted(set(options.payload_mb)):
            rounds = session.start_rounds(f"{payload_mb} MB")
            asyncio.run(_run_rounds(payload_mb, options, rounds))
            if rounds.runs:
                rows = rounds.summarise()
                title = f"a payload of {payload_mb:,} MB, from rollout workers to trainer ranks"
                lines = [*compare(rows), _NOTE]
                session.report(title, _COLUMNS, rows, rounds.runs, lines=lines)


def compare(rows: Mapping[str, Row]) -> list[str]:
    """Return the overhead of verl's driver over that of gcore's controllers, and whether the aim is met."""
    ours = [row["overhead_s"] for name, row in rows.items() if name.startswith("gcore")]
    verls = [row["overhead_s"] for name, row in rows.items() if name.startswith("verl")]
    if not ours or not verls:
        return []
    least = min(verls) / max(ours)
    highest = min(verls) / min(ours)
    return [
        f"overhead of verl's driver, the faster of its forms, over gcore's: {least:.1f} to {highest:.1f} "
        f"(aim: at least 5, {verdict(least >= 5)})"
    ]


async def _run_rounds(payload_mb: int, options: ControllerOptions, rounds: Rounds) -> None:
    """Measure a payload; contenders that lack the memory for it are reported and left out."""
    payload = Payload.of(nbytes=payload_mb << 20, num_samples=options.samples, seed=options.seed)
    free_bytes = psutil.virtual_memory().available
    store_bytes = int(2.25 * payload.nbytes) + (128 << 20)
    names: list[str] = []
    for contender in options.contenders:
        # Objects of this step and the last one; under verl also copies of workers and of the driver, up to four.
        num_copies = 3 if contender == "gcore" else 6
        needed_bytes = num_copies * payload.nbytes + store_bytes
        if needed_bytes > free_bytes:
            rounds.say(
                f"{rounds.part}: {contender} is left out; it needs {needed_bytes / 2**20:,.0f} MB of memory, of which "
                f"{free_bytes / 2**20:,.0f} are free"
            )
        elif contender == "gcore":
            names.extend(f"gcore-{number}" for number in options.controllers)
        else:
            names.append(contender)
    if not names:
        return
    # A new cluster each time, because a store keeps every page that it has used.
    with local_cluster(store_bytes) as ray:
        driver = ray.remote(DriverProcess)
        drivers: dict[str, Any] = {}
        for name, variables in _VERL_ENVIRONMENT.items():
            if name in names:
                configured = driver.options(num_cpus=1, runtime_env={"env_vars": variables})
                drivers[name] = configured.remote(options.workers)
        workers = [
            ray.remote(BenchWorker).options(num_cpus=1).remote() for _ in range(options.workers)
        ]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        copy_s = 0.0
        alone_s = 0.0
        for turn in rounds.turns([MEMCPY, ALONE, *names]):
            name = turn.contender
            if name == MEMCPY:
                copy_s = memcpy_seconds(payload.nbytes)
                figures = {"step_s": copy_s}
            elif name == ALONE:
                alone_s = await run_alone(workers, payload, num_steps=options.steps)
                figures = {"step_s": alone_s}
            else:
                figures = await _measure(name, payload, workers, drivers, options.steps)
                figures["overhead_s"] = max(figures["step_s"] - alone_s, 1e-6)
                figures["over_memcpy"] = copy_s / figures["overhead_s"]
            turn.done(figures, "{step_s:.3f} s")


async def _measure(
    name: str,
    payload: "Payload",
    workers: Sequence[Any],
    drivers: Mapping[str, Any],
    num_steps: int,
) -> Figures:
    """Return the figures of a contender's turn."""
    try:
        if name in drivers:
            return step_row([await drivers[name].run.remote(payload, num_steps)])
        program = partial(dispatch_program, payload=payload, num_steps=WARMUP_STEPS + num_steps)
        world_size = int(name.rpartition("-")[2])
        return step_row(await run_ray(program, roles=[*workers], world_size=world_size))
    except Exception as raised:
        # Ray's own error of an actor's error holds hundreds of lines about all processes of the machine.
        error = getattr(raised, "cause", None) or raised
        reason = str(error).strip().partition("\n")[0]
        raise BenchError(f"{name} failed at {payload.nbytes / 2**20:,.0f} MB: {reason}") from error


@contextmanager
def local_cluster(store_bytes: int) -> Generator[Any]:
    """Start a new Ray cluster of this machine alone, and yield Ray."""
    with environment(**_RAY_ENVIRONMENT):
        import ray

        with ray.init(
            address="local",
            # verl reserves ten cores for each worker; nothing here is scheduled by cores.
            num_cpus=1000,
            object_store_memory=store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        ):
            yield ray


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The samples of a step."""

    num_samples: int
    num_floats: int
    """Number of features of a sample; even, because checksums add eight bytes at a time."""
    seed: int

    @classmethod
    def of(cls, *, nbytes: int, num_samples: int, seed: int) -> "Payload":
        """Return a payload of about ``nbytes``."""
        return cls(
            num_samples=num_samples, num_floats=max(1, nbytes // num_samples // 8) * 2, seed=seed
        )

    @property
    def nbytes(self) -> int:
        """Size of all features."""
        return 4 * self.num_samples * self.num_floats

    def split(self, count: int) -> list[list[int]]:
        """Return the samples of each of ``count`` equal slices."""
        size = self.num_samples // count
        return [list(range(start, start + size)) for start in range(0, self.num_samples, size)]

    def features(self, index: int, out: Features | None = None) -> Features:
        """Return the features of a sample, [num_floats], written to ``out`` if given; they differ from all others'."""
        return np.multiply(_base_features(self.num_floats), np.float32(1 + index), out=out)

    def response(self, index: int) -> dict[str, Any]:
        """Return the ``length`` of a sample's response in tokens, lognormal, and its ``reward``, 0 or 1."""
        rng = np.random.default_rng((self.seed, index))
        length = draw_length(rng, 500, 1 << 20, sigma=0.8)
        return {"length": length, "reward": float(rng.random() < 0.5)}


@lru_cache(maxsize=1)
def _base_features(num_floats: int) -> Features:
    """Return what the first step of a process computes."""
    return np.linspace(1.0, 2.0, num_floats, dtype=np.float32)


def checksum(features: Features) -> int:
    """Return the sum of all bytes, eight at a time, modulo 2^64."""
    return int(features.view(np.int64).sum())


def check_read(expected: Mapping[int, int], read: Sequence[tuple[int, int]]) -> None:
    """Raise `BenchError` if the checksum of a sample differs, or a sample is missing or was read twice."""
    checksums = dict(read)
    if len(checksums) < len(read):
        raise BenchError(
            f"{len(read)} samples were read; only {len(checksums)} of them are distinct"
        )
    wrong = {index for index, _ in expected.items() ^ checksums.items()}
    if wrong:
        raise BenchError(
            f"{len(wrong)} samples, {min(wrong)} among them, were read with other bytes than were made"
        )


class StepFigures:
    """Figures of one control process: each step's start and end on the machine's clock, and resident memory.

    The memory (RssAnon) excludes mapped pages of Ray's object store. It is sampled every few milliseconds inside
    `watch`.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.idle_bytes = status_bytes("RssAnon")
        self.peak_bytes = self.idle_bytes

    @contextmanager
    def watch(self) -> Generator[None]:
        """Observe the memory of this process inside the block."""
        over = threading.Event()

        def sample_memory() -> None:
            while not over.wait(0.005):
                self.peak_bytes = max(self.peak_bytes, status_bytes("RssAnon"))

        thread = threading.Thread(target=sample_memory, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def step(self) -> Generator[None]:
        """Record the block as a step."""
        start_s = time.monotonic()
        yield
        self.steps.append((start_s, time.monotonic()))


def step_row(processes: Sequence[StepFigures]) -> Figures:
    """Return a contender's figures, without the warm-up; a step lasts from its first start to its last end."""
    starts_s, ends_s = np.array([process.steps[WARMUP_STEPS:] for process in processes]).T
    seconds = ends_s.max(axis=1) - starts_s.min(axis=1)
    peak_bytes = max(map(attrgetter("peak_bytes"), processes))
    idle_bytes = max(map(attrgetter("idle_bytes"), processes))
    return {
        "step_s": float(np.median(seconds)),
        "peak_bytes": float(peak_bytes),
        "grown_bytes": float(peak_bytes - idle_bytes),
    }


def memcpy_seconds(nbytes: int) -> float:
    """Measure a copy of ``nbytes`` into shared memory whose pages exist, with the best number of threads."""
    size = min(nbytes, _MOST_COPIED_BYTES)
    target = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    source = np.ones(size, np.uint8)
    target[:] = 0
    seconds = [
        copy_seconds(target, source, threads=threads) for threads in {1, os.cpu_count() or 1}
    ]
    return min(seconds) * nbytes / size


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """Metadata of a sample, which controllers see."""

    index: int
    length: int
    """Tokens of the response."""
    reward: float
    checksum: int
    features: Reference[Features]


class BenchWorker:
    """Rollout worker and trainer rank of the same devices."""

    def __init__(self) -> None:
        self._features: dict[int, Features] = {}

    async def make(self, payload: Payload, indices: Sequence[int]) -> list[SampleFacts]:
        """Make samples whose features are in the object store."""
        samples: list[SampleFacts] = []
        for index in indices:
            features = payload.features(index)
            facts = payload.response(index)
            facts["checksum"] = checksum(features)
            samples.append(SampleFacts(index=index, features=self.put(features), **facts))
        return samples

    def put(self, features: Features) -> Reference[Features]:
        """Put features into the object store."""
        from gcore_controller.runtimes.ray import put

        return put(features)

    async def read(self, samples: Sequence[SampleFacts]) -> list[tuple[int, int]]:
        """Return the index and the checksum of each sample."""
        return [(sample.index, checksum(await sample.features.get())) for sample in samples]

    async def work_alone(self, payload: Payload, indices: Sequence[int]) -> None:
        """Make the same features in memory that is kept between steps of the same samples, and read them twice."""
        if list(self._features) != list(indices):
            self._features = {index: np.empty(payload.num_floats, np.float32) for index in indices}
        for index, features in self._features.items():
            payload.features(index, out=features)
        for features in [*self._features.values(), *self._features.values()]:
            checksum(features)


async def run_alone(workers: Sequence[Any], payload: Payload, *, num_steps: int) -> float:
    """Return the median seconds of a step that makes the features and reads them where they are."""
    slices = payload.split(len(workers))
    figures = StepFigures()
    for _ in range(WARMUP_STEPS + num_steps):
        with figures.step():
            await asyncio.gather(
                *(w.work_alone.remote(payload, s) for w, s in zip(workers, slices, strict=True))
            )
    # Release the memory.
    await asyncio.gather(*(worker.work_alone.remote(payload, []) for worker in workers))
    return step_row([figures])["step_s"]


async def dispatch_program(
    ctx: Context[list[Any]], *, payload: Payload, num_steps: int
) -> StepFigures:
    """Make steps on every controller; ``ctx.roles`` are handles of `BenchWorker`s. Features stay in the store."""
    figures = StepFigures()
    with figures.watch():
        for _ in range(num_steps):
            await ctx.group.barrier()
            with figures.step():
                await _dispatch(ctx, payload)
    return figures


async def _dispatch(ctx: Context[list[Any]], payload: Payload) -> None:
    # Every worker has a controller and every controller a part, whichever of them are more.
    num_parts = max(ctx.world_size, len(ctx.roles))
    slices = payload.split(num_parts)
    workers: dict[int, Any] = {}
    for part in range(ctx.rank, num_parts, ctx.world_size):
        workers[part] = ctx.roles[part % len(ctx.roles)]
    makes = [worker.make.remote(payload, slices[part]) for part, worker in workers.items()]
    samples: list[SampleFacts] = list(chain.from_iterable(await asyncio.gather(*makes)))
    total_reward = await ctx.group.all_reduce(sum(sample.reward for sample in samples))
    baseline = total_reward / payload.num_samples
    facts: dict[int, tuple[int, int, float]] = {}
    for sample in samples:
        facts[sample.index] = (sample.length, sample.checksum, sample.reward - baseline)
    for rank_facts in await ctx.group.all_gather(facts):
        facts |= rank_facts
    lengths = [facts[index][0] for index in range(payload.num_samples)]
    parts = balance(lengths, num_parts, equal_count=True)
    part_of: dict[int, int] = {}
    for part, indices in enumerate(parts):
        part_of |= dict.fromkeys(indices.tolist(), part)
    outgoing: list[list[SampleFacts]] = [[] for _ in range(ctx.world_size)]
    for sample in samples:
        outgoing[part_of[sample.index] % ctx.world_size].append(sample)
    batches: dict[int, list[SampleFacts]] = defaultdict(list)
    for sample in chain.from_iterable(await ctx.group.all_to_all(outgoing)):
        batches[part_of[sample.index]].append(sample)
    reads = [worker.read.remote(batches[part]) for part, worker in workers.items()]
    read = list(chain.from_iterable(await asyncio.gather(*reads)))
    expected = chain.from_iterable(parts[part].tolist() for part in workers)
    check_read({index: facts[index][1] for index in expected}, read)


class DriverProcess:
    """The actor of verl's driver; this process and its workers are the only ones that import verl."""

    def __init__(self, num_workers: int) -> None:
        self._step = _make_verl_driver(num_workers)

    def run(self, payload: Payload, num_steps: int) -> StepFigures:
        """Make steps, after the warm-up steps."""
        figures = StepFigures()
        with figures.watch():
            for _ in range(WARMUP_STEPS + num_steps):
                with figures.step():
                    self._step(payload)
        return figures


def _make_verl_driver(num_workers: int) -> Callable[[Payload], None]:
    """Return the step of verl's single controller over a hybrid worker group, which generates and trains.

    The driver gathers a `DataProto` from verl's own workers, reorders and dispatches it.
    """
    import ray
    import torch
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch as VerlDispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    # verl creates its members at import.
    dispatch: Any = VerlDispatch

    class VerlWorker(Worker):
        """The work of `BenchWorker` in verl's API."""

        def __init__(self) -> None:
            super().__init__()
            torch.set_num_threads(1)

        @register(dispatch_mode=dispatch.DP_COMPUTE_PROTO)
        def make(self, data: Any) -> Any:
            """Return the features, [n, num_floats], of the samples ``index``, [n], and their metadata."""
            payload: Payload = data.meta_info["payload"]
            indices = data.batch["index"].tolist()
            features = np.empty((len(indices), payload.num_floats), np.float32)
            for row, index in zip(features, indices, strict=True):
                payload.features(index, out=row)
            columns = {"index": data.batch["index"], "features": torch.from_numpy(features)}
            columns["checksum"] = torch.tensor(list(map(checksum, features)))
            responses = [payload.response(index) for index in indices]
            for name in responses[0]:
                columns[name] = torch.tensor([response[name] for response in responses])
            return DataProto.from_dict(columns)

        @register(dispatch_mode=dispatch.DP_COMPUTE_PROTO)
        def read(self, data: Any) -> Any:
            """Return the index and the checksum of each sample."""
            checksums = list(map(checksum, data.batch["features"].numpy()))
            return DataProto.from_dict(
                {"index": data.batch["index"], "checksum": torch.tensor(checksums)}
            )

    torch.set_num_threads(1)
    worker: Any = ray.remote(VerlWorker)
    group: Any = RayWorkerGroup(
        RayResourcePool([num_workers], use_gpu=False), RayClassWithInitArgs(worker)
    )

    def list_checksums(data: Any) -> list[tuple[int, int]]:
        return list(zip(data.batch["index"].tolist(), data.batch["checksum"].tolist(), strict=True))

    def step(payload: Payload) -> None:
        indices: Any = torch.arange(payload.num_samples)
        batch = group.make(DataProto.from_dict({"index": indices}, meta_info={"payload": payload}))
        batch.batch["advantage"] = batch.batch["reward"] - batch.batch["reward"].mean()
        lengths = batch.batch["length"].tolist()
        parts: Any = get_seqlen_balanced_partitions(
            lengths, k_partitions=num_workers, equal_size=True
        )
        batch.reorder(torch.tensor(np.concatenate(parts)))
        check_read(dict(list_checksums(batch)), list_checksums(group.read(batch)))

    return step
