"""Checks a committed step without building its state."""

import os
from collections.abc import Callable, Iterator

from gcore_ckpt.format.checksum import block_count
from gcore_ckpt.format.index import StoredShard, StoredTensor
from gcore_ckpt.loading.reader import Step, StepReader, block_runs, find_step, open_step
from gcore_ckpt.storage import open_storage
from gcore_ckpt.workers import Job, Workers

_THREADS = 4


def verify(
    path: str | os.PathLike[str], step: Step = "latest", *, progress: Callable[[int], None] | None = None
) -> None:
    """Read every byte of a committed step and check it, in a few megabytes of memory.

    Args:
        path: The folder or URL of the checkpoints.
        step: Number of the step; `"latest"` is the highest committed one.
        progress: Is called, from several threads, with the bytes that have been checked since the last call.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        CorruptCheckpointError: With the file and, where there is one, the tensor that is not what was saved.
    """
    storage = open_storage(path)
    workers = Workers(_THREADS, "gcore-ckpt-read")
    try:
        with open_step(storage, find_step(storage, step)) as reader:
            reader.decode_tree(reader.index.tree, lambda _, name, __: name, lambda nodes: {"dict": dict(nodes)})
            jobs = (
                job
                for name, tensor in reader.index.tensors.items()
                for shard in tensor.shards
                for job in _jobs(reader, name, tensor, shard, progress)
            )
            workers.run(jobs)
    finally:
        workers.close()


def _jobs(
    reader: StepReader,
    name: str,
    tensor: StoredTensor,
    shard: StoredShard,
    progress: Callable[[int], None] | None,
) -> Iterator[Job]:
    size_bytes = shard.box.size * tensor.itemsize

    def check(first: int, last: int) -> None:
        count = min(last * shard.block_bytes, size_bytes) - first * shard.block_bytes
        reader.read_blocks(name, shard, first, memoryview(bytearray(count)))
        if progress is not None:
            progress(count)

    for first, last in block_runs(shard, 0, block_count(size_bytes, shard.block_bytes)):
        yield lambda first=first, last=last: check(first, last)
