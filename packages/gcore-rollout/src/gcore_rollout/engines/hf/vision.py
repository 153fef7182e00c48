"""Images in the `hf` engine's prefill: transformers' vision tower and positions, for packed prompts.

Shapes: T packed tokens of P prompts, D hidden dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.queueing import QueuedSample
from gcore_rollout.images.vision_processor import VisionProcessor, join_grids


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptEmbeddings:
    """Packed prompts and their images, embedded."""

    positions: NDArray[np.int64]
    """[T], or with three axes [3, T] rotary positions in time, height and width (Qwen2-VL: arXiv 2409.12191, section
    2.1)."""
    offsets: NDArray[np.int64]
    """[P] rotary position minus place of the tokens after each prompt: images may take fewer positions than tokens."""
    inputs: dict[str, Any]
    """Arguments of the model's text decoder, with embeddings [1, T, D]."""
    blocks: list[tuple[int, int, int]]
    """For each image whose tokens see each other: its prompt, and the place of its first token and after its last."""


def embed_images(
    model: Any,
    processor: VisionProcessor,
    samples: Sequence[QueuedSample],
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> PromptEmbeddings:
    """Embed packed prompts with their images: in one pass of a tower that takes images of all sizes at once.

    Args:
        model: of `VISION_MODELS`, ``...ForConditionalGeneration``.
        samples: one of each prompt, in the row's order; some have images.
        token_ids: [T].
        positions: [T] place of each token in its prompt.
    """
    device = model.device
    base = model.base_model
    tokens = torch.from_numpy(token_ids).to(device)
    has_axes = hasattr(base, "get_rope_index")
    if has_axes:
        positions = np.repeat(positions[None], 3, axis=0)
    offsets = np.zeros(len(samples), np.int64)
    image_places: list[NDArray[np.int64]] = []
    blocks: list[tuple[int, int, int]] = []
    calls: list[dict[str, torch.Tensor]] = []
    start = 0
    for i, sample in enumerate(samples):
        request = sample.request
        length = len(sample.start_token_ids)
        if request.images:
            # Other image tokens are text: the policy wrote them.
            prompt = np.array(request.prompt_token_ids)
            index = processor.find_images(prompt.tolist(), request.images, request.image_starts)
            calls += processor.model_inputs(request.images)
            if has_axes:
                is_image = np.zeros((1, prompt.size), np.int64)
                is_image[0, np.concatenate(index)] = 1
                prompt_positions, offset = base.get_rope_index(
                    torch.from_numpy(prompt)[None],
                    mm_token_type_ids=torch.from_numpy(is_image),
                    image_grid_thw=calls[-1]["image_grid_thw"],
                )
                offsets[i] = int(offset)
                here = positions[:, start : start + length]
                here[:, : prompt.size] = prompt_positions[:, 0].numpy()
                here[:, prompt.size :] += offsets[i]
            if model.config.model_type == "gemma3":
                blocks += [(i, int(places[0]), int(places[-1]) + 1) for places in index]
            image_places.append(start + np.concatenate(index))
        start += length
    features: list[torch.Tensor] = []
    by_layer: dict[int, list[torch.Tensor]] = {}
    for call in join_grids(calls):
        output = base.get_image_features(
            **{name: tensor.to(device) for name, tensor in call.items()}, return_dict=True
        )
        features.extend(output.pooler_output)
        for layer, added in enumerate(output.get("deepstack_features", ())):
            by_layer.setdefault(layer, []).extend(added)
    where = torch.from_numpy(np.concatenate(image_places)).to(device)
    embeddings = model.get_input_embeddings()(tokens)
    embeddings[where] = _join(features).to(embeddings.dtype)
    decoder_inputs: dict[str, Any] = {"inputs_embeds": embeddings[None]}
    if by_layer:
        # Added to hidden states of the first layers (DeepStack, arXiv 2406.04334).
        is_image_1T = torch.zeros_like(tokens, dtype=torch.bool)[None]
        decoder_inputs["visual_pos_masks"] = is_image_1T.index_fill(1, where, True)
        decoder_inputs["deepstack_visual_embeds"] = [_join(added) for added in by_layer.values()]
    return PromptEmbeddings(
        inputs=decoder_inputs, positions=positions, offsets=offsets, blocks=blocks
    )


def _join(features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the features [M, D] of all images, of tensors [..., D] for each image or tile."""
    return torch.cat([part.flatten(0, -2) for part in features])
