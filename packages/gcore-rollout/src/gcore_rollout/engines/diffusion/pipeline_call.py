"""The call of a pipeline for the requests of a batch: its arguments, and its images as uint8."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.diffusion.types import ImageRequest, ImageSampling
from gcore_rollout.errors import EngineModelError, RequestError, RolloutError
from gcore_rollout.images.reward import import_pillow

_SCALES_BELOW = {"ZImagePipeline": 1.0}
"""Pipelines whose guidance is c + scale (c - u), and how much less than in u + scale (c - u) the scale then is."""


class PipelineCall:
    """Calls a pipeline of diffusers, whose arguments it looks up in its signature.

    Args:
        pipeline: the pipeline.
        denoiser: the model that it calls in its steps.
        options: further arguments of each call.

    Attributes:
        takes_images: Whether prompts may have images.

    Raises:
        EngineModelError: the pipeline has no argument of a name in ``options``.
    """

    def __init__(self, pipeline: Any, denoiser: Any, options: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._denoiser = denoiser
        self.options = dict(options)
        self._accepted = set(inspect.signature(pipeline.__call__).parameters)
        self.kind = type(pipeline).__name__
        self.takes_images = "image" in self._accepted
        self.takes_text = "prompt" in self._accepted
        unknown = sorted(self.options.keys() - self._accepted)
        if unknown:
            raise EngineModelError(
                f"{self.kind} has no {unknown[0]}: it takes {sorted(self._accepted)}"
            )

    def check(self, request: ImageRequest) -> None:
        """Raise `RequestError` if the pipeline has no argument for something that is requested."""
        if not self.takes_text:
            self._parse_class(request.prompt)
        if request.images and not self.takes_images:
            raise RequestError(
                f"images has {len(request.images)}; expected none, because {self.kind} takes no image"
            )
        negative = request.sampling.negative_prompt
        if negative and "negative_prompt" not in self._accepted:
            raise RequestError(
                f"negative_prompt is {negative!r}; expected '', because {self.kind} takes none"
            )
        if (
            request.sampling.size is not None
            and "height" not in self._accepted
            and not self.takes_images
        ):
            raise RequestError(
                f"size is {request.sampling.size}; expected None, because the pipeline has one size"
            )

    @torch.no_grad()
    def __call__(
        self, requests: Sequence[ImageRequest], generators: Sequence[torch.Generator]
    ) -> NDArray[np.uint8]:
        """Run the pipeline for the request of each image; return the images [B, H, W, 3] or videos [B, F, H, W, 3].

        Images that are not to be decoded are empty.
        """
        prompts = [request.prompt for request in requests]
        images = requests[0].images
        sampling = requests[0].sampling
        has_decoder = getattr(self._pipeline, "vae", None) is not None
        options: dict[str, Any] = {}
        if images:
            pictures = [import_pillow().fromarray(image) for image in images]
            if sampling.size is not None and "height" not in self._accepted:
                # InstructPix2Pix makes its images as large as those of the prompt.
                pictures = [picture.resize(sampling.size[::-1]) for picture in pictures]
            options["image"] = pictures if len(pictures) > 1 else pictures[0]
        if sampling.size is not None and "height" in self._accepted:
            # Without a decoder latents are the images, and the pipeline counts as if there were one.
            factor = 1 if has_decoder else getattr(self._pipeline, "vae_scale_factor", 1)
            height, width = sampling.size
            options["height"] = height * factor
            options["width"] = width * factor
            if "max_area" in self._accepted:
                # FLUX.1 Kontext makes its images as large as this.
                options["max_area"] = math.prod(sampling.size)
            if "use_resolution_binning" in self._accepted:
                # Sana and PixArt would make an image of a size that they were trained on, and resize it.
                options["use_resolution_binning"] = False
        options |= self.options
        if self.takes_text:
            options |= self._text_arguments(prompts, has_images=bool(images))
        else:
            options["class_labels"] = [self._parse_class(prompt) for prompt in prompts]
        options |= self._guidance_arguments(sampling, len(options.get("prompt", ())))
        # The first field is called images or frames.
        output: torch.Tensor = self._pipeline(
            **options,
            generator=list(generators),
            num_inference_steps=sampling.num_inference_steps,
            output_type="pt" if has_decoder and sampling.decodes else "latent",
        )[0]
        if has_decoder and not sampling.decodes:
            return np.zeros((len(requests), 0, 0, 3), np.uint8)
        pixels = output.float()
        if not has_decoder:
            pixels = pixels / 2 + 0.5
        self._check_size(pixels, sampling.size)
        self._check_finite(pixels)
        pixels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
        return pixels.movedim(-3, -1).cpu().numpy()

    def _check_size(self, pixels: torch.Tensor, size: tuple[int, int] | None) -> None:
        """Raise `RequestError` if images [B, 3, H, W] or videos [B, F, 3, H, W] are not as large as requested."""
        size_made = tuple(pixels.shape[-2:])
        if size is not None and size_made != size:
            raise RequestError(
                f"size is {size}; expected one that {self.kind} makes as it is: it makes {size_made} of this one"
            )
        num_frames = self.options.get("num_frames")
        if num_frames is not None and pixels.shape[1] != num_frames:
            raise RequestError(
                f"num_frames is {num_frames}; expected a number that {self.kind} makes as it is: it makes "
                f"{pixels.shape[1]} of this one"
            )

    def _check_finite(self, pixels: torch.Tensor) -> None:
        """Raise `RolloutError` for pixels [B, ...] that would become black as uint8."""
        num_wrong = int((~pixels.isfinite()).flatten(1).any(1).sum())
        if num_wrong:
            dtype = str(self._pipeline.dtype).removeprefix("torch.")
            raise RolloutError(
                f"{num_wrong} of {len(pixels)} images of {self.kind} have pixels that are NaN or infinite; expected "
                f"finite ones: the decoder may overflow in its data type, {dtype}, or its weights are damaged"
            )

    def _text_arguments(self, prompts: Sequence[str], *, has_images: bool) -> dict[str, Any]:
        """Return the arguments for the prompt of each image; the only prompt of a batch is encoded once."""
        names = ["num_images_per_prompt"]
        if not has_images:
            # Wan repeats an image for each prompt, not for each video.
            names.append("num_videos_per_prompt")
        counts = [name for name in names if name in self._accepted]
        if counts and len(set(prompts)) == 1:
            return {"prompt": list(prompts[:1]), counts[0]: len(prompts)}
        # With a count, some pipelines order embeddings p0 p0 p1 p1, and attention masks p0 p1 p0 p1.
        return {"prompt": list(prompts)}

    def _guidance_arguments(self, sampling: ImageSampling, num_prompts: int) -> dict[str, Any]:
        """Return the arguments of guidance; models that are given their scale as an input have no second pass."""
        config: Any = self._denoiser.config
        scale = sampling.guidance_scale
        negative = sampling.negative_prompt
        options: dict[str, Any] = {}
        if "true_cfg_scale" not in self._accepted or config.get("guidance_embeds"):
            options["guidance_scale"] = scale - _SCALES_BELOW.get(self.kind, 0.0)
        else:
            options["true_cfg_scale"] = scale
            if scale > 1:
                # Without a negative prompt these pipelines have no guidance.
                negative = negative or " "
        if negative:
            options["negative_prompt"] = [negative] * num_prompts
        return options

    def _parse_class(self, prompt: str) -> int:
        names: Mapping[str, int] = getattr(self._pipeline, "labels", None) or {}
        if prompt in names:
            return names[prompt]
        if not prompt.isdecimal():
            expected = "the number of a class"
            if names:
                expected += f", or a name: {', '.join(list(names)[:5])}"
            raise RequestError(f"prompt is {prompt!r}; expected {expected}")
        return int(prompt)
