"""Forward processes and losses of diffusion models. B images, latents [B, ...]; every loss is [B]."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from gcore_trainer.advantages.estimator import MAX_LOG_RATIO
from gcore_trainer.objectives.policy import LossAndMetrics, clipped_surrogate


@dataclass(frozen=True, kw_only=True)
class FlowProcess:
    """Rectified flow (arXiv 2209.03003): x_s = (1 - s) x_0 + s e, and the model gives v = e - x_0.

    Levels [B], the sigmas, are in (0, 1].

    Example:
        >>> process = FlowProcess()
        >>> clean = torch.zeros(1, 2)
        >>> noise = torch.ones(1, 2)
        >>> process.add_noise(clean, noise, level=torch.tensor([0.25]))
        tensor([[0.2500, 0.2500]])
    """

    num_train_timesteps: int = 1000

    def add_noise(
        self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor
    ) -> torch.Tensor:
        """Return the latents [B, ...] at these levels [B]."""
        s = column(level, clean)
        return (1 - s) * clean + s * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return the target [B, ...] of the model's output at these levels [B]."""
        del level
        return noise - clean

    def timesteps(self, level: torch.Tensor) -> torch.Tensor:
        """Return the timesteps [B] that are passed to the model."""
        return level * self.num_train_timesteps


@dataclass(frozen=True, kw_only=True)
class DDPMProcess:
    """DDPM (arXiv 2006.11239, eq. 4): x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e, with a = alpha-bar.

    Levels [B] are shares of the T steps, in (0, 1].

    Example:
        >>> process = DDPMProcess(alphas_cumprod=[0.99, 0.64])
        >>> process.add_noise(torch.ones(1, 2), torch.zeros(1, 2), level=torch.tensor([1.0]))
        tensor([[0.8000, 0.8000]])
    """

    alphas_cumprod: Sequence[float]
    """[T]."""
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"

    def add_noise(
        self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor
    ) -> torch.Tensor:
        """Return the latents [B, ...] at these levels [B]."""
        a = self._alpha(clean, level)
        return a.sqrt() * clean + (1 - a).sqrt() * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return the target [B, ...] of the model's output at these levels [B]."""
        if self.prediction_type != "v_prediction":
            return noise if self.prediction_type == "epsilon" else clean
        a = self._alpha(clean, level)
        return a.sqrt() * noise - (1 - a).sqrt() * clean

    def timesteps(self, level: torch.Tensor) -> torch.Tensor:
        """Return the timesteps [B] that are passed to the model."""
        count = len(self.alphas_cumprod)
        return (level * count).long().clamp(0, count - 1)

    def _alpha(self, like: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        alphas = torch.tensor(self.alphas_cumprod, dtype=like.dtype, device=like.device)
        return column(alphas[self.timesteps(level)], like)


NoiseProcess = FlowProcess | DDPMProcess
"""A forward process: latents and targets at noise levels in (0, 1]."""


def column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape [B] to [B, 1, ...]."""
    return values.to(like).reshape((-1,) + (1,) * (like.ndim - 1))


def clipped_step_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio: float,
) -> LossAndMetrics:
    """Compute PPO's clipped surrogate of one denoising step: losses [B], and metrics [B] by name.

    max(-A r, -A clip(r, 1 - clip_ratio, 1 + clip_ratio)), r = exp(log_probs - old_log_probs): DDPO (arXiv 2305.13301,
    eq. 6, clipped as its section 4.2 says) and Flow-GRPO (arXiv 2505.05470, eq. 5).
    """
    return _clip_ratio(log_probs - old_log_probs, advantages, clip_ratio)


def guard_step_loss(
    next_latents: torch.Tensor,
    means: torch.Tensor,
    old_means: torch.Tensor,
    std: torch.Tensor,
    dt: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio: float,
) -> LossAndMetrics:
    """Compute GRPO-Guard's loss (arXiv 2510.22319, eq. 8 and 11): the log-ratio without its bias, equal weights.

    A Gaussian's log-ratio is on average -|m - m_old|^2 / 2 std^2, below 0: the clip from above hardly ever acts, and
    the more seldom the larger std is. With that added, and in units of std, it is the mean over dimensions of
    e (m - m_old), e the noise that was drawn: the same at every step. The loss is divided by -dt.

    Args:
        next_latents: [B, ...] that were drawn, from Gaussians of ``old_means`` [B, ...] and ``std`` [B].
        means: [B, ...] of the policy, with its gradient.
        dt: [B] the change of the noise level, below 0.
        advantages: [B].
    """
    noise = (next_latents - old_means) / column(std, means)
    log_ratio = (noise * (means - old_means)).flatten(1).mean(1)
    loss, metrics = _clip_ratio(log_ratio, advantages, clip_ratio)
    return loss / -dt, metrics


def gaussian_kl(means: torch.Tensor, ref_means: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Compute [B] KL divergences of Gaussians with one std, means over dimensions of (m - m_ref)^2 / 2 std^2."""
    return ((means - ref_means) ** 2 / (2 * column(std, means) ** 2)).flatten(1).mean(1)


def nft_loss(
    velocity: torch.Tensor,
    old_velocity: torch.Tensor,
    noised: torch.Tensor,
    clean: torch.Tensor,
    level: torch.Tensor,
    optimality: torch.Tensor,
    *,
    beta: float,
) -> torch.Tensor:
    """Compute DiffusionNFT's loss (arXiv 2509.16117, eq. 8), with its self-normalised regression of x_0.

    r d(v+) + (1 - r) d(v-), divided by beta, with v+- = (1 -+ beta) v_old +- beta v and d the squared error of
    x_0 = x_s - s v+-, divided by its own mean absolute error (without gradient).

    Args:
        velocity: [B, ...] of the policy, ``old_velocity`` of the one that made the images.
        noised: [B, ...] latents that both saw, ``clean`` those of the images.
        level: [B] sigma.
        optimality: [B] r, in [0, 1]: how good the images are.
    """

    def regression(implicit: torch.Tensor) -> torch.Tensor:
        error = noised - column(level, noised) * implicit - clean
        scale = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
        return (error**2).flatten(1).mean(1) / scale

    positive = regression((1 - beta) * old_velocity + beta * velocity)
    negative = regression((1 + beta) * old_velocity - beta * velocity)
    return (optimality * positive + (1 - optimality) * negative) / beta


def diffusion_dpo_loss(
    errors: torch.Tensor, ref_errors: torch.Tensor, *, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Diffusion-DPO (arXiv 2311.12908, eq. 14): compute -log sigmoid(-beta / 2 ((e_w - e_ref,w) - (e_l - e_ref,l))).

    Errors are mean squared ones, [2 P], of the policy and the reference with the same noise: of pairs, the chosen
    image's before the rejected one's. Returns losses [P], and whether the policy prefers the chosen image [P].
    """
    gaps = (errors - ref_errors).reshape(-1, 2)
    margins = -0.5 * beta * (gaps[:, 0] - gaps[:, 1])
    return -logsigmoid(margins), margins > 0


def _clip_ratio(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_ratio: float
) -> LossAndMetrics:
    # An infinite ratio has a gradient of NaN, even where the clip leaves it out.
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss, is_clipped = clipped_surrogate(ratio, advantages, low=clip_ratio, high=clip_ratio)
    deviation = (ratio.detach() - 1).abs()
    return loss, {"actor/pg_clipfrac": is_clipped, "actor/ratio_dev": deviation}
