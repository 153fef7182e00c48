"""Checks a committed step without building its state."""

import os
from pathlib import Path

from gcore_ckpt.directory import Step
from gcore_ckpt.reader import open_step


def verify(path: str | os.PathLike[str], step: Step = "latest") -> None:
    """Reads every byte of a committed step and checks it; needs host memory for the largest tensor only.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        CorruptCheckpointError: With the file and, where there is one, the tensor that is not what was saved.
    """
    with open_step(Path(path), step) as reader:
        reader.decode_tree(lambda kind, key: (kind, key))
        for key, entry in reader.index.tensors.items():
            reader.read_into(key, memoryview(bytearray(entry.spec.size_bytes)))
