"""What the ranks do in `test_sliced_weights.py`: models loaded whole and by slices, sharded by FSDP2."""

import errno
import logging
import os
import sys
import threading
import time
from collections import Counter
from typing import Any
from unittest import mock

import torch
from memory_growth import PRIVATE, growing
from rank import Rank
from safetensors.torch import save_file

from gcore_trainer import (
    FrozenModel,
    MicroBatch,
    Objective,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    SFTObjective,
    TorchParallel,
    TorchTrainer,
)
from gcore_trainer.torch import streamed_folder
from gcore_trainer.torch.host_memory import local


def compare(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    parallel: ParallelConfig,
    steps: list[list[list[MicroBatch]]],
    options: dict[str, Any],
) -> tuple[list[str], list[list[dict[str, float]]], list[str]]:
    """Train from both; return the tensors that differ after loading, the metrics of both, and what was logged."""
    kind = PackedModel if objective.scores == "tokens" else PackedValueModel
    loaded: list[dict[str, torch.Tensor]] = []
    metrics: list[list[dict[str, float]]] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gcore_trainer.torch.sliced_weights")
    logger.addHandler(handler)
    for sharded in (False, True):
        packed = kind.from_pretrained(path, sharded=sharded, **options)
        trainer = TorchTrainer(
            packed,
            optimizer=OptimizerConfig(lr=1e-3),
            objective=objective,
            parallel=TorchParallel.join(parallel),
        )
        tensors = {
            **dict(packed.model.named_parameters(remove_duplicate=False)),
            **dict(packed.model.named_buffers()),
        }
        loaded.append({name: local(tensor.detach()).clone() for name, tensor in tensors.items()})
        metrics.append(
            [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
        )
    logger.removeHandler(handler)
    whole, sliced = loaded
    assert whole.keys() == sliced.keys()
    different = [
        n for n, t in whole.items() if t.dtype != sliced[n].dtype or not torch.equal(t, sliced[n])
    ]
    return different, metrics, lines


def frozen_scores(rank: Rank, path: str, micro_batches: list[MicroBatch]) -> list[Any]:
    """Scores of a frozen model that was loaded whole, and of one that was by slices."""
    parallel = TorchParallel.join(ParallelConfig())
    models = [PackedModel.from_pretrained(path, sharded=sharded) for sharded in (False, True)]
    return [FrozenModel(packed, parallel=parallel).scores(micro_batches) for packed in models]


def peak_bytes(rank: Rank, path: str, sharded: bool) -> int:
    """The most memory that a rank has at a time while it loads and shards a model."""
    parallel = TorchParallel.join(ParallelConfig())
    with growing(PRIVATE) as peak:
        packed = PackedModel.from_pretrained(path, sharded=sharded)
        parallel.shard(packed)
    return peak[0]


def waits_in_a_save(rank: Rank, path: str, to: str, file_bytes: int) -> dict[str, int]:
    """How often a rank was in which function while the first one wrote its files, each of which takes a second."""
    trainer = TorchTrainer(
        PackedModel.from_pretrained(path, sharded=True),
        optimizer=OptimizerConfig(),
        objective=SFTObjective(),
        parallel=TorchParallel.join(ParallelConfig()),
    )
    main = threading.get_ident()
    seen: Counter[str] = Counter()
    has_saved = threading.Event()

    def watch() -> None:
        while not has_saved.wait(0.05):
            frame = sys._current_frames().get(main)  # pyright: ignore[reportPrivateUsage] - public, with its underscore
            while frame is not None:
                seen[frame.f_code.co_name] += 1
                frame = frame.f_back

    def save_slowly(tensors: dict[str, torch.Tensor], file: Any, **options: Any) -> None:
        if rank.number == 0:
            time.sleep(1)
        save_file(tensors, file, **options)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with (
        mock.patch.object(streamed_folder, "MAX_FILE_BYTES", file_bytes),
        mock.patch.object(streamed_folder, "save_file", save_slowly),
    ):
        trainer.save_pretrained(to)
    has_saved.set()
    watcher.join()
    return dict(seen)


def peak_bytes_of_export(
    rank: Rank, path: str, to: str, file_bytes: int
) -> tuple[int, set[torch.dtype], int]:
    """The most memory that a rank of a bfloat16 run takes to write the folder, and what the export consists of."""
    packed = PackedModel.from_pretrained(path, sharded=True, compute_dtype=torch.bfloat16)
    trainer = TorchTrainer(
        packed,
        optimizer=OptimizerConfig(),
        objective=SFTObjective(),
        parallel=TorchParallel.join(ParallelConfig()),
    )
    exported = [(tensor.dtype, tensor.nbytes) for _, tensor in trainer.export_weights()]
    with mock.patch.object(streamed_folder, "MAX_FILE_BYTES", file_bytes), growing(PRIVATE) as peak:
        trainer.save_pretrained(to)
    return peak[0], {dtype for dtype, _ in exported}, sum(size for _, size in exported)


def save_by_shares(
    rank: Rank, path: str, to: str, file_bytes: int, options: dict[str, Any], failing: int | None
) -> list[str]:
    """Save a sharded model, and return the names of the tensors that this rank wrote; the disk of one may be full."""
    trainer = TorchTrainer(
        PackedModel.from_pretrained(path, sharded=True, **options),
        optimizer=OptimizerConfig(),
        objective=SFTObjective(),
        parallel=TorchParallel.join(ParallelConfig()),
    )
    written: list[str] = []

    def save_or_fail(tensors: dict[str, torch.Tensor], file: Any, **metadata: Any) -> None:
        if rank.number == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.extend(tensors)
        save_file(tensors, file, **metadata)

    with (
        mock.patch.object(streamed_folder, "MAX_FILE_BYTES", file_bytes),
        mock.patch.object(streamed_folder, "save_file", save_or_fail),
    ):
        trainer.save_pretrained(to)
    return written
