"""Arrays that images share, such as the embeddings of their prompt: one in memory, and one in a checkpoint."""

import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout import ImageSample, host_array, host_tensor


def share_conditions(samples: Sequence[ImageSample], known: MutableMapping[bytes, NDArray[Any]]) -> list[ImageSample]:
    """Return images whose equal conditions are one array, of those that are ``known`` if it is among them."""
    found: dict[int, NDArray[Any]] = {}

    def shared(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or not value.ndim:
            return value
        if id(value) not in found:
            key = hashlib.sha256(f"{value.dtype.name} {value.shape}".encode())
            key.update(np.ascontiguousarray(value).view(np.uint8).data)
            found[id(value)] = known.setdefault(key.digest(), value)
        return found[id(value)]

    def of_image(conditions: Mapping[str, Any] | None) -> Any:
        return conditions and {name: shared(value) for name, value in conditions.items()}

    parts = ("conditions", "negative_conditions", "shared_conditions")
    return [replace(s, **{name: of_image(getattr(s, name)) for name in parts}) for s in samples]


def with_tensors(value: Any, kept: dict[int, torch.Tensor]) -> Any:
    """Return a tree with its arrays as tensors, which a checkpoint can hold in bfloat16, too."""
    if isinstance(value, Mapping):
        return {name: with_tensors(entry, kept) for name, entry in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if id(value) not in kept:
        kept[id(value)] = host_tensor(value)
    return kept[id(value)]


def with_arrays(value: Any, known: dict[int, NDArray[Any]]) -> Any:
    """Return a tree of `with_tensors` as it was."""
    if isinstance(value, Mapping):
        return {name: with_arrays(entry, known) for name, entry in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in known:
        known[id(value)] = host_array(value)
    return known[id(value)]
