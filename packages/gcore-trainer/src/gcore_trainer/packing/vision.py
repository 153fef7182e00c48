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
from gcore_trainer.sample import Images, MicroBatch, Sample, cut_at_forks

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
        pixel_values: list[NDArray[np.float32]] = []
        grids: list[NDArray[np.int64]] = []
        patch_index: list[NDArray[np.int64]] = []
        prompts: set[int] = set()
        for sample, last, response_places in zip(
            samples, batch.last_prompt_places.tolist(), batch.response_places, strict=True
        ):
            images = sample.images
            if images is None:
                continue
            num_prompt = sample.prompt_ids.size
            prompt_places = np.arange(last - num_prompt, last) + 1
            row_places = np.concatenate([prompt_places, response_places])
            starts, is_image = self._find_images(sample, images)
            is_input = row_places >= 0
            positions_3N = self._positions(sample, images, starts, is_image)
            positions_3T[:, row_places[is_input]] = positions_3N[:, is_input]
            first = 0
            if last in prompts:
                # Another sample of the row has the prompt's images.
                first = images.count_before(num_prompt)
                is_image[:num_prompt] = False
            prompts.add(last)
            pixel_values += images.patches[first:]
            grids.append(images.grid_thw[first:])
            patch_index.append(row_places[is_image])
        device = self._model.device
        return RowImages(
            positions=on_device(positions_3T[:, None], device),
            pixel_values=on_device(np.concatenate(pixel_values), device),
            grid_thw=on_device(np.concatenate(grids), device),
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

    def _find_images(
        self, sample: Sample, images: Images
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where images start in prompt and response, and [P + R] which tokens stand for their patches.

        An image token that the policy wrote is text.
        """
        is_image = np.concatenate([sample.prompt_ids, sample.response_ids]) == self._image_token_id
        if images.starts is None:
            is_image[sample.prompt_ids.size :] = False
        edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False))
        runs = dict(zip(edges[::2].tolist(), np.diff(edges)[::2].tolist(), strict=True))
        if images.starts is not None:
            runs = {start: runs.get(start, 0) for start in images.starts.tolist()}
        needed = (images.grid_thw.prod(1) // self._merge**2).tolist()
        lengths = [*runs.values()]
        if lengths != needed:
            raise BatchError(
                f"a sample has runs of {lengths} image tokens ({self._image_token_id}), and images of {needed} merged "
                "patches; expected one run for each image, of as many tokens"
            )
        is_image[:] = False
        for start, length in runs.items():
            is_image[start : start + length] = True
        return np.array([*runs]), is_image

    def _positions(
        self,
        sample: Sample,
        images: Images,
        starts: NDArray[np.int64],
        is_image: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Return positions [3, P + R] of prompt and response, each after those of the token that it follows.

        Images take fewer positions than tokens.
        """
        tokens = np.concatenate([sample.prompt_ids, sample.response_ids])
        num_prompt = sample.prompt_ids.size
        spans = [(-num_prompt, 0, -2), *cut_at_forks(sample.response_ids.size, sample.forks)]
        positions_3N = np.empty((3, tokens.size), np.int64)
        next_positions = {-2: 0}
        for start, stop, parent in spans:
            span = slice(start + num_prompt, stop + num_prompt)
            if stop < sample.response_ids.size and is_image[span.stop - 1 : span.stop + 1].all():
                raise BatchError(
                    f"an image is cut at response token {stop}; expected it on one side of prompt and forks"
                )
            grid_thw = images.grid_thw[(span.start <= starts) & (starts < span.stop)]
            positions, offset = self._model.base_model.get_rope_index(
                torch.from_numpy(tokens[span])[None],
                mm_token_type_ids=torch.from_numpy(is_image[span].astype(np.int64))[None],
                image_grid_thw=torch.from_numpy(grid_thw),
            )
            positions_3N[:, span] = positions[:, 0].numpy() + next_positions[parent]
            next_positions[stop - 1] = next_positions[parent] + stop - start + int(offset)
        return positions_3N


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
