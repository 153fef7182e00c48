"""Requests and samples in vLLM's own types."""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import FinishReason, Request
from gcore_rollout.engines.queueing import QueuedSample
from gcore_rollout.errors import RequestError
from gcore_rollout.images.vision_processor import VisionProcessor

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.logprobs import FlatLogprobs

# vLLM draws from a clamped or refused temperature outside these bounds.
_TEMPERATURES = (0.01, 2.0)


def check_temperature(request: Request) -> None:
    """Refuse temperatures that vLLM does not sample at."""
    low, high = _TEMPERATURES
    temperature = request.sampling.temperature
    if temperature != 0 and not low <= temperature <= high:
        raise RequestError(
            f"temperature of request {request.request_id!r} is {temperature}; expected 0 (greedy) or {low} to {high}, "
            "which vLLM takes"
        )


def prompt_of(
    sample: QueuedSample, vision: VisionProcessor | None, *, version: int
) -> "TokensInput | MultiModalInput":
    """Return a sample's prompt; its cached prefixes are used for weights of this version alone."""
    from vllm.inputs.engine import mm_input, tokens_input

    images = sample.request.images
    # vLLM cannot drop cached prefixes while samples run: the salt keeps those of other versions apart.
    if vision is None or not images:
        return tokens_input(list(sample.start_token_ids), cache_salt=str(version))
    from transformers import BatchFeature
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    pixels = vision.process(images)
    # Other image tokens are text: the policy wrote them.
    spans = vision.places(sample.request.prompt_token_ids, sample.request.image_starts)
    grid_thw = torch.from_numpy(pixels.grid_thw)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid_thw.prod(1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs = BatchFeature(
        {"pixel_values": torch.from_numpy(pixels.pixel_values), "image_grid_thw": grid_thw}
    )
    return mm_input(
        list(sample.start_token_ids),
        MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        {"image": [sha256(image).hexdigest() for image in images]},
        {"image": [PlaceholderRange(offset=start, length=length) for start, length in spans]},
        cache_salt=str(version),
    )


def options_for_images(*, on_cpu: bool) -> dict[str, Any]:
    """Return the engine arguments with which vLLM takes images that are processed already."""
    return {
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        "skip_mm_profiling": on_cpu,
    }


def sampling_settings(
    sample: QueuedSample, eos_token_ids: Sequence[int], *, has_seed: bool = True
) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams` for a sample, as its server takes them."""
    sampling = sample.request.sampling
    detection = sampling.repetition_detection
    return {
        "max_tokens": sampling.max_tokens - sample.prefix_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_detection": None if detection is None else asdict(detection),
        # vLLM's generators take signed 64-bit seeds, and -1 for none.
        "seed": sample.generator_seed if has_seed else None,
        "stop_token_ids": list(eos_token_ids),
        # Without a tokenizer vLLM knows no other end-of-sequence token.
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
    }


def sampling_params(
    sample: QueuedSample,
    eos_token_ids: Sequence[int],
    *,
    has_seed: bool = True,
    needs_top_k: bool = False,
) -> "SamplingParams":
    """Return vLLM's parameters of a sample; where it ``needs_top_k``, a greedy one is drawn from one token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

    settings = sampling_settings(sample, eos_token_ids, has_seed=has_seed)
    if needs_top_k and not settings["temperature"]:
        settings |= {"temperature": 1.0, "top_k": 1}
    detection = settings["repetition_detection"]
    if detection is not None:
        settings["repetition_detection"] = RepetitionDetectionParams(**detection)
    return SamplingParams(
        **settings, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
    )


def finish(
    sample: QueuedSample,
    result: "CompletionOutput",
    reason: FinishReason,
    *,
    num_tokens: int | None = None,
    layers: Sequence[int] = (),
) -> None:
    """Hand over a sample, or its first ``num_tokens`` new tokens, with their experts in some ``layers``, and sets."""
    new = slice(num_tokens)
    experts: Any = result.routed_experts
    if experts is not None:
        experts = experts[:, layers]
    spans = result.weight_versions or []
    kept: list[NDArray[np.int32]] = []
    if result.sampling_mask is not None and sample.request.sampling.truncates:
        kept = [np.array(ids, np.int32) for ids in result.sampling_mask.token_ids[new]]
    versions = [np.full(span.end - span.start, int(span.version), np.int32) for span in spans]
    sample.finish(
        np.array(result.token_ids, np.int64)[new],
        np.array(cast("FlatLogprobs", result.logprobs).logprobs, np.float32)[new],
        np.concatenate([np.empty(0, np.int32), *versions])[new],
        reason,
        experts,
        kept,
    )
