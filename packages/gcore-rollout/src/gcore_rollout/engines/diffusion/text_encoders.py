"""Text encoders that are on the device only while prompts are encoded."""

from typing import Any

import torch

from gcore_rollout.engines.host_weights import HostWeights
from gcore_rollout.errors import UnsupportedModelError


class HostedEncoders:
    """Keeps the text encoders of a pipeline in host memory, and copies them to the device for each call of theirs.

    Their weights do not change: nothing is copied back.

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
        self._weights = HostWeights(self.modules, device)
        self._encode = pipeline.encode_prompt
        pipeline.encode_prompt = self._encode_prompt
        self._weights.leave(version=0)

    def _encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.come()
        try:
            return self._encode(*args, **kwargs)
        finally:
            self._weights.leave(version=0)
