"""Pictures of evaluations: a grid with one row per prompt, and a sheet of the images of each prompt."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gcore_diffusion.sampling.image_sampling import ImageEvaluation
from gcore_runs.run_folder import write_atomically, write_jsonl

MAX_PROMPTS = 15
"""Most rows of a grid; of more prompts a regular selection is shown."""

MAX_SHEETS = 32
"""Most prompts with a sheet of their own; of more prompts a regular selection has one."""

MAX_COLUMNS = 8

_MAX_TRACKED_PROMPTS = 8
_SHEET_COLUMNS = 4
_SMALLEST_TILE = 40
_LARGEST_TILE = 160
_LARGEST_SHEET_TILE = 256
_LOSSLESS_SIDE = 64
_GAP = 4
_FONT_SIZE = 15
_LONGEST_LABEL = 48
_INK = (40, 46, 56)
_PAPER = (246, 247, 249)


def write_grid(
    path: Path, images: NDArray[np.uint8], prompts: Sequence[str], *, per_prompt: int
) -> None:
    """Write a PNG of images [P * per_prompt, H, W, 3] and ``prompts`` [P * per_prompt], with a row for each prompt."""
    picture = grid(images, prompts, per_prompt=per_prompt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: picture.save(partial, format="PNG"))


def grid(
    images: NDArray[np.uint8],
    prompts: Sequence[str],
    *,
    per_prompt: int,
    largest_tile: int = _LARGEST_TILE,
) -> Image.Image:
    """Return the grid as an image, of videos [..., F, H, W, 3] with their middle frames; see `write_grid`.

    The longest side of a tile has ``largest_tile`` pixels or fewer.
    """
    images = _frames(images)
    rows = selection(len(images) // per_prompt, MAX_PROMPTS)
    columns = min(per_prompt, MAX_COLUMNS)
    tile_w, tile_h = _resize(images[0], largest_tile).size
    font = ImageFont.load_default(size=_FONT_SIZE)
    texts = [_cut_text(prompts[row * per_prompt]) for row in rows]
    label = int(max(map(font.getlength, texts))) + 2 * _GAP
    size = (label + columns * (tile_w + _GAP), len(rows) * (tile_h + _GAP) + _GAP)
    picture = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(picture)
    top = _GAP
    for row, text in zip(rows, texts, strict=True):
        draw.text((_GAP, top + tile_h // 2), text, fill=_INK, font=font, anchor="lm")
        for column in range(columns):
            tile = _resize(images[row * per_prompt + column], largest_tile)
            picture.paste(tile, (label + column * (tile_w + _GAP), top))
        top += tile_h + _GAP
    return picture


def write_sheets(folder: Path, evaluation: ImageEvaluation, *, per_prompt: int) -> None:
    """Write a WebP of the images of each prompt, and their scores, as the report's gallery reads them.

    `prompts.jsonl` has a row for each sheet: its prompt, its file, its columns, and the scores by their names.
    """
    rows: list[dict[str, Any]] = []

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        for index in selection(len(evaluation.prompts) // per_prompt, MAX_SHEETS):
            first = index * per_prompt
            num_images = min(per_prompt, MAX_COLUMNS)
            selected = slice(first, first + num_images)
            images = _frames(evaluation.images[selected])
            name = f"{index:03}.webp"
            picture = _sheet(images)
            picture.save(
                partial / name,
                format="WEBP",
                lossless=max(images.shape[1:3]) <= _LOSSLESS_SIDE,
                quality=80,
            )
            scores = {"reward": evaluation.scores[selected].tolist()}
            if evaluation.held_out is not None:
                scores["reward not trained on"] = evaluation.held_out[selected].tolist()
            row = {
                "prompt": evaluation.prompts[first],
                "file": name,
                "columns": min(num_images, _SHEET_COLUMNS),
                "width": picture.width,
                "height": picture.height,
                "scores": scores,
            }
            rows.append(row)
        write_jsonl(partial / "prompts.jsonl", rows)

    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder, write)


def draw_pictures(evaluation: ImageEvaluation, *, per_prompt: int) -> dict[str, NDArray[np.uint8]]:
    """Return the pictures that trackers show, by name: the grid, and larger images of up to eight prompts."""
    images = evaluation.images
    prompts = evaluation.prompts
    pictures = {"images/grid": np.asarray(grid(images, prompts, per_prompt=per_prompt))}
    for index in selection(len(prompts) // per_prompt, _MAX_TRACKED_PROMPTS):
        rows = slice(index * per_prompt, (index + 1) * per_prompt)
        picture = grid(
            images[rows], prompts[rows], per_prompt=per_prompt, largest_tile=_LARGEST_SHEET_TILE
        )
        pictures[f"images/prompt-{index:03}"] = np.asarray(picture)
    return pictures


def thumbnail(image: NDArray[np.uint8]) -> bytes:
    """Return a WebP of an image, or of the middle frame of a video [F, H, W, 3], with sides of at most 160 pixels."""
    frame = _frames(image[None])[0]
    buffer = io.BytesIO()
    is_lossless = max(frame.shape[:2]) <= _LOSSLESS_SIDE
    _resize(frame, _LARGEST_TILE).save(buffer, format="WEBP", lossless=is_lossless, quality=80)
    return buffer.getvalue()


def selection(count: int, limit: int) -> range:
    """Return ``limit`` or fewer of ``count`` indices, at equal distances."""
    return range(0, count, -(-count // limit))


def _sheet(images: NDArray[np.uint8]) -> Image.Image:
    """Return images [n, H, W, 3] in rows of up to four."""
    tiles = [_resize(image, _LARGEST_SHEET_TILE) for image in images]
    width, height = tiles[0].size
    columns = min(len(tiles), _SHEET_COLUMNS)
    sheet = Image.new("RGB", (columns * width, -(-len(tiles) // columns) * height), _PAPER)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        sheet.paste(tile, (column * width, row * height))
    return sheet


def _frames(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images as they are, and the middle frames of videos [..., F, H, W, 3]."""
    return images[:, images.shape[1] // 2] if images.ndim == 5 else images


def _resize(image: NDArray[np.uint8], largest: int) -> Image.Image:
    """Return an image [H, W, 3] as a tile: small ones are enlarged by whole factors, large ones are reduced."""
    tile = Image.fromarray(image)
    longest = max(tile.size)
    if longest > largest:
        scale = largest / longest
        size = (max(1, round(tile.width * scale)), max(1, round(tile.height * scale)))
        return tile.resize(size, Image.Resampling.LANCZOS)
    factor = max(1, -(-_SMALLEST_TILE // longest))
    return tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)


def _cut_text(text: str) -> str:
    if len(text) <= _LONGEST_LABEL:
        return text
    return f"{text[: _LONGEST_LABEL - 1]}…"
