"""Images of prompts, from the user's rows to the engine and to the trainer."""

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
"""Marks the place of an image in a prompt that is plain text."""


@cache
def vision_processor(folder: str) -> VisionProcessor:
    """Load the image processor of a model folder, once."""
    return VisionProcessor.from_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt, in order; files are read whenever they are needed."""

    model: str
    """Hugging Face folder of the model that the images are for."""
    sources: tuple[bytes | Path, ...]
    """Encoded image files, or their paths."""

    def encoded(self) -> tuple[bytes, ...]:
        """Return the encoded image files, for a request."""
        return tuple(s if isinstance(s, bytes) else s.read_bytes() for s in self.sources)

    def for_training(self) -> Images:
        """Return the images as the model takes them, for a training sample."""
        pixels = vision_processor(self.model).process(self.encoded())
        return Images(pixel_values=pixels.pixel_values, grid_thw=pixels.grid_thw)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and strings for a checkpoint."""
        sources = [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else str(s) for s in self.sources]
        return {"model": self.model, "sources": sources}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PromptImages":
        sources = (Path(s) if isinstance(s, str) else np.asarray(s).tobytes() for s in state["sources"])
        return cls(model=state["model"], sources=tuple(sources))


def images_of(value: object, *, model: str, folder: Path, where: str) -> PromptImages | None:
    """Return the images in a row's column: one or several, each a path, an encoded file, or a mapping with either.

    Args:
        value: of the column; None, or an empty list, if the row has only text.
        model: Hugging Face folder of the model that the images are for.
        folder: that paths are relative to.
        where: names the column in errors.

    Raises:
        UserError: the value has another form, or a path has no file.
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
    """Return messages whose "<image>" marks are parts of their own, as chat templates of such models expect."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: Any) -> Any:
    if not isinstance(content, str):
        # Parquet gives every part the keys of all parts, and templates test which keys exist.
        return [{k: v for k, v in part.items() if v is not None} for part in content]
    if _MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(_MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
