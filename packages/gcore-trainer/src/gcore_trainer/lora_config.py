"""Settings of low-rank adapters, and the reading of settings from a folder of peft."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gcore_trainer.config import CheckedConfig, ConfigBound, Count
from gcore_trainer.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of tensors in the folder: peft wraps the model twice."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, [], ["classifier", "score"], ["score"]),
    **dict.fromkeys(
        ("fan_in_fan_out", "use_dora", "lora_bias", "use_qalora", "use_bdlora"), (None, False)
    ),
    **dict.fromkeys(
        ("rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters"),
        (None, {}, []),
    ),
    **dict.fromkeys(
        ("layer_replication", "alora_invocation_tokens", "kasa_config", "velora_config"), (None,)
    ),
}
"""Settings of peft that change what adapters compute or which parameters learn, with the values known here."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(CheckedConfig):
    """Low-rank adapters instead of full fine-tuning.

    Example:
        >>> LoRAConfig(rank=32, alpha=64).scaling
        2.0
    """

    rank: Count = 16
    """Rank of each adapter's matrices."""
    alpha: Count = 32
    """An adapter's output is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], ConfigBound(bool, "at least one name")] = (
        "all-linear",
    )
    """Names of the layers that get one, such as q_proj; all-linear: all but the head."""
    use_rslora: bool = False
    """An adapter's output is scaled by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    path: str = ""
    """A folder of peft, or for image models also a LoRA of diffusers (`read_component_lora_config`), whose adapters
    training starts from; empty: new ones, which change nothing at first."""

    @property
    def scaling(self) -> float:
        """Factor of an adapter's output."""
        if self.use_rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank


def read_lora_config(path: str | Path) -> LoRAConfig:
    """Read the settings of the adapters in a folder of peft from its ``adapter_config.json``.

    A dropout is ignored: adapters are trained without.

    Raises:
        ConfigError: the folder has no adapters, or some that compute something else.
    """
    folder = Path(path)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"path is {str(path)!r}; expected a folder of peft, with {name}")
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text())
        rank = settings["r"]
        alpha = settings["lora_alpha"]
        targets = settings["target_modules"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} is no LoRA's: {type(error).__name__}: {error}"
        ) from None
    check_settings(settings, str(folder / ADAPTER_CONFIG))
    if int(alpha) != alpha:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG}: lora_alpha is {alpha}; expected a whole number"
        )
    names = tuple(sorted(targets)) if isinstance(targets, list) else ()
    if not names or settings.get("layers_to_transform") or settings.get("exclude_modules"):
        names = _layers(folder / ADAPTER_WEIGHTS)
    return LoRAConfig(
        rank=rank,
        alpha=int(alpha),
        target_modules=names,
        use_rslora=bool(settings.get("use_rslora")),
        path=str(path),
    )


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for settings of peft with which adapters compute something else; ``where`` names the file."""
    for name, accepted in _PLAIN.items():
        value = settings.get(name, accepted[0])
        compared = sorted(value) if isinstance(value, list) else value
        if compared not in accepted:
            raise ConfigError(f"{where}: {name} is {value!r}; expected {accepted[0]!r}")


def _layers(file: Path) -> tuple[str, ...]:
    """Return the names of all layers that have an adapter in a file."""
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        layers = {name.partition(".lora_")[0] for name in opened.keys() if ".lora_" in name}  # noqa: SIM118 - not a dict
    return tuple(sorted(name.removeprefix(PREFIX) for name in layers))
