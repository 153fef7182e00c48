"""Adapters of language models: those that a run starts from, and the form in which it exports them."""

import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from gcore_runs import AdapterSettings, UserError
from gcore_trainer import ConfigError, LoRAConfig, read_lora_config

_FILE = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(AdapterSettings):
    """Adapters that are trained in place of all parameters, as folders of peft go in and out."""

    lora_adapter_path: str = ""
    """A folder of peft with adapters of the model, to start from; rank, alpha and layers are the folder's."""
    export_merged: bool = False
    """Export the model with the adapters merged into it, a Hugging Face folder; False: the adapters, a folder of
    peft."""

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters; None without any."""
        found = super().lora
        return found and replace(found, path=self.lora_adapter_path)

    @property
    def exports_adapters(self) -> bool:
        """True if the adapters alone are exported."""
        return self.lora_rank > 0 and not self.export_merged


SettingsT = TypeVar("SettingsT", bound=AdapterConfig)


def with_adapter(settings: SettingsT) -> SettingsT:
    """Return settings with rank, alpha, layers and scale of the adapters that they start from.

    Raises:
        UserError: the folder has no such adapters, or other settings are given.
    """
    if not settings.lora_adapter_path:
        return settings
    where = f"{settings.section}.".lstrip(".")
    try:
        found = read_lora_config(settings.lora_adapter_path)
    except ConfigError as error:
        raise UserError(f"{where}lora_adapter_{error}") from None
    of_folder = {
        "lora_rank": found.rank,
        "lora_alpha": found.alpha,
        "target_modules": found.target_modules,
        "use_rslora": found.use_rslora,
    }
    defaults = {field.name: field.default for field in fields(settings)}
    for name, value in of_folder.items():
        if getattr(settings, name) not in (defaults[name], value):
            raise UserError(
                f"{where}{name} is {getattr(settings, name)!r}; expected {value!r}, as the adapters in "
                f"{settings.lora_adapter_path} have, or none set"
            )
    return replace(settings, **of_folder)


def drop_other_export(export: Path, settings: AdapterConfig) -> None:
    """Remove a run's export if it is of the other form, so that it is made again."""
    if export.is_dir() and settings.lora_rank and (export / _FILE).is_file() != settings.exports_adapters:
        shutil.rmtree(export)
