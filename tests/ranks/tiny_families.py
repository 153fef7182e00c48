"""Pipelines of diffusers, one for each family, tiny and with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_edit_makers as edits
import tiny_image_makers as images
import tiny_video_makers as videos


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of pipelines, and the arguments of its call that make it small and quick."""

    make: Callable[[Path], Any]
    """Return a pipeline; the folder is for a tokenizer's files."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    size: tuple[int, int] | None = (16, 16)
    guidance_scales: tuple[float, ...] = (1.0, 2.5)
    """Scales that it is tried with."""
    num_images: int = 0
    """Images in a prompt."""
    component: str = ""
    """The transformer that is trained, where there are two."""
    window: tuple[int, int] | None = None
    """Steps, of three, that are recorded; None: all."""


_SHORT = {"max_sequence_length": 16}
_LAYERS = {**_SHORT, "text_encoder_out_layers": (0, 1)}
_LONG = {"max_sequence_length": 400}
FAMILIES = {
    "Stable Diffusion 1": Family(make=images.stable_diffusion),
    "Stable Diffusion 3 and 3.5": Family(make=images.stable_diffusion_3),
    "Stable Diffusion XL": Family(make=images.stable_diffusion_xl),
    "FLUX.1 dev": Family(make=images.flux_dev, options=_SHORT),
    "FLUX.1 schnell": Family(make=images.flux_schnell, options=_SHORT),
    "FLUX.1 Kontext": Family(
        make=edits.kontext, options={**_SHORT, "_auto_resize": False}, num_images=1
    ),
    "FLUX.1 Kontext, without an image": Family(make=edits.kontext, options=_SHORT),
    "FLUX.2 dev": Family(make=images.flux_2_dev, options=_LAYERS),
    "FLUX.2 dev, with two images": Family(make=images.flux_2_dev, options=_LAYERS, num_images=2),
    "FLUX.2 klein": Family(make=images.flux_2_klein, options=_SHORT),
    "FLUX.2 klein, with an image": Family(make=images.flux_2_klein, options=_SHORT, num_images=1),
    "PixArt-alpha": Family(make=images.pixart_alpha, options=_SHORT),
    "PixArt-Sigma": Family(make=images.pixart_sigma, options=_SHORT),
    "Sana": Family(
        make=images.sana, options={**_SHORT, "complex_human_instruction": None}, size=(32, 32)
    ),
    "AuraFlow": Family(make=images.aura_flow, options=_SHORT),
    "Qwen-Image": Family(make=images.qwen_image, options=_LONG),
    "Qwen-Image-Edit": Family(make=edits.qwen_image_edit, options=_LONG, num_images=1),
    "Qwen-Image-Edit-Plus, with two images": Family(
        make=edits.qwen_image_edit_plus, options=_LONG, num_images=2
    ),
    "InstructPix2Pix": Family(
        make=edits.instruct_pix2pix, size=(64, 64), num_images=1, guidance_scales=(1.0,)
    ),
    "Lumina 2": Family(
        make=images.lumina_2, options={"max_sequence_length": 64, "system_prompt": "a"}
    ),
    "Z-Image": Family(make=images.z_image, options=_SHORT),
    "LTX": Family(make=videos.ltx, options={**_SHORT, "num_frames": 9}, size=(32, 32)),
    "Wan 2.1": Family(make=videos.wan, options={**_SHORT, "num_frames": 5}),
    "Wan 2.2 of two transformers": Family(
        make=videos.wan_of_two,
        options={**_SHORT, "num_frames": 5},
        component="transformer_2",
        window=(1, 3),
    ),
    "Wan 2.1, image to video": Family(
        make=videos.wan_image_to_video,
        options={**_SHORT, "num_frames": 5},
        num_images=1,
    ),
}
REFUSED = {
    "LTX, image to video": Family(
        make=videos.ltx_image_to_video,
        options={**_SHORT, "num_frames": 9},
        size=(32, 32),
        num_images=1,
    ),
}
