"""Weights as files in a folder that an engine's server reads."""

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

_PARTIAL = ".partial"


def write_weights(tensors: Mapping[str, torch.Tensor], parent: Path, *, version: int, model_path: Path) -> Path:
    """Write a new folder with one safetensors file, and the model's own JSON files beside it.

    Args:
        tensors: of the model, on any device; tied ones are given once.
        parent: existing folder.
        model_path: folder of which the configuration is copied; some servers read it again.

    Returns:
        The folder. It gets its name once it is whole, and shares it with no other.
    """
    folder = parent / f"weights-{version}-{uuid.uuid4().hex}"
    partial = folder.with_name(folder.name + _PARTIAL)
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
    """Remove such a folder. Nothing if somebody else has."""
    shutil.rmtree(folder, ignore_errors=True)
