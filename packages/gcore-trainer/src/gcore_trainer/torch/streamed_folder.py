"""Writing of Hugging Face folders one file at a time, from a stream of weights."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from gcore_trainer.trainer import Replicas

MAX_FILE_BYTES = 5 << 30
"""Most bytes of a file, which are in memory at a time, if that is not less than a tensor."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PART = re.compile(r".*?\.\d+\.")
"""The part of a name that the tensors of a layer share."""


def tensor_files(folder: Path) -> dict[str, str] | None:
    """Return the name of the safetensors file of each tensor in a Hugging Face folder; None if it has no such file."""
    if (folder / INDEX_FILE).is_file():
        return json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    if (folder / SINGLE_FILE).is_file():
        with safe_open(folder / SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    return None


def save_streamed(
    model: Any, folder: Path, weights: Iterable[tuple[str, torch.Tensor]], ranks: "Replicas"
) -> None:
    """Write the files that ``model.save_pretrained`` writes.

    Args:
        weights: the full parameters by the model's names, those of a layer together.
        ranks: those that call this; see `write_tensors`.
    """
    ignored: set[str] = set(model._keys_to_ignore_on_save or ())
    everything = chain(weights, _saved_buffers(model))
    saved = ((n, t) for n, t in everything if n not in ignored)
    write_tensors(folder, _as_published(model, saved), ranks)
    if ranks.rank:
        return
    model.config.dtype = str(model.dtype).split(".")[1]
    # FSDP2 makes a class of its own of the model's.
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def write_tensors(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], ranks: "Replicas"
) -> torch.dtype:
    """Write safetensors files, with an index if there are several, and return the last one's data type.

    All ranks call this with the same names and shapes, and the first one writes. The others wait for each file on the
    host: in a collective of the weights, NCCL would end a wait that takes minutes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    file_of: dict[str, int] = {}
    size_bytes = 0
    dtype = torch.float32
    for tensors in _by_file(weights, "meta" if ranks.rank else "cpu"):
        parts.append(folder / f"part-{len(parts)}.safetensors.tmp")
        if not ranks.rank:
            save_file(tensors, parts[-1], metadata={"format": "pt"})
        ranks.gather(None)
        file_of |= dict.fromkeys(tensors, len(parts) - 1)
        size_bytes += sum(t.nbytes for t in tensors.values())
        dtype = next(iter(tensors.values())).dtype
        tensors.clear()
    if ranks.rank:
        return dtype
    count = len(parts)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = [SINGLE_FILE]
    else:
        index = {
            "metadata": {"total_size": size_bytes},
            "weight_map": {name: files[i] for name, i in sorted(file_of.items())},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    for part, name in zip(parts, files, strict=True):
        part.rename(folder / name)
    return dtype


def _by_file(
    weights: Iterable[tuple[str, torch.Tensor]], device: str
) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, tensor in weights:
        if tensors and size_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield tensors
            tensors = {}
            size_bytes = 0
        tensors[name] = tensor.detach().to(device).contiguous()
        size_bytes += tensor.nbytes
    yield tensors


def _saved_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _as_published(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Undo the renaming and fusing of transformers' loading, for the tensors of a layer together."""
    from transformers.core_model_loading import revert_weight_conversion

    def layer_of(pair: tuple[str, torch.Tensor]) -> str:
        name, _ = pair
        match = _PART.match(name)
        return match[0] if match else name

    for _, pairs in groupby(weights, layer_of):
        yield from revert_weight_conversion(model, dict(pairs)).items()
