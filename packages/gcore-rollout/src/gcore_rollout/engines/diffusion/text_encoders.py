"""Text encoders of pipelines: what they read of prompts, and memory of a device only while they work."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
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
        self.modules: list[torch.nn.Module] = []
        for name in pipeline.components:
            if name.startswith("text_encoder") and getattr(pipeline, name) is not None:
                self.modules.append(getattr(pipeline, name))
        if not self.modules or not hasattr(pipeline, "encode_prompt"):
            raise UnsupportedModelError(
                f"{type(pipeline).__name__} has no text encoder; expected one with offload_text_encoders"
            )
        self._weights = HostWeights(self.modules, device)
        self._encode = pipeline.encode_prompt
        pipeline.encode_prompt = self._encode_prompt
        self._weights.offload(version=0)

    def _encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.onload()
        try:
            return self._encode(*args, **kwargs)
        finally:
            self._weights.offload(version=0)


def cut_prompts(
    path: str | Path, prompts: Sequence[str], *, max_sequence_length: int = 0
) -> list[str]:
    """Return the prompts of which no text encoder of a pipeline's folder reads the end.

    Templates that a pipeline writes around its prompts are not counted.

    Args:
        path: a pipeline's folder; only its tokenizers are loaded.
        prompts: the texts.
        max_sequence_length: the argument of the pipeline's call; 0: its own value.
    """
    import diffusers
    from transformers import AutoTokenizer

    components = json.loads((Path(path) / "model_index.json").read_text())
    names = [
        name for name in components if name.startswith("tokenizer") and None not in components[name]
    ]
    if not names:
        return []
    call = inspect.signature(getattr(diffusers, components["_class_name"]).__call__)
    if not max_sequence_length and "max_sequence_length" in call.parameters:
        max_sequence_length = call.parameters["max_sequence_length"].default
    remaining = list(dict.fromkeys(prompts))
    for name in names:
        tokenizer: Any = AutoTokenizer.from_pretrained(Path(path) / name, local_files_only=True)
        is_clip = components[name][1].startswith("CLIP")
        limit = tokenizer.model_max_length
        if max_sequence_length and not is_clip:
            limit = max_sequence_length
        token_ids = tokenizer(remaining, verbose=False)["input_ids"] if remaining else []
        remaining = [
            prompt for prompt, ids in zip(remaining, token_ids, strict=True) if len(ids) > limit
        ]
    return remaining
