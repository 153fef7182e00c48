"""Images in the `hf` engine's prefill: transformers' vision tower and positions, for packed prompts.

Shapes: T packed tokens of P prompts, D hidden dimension.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.queueing import QueuedSample
from gcore_rollout.images.vision_processor import Pixels, VisionProcessor


def embed_images(
    model: Any,
    processor: VisionProcessor,
    samples: Sequence[QueuedSample],
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Embed packed prompts, their images in one pass of the tower.

    Args:
        model: of the Qwen-VL kind, ``...ForConditionalGeneration``.
        samples: one of each prompt, in the row's order.
        token_ids: [T].
        positions: [T] place of each token in its prompt.

    Returns:
        embeddings [1, T, D]; rotary positions in time, height and width [3, T] (Qwen2-VL: arXiv 2409.12191, section
        2.1); and rotary position minus place of the tokens after each prompt [P], because images take fewer
        positions than tokens.
    """
    device = model.device
    embeddings = model.get_input_embeddings()(torch.from_numpy(token_ids).to(device))
    positions_3T = np.repeat(positions[None], 3, axis=0)
    offsets = np.zeros(len(samples), np.int64)
    image_places: list[NDArray[np.int64]] = []
    seen: list[Pixels] = []
    start = 0
    for i, sample in enumerate(samples):
        length = len(sample.start_token_ids)
        if sample.request.images:
            # Other image tokens are text: the policy wrote them.
            request = sample.request
            prompt = np.array(request.prompt_token_ids)
            is_image = np.zeros(prompt.size, np.bool_)
            for first, size in processor.places(request.prompt_token_ids, request.image_starts):
                is_image[first : first + size] = True
            pixels = processor.process(request.images)
            here = positions_3T[:, start : start + length]
            prompt_positions, offset = model.base_model.get_rope_index(
                torch.from_numpy(prompt)[None],
                mm_token_type_ids=torch.from_numpy(is_image.astype(np.int64))[None],
                image_grid_thw=torch.from_numpy(pixels.grid_thw),
            )
            offsets[i] = int(offset)
            here[:, : prompt.size] = prompt_positions[:, 0].numpy()
            here[:, prompt.size :] += offsets[i]
            image_places.append(start + np.flatnonzero(is_image))
            seen.append(pixels)
        start += length
    if seen:
        features = model.base_model.get_image_features(
            torch.from_numpy(np.concatenate([p.pixel_values for p in seen])).to(device),
            torch.from_numpy(np.concatenate([p.grid_thw for p in seen])).to(device),
        )
        where = torch.from_numpy(np.concatenate(image_places)).to(device)
        embeddings[where] = torch.cat(features.pooler_output).to(embeddings.dtype)
    return embeddings[None], positions_3T, offsets
