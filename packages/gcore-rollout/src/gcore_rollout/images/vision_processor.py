"""Images of prompts: their pixels as a vision-language model reads them, and their places among the tokens.

A prompt's token ids are those that the model sees: at an image's place its image token stands once for each of the
image's features, in some models with other tokens before, between and after them. Rendered chat templates have one
token at each place; `VisionProcessor.expand` replaces it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import EngineModelError, RequestError
from gcore_rollout.images.decoding import count_pixels, image_size, open_rgb
from gcore_rollout.images.reward import import_pillow

VISION_MODELS = (
    "gemma3",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "idefics3",
    "internvl",
    "lighton_ocr",
    "llava",
    "mistral3",
    "paddleocr_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "vipllava",
)
"""Model types whose images are supported."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pixels:
    """Images as a model reads them, concatenated: cut into patches or, for towers of one size, into whole tiles."""

    pixel_values: NDArray[np.float32]
    """[patches, features]."""
    grid_thw: NDArray[np.int64]
    """[images, 3] patches of each image in time, height and width; of tiles: their number, 1 and 1."""


class VisionProcessor:
    """A model folder's image processor of transformers, and the tokens of an image in a prompt.

    Args:
        processor: transformers' image processor.
        config: the model's.
        writer: transformers' processor of texts and images; None: an image takes image tokens alone, of whose number
            the model's config and the image's size decide.

    Example:
        >>> from transformers import Qwen2VLConfig, Qwen2VLImageProcessor
        >>> from gcore_rollout.images.reward import png
        >>> processor = VisionProcessor(Qwen2VLImageProcessor(), Qwen2VLConfig(image_token_id=9))
        >>> image = png(np.zeros((56, 84, 3), np.uint8))
        >>> token_ids = processor.expand([1, 9, 2], [image])
        >>> token_ids
        (1, 9, 9, 9, 9, 9, 9, 2)
        >>> processor.places(token_ids)
        [(1, 6)]
        >>> processor.process([image]).grid_thw
        array([[1, 4, 6]])
    """

    def __init__(self, processor: Any, config: Any, writer: Any = None) -> None:
        self._processor = processor
        self._config = config
        self._writer = writer
        self._read = lru_cache(maxsize=16)(self._read_image)
        self._place_token_id: int = config.image_token_id
        """The token that chat templates write for an image."""
        if writer is not None:
            self._place_token_id = writer.tokenizer.convert_tokens_to_ids(writer.image_token)
        self.image_token_id: int = config.image_token_id

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Self:
        """Load the image processor of a Hugging Face folder; `RolloutError` if Pillow is not installed.

        `EngineModelError` if its model takes no images or is not supported, or it has no image processor.
        """
        from transformers import AutoConfig, AutoImageProcessor, AutoProcessor

        config = AutoConfig.from_pretrained(path)
        if config.model_type not in VISION_MODELS:
            raise EngineModelError(
                f"model type of {path} is {config.model_type!r}; expected one of {', '.join(VISION_MODELS)} for images"
            )
        import_pillow()
        try:
            if hasattr(config.vision_config, "spatial_merge_size"):
                return cls(AutoImageProcessor.from_pretrained(path), config)
            writer = AutoProcessor.from_pretrained(path)
            return cls(writer.image_processor, config, writer)
        except (AttributeError, ImportError, OSError, ValueError) as error:
            raise EngineModelError(
                f"{path} has no image processor that loads ({error}); expected preprocessor_config.json or "
                "processor_config.json, and the tokenizer"
            ) from error

    def num_tokens(self, image: bytes) -> int:
        """Return how many image tokens an encoded image takes in a prompt; `RequestError` if it is no image."""
        if self._writer is not None:
            return self._tokens(image).count(self.image_token_id)
        height, width = image_size(image)
        merge: int = self._config.vision_config.spatial_merge_size
        return self._processor.get_number_of_image_patches(height, width) // merge**2

    def _tokens(self, image: bytes) -> list[int]:
        """Return the tokens that take the place of an image in a prompt."""
        if self._writer is not None:
            return self._read(image)["input_ids"][0].tolist()
        return [self.image_token_id] * self.num_tokens(image)

    def _read_image(self, image: bytes) -> Mapping[str, torch.Tensor]:
        """Return what transformers' processor makes of an image: inputs of the model and, with a writer, tokens."""
        picture = open_rgb(image)
        if self._writer is None:
            return self._processor(images=[picture], return_tensors="pt")
        text = [self._writer.image_token]
        return self._writer(
            images=[picture], text=text, add_special_tokens=False, return_tensors="pt"
        )

    def check_image(self, image: bytes, *, max_pixels: int) -> None:
        """Raise a `ValueError` for bytes that are no image, or one that the model does not take, or of more pixels.

        An image with too many is not decoded.
        """
        num_pixels = count_pixels(image)
        if num_pixels > max_pixels:
            raise RequestError(f"an image has {num_pixels} pixels; expected at most {max_pixels}")
        open_rgb(image)
        self.num_tokens(image)

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[int, ...]:
        """Return token ids in which each image has all its tokens.

        `RequestError` if there are not as many places for images, or image tokens that belong to none.
        """
        num_places = list(token_ids).count(self._place_token_id)
        if num_places != len(images):
            raise RequestError(
                f"a prompt has {len(images)} images; expected {num_places}, for which it has places"
            )
        rest = iter(images)
        expanded: list[int] = []
        for token in token_ids:
            if token == self._place_token_id:
                expanded += self._tokens(next(rest))
            else:
                expanded.append(token)
        self.find_images(expanded, images)
        return tuple(expanded)

    def places(
        self, prompt_token_ids: Sequence[int], starts: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """Return the first token and the number of tokens of each run of image tokens in an expanded prompt.

        Of several runs of image tokens these are the ones that begin at ``starts``; None: all.
        """
        places: list[tuple[int, int]] = []
        start = 0
        for token, run in groupby(prompt_token_ids):
            length = len(list(run))
            if token == self.image_token_id and (starts is None or start in starts):
                places.append((start, length))
            start += length
        return places

    def check(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        images: Sequence[bytes],
        starts: Sequence[int] | None = None,
    ) -> None:
        """Raise `RequestError` for bytes that are no image, or images that do not fit a prompt's places for them."""
        for image in images:
            open_rgb(image)
        try:
            self.find_images(prompt_token_ids, images, starts)
        except RequestError as error:
            raise RequestError(f"request {request_id!r}: {error}") from None

    def find_images(
        self,
        prompt_token_ids: Sequence[int],
        images: Sequence[bytes],
        starts: Sequence[int] | None = None,
    ) -> list[NDArray[np.int64]]:
        """Return which tokens of an expanded prompt stand for the features of each image; ``starts`` as in `places`.

        `RequestError` if they are not as many as each image has.
        """
        index = np.flatnonzero(np.array(prompt_token_ids) == self.image_token_id)
        # Bounds of runs of image tokens, as indices of the index.
        bounds = np.flatnonzero(np.diff(index, prepend=-2, append=len(prompt_token_ids) + 1) > 1)
        counts = np.array([self.num_tokens(image) for image in images], np.int64)
        firsts = counts.cumsum() - counts
        is_complete = index.size == counts.sum()
        if starts is not None:
            firsts = index.searchsorted(starts)
            is_complete = np.isin(starts, index).all()
        stops = firsts + counts
        if not (is_complete and np.isin(firsts, bounds).all() and np.isin(stops, bounds).all()):
            available = [length for _, length in self.places(prompt_token_ids, starts)]
            raise RequestError(
                f"a prompt has images of {counts.tolist()} tokens and places of {available}: each image needs its "
                f"number of image tokens ({self.image_token_id}), apart from the next"
            )
        return [index[first:stop] for first, stop in zip(firsts, stops, strict=True)]

    def model_inputs(self, images: Sequence[bytes]) -> list[dict[str, torch.Tensor]]:
        """Return arguments of ``get_image_features`` of transformers' model, for all images or for each in turn."""
        names = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")
        inputs: list[dict[str, torch.Tensor]] = []
        for image in images:
            read = self._read(image)
            inputs.append({name: read[name] for name in names if name in read})
        return join_grids(inputs)

    def process(self, images: Sequence[bytes]) -> Pixels:
        """Return the pixels of one or more encoded images; `RequestError` if bytes are no image."""
        pixel_values: list[NDArray[np.float32]] = []
        grids: list[NDArray[np.int64]] = []
        for inputs in self.model_inputs(images):
            values = inputs["pixel_values"].numpy().astype(np.float32, copy=False)
            if "image_grid_thw" in inputs:
                grid = inputs["image_grid_thw"].numpy().astype(np.int64, copy=False)
                values = values.reshape(len(values), -1)
            elif "image_sizes" in inputs:
                side: int = self._config.vision_config.patch_size
                _, channels, height, width = values.shape
                rows, columns = height // side, width // side
                patches = values.reshape(channels, rows, side, columns, side)
                values = patches.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
                grid = np.array([[1, rows, columns]])
            else:
                values = values.reshape(-1, int(np.prod(values.shape[-3:])))
                grid = np.array([[len(values), 1, 1]])
            pixel_values.append(values)
            grids.append(grid)
        return Pixels(pixel_values=np.concatenate(pixel_values), grid_thw=np.concatenate(grids))


def join_grids(calls: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return calls of ``get_image_features`` as one, if they are of patches with a grid; others as they are."""
    if "image_grid_thw" not in calls[0]:
        return calls
    return [{name: torch.cat([call[name] for call in calls]) for name in calls[0]}]


@cache
def load_vision_processor(folder: str) -> VisionProcessor:
    """Load the image processor of a model folder, once."""
    return VisionProcessor.from_pretrained(folder)


def checkpoint_name(model: Any, name: str) -> str:
    """Return a parameter's name in a Hugging Face folder: transformers renames those of vision-language models."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        [renamed] = revert_weight_conversion(model, {name: torch.empty(0)})
    except (IndexError, RuntimeError):
        # Experts: a folder has matrices of which transformers makes one tensor, whose name it keeps here.
        return name
    return renamed
