"""Pipelines of diffusers that make images of a prompt with images, tiny and with random weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from tiny_image_makers import flux_parts, qwen_parts
from tiny_parts import WIDTH, clip_parts, ddim, kinds, letters, unet, vae
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_QWEN_AREA = 64 * 64
"""Pixels that images in the prompts of Qwen-Image-Edit are resized to, rather than 1024 x 1024."""


def kontext(path: Path) -> Any:
    return kinds.FluxKontextPipeline(**flux_parts(path, is_distilled=True))


def _qwen_edit(kind: str, module: str) -> Any:
    names = (
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    processor = transformers.Qwen2_5_VLProcessor(
        Qwen2VLImageProcessorPil(
            patch_size=2, size={"shortest_edge": 4 * 4, "longest_edge": 8 * 8}
        ),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
    )
    own: Any = import_module(f"diffusers.pipelines.qwenimage.{module}")
    calculate = own.calculate_dimensions
    own.calculate_dimensions = lambda area, ratio: calculate(min(area, _QWEN_AREA), ratio)
    return getattr(kinds, kind)(**qwen_parts(tokenizer), processor=processor)


def qwen_image_edit(_: Path) -> Any:
    return _qwen_edit("QwenImageEditPipeline", "pipeline_qwenimage_edit")


def qwen_image_edit_plus(_: Path) -> Any:
    return _qwen_edit("QwenImageEditPlusPipeline", "pipeline_qwenimage_edit_plus")


def instruct_pix2pix(path: Path) -> Any:
    # Of the latents, and of those of the image.
    model = unet(cross_attention_dim=WIDTH, in_channels=2 * 4)
    nothing: dict[str, Any] = dict.fromkeys(
        ("safety_checker", "feature_extractor", "image_encoder")
    )
    parts: dict[str, Any] = {
        "unet": model,
        "vae": vae(),
        "scheduler": ddim(),
        **clip_parts(path),
        **nothing,
    }
    return kinds.StableDiffusionInstructPix2PixPipeline(**parts, requires_safety_checker=False)
