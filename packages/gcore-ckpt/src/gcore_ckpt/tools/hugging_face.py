"""Writes the weights in a step as a folder that `from_pretrained` of transformers loads."""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from gcore_ckpt.errors import CheckpointMismatchError, CheckpointWriteError
from gcore_ckpt.format.boxes import DTYPES, Box, HeldBox, safetensors_header
from gcore_ckpt.format.tree import View
from gcore_ckpt.loading.loader import read_whole
from gcore_ckpt.loading.reader import Step, StepReader, find_step, open_step, step_leaves
from gcore_ckpt.ranks.shards import TORCH_DTYPES
from gcore_ckpt.storage import STEP_NAME
from gcore_ckpt.storage.local import LocalStorage, open_storage, sync_directory, write_synced
from gcore_ckpt.storage.safetensors_folder import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from gcore_ckpt.threads import Workers

_THREADS = 4
_FLOATS = tuple(
    name
    for name, dtype in DTYPES.items()
    if dtype.safetensors is not None and TORCH_DTYPES[name].is_floating_point
)
_CONFIG_FILE = "config.json"
_CONFIG_DTYPES = ("dtype", "torch_dtype")
_CONFIG_PATTERNS = (
    _CONFIG_FILE,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*processor_config.json",
)


_Weights: TypeAlias = dict[tuple[str, View | None], HeldBox]
"""Tensors as they are in a file, by their names in the step."""


