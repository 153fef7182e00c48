"""Servers of engines as their clients see them: samples, and folders of weights."""

import asyncio
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gcore_rollout.engines.protocol import FinishReason
from gcore_rollout.engines.queueing import QueuedSample


@dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """A part of a sample, as the server sends it."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason | None = None
    version_spans: list[Mapping[str, Any]] | None = None
    """Set in the last piece if the server reports it: version, start and end (one past the last token) of each span."""
    ended_here: bool = False
    """Set in the last piece if the server would continue the sample."""


@dataclass(eq=False)
class RunningSample:
    """A sample that has been requested from the server."""

    sample: QueuedSample
    server_id: str
    version: int
    """Version of the weights when it started."""
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    updates: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(tokens so far, new version) of each change of weights since."""
    task: "asyncio.Task[None]" = field(init=False)

    def finish(
        self, reason: FinishReason, version_spans: list[Mapping[str, Any]] | None = None
    ) -> None:
        """Hand over the completion; versions that the server has not recorded are those of the updates seen here."""
        length = len(self.token_ids)
        versions = np.full(length, self.version, np.int32)
        if version_spans is None:
            version_spans = [
                {"version": version, "start": start, "end": length}
                for start, version in self.updates
            ]
        for span in version_spans:
            versions[span["start"] : span["end"]] = int(span["version"])
        tokens = np.array(self.token_ids, np.int64)
        log_probs = np.array(self.log_probs, np.float32)
        self.sample.finish(tokens, log_probs, versions, reason)


def write_weights(
    tensors: Mapping[str, torch.Tensor], parent: Path, *, version: int, model_path: Path
) -> Path:
    """Write one safetensors file, and copies of the model's JSON files, to a new folder, and return it.

    Tied tensors are given once. The folder gets its unique name once it is whole.
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
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder
