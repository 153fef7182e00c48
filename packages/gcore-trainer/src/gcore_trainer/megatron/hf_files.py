"""Hugging Face folders: reading slices of their safetensors files, and writing them a file at a time."""

import copy
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from gcore_trainer.errors import UnsupportedModelError
from gcore_trainer.megatron.pieces import Piece

MAX_FILE_BYTES = 5 << 30
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")


class WeightFiles:
    """The weights of a folder; files that were read from stay open until `close`.

    Raises:
        UnsupportedModelError: there are no such files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._read: set[str] = set()
        if (folder / _INDEX).exists():
            self._file_of: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        elif (folder / _SINGLE).exists():
            self._file_of = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            raise UnsupportedModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, piece: Piece) -> torch.Tensor:
        """The piece's box; of experts, one whole expert's.

        Raises:
            UnsupportedModelError: the folder does not have the tensor, or in another shape.
        """
        match = _EXPERTS.fullmatch(piece.name)
        if match is None or piece.name in self:
            return self._slice(piece.name, piece.global_shape, piece.offset, piece.shape)
        rows, columns = piece.shape[1:]
        disk_names = [f"{match[1]}{piece.offset[0]}.{name}.weight" for name in _linears(match[2])]
        shape = (rows // len(disk_names), columns)
        return torch.cat([self._slice(name, shape, (0, 0), shape) for name in disk_names])[None]

    def check_layers(self) -> None:
        """Raise `UnsupportedModelError` if layers have tensors of a kind that was not read."""
        kinds = {_NUMBER.sub("*", name) for name in self._read}
        left = {_NUMBER.sub("*", name) for name in self._file_of if name.startswith("model.layers.")} - kinds
        # Old folders hold what the config says.
        if unknown := sorted(name for name in left if not name.endswith(".rotary_emb.inv_freq")):
            raise UnsupportedModelError(
                f"{self._folder} has tensors {', '.join(unknown)}, which the Megatron backend does not convert"
            )

    def _slice(
        self, name: str, global_shape: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        if name not in self:
            raise UnsupportedModelError(f"{self._folder} has no tensor {name!r}")
        self._read.add(name)
        whole = self._file(self._file_of[name]).get_slice(name)
        if tuple(whole.get_shape()) != global_shape:
            raise UnsupportedModelError(
                f"{name!r} of {self._folder} has shape {tuple(whole.get_shape())}: its config needs {global_shape}"
            )
        return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._open[name]


def write_folder(
    folder: Path, source: Path, hf_config: Any, weights: Iterable[tuple[str, torch.Tensor]], *, is_classifier: bool
) -> None:
    """Write what ``from_pretrained`` loads, with no more than a file's weights in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    hf_config = copy.deepcopy(hf_config)
    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if is_classifier else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    hf_config.architectures = [names[hf_config.model_type]]
    if is_classifier:
        hf_config.num_labels = 1
    if (source / "generation_config.json").exists() and source.resolve() != folder.resolve():
        shutil.copy(source / "generation_config.json", folder)
    parts: list[Path] = []
    file_of: dict[str, int] = {}
    size_bytes = 0
    for tensors in _by_file(_on_disk(weights)):
        parts.append(folder / f"part-{len(parts)}.safetensors.tmp")
        save_file(tensors, parts[-1], metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, len(parts) - 1)
        size_bytes += sum(t.nbytes for t in tensors.values())
        hf_config.dtype = next(iter(tensors.values())).dtype
    files = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    if len(files) == 1:
        files = [_SINGLE]
    else:
        index = {
            "metadata": {"total_size": size_bytes},
            "weight_map": {name: files[i] for name, i in sorted(file_of.items())},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for part, name in zip(parts, files, strict=True):
        part.rename(folder / name)
    hf_config.save_pretrained(folder)


def _by_file(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if tensors and sum(t.nbytes for t in tensors.values()) + tensor.nbytes > MAX_FILE_BYTES:
            yield tensors
            tensors = {}
        tensors[name] = tensor.contiguous().cpu()
    yield tensors


def _on_disk(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Files have every expert's matrices on their own, as other programs read them."""
    for name, tensor in weights:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        linears = _linears(match[2])
        for expert, matrix in enumerate(tensor):
            for linear, part in zip(linears, matrix.chunk(len(linears)), strict=True):
                yield f"{match[1]}{expert}.{linear}.weight", part.clone()


def _linears(fused: str) -> list[str]:
    return ["gate_proj", "up_proj"] if fused == "gate_up_proj" else ["down_proj"]
