"""Settings of low-rank adapters."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from gcore_runs.errors import UserError
from gcore_runs.settings.bounds import Checked, Count, NonNegative
from gcore_runs.settings.readers import ABOVE_0, IS_SET, ReadWith
from gcore_trainer import ConfigError, LoRAConfig, read_lora_config


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Checked):
    """Adapters that are trained in place of all parameters."""

    lora_rank: NonNegative = 0
    """Train adapters of this rank, and nothing else; 0: all parameters."""
    lora_alpha: Count = 32
    """An adapter's output is scaled by lora-alpha / lora-rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter, such as q_proj or to_q; all-linear: all but the head."""
    use_rslora: bool = False
    """Scale an adapter's output by lora-alpha / sqrt(lora-rank) instead (rsLoRA, arXiv 2312.03732), so that a higher
    rank does not make it smaller."""
    lora_adapter_path: str = ""
    """Adapters of the model to start from, a folder of peft, or of image models also a LoRA of diffusers; rank, alpha
    and layers are those of the adapters."""

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters; None without any."""
        if not self.lora_rank:
            return None
        return LoRAConfig(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            target_modules=self.target_modules,
            use_rslora=self.use_rslora,
            path=self.lora_adapter_path,
        )


SettingsT = TypeVar("SettingsT", bound=AdapterSettings)


def adapter_settings(section: str, *further_names: str) -> ReadWith:
    """Return the settings of adapters, whose names begin with ``section``, that nothing reads without adapters."""
    names = ("lora_alpha", "target_modules", "use_rslora", *further_names)
    return ReadWith(
        settings=tuple(f"{section}{name}" for name in names),
        chosen_by={f"{section}lora_rank": ABOVE_0, f"{section}lora_adapter_path": IS_SET},
    )


def with_adapter(
    settings: SettingsT, read: Callable[[str], LoRAConfig] = read_lora_config
) -> SettingsT:
    """Return settings with rank, alpha, layers and scale of the adapters that they start from.

    Args:
        read: returns those of the adapters at a path.

    Raises:
        UserError: there are no such adapters, or other settings are given.
    """
    if not settings.lora_adapter_path:
        return settings
    where = f"{settings.section}.".lstrip(".")
    try:
        adapter = read(settings.lora_adapter_path)
    except ConfigError as error:
        raise UserError(f"{where}lora_adapter_{error}") from None
    adapter_values = {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.target_modules,
        "use_rslora": adapter.use_rslora,
    }
    defaults = {field.name: field.default for field in fields(settings)}
    for name, value in adapter_values.items():
        configured = getattr(settings, name)
        if configured not in (defaults[name], value):
            raise UserError(
                f"{where}{name} is {configured!r}; expected {value!r}, as the adapters in "
                f"{settings.lora_adapter_path} have, or none set"
            )
    return replace(settings, **adapter_values)
