"""Servers of engines as their clients see them: the model, samples, and folders of weights."""

import asyncio
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from gcore_rollout.engines.protocol import FinishReason
from gcore_rollout.engines.queueing import QueueingEngine, Sample
from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.vllm.process import TIED_HEAD, checkpoint_shapes, eos_token_ids
from gcore_rollout.errors import ServerRequestError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """The settings that a server reports."""

    model_path: str
    max_length: int
    """Longest prompt + completion, in tokens."""
    max_num_seqs: int
    """Default of the largest number of samples requested at once."""
    is_on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a server runs."""

    path: Path
    vocab_size: int
    tied: bool
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the checkpoint's tensors, without the head if that is tied."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Read the model's Hugging Face folder.

        Raises:
            UnsupportedModelError: there is no such folder here, or it has no safetensors.
        """
        if not (path / "config.json").exists():
            raise UnsupportedModelError(
                f"the server runs {path}, which is no model's folder on this machine: "
                "set model_path to a folder here that holds the same model"
            )
        config: Any = AutoConfig.from_pretrained(path).get_text_config()
        tied = bool(config.tie_word_embeddings)
        shapes = {name: shape for name, shape in checkpoint_shapes(path).items() if not (tied and name == TIED_HEAD)}
        eos = tuple(eos_token_ids(path))
        return cls(path=path, vocab_size=config.vocab_size, tied=tied, shapes=shapes, eos_token_ids=eos)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a sample, as the server sends it."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason | None = None
    version_spans: list[tuple[int, int, int]] | None = None
    """Set in the last piece if the server reports it: (version, first token, one past the last token)."""
    ended_here: bool = False
    """Set in the last piece if the server would continue the sample."""


def spans_of(weight_versions: list[Any] | None) -> list[tuple[int, int, int]] | None:
    """Return a server's record of the versions of tokens as `Piece.version_spans`."""
    if weight_versions is None:
        return None
    return [(int(span["version"]), span["start"], span["end"]) for span in weight_versions]


@dataclass(eq=False)
class RunningSample:
    """A sample that has been requested from the server."""

    sample: Sample
    server_id: str
    version: int
    """Version of the weights when it started."""
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    updates: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(tokens so far, new version) of each change of weights since."""
    task: "asyncio.Task[None] | None" = None

    def finish(self, reason: FinishReason, version_spans: list[tuple[int, int, int]] | None = None) -> None:
        """Hand over the completion; versions that the server has not recorded are those of the updates seen here."""
        length = len(self.token_ids)
        versions = np.full(length, self.version, np.int32)
        seen_here = [(version, start, length) for start, version in self.updates]
        for version, start, end in seen_here if version_spans is None else version_spans:
            versions[start:end] = version
        tokens, log_probs = np.array(self.token_ids, np.int64), np.array(self.log_probs, np.float32)
        self.sample.finish(tokens, log_probs, versions, reason)


def write_weights(tensors: Mapping[str, torch.Tensor], parent: Path, *, version: int, model_path: Path) -> Path:
    """Write a new folder with one safetensors file, and copies of the model's JSON files, for servers that read them.

    Args:
        tensors: of the model, on any device; tied ones are given once.

    Returns:
        The folder, of a unique name that it gets once it is whole.
    """
    folder = parent / f"weights-{version}-{uuid.uuid4().hex}"
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir()
    try:
        for file in model_path.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_host, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(folder)
    except BaseException:
        remove_weights(partial)
        raise
    return folder


def remove_weights(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


Control = Literal["pause", "resume", "sleep", "wake"]
Controls = Mapping[Control, tuple[str, Mapping[str, Any]]]
"""Path and further arguments of `ServerClient.call` by which a server is controlled, all of them idempotent."""


class ServerCalls(QueueingEngine):
    """The base of `ServerEngine`: the calls that a subclass for a kind of server defines."""

    _HOW_TO_OPEN = "connect again"
    _GENERATE_PATH: ClassVar[str]
    _CONTROLS: ClassVar[Controls]
    _ENDS_PAUSED_SAMPLES: ClassVar[bool]
    """Whether the server answers an abort while it is paused."""

    _client: ServerClient
    _identity: str
    """Servers keep prefixes computed with older weights, also of an earlier client: each version has its own."""

    @property
    def _cache_salt(self) -> str:
        return f"{self._identity}-{self._version}"

    async def _control_server(self, name: Control) -> None:
        path, arguments = self._CONTROLS[name]
        await self._client.call("POST", path, **arguments)

    def _failure(self, sample: Sample, *, status: int, answer: str) -> ServerRequestError:
        """Return the error of a stream which reports that its sample failed."""
        name = f"sample {sample.index} of {sample.request.request_id!r}, POST {self._client.url}{self._GENERATE_PATH}"
        return ServerRequestError(name, status=status, answer=answer)

    @classmethod
    @abstractmethod
    def _ask(cls, client: ServerClient) -> ServerInfo:
        """Ask what the server runs, and refuse one that was started without a needed option. Blocks."""

    @abstractmethod
    def _take_over(self) -> None:
        """Bring the server into the state that `connect` promises, whatever it was. Blocks."""

    @abstractmethod
    def _body(self, sample: Sample, server_id: str) -> dict[str, Any]:
        """Return the JSON to be sent to ``_GENERATE_PATH``."""

    @abstractmethod
    def _reader(self, running: RunningSample) -> Callable[[Any], Piece]:
        """Return what reads the events of the answer one by one, and raises `ServerRequestError` for a failure."""

    @abstractmethod
    def _abort_on_server(self, server_ids: Sequence[str]) -> Awaitable[None]:
        """End samples; unknown ones are ignored, and the list may be empty."""

    @abstractmethod
    def _load_on_server(self, folder: Path, version: int) -> Awaitable[None]:
        """Load a folder's weights while paused; tokens sampled afterwards are labelled ``version``."""

    async def _check_update_possible(self) -> None:
        """Refuse an update that the server cannot apply completely."""
