"""Images in packed rows: one pass of a transformers vision tower for a row's images, and their places among the tokens.

Shapes: T packed tokens, D hidden dimension, M features of a row's images, each in the place of one image token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError
from gcore_trainer.objectives.objective import on_device
from gcore_trainer.packing.layout import PackedBatch
from gcore_trainer.sample import Images, MicroBatch, Sample, cut_at_forks

VISION_MODELS = {
    "gemma3": "tiles",
    "glm46v": "grid",
    "glm4v": "grid",
    "glm4v_moe": "grid",
    "glm_ocr": "grid",
    "idefics3": "nested tiles",
    "internvl": "tiles",
    "lighton_ocr": "sizes",
    "llava": "tiles",
    "mistral3": "sizes",
    "paddleocr_vl": "square grid",
    "qwen2_5_vl": "grid",
    "qwen2_vl": "grid",
    "qwen3_5": "grid",
    "qwen3_5_moe": "grid",
    "qwen3_vl": "grid",
    "qwen3_vl_moe": "grid",
    "smolvlm": "nested tiles",
    "vipllava": "tiles",
}
"""Model types whose images are understood, and what the rows of `Images.pixel_values` are for each.

``grid``: patches as transformers' image processor returns them, flat or ``square``. ``sizes``: patches of an image of
any size, row by row, which the tower gets whole. ``tiles``: square images of the tower's size, several for each image,
in a batch of their own if ``nested``.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowImages:
    """The images of a packed row."""

    positions: torch.Tensor
    """[1, T], or with three axes [3, 1, T] rotary positions in time, height and width (Qwen2-VL: arXiv 2409.12191,
    section 2.1)."""
    calls: list[dict[str, torch.Tensor]]
    """Arguments of calls of ``get_image_features`` of transformers' model."""
    patch_index: torch.Tensor
    """[M] index of each feature's token in the row, in the order of the images."""
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    """For each image whose tokens see each other: their places in the row, and those of all tokens up to its end."""


