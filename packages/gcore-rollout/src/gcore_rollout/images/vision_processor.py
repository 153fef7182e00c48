"""Images of prompts: their pixels as a vision-language model reads them, and their places among the tokens.

A prompt's token ids are those that the model sees: at an image's place its image token stands once for each of the
image's merged patches. Rendered chat templates have one at each place; `VisionProcessor.expand` repeats it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import EngineModelError, RequestError
from gcore_rollout.images.decoding import count_pixels, image_size, open_rgb
from gcore_rollout.images.reward import import_pillow

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose images are supported."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pixels:
    """Images as a Qwen-VL model reads them, concatenated."""

    pixel_values: NDArray[np.float32]
    """[patches, features]."""
    grid_thw: NDArray[np.int64]
    """[images, 3] patches of each image in time, height and width."""


class VisionProcessor:
    """A model folder's image processor of transformers, and the number of tokens of an image by the model's config.

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

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor = processor
        self._merge: int = config.vision_config.spatial_merge_size
        self.image_token_id: int = config.image_token_id

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Self:
        """Load the image processor of a Hugging Face folder; `RolloutError` if Pillow is not installed.

        `EngineModelError` if its model takes no images or is not supported, or it has no image processor.
        """
        from transformers import AutoConfig, AutoImageProcessor

        config = AutoConfig.from_pretrained(path)
        if config.model_type not in VISION_MODELS:
            expected = f"{' or '.join(VISION_MODELS)} for images"
            raise EngineModelError(
                f"model type of {path} is {config.model_type!r}; expected {expected}"
            )
        import_pillow()
        try:
            processor = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError) as error:
            message = f"{path} has no image processor that loads; expected preprocessor_config.json"
            raise EngineModelError(message) from error
        return cls(processor, config)

    def num_tokens(self, image: bytes) -> int:
        """Return the number of tokens that an encoded image takes in a prompt; `RequestError` if it is no image."""
        height, width = image_size(image)
        return self._processor.get_number_of_image_patches(height, width) // self._merge**2

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
        """Return token ids with an image token for each merged patch; `RequestError` if there are other images."""
        num_places = list(token_ids).count(self.image_token_id)
        if num_places != len(images):
            raise RequestError(
                f"a prompt has {len(images)} images; expected {num_places}, for which it has places"
            )
        sizes = iter([self.num_tokens(image) for image in images])
        expanded: list[int] = []
        for token in token_ids:
            count = 1
            if token == self.image_token_id:
                count = next(sizes)
            expanded += [token] * count
        return tuple(expanded)

    def places(
        self, prompt_token_ids: Sequence[int], starts: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """Return the first token and the number of tokens of each image in an expanded prompt.

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
        needed = [self.num_tokens(image) for image in images]
        available = [length for _, length in self.places(prompt_token_ids, starts)]
        if available != needed:
            raise RequestError(
                f"request {request_id!r} has images of {needed} tokens and places of {available}: each image needs one "
                f"run of its number of image tokens ({self.image_token_id}), apart from the next"
            )

    def process(self, images: Sequence[bytes]) -> Pixels:
        """Return the pixels of one or more encoded images; `RequestError` if bytes are no image."""
        inputs: Mapping[str, torch.Tensor] = self._processor(
            images=list(map(open_rgb, images)), return_tensors="pt"
        )
        return Pixels(
            pixel_values=inputs["pixel_values"].numpy().astype(np.float32, copy=False),
            grid_thw=inputs["image_grid_thw"].numpy().astype(np.int64, copy=False),
        )


@cache
def load_vision_processor(folder: str) -> VisionProcessor:
    """Load the image processor of a model folder, once."""
    return VisionProcessor.from_pretrained(folder)


def checkpoint_name(model: Any, name: str) -> str:
    """Return a parameter's name in a Hugging Face folder: transformers renames those of vision-language models."""
    from transformers.core_model_loading import revert_weight_conversion

    [renamed] = revert_weight_conversion(model, {name: torch.empty(0)})
    return renamed
