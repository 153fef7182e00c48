"""Rebuilds a state from an open step, in host memory."""

from typing import Any

import numpy as np
import torch

from gcore_ckpt.reader import StepReader
from gcore_ckpt.tree import ArrayKind, State


def restore(reader: StepReader) -> State:
    """The state of an open step; leaves that shared memory when it was saved are one and the same object.

    Raises:
        CorruptCheckpointError: The bytes or the tree are not what was saved.
    """
    loaded: dict[tuple[ArrayKind, str], object] = {}

    def array(kind: ArrayKind, key: str) -> object:
        if (kind, key) not in loaded:
            loaded[kind, key] = _load_tensor(reader, key) if kind == "tensor" else _load_array(reader, key)
        return loaded[kind, key]

    return reader.decode_tree(array)


def _load_tensor(reader: StepReader, key: str) -> torch.Tensor:
    entry = reader.index.tensors[key]
    data = torch.empty(entry.spec.size_bytes, dtype=torch.uint8)
    reader.read_into(key, data.numpy().data)
    return data.view(getattr(torch, entry.dtype)).view(entry.shape)


def _load_array(reader: StepReader, key: str) -> object:
    entry = reader.index.tensors[key]
    array: np.ndarray[Any, np.dtype[Any]] = np.empty(entry.shape, dtype=entry.dtype)
    reader.read_into(key, array.reshape(-1).view(np.uint8).data)
    return array
