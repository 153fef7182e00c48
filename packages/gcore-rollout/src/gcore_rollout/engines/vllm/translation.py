"""Requests, samples and weights in vLLM's own types and layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from gcore_rollout.engines.protocol import FinishReason, Request
from gcore_rollout.engines.queueing import QueuedSample
from gcore_rollout.engines.vllm.process import TIED_HEAD
from gcore_rollout.engines.vllm.ranks import gather_tensor
from gcore_rollout.errors import RequestError
from gcore_rollout.images.vision_processor import VisionProcessor
from gcore_rollout.weight_sync.digests import HeldTensor, digest_held_tensor

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.logprobs import FlatLogprobs

# vLLM draws from a clamped or refused temperature outside these bounds.
_TEMPERATURES = (0.01, 2.0)

_ROWS_AT_ONCE = 1024


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
    sample: QueuedSample, eos_token_ids: Sequence[int], *, has_seed: bool = True
) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

    settings = sampling_settings(sample, eos_token_ids, has_seed=has_seed)
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
) -> None:
    """Hand over a sample, or its first ``num_tokens`` new tokens."""
    new = slice(num_tokens)
    spans = result.weight_versions or []
    versions = [np.full(span.end - span.start, int(span.version), np.int32) for span in spans]
    sample.finish(
        np.array(result.token_ids, np.int64)[new],
        np.array(cast("FlatLogprobs", result.logprobs).logprobs, np.float32)[new],
        np.concatenate([np.empty(0, np.int32), *versions])[new],
        reason,
    )


@torch.no_grad()
def held_tensors(
    model: Any, *, shapes: Mapping[str, tuple[int, ...]], is_tied: bool, names: Sequence[str] | None
) -> list[HeldTensor]:
    """Digest the weights of a model on one device, but for experts and others that vLLM keeps in layouts of its own.

    A tied head is reported as a tensor of its own. ``shapes`` are of the published tensors, by Hugging Face name; of
    these, or of ``names`` if there are any, all that can be read are digested.
    """
    if names is None:
        names = list(shapes)
        if is_tied and TIED_HEAD not in shapes:
            names.append(TIED_HEAD)
    tensors: list[HeldTensor] = []
    for name in names:
        source: str | None = name
        if is_tied and name == TIED_HEAD:
            source = _find_embedding(model, shapes)
        if source is None:
            continue
        try:
            tensors.append(
                digest_held_tensor(
                    name, partial(_read_published, model, name, shapes[source]), source=source
                )
            )
        except AttributeError:
            # There is no module or parameter of this name: vLLM has made something else of it.
            continue
    return tensors


def _read_published(model: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a published tensor from the model's own layout; an `AttributeError` if it cannot be found."""
    mapped = _map_name(model, name)
    path, _, attribute = mapped.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    published_leaf = name.rpartition(".")[0].rpartition(".")[2]
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    fused = next(
        (f for f, parts in packed.items() if published_leaf in parts and len(parts) > 1), None
    )
    if fused is not None and leaf in (fused, published_leaf):
        module = model.get_submodule(f"{parent}.{fused}")
        index = list(packed[fused]).index(published_leaf)
        sizes: list[int] = module.output_partition_sizes
        tensor = _read_parameter(module, attribute).narrow(0, sum(sizes[:index]), sizes[index])
    else:
        module = model.get_submodule(path)
        tensor = _read_parameter(module, attribute)
        if tensor.dim() and tensor.shape[1:] == shape[1:]:
            # The vocabulary is padded.
            tensor = tensor[: shape[0]]
    tensor = gather_tensor(tensor, shape, module)
    if tensor.numel() != torch.Size(shape).numel():
        raise AttributeError(f"{mapped} has shape {tuple(tensor.shape)}; expected {shape}")
    return tensor


def _read_parameter(module: Any, name: str) -> torch.Tensor:
    """Return a parameter as the module's forward uses it; on CPU, where vLLM packs matrices, from its packed copy."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    parameter: torch.Tensor = getattr(module, name)
    if not (isinstance(module, LinearBase | ParallelLMHead) and hasattr(module, "cpu_linear")):
        return parameter
    layer: Any = module
    if name != "weight":
        # Some kernels want it in float32, whatever it was loaded as.
        return parameter.to(layer.weight.dtype)
    width: int = (
        layer.embedding_dim
        if isinstance(module, ParallelLMHead)
        else layer.input_size_per_partition
    )
    # The output for the rows of the identity is exactly the transposed matrix.
    identity = torch.eye(width, dtype=layer.weight.dtype)
    parts = [layer.quant_method.apply(layer, rows, None) for rows in identity.split(_ROWS_AT_ONCE)]
    return torch.cat(parts).t()


def _find_embedding(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the published name of the tensor that shares its memory with a tied head."""
    try:
        head = _get_parameter(model, TIED_HEAD)
        return next(
            (
                n
                for n in shapes
                if n.endswith("embed_tokens.weight") and _get_parameter(model, n) is head
            ),
            None,
        )
    except AttributeError:
        return None


def _get_parameter(model: Any, name: str) -> torch.Tensor:
    path, _, attribute = _map_name(model, name).rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def _map_name(model: Any, name: str) -> str:
    """Return vLLM's name of a published tensor."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    return mapper.map_name(name) or name
