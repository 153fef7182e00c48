"""Arrays of the host as tensors of a device, without waiting for it."""

from typing import Any

import torch
from numpy.typing import NDArray


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor of a device.

    From ordinary memory torch copies to a GPU only when it has finished all that it was given, and waits; from pinned
    memory the copy takes its turn.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
