"""NumPy arrays of tensors, bfloat16 among them, and equal ones as one object."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import make_extra_error

if TYPE_CHECKING:
    from gcore_rollout.engines.diffusion.types import Trajectory

try:
    import ml_dtypes
except ImportError:
    raise make_extra_error("ml_dtypes", "diffusion") from None


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as an array of its data type, which for bfloat16 is that of ml_dtypes."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def host_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return the tensor that `host_array` gives this array for; they share memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def host_rows(rows: torch.Tensor) -> list[NDArray[Any]]:
    """Return the rows of a tensor [R, ...]; equal neighbours are one array."""
    flat = rows.reshape(len(rows), -1)
    differs = (flat[1:] != flat[:-1]).any(1)
    is_new = [True, *differs.tolist()]
    arrays = list(host_array(rows[torch.tensor(is_new, device=rows.device)]))
    return [arrays[index] for index in np.cumsum(is_new) - 1]


def host_entries(entries: Sequence[Any]) -> list[Any]:
    """Return tensors, as arrays, and plain values; equal neighbours are one object."""
    on_host: list[Any] = []
    before: Any = None
    for entry in entries:
        if isinstance(entry, torch.Tensor):
            is_same = isinstance(before, torch.Tensor) and torch.equal(entry, before)
            on_host.append(on_host[-1] if is_same else host_array(entry))
        else:
            on_host.append(entry)
        before = entry
    return on_host


def in_dtype(trajectory: "Trajectory", dtype: torch.dtype) -> "Trajectory":
    """Return a trajectory with its latents in the data type of a model, if that changes none."""
    narrow: dict[str, Any] = {}
    for name in ("latents", "next_latents"):
        wide = torch.from_numpy(getattr(trajectory, name))
        latents = wide.to(dtype)
        if not torch.equal(latents.float(), wide):
            return trajectory
        narrow[name] = host_array(latents)
    return replace(trajectory, **narrow)
