"""Images of a prompt: where the user's rows have them, for the engine and for the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gcore_rollout import VisionProcessor
from gcore_runs.errors import UserError
from gcore_trainer import Images

_MARK = "<image>"
"""Stands for an image in a prompt that is plain text."""


@cache
def vision_processor(folder: str) -> VisionProcessor:
    """What reads images for a model folder, loaded once."""
    return VisionProcessor.from_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """One prompt's images, in the order of their places; files are read whenever they are needed."""

    model: str
    """Hugging Face folder of the model that sees them."""
    sources: tuple[bytes | Path, ...]
    """Encoded image files, or where they are."""

    def encoded(self) -> tuple[bytes, ...]:
        """Every image as an encoded file, as requests have them."""
        return tuple(s if isinstance(s, bytes) else s.read_bytes() for s in self.sources)

    def for_training(self) -> Images:
        """Every image as the model reads it, as samples have them."""
        pixels = vision_processor(self.model).process(self.encoded())
        return Images(pixel_values=pixels.pixel_values, grid_thw=pixels.grid_thw)

    def state(self) -> dict[str, Any]:
        """As plain arrays and strings, for a checkpoint."""
        sources = [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else str(s) for s in self.sources]
        return {"model": self.model, "sources": sources}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PromptImages":
        sources = (Path(s) if isinstance(s, str) else np.asarray(s).tobytes() for s in state["sources"])
        return cls(model=state["model"], sources=tuple(sources))


def images_of(value: object, *, model: str, folder: Path, where: str) -> PromptImages | None:
    """The images of a row's column: one or several, each a path, an encoded file, or a mapping that has either.

    Args:
        value: of the column; None, or no images: the row is of text alone.
        model: Hugging Face folder of the model that sees them.
        folder: what paths are relative to.
        where: names the column in errors.

    Raises:
        UserError: something else, or a path where no file is.
    """
    values: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
    sources = tuple(_source(v, folder, where) for v in values)
    return PromptImages(model=model, sources=sources) if sources else None


def _source(value: object, folder: Path, where: str) -> bytes | Path:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(f"{where} is {value!r:.80}; expected a path, or the bytes of an image file")
    path = folder / value
    if not path.is_file():
        raise UserError(f"{where} is {value!r}; expected an existing file")
    return path


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with "<image>" in their texts as parts of their own, as chat templates of such models want them."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: Any) -> Any:
    if not isinstance(content, str):
        # Parquet gives every part the keys of all, and templates ask which keys there are.
        return [{k: v for k, v in part.items() if v is not None} for part in content]
    if _MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(_MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
