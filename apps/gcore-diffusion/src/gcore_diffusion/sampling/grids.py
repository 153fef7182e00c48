"""Grids of images with one row per prompt."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gcore_runs.run_folder import write_atomically

MAX_PROMPTS = 15
"""Most rows of a grid; of more prompts a regular selection is shown."""

MAX_COLUMNS = 8

_SMALLEST_TILE = 40
_LARGEST_TILE = 160
_GAP = 4
_FONT_SIZE = 15
_INK, _PAPER = (40, 46, 56), (246, 247, 249)


def write_grid(path: Path, images: NDArray[np.uint8], prompts: Sequence[str], *, per_prompt: int) -> None:
    """Write a PNG of images [P * per_prompt, H, W, 3] and ``prompts`` [P * per_prompt], with a row for each prompt."""
    picture = grid(images, prompts, per_prompt=per_prompt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: picture.save(partial, format="PNG"))


def grid(images: NDArray[np.uint8], prompts: Sequence[str], *, per_prompt: int) -> Image.Image:
    """Return the grid as an image, of videos [..., F, H, W, 3] with their middle frames; see `write_grid`."""
    if images.ndim == 5:
        images = images[:, images.shape[1] // 2]
    num_prompts = len(images) // per_prompt
    rows = range(0, num_prompts, -(-num_prompts // MAX_PROMPTS))
    columns = min(per_prompt, MAX_COLUMNS)
    height, width = images.shape[1:3]
    tile_h, tile_w, how = _tile(height, width)
    font = ImageFont.load_default(size=_FONT_SIZE)
    texts = [_shortened(prompts[row * per_prompt]) for row in rows]
    label = int(max(font.getlength(text) for text in texts)) + 2 * _GAP
    size = label + columns * (tile_w + _GAP), len(rows) * (tile_h + _GAP) + _GAP
    picture = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(picture)
    for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
        top = _GAP + place * (tile_h + _GAP)
        draw.text((_GAP, top + tile_h // 2), text, fill=_INK, font=font, anchor="lm")
        for column in range(columns):
            tile = Image.fromarray(images[row * per_prompt + column]).resize((tile_w, tile_h), how)
            picture.paste(tile, (label + column * (tile_w + _GAP), top))
    return picture


def _tile(height: int, width: int) -> tuple[int, int, Image.Resampling]:
    """Return the size of a tile and its filter: small images are enlarged by whole factors, large ones are reduced."""
    longest = max(height, width)
    if longest > _LARGEST_TILE:
        scale = _LARGEST_TILE / longest
        return max(1, round(height * scale)), max(1, round(width * scale)), Image.Resampling.LANCZOS
    factor = max(1, -(-_SMALLEST_TILE // longest))
    return height * factor, width * factor, Image.Resampling.NEAREST


def _shortened(text: str, *, longest: int = 48) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
