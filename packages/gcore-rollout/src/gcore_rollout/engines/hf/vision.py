"""How the `hf` engine's prefill sees images: transformers' vision tower and positions, for packed prompts.

Shapes: T packed tokens of P prompts, D hidden dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.queueing import Sample
from gcore_rollout.images.vision_processor import Pixels, VisionProcessor


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenPrompts:
    """Packed prompts with their images in them."""

    embeddings: torch.Tensor
    """[1, T, D]."""
    positions: NDArray[np.int64]
    """[3, T] rotary positions in time, height and width (Qwen2-VL: arXiv 2409.12191, section 2.1)."""
    offsets: NDArray[np.int64]
    """[P] what the rotary position of each token behind a prompt has over its place; images take fewer positions."""


class HFVision:
    """The vision tower of a transformers model of the Qwen-VL kind.

    Args:
        model: ``...ForConditionalGeneration``.
        processor: of the same folder.
    """

    def __init__(self, model: Any, processor: VisionProcessor) -> None:
        self._model = model
        self.processor = processor

    def see(self, samples: Sequence[Sample], token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> SeenPrompts:
        """Embed packed prompts, their images in one pass of the tower.

        Args:
            samples: one of each prompt, in the row's order.
            token_ids: [T].
            positions: [T] place of each token in its prompt.
        """
        device = self._model.device
        embeddings = self._model.get_input_embeddings()(torch.from_numpy(token_ids).to(device))
        positions_3T = np.repeat(positions[None], 3, axis=0)
        offsets = np.zeros(len(samples), np.int64)
        places: list[NDArray[np.int64]] = []
        seen: list[Pixels] = []
        start = 0
        for i, sample in enumerate(samples):
            length = len(sample.start_token_ids)
            if sample.request.images:
                # Behind the prompt an image token is text: the policy wrote it.
                prompt = np.array(sample.request.prompt_token_ids)
                is_image = prompt == self.processor.image_token_id
                pixels = self.processor.process(sample.request.images)
                here = positions_3T[:, start : start + length]
                here[:, : prompt.size], offsets[i] = self._positions(prompt, is_image, pixels.grid_thw)
                here[:, prompt.size :] += offsets[i]
                places.append(start + np.flatnonzero(is_image))
                seen.append(pixels)
            start += length
        if seen:
            features = self._model.base_model.get_image_features(
                torch.from_numpy(np.concatenate([p.pixel_values for p in seen])).to(device),
                torch.from_numpy(np.concatenate([p.grid_thw for p in seen])).to(device),
            )
            where = torch.from_numpy(np.concatenate(places)).to(device)
            embeddings[where] = torch.cat(features.pooler_output).to(embeddings.dtype)
        return SeenPrompts(embeddings=embeddings[None], positions=positions_3T, offsets=offsets)

    def _positions(
        self, prompt: NDArray[np.int64], is_image: NDArray[np.bool_], grid_thw: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        positions, offset = self._model.base_model.get_rope_index(
            torch.from_numpy(prompt)[None],
            mm_token_type_ids=torch.from_numpy(is_image.astype(np.int64))[None],
            image_grid_thw=torch.from_numpy(grid_thw),
        )
        return positions[:, 0].numpy(), int(offset)