def export_hf(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: Step = "latest",
    prefix: str = "",
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config_from: str | os.PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the tensors of a step as `model.safetensors`, or as several such files and their index.

    One process does it, whatever the sharding was, in host memory of the size of the largest tensor. The folder
    appears whole or not at all. Of tensors that share their memory the first is written, as transformers expects.

    Args:
        path: The folder or URL of the checkpoints.
        folder: Where to; it must not exist, or be empty.
        step: Number of the step; `"latest"` is the highest committed one.
        prefix: Dotted path of the part of the state to write, such as `"model"`; names are relative to it. What is
            no tensor is left out.
        dtype: What floating-point tensors become, such as `"bfloat16"`; None leaves each as it is. It replaces the
            dtype that `config.json` states.
        max_shard_bytes: Largest file, but for a tensor that is larger on its own.
        config_from: Folder of which `config.json`, `generation_config.json` and the tokenizer's files are copied.
        progress: Is called with the bytes that have been written since the last call.

    Raises:
        ValueError: An argument is out of its range.
        CheckpointNotFoundError: The step is not committed.
        CheckpointMismatchError: It holds no tensors there, or one that safetensors cannot hold.
        CheckpointWriteError: `folder` holds something, or has a name that the folder of the checkpoints uses.
        CorruptCheckpointError: The step is not what was saved.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; expected 1 or more")
    float_dtype: str | None = None
    if dtype is not None:
        float_dtype = str(dtype).removeprefix("torch.")
        if float_dtype not in _FLOATS:
            raise ValueError(f"dtype is {dtype!r}; expected None or one of {', '.join(_FLOATS)}")
    copied: dict[str, bytes] = {}
    if config_from is not None:
        copied = _read_configs(Path(config_from), float_dtype)
    target = Path(folder)
    if target.is_symlink() or (
        target.exists() and not (target.is_dir() and not any(target.iterdir()))
    ):
        raise CheckpointWriteError(
            f"{target} is there already; expected a new folder, or an empty one"
        )
    storage = open_storage(path)
    inside = isinstance(storage, LocalStorage) and target.parent.resolve() == storage.path.resolve()
    if inside and (STEP_NAME.fullmatch(target.name) or target.name.startswith((".", "set-aside-"))):
        raise CheckpointWriteError(
            f"{target} has a name that {storage} keeps for itself; expected another one"
        )
    with open_step(storage, find_step(storage, step)) as reader:
        files = _split(_weights(reader, prefix, float_dtype), max_shard_bytes)
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = target.with_name(f".export-{target.name}-{uuid.uuid4().hex[:12]}")
        temp.mkdir()
        try:
            _write_all(reader, temp, files, copied, progress or (lambda _: None))
            temp.rename(target)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    sync_directory(target.parent)


def _read_configs(folder: Path, float_dtype: str | None) -> dict[str, bytes]:
    """Return the files to copy, by name."""
    if not (folder / _CONFIG_FILE).is_file():
        raise ValueError(
            f"config_from is {str(folder)!r}; expected a folder that holds {_CONFIG_FILE}"
        )
    paths: set[Path] = set()
    for pattern in _CONFIG_PATTERNS:
        paths.update(folder.glob(pattern))
    files = {path.name: path.read_bytes() for path in sorted(paths) if path.is_file()}
    if float_dtype is not None:
        config = json.loads(files[_CONFIG_FILE])
        if not isinstance(config, dict):
            raise ValueError(
                f"config_from has a {_CONFIG_FILE} that is a {type(config).__name__}; expected a dict"
            )
        stated = {key: float_dtype for key in _CONFIG_DTYPES if key in config}
        files[_CONFIG_FILE] = (
            json.dumps(config | stated, indent=2, ensure_ascii=False) + "\n"
        ).encode()
    return files


def _weights(reader: StepReader, prefix: str, float_dtype: str | None) -> _Weights:
    """Return the tensors under the prefix, each stored one once."""
    leaves = step_leaves(reader)
    start = prefix
    if prefix:
        start += "."
    weights: _Weights = {}
    names: set[str] = set()
    for leaf in leaves:
        if leaf.tensor is None or not leaf.path.startswith(start):
            continue
        name = leaf.path.removeprefix(start)
        if leaf.per_rank:
            raise CheckpointMismatchError(
                f"{reader.where}: {leaf.path} is one rank's own; expected another prefix"
            )
        if name in names:
            raise CheckpointMismatchError(
                f"{reader.where} holds two tensors of the name {leaf.path!r}"
            )
        if (leaf.tensor, leaf.view) not in weights:
            weights[leaf.tensor, leaf.view] = _weight(
                reader, leaf.path, name, leaf.tensor, leaf.view, float_dtype
            )
        names.add(name)
    if not weights:
        parts = dict.fromkeys(
            leaf.path.partition(".")[0] for leaf in leaves if leaf.tensor is not None
        )
        raise CheckpointMismatchError(
            f"{reader.where} holds no tensors under the prefix {prefix!r}; it holds some under {', '.join(parts)}"
        )
    return weights


def _weight(
    reader: StepReader,
    path: str,
    name: str,
    stored: str,
    view: View | None,
    float_dtype: str | None,
) -> HeldBox:
    tensor = reader.index.tensors[stored]
    dtype = tensor.dtype
    is_packed = dtype == "float4_e2m1fn_x2"  # two numbers in each element
    is_convertible = TORCH_DTYPES[dtype].is_floating_point and not is_packed
    if float_dtype is not None and is_convertible:
        dtype = float_dtype
    if DTYPES[dtype].safetensors is None:
        remedy = "another type"
        if is_convertible:
            remedy = "a dtype to convert it to"
        raise CheckpointMismatchError(
            f"{reader.where}: {path} has dtype {dtype}, for which safetensors has no code; expected {remedy}"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointMismatchError(
            f"{reader.where}: {path!r} is no text; safetensors names are UTF-8"
        ) from None
    if name == "__metadata__":
        raise CheckpointMismatchError(
            f"{reader.where}: {path} has a name that safetensors keeps for itself"
        )
    shape = tensor.shape_of(view)
    return HeldBox(name=name, dtype=dtype, shape=shape, box=Box.of_shape(shape))


def _split(weights: _Weights, max_bytes: int) -> dict[str, _Weights]:
    """Return the tensors of each file by its name, the widest elements first, so that all are aligned."""
    files: list[_Weights] = [{}]
    used_bytes = 0
    for stored, box in weights.items():
        if files[-1] and used_bytes + box.size_bytes > max_bytes:
            files.append({})
            used_bytes = 0
        files[-1][stored] = box
        used_bytes += box.size_bytes
    named_files: dict[str, _Weights] = {}
    for number, file in enumerate(files, start=1):
        name = WEIGHTS_FILE
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        entries = sorted(file.items(), key=lambda item: -DTYPES[item[1].dtype].size_bytes)
        named_files[name] = dict(entries)
    return named_files


def _write_all(
    reader: StepReader,
    folder: Path,
    files: dict[str, _Weights],
    copied: dict[str, bytes],
    progress: Callable[[int], None],
) -> None:
    with Workers(_THREADS) as workers:
        for name, weights in files.items():
            with (folder / name).open("xb") as file:
                file.write(safetensors_header([*weights.values()]))
                for (stored, view), box in weights.items():
                    file.write(read_whole(reader, stored, view, workers, box.dtype).numpy().data)
                    progress(box.size_bytes)
                file.flush()
                os.fsync(file.fileno())
    if len(files) > 1:
        total_bytes = 0
        weight_map: dict[str, str] = {}
        for name, weights in files.items():
            for box in weights.values():
                total_bytes += box.size_bytes
                weight_map[box.name] = name
        content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        copied = {**copied, WEIGHTS_INDEX_FILE: (json.dumps(content, indent=2) + "\n").encode()}
    for name, data in copied.items():
        write_synced(folder / name, data)
    sync_directory(folder)
