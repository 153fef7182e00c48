"""Images in packed rows: one pass of a transformers vision tower for a row's images, and positions of three axes.

Shapes: T packed tokens, D hidden dimension, M merged patches of a row's images, each in the place of one token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError
from gcore_trainer.objectives.objective import on_device
from gcore_trainer.packing.layout import PackedBatch
from gcore_trainer.sample import Images, MicroBatch

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose images are understood."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowImages:
    """The images of a packed row."""

    positions: torch.Tensor
    """[3, 1, T] rotary positions in time, height and width (Qwen2-VL: arXiv 2409.12191, section 2.1)."""
    pixel_values: torch.Tensor
    """[patches, features]."""
    grid_thw: torch.Tensor
    """[images, 3]."""
    patch_index: torch.Tensor
    """[M] index of each merged patch's token in the row."""


class Vision:
    """The vision tower of a transformers model of the Qwen-VL kind."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._image_token_id: int = model.config.image_token_id
        self._merge: int = model.config.vision_config.spatial_merge_size

    def row_images(self, samples: MicroBatch, batch: PackedBatch) -> RowImages | None:
        """Collect the images of a row's samples; None: there are none."""
        if all(sample.images is None for sample in samples):
            return None
        positions_3T = np.repeat(batch.positions[None], 3, axis=0)
        seen: list[Images] = []
        patch_index: list[NDArray[np.int64]] = []
        prompts: set[np.int64] = set()
        sequence_starts = batch.sequence_starts
        for sample, row_places, last in zip(
            samples, batch.input_places(samples), batch.last_prompt_places, strict=True
        ):
            if sample.images is None:
                continue
            prompt_length = sample.prompt_ids.size
            # A response's image token is text: the policy wrote it.
            is_image = sample.prompt_ids == self._image_token_id
            self._check(is_image, sample.images)
            positions_3P, offset = self._positions(
                sample.prompt_ids, is_image, sample.images.grid_thw
            )
            # Branches that do not follow the prompt do not see its images.
            is_offset = sequence_starts[row_places] == row_places[0]
            positions_3T[:, row_places[is_offset]] += offset
            positions_3T[:, row_places[:prompt_length]] = positions_3P
            if last not in prompts:
                prompts.add(last)
                seen.append(sample.images)
                patch_index.append(row_places[:prompt_length][is_image])
        device = self._model.device
        return RowImages(
            positions=on_device(positions_3T[:, None], device),
            pixel_values=on_device(np.concatenate([i.pixel_values for i in seen]), device),
            grid_thw=on_device(np.concatenate([i.grid_thw for i in seen]), device),
            patch_index=on_device(np.concatenate(patch_index), device),
        )

    def embed(self, input_ids: torch.Tensor, images: RowImages | None) -> torch.Tensor:
        """Embed a row's tokens [1, T] with its images: [1, T, D]."""
        embeddings_1TD = self._model.get_input_embeddings()(input_ids)
        if images is None:
            if not torch.is_grad_enabled():
                return embeddings_1TD
            # Ranks of a divided model must all have gradients of the tower, even if of nothing.
            tower: torch.nn.Module = self._model.base_model.visual
            return embeddings_1TD + 0.0 * torch.stack([p.sum() for p in tower.parameters()]).sum()
        features = self._model.base_model.get_image_features(
            images.pixel_values, images.grid_thw
        ).pooler_output
        features_1MD = torch.cat(features)[None].to(embeddings_1TD.dtype)
        return embeddings_1TD.index_copy(1, images.patch_index, features_1MD)

    def _positions(
        self,
        prompt_ids: NDArray[np.int64],
        is_image: NDArray[np.bool_],
        grid_thw: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], int]:
        """Return positions [3, P] of a prompt, and the offset of later ones: images take fewer positions."""
        positions, offset = self._model.base_model.get_rope_index(
            torch.from_numpy(prompt_ids)[None],
            mm_token_type_ids=torch.from_numpy(is_image.astype(np.int64))[None],
            image_grid_thw=torch.from_numpy(grid_thw),
        )
        return positions[:, 0].numpy(), int(offset)

    def _check(self, is_image: NDArray[np.bool_], images: Images) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_image, [False]])))
        runs = (edges[1::2] - edges[::2]).tolist()
        needed = (images.grid_thw.prod(1) // self._merge**2).tolist()
        if runs != needed:
            raise BatchError(
                f"a prompt has runs of {runs} image tokens ({self._image_token_id}), and images of {needed} merged "
                "patches; expected one run for each image, of as many tokens"
            )


def checkpoint_name(model: Any, name: str) -> str:
    """Return a parameter's name in a Hugging Face folder: transformers renames those of vision-language models."""
    from transformers.core_model_loading import revert_weight_conversion

    [renamed] = revert_weight_conversion(model, {name: torch.empty(0)})
    return renamed


def copy_processor(source: Path, target: Path) -> None:
    """Copy the configs of image processors that a Hugging Face folder has."""
    for name in (
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
    ):
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())
