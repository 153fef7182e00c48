"""Writing of Hugging Face folders by all ranks, a file of each at a time, from a stream of weights."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gcore_trainer.packing.vision import VISION_MODELS, copy_processor

if TYPE_CHECKING:
    from gcore_trainer.trainer import Replicas

MAX_FILE_BYTES = 5 << 30
"""Most bytes of a file, which are in each rank's memory at a time, if that is not less than a tensor."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PART = re.compile(r".*?\.\d+\.")
"""The part of a name that the tensors of a layer share."""


def tensor_files(folder: Path, single_file: str = SINGLE_FILE) -> dict[str, str] | None:
    """Return the name of the safetensors file of each tensor in a folder, by default one of transformers.

    None: the folder has neither the single file nor an index of several, which has a variant such as fp16 at its end.
    """
    stem, *variant, _ = single_file.split(".")
    index = folder / ".".join([stem, "safetensors", "index", *variant, "json"])
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if (folder / single_file).is_file():
        with safe_open(folder / single_file, framework="pt") as file:
            return dict.fromkeys(file.keys(), single_file)
    return None


def save_streamed(
    model: Any, folder: Path, weights: Iterable[tuple[str, torch.Tensor]], ranks: "Replicas"
) -> None:
    """Write the files that ``model.save_pretrained`` writes.

    Args:
        weights: the full parameters by the model's names, those of a layer together.
        ranks: those that call this; see `write_folder`.
    """
    ignored: set[str] = set(model._keys_to_ignore_on_save or ())
    everything = chain(weights, _saved_buffers(model))
    saved = ((n, t) for n, t in everything if n not in ignored)

    def write_config(path: Path, dtype: torch.dtype) -> None:
        del dtype  # some parameters may stay in float32
        model.config.dtype = str(model.dtype).split(".")[1]
        # FSDP2 makes a class of its own of the model's.
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
        if model.config.model_type in VISION_MODELS:
            copy_processor(Path(model.name_or_path), path)

    write_folder(folder, _as_published(model, saved), ranks, write_config)


def write_folder(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    ranks: "Replicas",
    write_config: Callable[[Path, torch.dtype], None],
) -> None:
    """Write a folder of safetensors files, with an index if there are several, and of what ``write_config`` writes.

    All ranks call this with the same names and shapes, and see the folder. Each writes a share of the tensors, the
    first one also the other files. They wait for each other on the host: NCCL would end a collective that waits for
    minutes.

    Until all is written, the files are in another folder, which is then renamed. If ``folder`` exists, its config.json,
    without which no loader takes it for a model, is absent while files are replaced; its other files stay.

    Args:
        write_config: writes config.json and the like to a folder, given the data type of the last tensor.

    Raises:
        OSError, SafetensorError: a rank cannot write; all of them raise it.
    """
    temp = ranks.gather_or_raise(partial(_make_temp, folder, ranks.rank))[0]
    parts: list[list[str]] = []
    size_bytes = 0
    dtype = torch.float32
    try:
        for shares in _divide(weights, ranks):
            write = partial(_write_part, shares[ranks.rank], temp, len(parts) + ranks.rank)
            ranks.gather_or_raise(write)
            for tensors in shares:
                parts.append(list(tensors))
                size_bytes += sum(t.nbytes for t in tensors.values())
                dtype = next(iter(tensors.values()), torch.empty(0, dtype=dtype)).dtype
                tensors.clear()

        def finish() -> None:
            if not ranks.rank:
                _name_parts(temp, parts, size_bytes)
                write_config(temp, dtype)
                _put_in_place(temp, folder)

        ranks.gather_or_raise(finish)
    except BaseException:
        if not ranks.rank:
            shutil.rmtree(temp, ignore_errors=True)
        raise


def _make_temp(folder: Path, rank: int) -> Path:
    """Make a folder to write to, on the first rank; it is next to ``folder``, or in it if it exists."""
    temp = folder.with_name(f".{folder.name}.partial")
    if folder.exists():
        # It may be the root of a file system.
        temp = folder / ".partial"
    if not rank:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
    return temp


def _divide(
    weights: Iterable[tuple[str, torch.Tensor]], ranks: "Replicas"
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the tensors of the next file of each rank; those of other ranks are on the meta device.

    The rank with the fewest bytes so far gets the next tensor.
    """
    shares: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks.size)]
    sizes = [0] * ranks.size
    for name, tensor in weights:
        writer = sizes.index(min(sizes))
        file_bytes = sum(t.nbytes for t in shares[writer].values())
        if shares[writer] and file_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield shares
            shares = [{} for _ in range(ranks.size)]
        device = "cpu" if writer == ranks.rank else "meta"
        shares[writer][name] = tensor.detach().to(device).contiguous()
        sizes[writer] += tensor.nbytes
    yield shares


def _write_part(tensors: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    if tensors:
        save_file(tensors, folder / f"part-{number}.tmp", metadata={"format": "pt"})


def _name_parts(folder: Path, parts: Sequence[Sequence[str]], size_bytes: int) -> None:
    """Give the files of parts that have tensors their names, and write their index if there are several."""
    numbers = [number for number, names in enumerate(parts) if names]
    count = len(numbers)
    file_of: dict[str, str] = {}
    for i, number in enumerate(numbers, start=1):
        file = SINGLE_FILE if count == 1 else f"model-{i:05}-of-{count:05}.safetensors"
        (folder / f"part-{number}.tmp").rename(folder / file)
        file_of |= dict.fromkeys(parts[number], file)
    if count > 1:
        index = {
            "metadata": {"total_size": size_bytes},
            "weight_map": dict(sorted(file_of.items())),
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _put_in_place(temp: Path, folder: Path) -> None:
    if temp.parent != folder:
        temp.rename(folder)
        return
    replaced = set((tensor_files(folder) or {}).values())
    for name in ("config.json", INDEX_FILE, *replaced):
        (folder / name).unlink(missing_ok=True)
    for file in sorted(temp.iterdir(), key=lambda file: file.name == "config.json"):
        file.rename(folder / file.name)
    temp.rmdir()


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
