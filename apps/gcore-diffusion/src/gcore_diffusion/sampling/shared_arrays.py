"""Arrays that images share, such as the embeddings of their prompt: one in memory, and one in a checkpoint."""

import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout import ImageSample, host_array, host_tensor


def share_conditions(
    samples: Sequence[ImageSample], arrays: MutableMapping[bytes, NDArray[Any]]
) -> list[ImageSample]:
    """Return images whose equal conditions are one array: the equal one of ``arrays``, by hash, if there is one."""
    by_id: dict[int, NDArray[Any]] = {}

    def share(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or not value.ndim:
            return value
        if id(value) not in by_id:
            key = hashlib.sha256(f"{value.dtype.name} {value.shape}".encode())
            key.update(np.ascontiguousarray(value).view(np.uint8).data)
            by_id[id(value)] = arrays.setdefault(key.digest(), value)
        return by_id[id(value)]

    shared: list[ImageSample] = []
    for sample in samples:
        fields: dict[str, Any] = {}
        for name in ("conditions", "negative_conditions", "shared_conditions"):
            conditions = getattr(sample, name)
            if conditions:
                fields[name] = {key: share(value) for key, value in conditions.items()}
        shared.append(replace(sample, **fields))
    return shared


def with_tensors(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """Return a tree with its arrays as tensors, which a checkpoint can hold in bfloat16, too."""
    if isinstance(value, Mapping):
        return {name: with_tensors(entry, tensors) for name, entry in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if id(value) not in tensors:
        tensors[id(value)] = host_tensor(value)
    return tensors[id(value)]


def with_arrays(value: Any, arrays: dict[int, NDArray[Any]]) -> Any:
    """Return a tree of `with_tensors` as it was."""
    if isinstance(value, Mapping):
        return {name: with_arrays(entry, arrays) for name, entry in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in arrays:
        arrays[id(value)] = host_array(value)
    return arrays[id(value)]
