"""Writes a staged state as one committed step: everything under a temporary name, then one rename."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_ckpt.checksum import checksum
from gcore_ckpt.data_file import safetensors_header
from gcore_ckpt.directory import step_name, sync_directory, temp_path
from gcore_ckpt.index import INDEX_FILE, DataFile, Index, Shard, TensorEntry, encode_index

if TYPE_CHECKING:
    from gcore_ckpt.staging import StagedState

DATA_FILE = "data-00000.safetensors"


def write_step(path: Path, step: int, staged: "StagedState") -> None:
    """Commits `staged` as `step` in `path`; on return it survives a power cut.

    Raises:
        OSError: Nothing was committed, unless the last sync of `path` itself failed.
    """
    temp = temp_path(path, step)
    temp.mkdir()
    try:
        header = safetensors_header(staged.tensors, staged.placement)
        _write_synced(temp / DATA_FILE, header, staged.data)
        _write_synced(temp / INDEX_FILE, encode_index(_index(staged, header)))
        sync_directory(temp)
        temp.rename(path / step_name(step))
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)  # what stays is removed when the path is next opened for saving
        raise
    sync_directory(path)


def _index(staged: "StagedState", header: bytes) -> Index:
    tensors: dict[str, TensorEntry] = {}
    for key, spec in staged.tensors.items():
        start = staged.placement.offsets[key]
        shard = Shard(
            file=DATA_FILE,
            offset_bytes=len(header) + start,
            start=(0,) * len(spec.shape),
            shape=spec.shape,
            checksum=checksum(staged.data[start : start + spec.size_bytes]),
        )
        tensors[key] = TensorEntry(dtype=spec.dtype, shape=spec.shape, shards=(shard,))
    file = DataFile(
        size_bytes=len(header) + len(staged.data),
        header_size_bytes=len(header),
        header_checksum=checksum(header),
    )
    return Index(tree=staged.tree, tensors=tensors, files={DATA_FILE: file})


def _write_synced(path: Path, *parts: bytes | memoryview) -> None:
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
