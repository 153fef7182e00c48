"""The payload of a step, samples with image features, and the figures of the processes that control it."""

import mmap
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, ClassVar, TypeAlias

import numpy as np

from gcore_bench.harness.measure import copy_seconds, status_bytes
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures

Features: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MEMCPY, ALONE = "memcpy", "work alone"
"""Contenders that every payload is compared with."""
WARMUP_STEPS = 2
"""Steps of every contender in every round that are not measured; buffers, connections and pages are made in them."""
MOST_COPIED_BYTES = 512 << 20
"""Larger copies have the same rate."""

_MEDIAN_TOKENS, _SIGMA = 500, 0.8
_INTERVAL_S = 0.005


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
        return cls(num_samples=num_samples, num_floats=max(1, nbytes // num_samples // 8) * 2, seed=seed)

    @property
    def nbytes(self) -> int:
        """Size of all features."""
        return 4 * self.num_samples * self.num_floats

    def empty(self) -> Features:
        """Return memory for the features of a sample."""
        return np.empty(self.num_floats, np.float32)

    def parts(self, count: int) -> list[list[int]]:
        """Return the samples of each of ``count`` equal slices."""
        size = self.num_samples // count
        return [list(range(start, start + size)) for start in range(0, self.num_samples, size)]

    def features(self, index: int, out: Features | None = None) -> Features:
        """Return the features of a sample, [num_floats], written to ``out`` if given; they differ from all others'."""
        return np.multiply(_base_features(self.num_floats), np.float32(1 + index), out=out)

    def response(self, index: int) -> dict[str, Any]:
        """Return the ``length`` of a sample's response in tokens, lognormal, and its ``reward``, 0 or 1."""
        of_length, of_reward = (np.random.default_rng((self.seed, index)) for _ in range(2))
        length = round(_MEDIAN_TOKENS * float(np.exp(_SIGMA * of_length.normal())))
        return {"length": length, "reward": float(of_reward.random() < 0.5)}


@dataclass(frozen=True, kw_only=True)
class ImagePayload(Payload):
    """Prompts whose images are encoded: [tokens, HIDDEN] in float16 each, as a vision tower gives them."""

    HIDDEN: ClassVar[int] = 1280
    """Width of the vision towers of Qwen2-VL and Qwen2.5-VL."""

    @classmethod
    def of(cls, *, nbytes: int, num_samples: int, seed: int) -> "ImagePayload":
        """Return a payload of about ``nbytes``, of whole tokens."""
        tokens = max(1, round(nbytes / num_samples / (2 * cls.HIDDEN)))
        return cls(num_samples=num_samples, num_floats=tokens * cls.HIDDEN, seed=seed)

    @property
    def nbytes(self) -> int:
        return 2 * self.num_samples * self.num_floats

    def empty(self) -> Features:
        return np.empty((self.num_floats // self.HIDDEN, self.HIDDEN), np.float16)

    def features(self, index: int, out: Features | None = None) -> Features:
        made = self.empty() if out is None else out
        # Neighbouring numbers of float16 have neighbouring bits; sums of integers are much faster than of float16.
        np.add(_base_images(self.num_floats).view(np.uint16), np.uint16(index), out=made.reshape(-1).view(np.uint16))
        return made


@lru_cache(maxsize=1)
def _base_images(num_floats: int) -> Features:
    return np.linspace(1.0, 2.0, num_floats, dtype=np.float16)


@lru_cache(maxsize=1)
def _base_features(num_floats: int) -> Features:
    """Return what the first step of a process computes."""
    return np.linspace(1.0, 2.0, num_floats, dtype=np.float32)


def checksum(features: Features) -> int:
    """Return the sum of all bytes, eight at a time, modulo 2^64."""
    return int(features.view(np.int64).sum())


def check_read(made: Mapping[int, int], read: Sequence[tuple[int, int]]) -> None:
    """Raise `BenchError` if the checksum of a sample differs, or a sample is missing or was read twice."""
    found = dict(read)
    if len(found) < len(read):
        raise BenchError(f"{len(read)} samples were read; only {len(found)} of them are distinct")
    wrong = [index for index in made.keys() | found.keys() if made.get(index) != found.get(index)]
    if wrong:
        raise BenchError(f"{len(wrong)} samples, {min(wrong)} among them, were read with other bytes than were made")


class StepFigures:
    """Figures of one control process: each step's start and end on the machine's clock, CPU seconds, resident memory.

    Its own memory (RssAnon) excludes mapped pages of Ray's object store, and `resident_bytes` counts them. Both are
    sampled every few milliseconds inside `watched`.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.cpu_s: list[float] = []
        self.idle_bytes = self.peak_bytes = status_bytes("RssAnon")
        self.resident_bytes = self.idle_bytes + status_bytes("RssShmem")

    @contextmanager
    def watched(self) -> Generator[None]:
        """Observe the memory of this process inside the block."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_INTERVAL_S):
                own_bytes, shared_bytes = status_bytes("RssAnon"), status_bytes("RssShmem")
                self.peak_bytes = max(self.peak_bytes, own_bytes)
                self.resident_bytes = max(self.resident_bytes, own_bytes + shared_bytes)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def step(self) -> Generator[None]:
        """Record the block as a step."""
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        yield
        self.steps.append((start_s, time.monotonic()))
        self.cpu_s.append(time.process_time() - start_cpu_s)


def step_row(processes: Sequence[StepFigures]) -> Figures:
    """Return a contender's figures, without the warm-up; a step lasts from its first start to its last end.

    ``cpu_s`` are the CPU seconds of the busiest process in a step.
    """
    steps = zip(*(process.steps[WARMUP_STEPS:] for process in processes), strict=True)
    seconds = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    return {
        "step_s": median(seconds),
        "cpu_s": median(map(max, zip(*(process.cpu_s[WARMUP_STEPS:] for process in processes), strict=True))),
        "idle_bytes": float(max(process.idle_bytes for process in processes)),
        "peak_bytes": float(max(process.peak_bytes for process in processes)),
        "resident_bytes": float(max(process.resident_bytes for process in processes)),
    }


def memcpy_seconds(nbytes: int) -> float:
    """Measure a copy of ``nbytes`` into shared memory whose pages exist, with the best number of threads."""
    size = min(nbytes, MOST_COPIED_BYTES)
    target, source = np.frombuffer(mmap.mmap(-1, size), np.uint8), np.ones(size, np.uint8)
    target[:] = 0
    seconds = (
        copy_seconds(np.array_split(target, threads), np.array_split(source, threads), threads=threads)
        for threads in {1, os.cpu_count() or 1}
    )
    return min(seconds) * nbytes / size
