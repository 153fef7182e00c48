"""Prompts, and their images, which are read whenever they are needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_rollout.images.decoding import read_image

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import Pixels, VisionProcessor


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt, in order; files are read whenever they are needed.

    Example:
        >>> Path("chart.png").write_bytes(b"the encoded file")
        16
        >>> images = PromptImages(model="Qwen2-VL-2B-Instruct", sources=(Path("chart.png"),))
        >>> images.encoded()
        (b'the encoded file',)
        >>> PromptImages.from_state(images.state()) == images
        True
    """

    model: str
    """Hugging Face folder of the model that the images are for."""
    sources: tuple[bytes | Path | str, ...]
    """Encoded image files, their paths, or their URLs, such as ``s3://bucket/image.png``, which fsspec reads."""
    starts: tuple[int, ...] | None = None
    """Where each image starts among the tokens; None: each run of image tokens in the prompt is one."""

    def encoded(self) -> tuple[bytes, ...]:
        """Return the encoded image files, for a request."""
        return tuple(map(read_image, self.sources))

    def expand(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's token ids with as many image tokens as each image takes; see `VisionProcessor.expand`."""
        return self._processor().expand(token_ids, self.encoded())

    def pixels(self) -> "Pixels":
        """Return the images as the model takes them."""
        return self._processor().process(self.encoded())

    def _processor(self) -> "VisionProcessor":
        from gcore_rollout.images.vision_processor import load_vision_processor

        return load_vision_processor(self.model)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and strings for a checkpoint."""
        sources = [
            np.frombuffer(s, np.uint8) if isinstance(s, bytes) else str(s) for s in self.sources
        ]
        return {"model": self.model, "sources": sources, "starts": self.starts}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PromptImages":
        """Return the images that `state` gave this state for."""
        sources = tuple(map(_source_from_state, state["sources"]))
        starts = state.get("starts")
        starts = None if starts is None else tuple(starts)
        return cls(model=state["model"], sources=sources, starts=starts)


def _source_from_state(source: Any) -> bytes | Path | str:
    if not isinstance(source, str):
        return np.asarray(source).tobytes()
    if "://" in source:
        return source
    return Path(source)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine.

    Example:
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("model")
        >>> row = {"question": "1 + 1 =", "answer": "2"}
        >>> ids = tokenizer(row["question"])["input_ids"]
        >>> prompt = Prompt(text=row["question"], token_ids=tuple(ids), row=row)
        >>> sampling = SamplingParams(max_tokens=8)
        >>> request = Request(request_id="0", prompt_token_ids=prompt.token_ids, sampling=sampling)
        >>> len(request.prompt_token_ids)
        7
    """

    text: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]
    """Every column of the data set, for the reward."""
    images: PromptImages | None = None
    where: str = field(default="", compare=False)
    """Its place in a data set, for errors, such as ``train.jsonl: prompt of row 3``."""
