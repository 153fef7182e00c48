"""Adapters in a safetensors file of diffusers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gcore_trainer.errors import ConfigError
from gcore_trainer.lora_config import ADAPTER_CONFIG, LoRAConfig, check_settings, read_lora_config

FILE_NAME = "pytorch_lora_weights.safetensors"
"""The file that ``pipeline.load_lora_weights`` of diffusers looks for in a folder."""
_MATRIX = re.compile(
    r"(?P<layer>.+)\.(?:lora_(?P<letter>[AB])|lora\.(?P<direction>down|up))\.weight"
)
_LETTERS = {"down": "A", "up": "B"}
"""The matrices by their older names."""


def read_component_lora_config(path: str | Path, component: str) -> LoRAConfig:
    """Return the settings of the adapters of a pipeline's model: in a folder of peft, or in a LoRA of diffusers.

    Raises:
        ConfigError: see `read_lora_config` and `read_lora_file`.
    """
    if (Path(path) / ADAPTER_CONFIG).is_file():
        return read_lora_config(path)
    config, _ = read_lora_file(path, component)
    return config


def read_lora_file(
    path: str | Path, component: str | None = None
) -> tuple[LoRAConfig, dict[str, torch.Tensor]]:
    """Read the settings of the adapters in a file of diffusers, and their matrices under peft's names.

    The scale is that of the file's alphas, or of the settings of peft in its header; without either it is 1.

    Args:
        path: a safetensors file, or a folder with ``pytorch_lora_weights.safetensors``.
        component: the pipeline's model that has the adapters, such as transformer; None: the one of the first name.

    Raises:
        ConfigError: there is no such file, or it holds more than adapters of this model, all of one rank and scale.
    """
    file = Path(path)
    if not file.is_file():
        file /= FILE_NAME
    if not file.is_file():
        raise ConfigError(
            f"path is {str(path)!r}; expected adapters of diffusers, a safetensors file or a folder with {FILE_NAME}, "
            f"or a folder of peft, with {ADAPTER_CONFIG}"
        )
    metadata, tensors = _load(file)
    if component is None:
        component = next(iter(tensors), "").partition(".")[0]
    settings = {name.removeprefix(f"{component}."): value for name, value in metadata.items()}
    check_settings(settings, str(file))
    matrices: dict[str, torch.Tensor] = {}
    alphas: set[float] = set()
    for name, tensor in tensors.items():
        plain = name.removeprefix(f"{component}.")
        match = _MATRIX.fullmatch(plain)
        if plain == name or (match is None and not plain.endswith(".alpha")):
            raise ConfigError(
                f"{file} has a tensor {name!r}; expected adapters of the pipeline's {component} alone, "
                f"{component}.LAYER.lora_A.weight and lora_B.weight, as save_lora_weights of diffusers writes them"
            )
        if match is None:
            alphas.add(tensor.item())
        else:
            letter = match["letter"] or _LETTERS[match["direction"]]
            matrices[f"{match['layer']}.lora_{letter}.weight"] = tensor
    ranks = {
        matrix.shape[0] for name, matrix in matrices.items() if name.endswith(".lora_A.weight")
    }
    if len(ranks) != 1:
        raise ConfigError(f"{file} has adapters of ranks {sorted(ranks)}; expected one rank")
    [rank] = ranks
    if "lora_alpha" in settings:
        alphas.add(float(settings["lora_alpha"]))
    alphas = alphas or {float(rank)}
    if len(alphas) != 1 or not min(alphas).is_integer():
        raise ConfigError(
            f"{file} has adapters with alphas {sorted(alphas)}; expected one whole number"
        )
    layers = {name.rpartition(".lora_")[0] for name in matrices}
    config = LoRAConfig(
        rank=rank,
        alpha=int(alphas.pop()),
        target_modules=tuple(sorted(layers)),
        use_rslora=bool(settings.get("use_rslora")),
        path=str(path),
    )
    return config, matrices


def _load(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the settings of peft in a file's header, if there are any, and its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        return json.loads(metadata.get("lora_adapter_metadata", "{}")), tensors
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{file} does not load; expected a safetensors file ({error})") from None
