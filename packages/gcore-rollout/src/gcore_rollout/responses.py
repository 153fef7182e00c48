"""Prompts and responses to them, and groups of responses that are to be continued."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import Completion
from gcore_rollout.multi_turn.environment import EpisodeEnd

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import Pixels, VisionProcessor


@cache
def vision_processor(folder: str) -> "VisionProcessor":
    """Load the image processor of a model folder, once."""
    from gcore_rollout.images.vision_processor import VisionProcessor

    return VisionProcessor.from_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt, in order; files are read whenever they are needed."""

    model: str
    """Hugging Face folder of the model that the images are for."""
    sources: tuple[bytes | Path | str, ...]
    """Encoded image files, their paths, or their URLs, such as ``s3://bucket/image.png``, which fsspec reads."""

    def encoded(self) -> tuple[bytes, ...]:
        """Return the encoded image files, for a request."""
        return tuple(map(read_image, self.sources))

    def pixels(self) -> "Pixels":
        """Return the images as the model takes them."""
        return vision_processor(self.model).process(self.encoded())

    def state(self) -> dict[str, Any]:
        """Return plain arrays and strings for a checkpoint."""
        sources = [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else str(s) for s in self.sources]
        return {"model": self.model, "sources": sources}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PromptImages":
        """Return the images that `state` gave this state for."""
        return cls(model=state["model"], sources=tuple(map(_source_from_state, state["sources"])))


def read_image(source: bytes | Path | str) -> bytes:
    """Return an encoded image file, from its path or its URL; `OSError` if it cannot be read."""
    if isinstance(source, str):
        import fsspec

        # Untyped: its stubs have a list of files.
        opened: Any = fsspec.open(source, "rb")
        with opened as file:
            return file.read()
    return source if isinstance(source, bytes) else source.read_bytes()


def _source_from_state(source: Any) -> bytes | Path | str:
    if isinstance(source, str):
        return source if "://" in source else Path(source)
    return np.asarray(source).tobytes()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine."""

    text: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]
    """Every column of the data set, for the reward."""
    images: PromptImages | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One completion and its score. Arrays have shape [R]."""

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    truncated: bool
    score: float
    mask: NDArray[np.bool_] | None = None
    """Whether the policy generated the token; None: it generated all of them."""
    end: EpisodeEnd | None = None
    """How an episode of several turns ended; None: there is one turn."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that explain the score, by name."""
    answer: str | None = None
    """The answer that the reward found in the text; see `Scored.answer`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfinishedGroup:
    """A group some of whose responses were cut short, to be continued later."""

    prompt_index: int
    responses: Mapping[int, Response] = field(default_factory=dict[int, Response])
    """The finished responses, by index."""
    partial: Sequence[Completion] = ()
    """The others, with their tokens so far."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that generated any token; None: there is no token yet."""
        versions = [own.weight_versions for own in (*self.responses.values(), *self.partial)]
        return min((int(v.min()) for v in versions if v.size), default=None)

    def restarted(self) -> "UnfinishedGroup":
        """Return the group without any response."""
        return UnfinishedGroup(prompt_index=self.prompt_index)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        return {
            "ticket": self.prompt_index,
            "responses": [{"index": i, **vars(r)} for i, r in self.responses.items()],
            "begun": [dict(vars(completion)) for completion in self.partial],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "UnfinishedGroup":
        """Return the group that `state` gave this state for."""
        responses = ({**r} for r in state["responses"])
        return cls(
            prompt_index=state["ticket"],
            responses={r.pop("index"): Response(**r) for r in responses},
            partial=[Completion(**completion) for completion in state["begun"]],
        )
