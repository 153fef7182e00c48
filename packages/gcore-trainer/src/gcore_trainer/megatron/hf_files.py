"""Reading of slices of the safetensors files in a Hugging Face folder, and writing of such folders."""

import copy
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from gcore_trainer.errors import StateError, UnsupportedModelError
from gcore_trainer.megatron.pieces import TensorPiece
from gcore_trainer.torch.streamed_folder import INDEX_FILE, SINGLE_FILE, tensor_files, write_folder

if TYPE_CHECKING:
    from gcore_trainer.trainer import Replicas

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_QKV = re.compile(r"\.[qkv]_proj\.")
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")


@torch.no_grad()
def load_weights(folder: Path, pieces: Mapping[torch.nn.Parameter, Sequence[TensorPiece]]) -> None:
    """Read parameters from a folder; a value head that the folder lacks stays as it is.

    Raises:
        UnsupportedModelError: there are no safetensors files, or a tensor is missing, misshapen or of no known kind.
        StateError: the folder has layers that its configuration does not have.
    """
    with ExitStack() as stack:
        open_file = cache(
            lambda name: stack.enter_context(safe_open(folder / name, framework="pt"))
        )
        file_of = tensor_files(folder)
        if file_of is None:
            raise UnsupportedModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        kinds: set[str] = set()

        def read(name: str, global_shape: tuple[int, ...], box: tuple[slice, ...]) -> torch.Tensor:
            if name not in file_of:
                raise UnsupportedModelError(f"{folder} has no tensor {name!r}")
            # A rank may have some of the fused queries, keys and values.
            for letter in "qkv":
                kinds.add(_NUMBER.sub("*", _QKV.sub(rf".{letter}_proj.", name)))
            tensor = open_file(file_of[name]).get_slice(name)
            shape = tuple(tensor.get_shape())
            if shape != global_shape:
                raise UnsupportedModelError(
                    f"{name!r} of {folder} has shape {shape}: its config needs {global_shape}"
                )
            return tensor[box]

        def read_piece(piece: TensorPiece) -> torch.Tensor:
            match = _EXPERTS.fullmatch(piece.name)
            if match is None or piece.name in file_of:
                return read(piece.name, piece.global_shape, piece.box)
            # A piece of experts is all of one expert.
            expert = f"{match[1]}{piece.offset[0]}"
            linears = _linears(match[2])
            shape = (piece.shape[1] // len(linears), piece.shape[2])
            box = (slice(None), slice(None))
            return torch.cat([read(f"{expert}.{linear}.weight", shape, box) for linear in linears])[
                None
            ]

        for parameter, parameter_pieces in pieces.items():
            for piece in parameter_pieces:
                # A causal LM's folder has no value head: a new critic's values begin at 0.
                if piece.name != "score.weight" or piece.name in file_of:
                    piece.view(parameter.view(-1)).copy_(read_piece(piece))
    num_layers: int = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for name in sorted(file_of):
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= num_layers:
            raise StateError(
                f"the weights in {folder} have layers that config.json does not have, such as {name}; expected the "
                f"configuration that the weights were saved with (num_hidden_layers is {num_layers})"
            )
    unread = {
        _NUMBER.sub("*", name) for name in file_of if name.startswith("model.layers.")
    } - kinds
    # Old folders hold the frequencies, which the config gives.
    unknown = sorted(name for name in unread if not name.endswith(".rotary_emb.inv_freq"))
    if unknown:
        raise UnsupportedModelError(
            f"{folder} has tensors {', '.join(unknown)}, which the Megatron backend does not convert"
        )


def num_parameters(folder: Path) -> int:
    """Return the number of entries of all tensors in a folder; only the headers of its files are read."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118 - no mapping
    return total


def save_weights(
    folder: Path,
    source: Path,
    hf_config: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    ranks: "Replicas",
    *,
    is_classifier: bool,
) -> None:
    """Write a folder that ``from_pretrained`` loads; all ``ranks`` call it, see `write_folder`."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_classifier:
        names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    def write_config(path: Path, dtype: torch.dtype) -> None:
        config = copy.deepcopy(hf_config)
        config.architectures = [names[config.model_type]]
        if is_classifier:
            config.num_labels = 1
        config.dtype = dtype
        config.save_pretrained(path)
        if (source / "generation_config.json").exists():
            shutil.copy(source / "generation_config.json", path)

    write_folder(folder, _split_experts(weights), ranks, write_config)


def _split_experts(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of every expert as tensors of their own, as other programs read them."""
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
