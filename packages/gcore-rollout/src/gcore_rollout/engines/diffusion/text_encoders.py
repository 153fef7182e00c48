"""Text encoders of pipelines: what they read of prompts, and memory of a device only while they work."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gcore_rollout.engines.host_weights import HostWeights
from gcore_rollout.errors import EngineModelError


def host_text_encoders(pipeline: Any, device: torch.device) -> list[torch.nn.Module]:
    """Keep the text encoders of a pipeline in host memory, copy them to the device for each call, and return them.

    Their weights do not change: nothing is copied back.

    Args:
        pipeline: its method ``encode_prompt`` is replaced.
        device: of the pipeline's other models.

    Raises:
        EngineModelError: the pipeline has no such method, or no text encoder.
    """
    encoders: list[torch.nn.Module] = []
    for name, part in pipeline.components.items():
        if name.startswith("text_encoder") and part is not None:
            encoders.append(part)
    if not encoders or not hasattr(pipeline, "encode_prompt"):
        raise EngineModelError(
            f"{type(pipeline).__name__} has no text encoder; expected one with offload_text_encoders"
        )
    weights = HostWeights(encoders, device)
    encode = pipeline.encode_prompt

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        weights.onload()
        try:
            return encode(*args, **kwargs)
        finally:
            weights.offload(version=0)

    pipeline.encode_prompt = encode_prompt
    weights.offload(version=0)
    return encoders


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
