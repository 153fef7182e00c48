"""Prompts of the user's files, or of the embedded model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_agents import MessageError, check_text
from gcore_diffusion.config import DiffusionDataConfig
from gcore_rollout import RolloutError, decode_image
from gcore_runs import UserError, columns, hold_out, image_sources, mix_sets, open_rows
from gcore_runs.inputs import read_lines


@dataclass(frozen=True, kw_only=True)
class ImagePrompt:
    """A prompt and its row in the data set."""

    text: str
    row: Mapping[str, Any]
    images: tuple[bytes | Path | str, ...] = ()
    """Image files that belong to the text, encoded, or their paths or URLs."""

    def pixels(self) -> tuple[NDArray[np.uint8], ...]:
        """Read the images [H, W, 3]; `RequestError` if one is no image."""
        return tuple(map(decode_image, self.images))


@dataclass(frozen=True, kw_only=True)
class ImagePromptSets:
    """The prompts to train on, and the held-out ones."""

    train: Sequence[ImagePrompt]
    val: Sequence[ImagePrompt]


def load_prompts(
    config: DiffusionDataConfig,
    defaults: Iterable[str] = (),
    *,
    size: tuple[int, int] | None = None,
) -> ImagePromptSets:
    """Load the prompts of the config's files; without any, those in ``defaults`` are both trained on and held out.

    Args:
        size: of the images that are made; None: pipelines may make them as large as those of the prompt.

    Raises:
        UserError: a file or a row is wrong, or an image does not decode.
    """
    if not config.train_files:
        prompts = [ImagePrompt(text=text, row={}) for text in defaults]
        return ImagePromptSets(train=prompts, val=prompts)
    train = [_read(file, config) for file in config.train_files]
    val: list[ImagePrompt] = []
    for file in config.val_files:
        val += _read(file, config)
    if config.image_key and size is None:
        sizes: set[tuple[Any, ...]] = set()
        for prompt in chain(*train, val):
            sizes.add(tuple(image.shape[:2] for image in prompt.pixels()))
        if len(sizes) > 1:
            raise UserError(
                "rollout.size is (0, 0); expected a size, because images of prompts have several"
            )
    if not val:
        train, val = hold_out(train, size=config.val_size, seed=0)
    prompts = mix_sets(train, config) if config.weights else list(chain.from_iterable(train))
    return ImagePromptSets(train=prompts, val=val)


def _read(path: str, config: DiffusionDataConfig) -> list[ImagePrompt]:
    if path.startswith("hf://") or Path(path).suffix in (".jsonl", ".parquet", ".arrow", ".csv"):
        return _read_rows(path, config)
    if config.image_key:
        raise UserError(
            f"data file {path} has no columns; expected .jsonl, .parquet, .arrow or .csv with data.image_key"
        )
    try:
        lines = read_lines(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {path}: {getattr(error, 'strerror', None) or error}") from None
    prompts = [ImagePrompt(text=line.strip(), row={}) for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"data file {path} has no prompts; expected one per line")
    return prompts


def _read_rows(path: str, config: DiffusionDataConfig) -> list[ImagePrompt]:
    key = config.image_key
    prompts: list[ImagePrompt] = []
    for rows in open_rows(path, config.columns):
        name = f"data file {rows.name}"
        if key and not any(key in row for row in rows.rows):
            raise UserError(
                f"{name} has no column {key!r} (data.image_key); it has {columns(rows.rows[0])}"
            )
        for number, row in enumerate(rows.rows, 1):
            prompts.append(_of_row(row, config, rows.folder, f"{name}, row {number}"))
    return prompts


def _of_row(
    row: Mapping[str, Any], config: DiffusionDataConfig, folder: Path, where: str
) -> ImagePrompt:
    key = config.prompt_key
    if key not in row:
        raise UserError(f"{where} has no column {key!r} (data.prompt_key); it has {columns(row)}")
    text = row[key]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {key} is {text!r:.80}; expected a text")
    try:
        check_text(text, key)
    except MessageError as error:
        raise UserError(f"{where}: {error}") from None
    prompt = ImagePrompt(text=text, row=row)
    if config.image_key:
        return _with_images(prompt, config.image_key, folder, where)
    return prompt


def _with_images(prompt: ImagePrompt, key: str, folder: Path, where: str) -> ImagePrompt:
    """Return the prompt with the images of its row, in which their paths are absolute, as the reward needs them."""
    images = image_sources(prompt.row, key, folder.absolute(), f"{where}: {key}")
    if not images:
        return prompt
    value = prompt.row[key]
    sources: Any = [image if isinstance(image, bytes) else str(image) for image in images]
    if not isinstance(value, list):
        sources = sources[0]
    prompt = replace(prompt, images=images, row={**prompt.row, key: sources})
    try:
        prompt.pixels()
    except (RolloutError, OSError, ImportError) as error:
        raise UserError(f"{where}: {key} is {value!r:.80}: {error}") from None
    return prompt
