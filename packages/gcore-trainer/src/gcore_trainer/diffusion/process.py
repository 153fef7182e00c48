"""Forward processes of diffusion models: the noising of clean latents, and a model's target there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


class NoiseProcess(ABC):
    """Levels [B] are in (0, 1]: of flow matching the sigma, of DDPM the share of its steps. Latents are [B, ...]."""

    @abstractmethod
    def noised(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return the latents at these levels."""

    @abstractmethod
    def target(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return the target of the model's output there."""

    @abstractmethod
    def timesteps(self, level: torch.Tensor) -> torch.Tensor:
        """Return the timesteps [B] that are passed to the model."""


@dataclass(frozen=True, kw_only=True)
class FlowProcess(NoiseProcess):
    """Rectified flow (arXiv 2209.03003): x_s = (1 - s) x_0 + s e, and the model gives v = e - x_0."""

    num_train_timesteps: int = 1000

    def noised(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        s = column(level, clean)
        return (1 - s) * clean + s * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        del level
        return noise - clean

    def timesteps(self, level: torch.Tensor) -> torch.Tensor:
        return level * self.num_train_timesteps


@dataclass(frozen=True, kw_only=True)
class DDPMProcess(NoiseProcess):
    """DDPM (arXiv 2006.11239, eq. 4): x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e, with a = alpha-bar."""

    alphas_cumprod: Sequence[float]
    """[T]."""
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"

    def noised(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        a = self._alpha(clean, level)
        return a.sqrt() * clean + (1 - a).sqrt() * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        match self.prediction_type:
            case "epsilon":
                return noise
            case "sample":
                return clean
            case "v_prediction":
                a = self._alpha(clean, level)
                return a.sqrt() * noise - (1 - a).sqrt() * clean

    def timesteps(self, level: torch.Tensor) -> torch.Tensor:
        count = len(self.alphas_cumprod)
        return (level * count).long().clamp(0, count - 1)

    def _alpha(self, like: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        alphas = torch.tensor(self.alphas_cumprod, dtype=like.dtype, device=like.device)
        return column(alphas[self.timesteps(level)], like)


def column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape [B] to [B, 1, ...]."""
    return values.to(like).reshape((-1,) + (1,) * (like.ndim - 1))