class Vision:
    """The vision tower of a transformers model of `VISION_MODELS`."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self._layout: str = VISION_MODELS[config.model_type]
        self._image_token_id: int = config.image_token_id
        self._has_axes = hasattr(model.base_model, "get_rope_index")
        self._sees_whole_images = config.model_type == "gemma3"
        vision = config.vision_config
        merge = getattr(vision, "spatial_merge_size", getattr(config, "spatial_merge_size", 1))
        self._merged_patches = merge**2
        self._tokens_per_tile = 1
        if self._layout.endswith("tiles"):
            self._tokens_per_tile = _tokens_per_tile(model)

    def row_images(self, samples: MicroBatch, batch: PackedBatch) -> RowImages | None:
        """Collect the images of a row's samples; None: there are none."""
        if all(sample.images is None for sample in samples):
            return None
        positions_1T = batch.positions[None]
        if self._has_axes:
            positions_1T = np.repeat(positions_1T[None], 3, axis=0)
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
            image_index = self._find_images(sample, images)
            _check_whole(sample, image_index)
            if self._has_axes:
                is_input = row_places >= 0
                positions_3N = self._positions(sample, images, image_index)
                positions_1T[:, 0, row_places[is_input]] = positions_3N[:, is_input]
            first = 0
            if last in prompts:
                # Another sample of the row has the prompt's images.
                first = images.count_before(num_prompt)
            prompts.add(last)
            pixel_values += images.patches[first:]
            grids.append(images.grid_thw[first:])
            patch_index += [row_places[index] for index in image_index[first:]]
        device = self._model.device
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._sees_whole_images:
            for index in patch_index:
                context = _sequence_to(batch, int(index[-1]))
                blocks.append((on_device(index, device), on_device(context, device)))
        calls = self._model_inputs(np.concatenate(pixel_values), np.concatenate(grids))
        for call in calls:
            for name, array in call.items():
                call[name] = on_device(array, device)
        return RowImages(
            positions=on_device(positions_1T, device),
            calls=calls,
            patch_index=on_device(np.concatenate(patch_index), device),
            blocks=blocks,
        )

    def decoder_inputs(
        self, input_ids: torch.Tensor, images: RowImages | None
    ) -> dict[str, torch.Tensor]:
        """Embed a row's tokens [1, T] with its images: arguments of the model's text decoder."""
        embeddings_1TD = self._model.get_input_embeddings()(input_ids)
        base = self._model.base_model
        if images is None:
            if torch.is_grad_enabled():
                # Ranks of a divided model must all have gradients of the tower, even if of nothing.
                sums: list[torch.Tensor] = []
                for module in base.children():
                    if module is not self._model.get_decoder():
                        sums += [parameter.sum() for parameter in module.parameters()]
                embeddings_1TD = embeddings_1TD + 0.0 * torch.stack(sums).sum()
            return {"inputs_embeds": embeddings_1TD}
        features: list[Any] = []
        by_layer: dict[int, list[Any]] = {}
        for call in images.calls:
            output = base.get_image_features(**call, return_dict=True)
            features.extend(output.pooler_output)
            for layer, added in enumerate(output.get("deepstack_features", ())):
                by_layer.setdefault(layer, []).extend(added)
        index = images.patch_index
        features_1MD = _join(features)[None].to(embeddings_1TD.dtype)
        inputs: dict[str, Any] = {
            "inputs_embeds": embeddings_1TD.index_copy(1, index, features_1MD)
        }
        if by_layer:
            # Added to hidden states of the first layers (DeepStack, arXiv 2406.04334), in the order of the row.
            is_image_1T = torch.zeros_like(input_ids, dtype=torch.bool)
            inputs["visual_pos_masks"] = is_image_1T.index_fill(1, index, True)
            inputs["deepstack_visual_embeds"] = [
                _join(added)[index.argsort()] for added in by_layer.values()
            ]
        return inputs

    def _model_inputs(
        self, pixel_values: NDArray[np.float32], grid_thw: NDArray[np.int64]
    ) -> list[dict[str, Any]]:
        """Return patches and grids of images as the model takes them, in one call or one for each image."""
        if self._layout == "grid":
            return [{"pixel_values": pixel_values, "image_grid_thw": grid_thw}]
        channels: int = self._model.config.vision_config.num_channels
        side = isqrt(pixel_values.shape[1] // channels)
        squares = pixel_values.reshape(-1, channels, side, side)
        if self._layout == "square grid":
            return [{"pixel_values": squares, "image_grid_thw": grid_thw}]
        if self._layout == "tiles":
            return [{"pixel_values": squares}]
        if self._layout == "nested tiles":
            return [{"pixel_values": squares[None]}]
        calls: list[dict[str, Any]] = []
        ends = grid_thw.prod(1).cumsum()
        for patches, (_, rows, columns) in zip(np.split(squares, ends[:-1]), grid_thw, strict=True):
            image = patches.reshape(rows, columns, *squares.shape[1:]).transpose(2, 0, 3, 1, 4)
            whole = image.reshape(1, channels, rows * side, columns * side)
            calls.append({"pixel_values": whole, "image_sizes": np.array([whole.shape[2:]])})
        return calls

    def _find_images(self, sample: Sample, images: Images) -> list[NDArray[np.int64]]:
        """Return which of the [P + R] tokens of prompt and response stand for the features of each image.

        An image token that the policy wrote is text.
        """
        is_image = np.concatenate([sample.prompt_ids, sample.response_ids]) == self._image_token_id
        if images.starts is None:
            is_image[sample.prompt_ids.size :] = False
        places = np.flatnonzero(is_image)
        # Bounds of runs of image tokens, as indices of places.
        bounds = np.flatnonzero(np.diff(places, prepend=-2, append=is_image.size + 1) > 1)
        counts = images.grid_thw.prod(1) * self._tokens_per_tile // self._merged_patches
        firsts = counts.cumsum() - counts
        is_complete = places.size == counts.sum()
        if images.starts is not None:
            firsts = places.searchsorted(images.starts)
            is_complete = np.isin(images.starts, places).all()
        stops = firsts + counts
        if not (is_complete and np.isin(firsts, bounds).all() and np.isin(stops, bounds).all()):
            raise BatchError(
                f"a sample has runs of {np.diff(bounds).tolist()} image tokens ({self._image_token_id}), and images of "
                f"{counts.tolist()} features; expected one run for each image, of as many tokens (several where the "
                "model's processor writes other tokens between them)"
            )
        return [places[first:stop] for first, stop in zip(firsts, stops, strict=True)]

    def _positions(
        self, sample: Sample, images: Images, image_index: list[NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Return positions [3, P + R] of prompt and response, each after those of the token that it follows.

        Images take fewer positions than tokens.
        """
        tokens = np.concatenate([sample.prompt_ids, sample.response_ids])
        starts = np.array([index[0] for index in image_index])
        is_image = np.zeros(tokens.size, np.int64)
        is_image[np.concatenate(image_index)] = 1
        num_prompt = sample.prompt_ids.size
        spans = [(-num_prompt, 0, -2), *cut_at_forks(sample.response_ids.size, sample.forks)]
        positions_3N = np.empty((3, tokens.size), np.int64)
        next_positions = {-2: 0}
        for start, stop, parent in spans:
            span = slice(start + num_prompt, stop + num_prompt)
            grid_thw = images.grid_thw[(span.start <= starts) & (starts < span.stop)]
            positions, offset = self._model.base_model.get_rope_index(
                torch.from_numpy(tokens[span])[None],
                mm_token_type_ids=torch.from_numpy(is_image[span])[None],
                image_grid_thw=torch.from_numpy(grid_thw),
            )
            positions_3N[:, span] = positions[:, 0].numpy() + next_positions[parent]
            next_positions[stop - 1] = next_positions[parent] + stop - start + int(offset)
        return positions_3N


def _check_whole(sample: Sample, image_index: list[NDArray[np.int64]]) -> None:
    """Raise `BatchError` for an image that is partly in the prompt, or on both sides of a fork."""
    num_prompt = sample.prompt_ids.size
    for start, _, _ in cut_at_forks(sample.response_ids.size, sample.forks):
        for index in image_index:
            if index[0] < start + num_prompt <= index[-1]:
                raise BatchError(
                    f"an image is cut at response token {start}; expected it on one side of prompt and forks"
                )


def _tokens_per_tile(model: Any) -> int:
    """Return how many image tokens of a prompt a square image of the tower's size takes."""
    config = model.config
    count = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", 0)
    return count or model.base_model.image_seq_len


def _join(features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the features [M, D] of all images, of tensors [..., D] for each image or tile."""
    return torch.cat([part.flatten(0, -2) for part in features])


def _sequence_to(batch: PackedBatch, last: int) -> NDArray[np.int64]:
    """Return the places of all tokens that the token at a place follows, and its own."""
    for segment in batch.segments:
        if last in segment.tokens:
            return segment.sequence[: segment.context_length + last - segment.start + 1]
    raise AssertionError(last)


def checkpoint_name(model: Any, name: str) -> str:
    """Return a parameter's name in a Hugging Face folder: transformers renames those of vision-language models."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        [renamed] = revert_weight_conversion(model, {name: torch.empty(0)})
    except (IndexError, RuntimeError):
        # Experts: a folder has matrices of which transformers makes one tensor, whose name it keeps here.
        return name
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
