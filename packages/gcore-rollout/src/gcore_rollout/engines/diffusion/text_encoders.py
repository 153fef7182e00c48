"""Text encoders that are on the device only while prompts are encoded."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from gcore_rollout.errors import UnsupportedModelError


class HostedEncoders:
    """Keeps the text encoders of a pipeline in host memory, and copies them to the device for each call of theirs.

    Their weights do not change: nothing is copied back. Host memory is pinned where the device is CUDA.

    Args:
        pipeline: its method ``encode_prompt`` is replaced.
        device: of the pipeline's other models.

    Raises:
        UnsupportedModelError: the pipeline has no such method, or no text encoder.
    """

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        names = [name for name in pipeline.components if name.startswith("text_encoder")]
        self.modules: list[torch.nn.Module] = [m for name in names if (m := getattr(pipeline, name)) is not None]
        if not self.modules or not hasattr(pipeline, "encode_prompt"):
            kind = type(pipeline).__name__
            raise UnsupportedModelError(f"{kind} has no text encoder; expected one with offload_text_encoders")
        self._device = device
        self._kept = [(tensor, _host_copy(tensor.data, device)) for tensor in self._tensors()]
        self._encode = pipeline.encode_prompt
        pipeline.encode_prompt = self._encode_prompt
        self.leave()

    def leave(self) -> None:
        """Free what the encoders have of the device's memory."""
        for tensor, kept in self._kept:
            tensor.data = kept

    def _encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        for tensor, kept in self._kept:
            tensor.data = kept.to(self._device, non_blocking=True, copy=True)
        try:
            return self._encode(*args, **kwargs)
        finally:
            self.leave()

    def _tensors(self) -> Iterator[torch.Tensor]:
        return chain(*(chain(module.parameters(), module.buffers()) for module in self.modules))


def _host_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    host = tensor.to("cpu")
    return host.pin_memory() if device.type == "cuda" else host
