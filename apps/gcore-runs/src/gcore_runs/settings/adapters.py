"""Settings of low-rank adapters."""

from dataclasses import dataclass

from gcore_runs.settings.bounds import Checked, Count, NonNegative
from gcore_trainer import LoRAConfig


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
        )
