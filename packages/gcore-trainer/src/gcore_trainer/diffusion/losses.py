"""Forward processes of diffusion models, and the interface of their losses. B images, latents [B, ...]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

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


LossGroups = Literal["none", "pairs", "shared_noise", "own_noise"]
"""none: images are not compared; pairs: a chosen and a rejected one with the same noise, without advantages;
shared_noise, own_noise: the images of a prompt, with the same noise or each with its own."""

_Loss = Callable[..., LossAndMetrics]


_UNREAD: Any = None
RATIO_FIELDS = ("next_latents", "old_log_probs", "advantage")
"""Fields of images that a policy gradient reads."""


class Gaussian(Protocol):
    """The distribution of the next latents."""

    @property
    def mean(self) -> torch.Tensor: ...
    @property
    def std(self) -> torch.Tensor: ...
    def log_prob(self, next_latents: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class DenoisingStep:
    """A recorded step of B images, as a loss of `DenoisingPolicyObjective` reads it.

    Its tensors besides ``dt`` are fields of `DiffusionSample` at the step, None where the loss does not read them.
    """

    drawn: Gaussian
    """The policy's Gaussians, [B, ...], with their gradient."""
    dt: torch.Tensor
    """[B] change of the noise level, below 0."""
    next_latents: torch.Tensor = _UNREAD
    old_log_probs: torch.Tensor = _UNREAD
    advantage: torch.Tensor = _UNREAD
    old_means: torch.Tensor = _UNREAD
    ref_means: torch.Tensor = _UNREAD

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log-probability of the next latents [B] less that under the policy that drew them."""
        return self.drawn.log_prob(self.next_latents) - self.old_log_probs


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardPass:
    """B finished images with noise, as a loss of `ForwardObjective` reads them."""

    clean: torch.Tensor
    """[B, ...] of the images."""
    noised: torch.Tensor
    """[B, ...] that the models see."""
    level: torch.Tensor
    """[B] of the noise; see `FlowProcess` and `DDPMProcess`."""
    target: torch.Tensor
    """[B, ...] of the models' outputs, in pretraining."""
    policy: torch.Tensor
    """[B, ...] output of the policy, with its gradient."""
    old: torch.Tensor = _UNREAD
    """[B, ...] output of the old policy; None: the loss does not need it."""
    reference: torch.Tensor = _UNREAD
    """[B, ...] output of the reference; None: nothing needs it."""
    advantages: torch.Tensor = _UNREAD
    """[B]; None: the loss does not need them."""
    adv_clip_max: float
    """Largest advantage that there can be."""
    group_size: int
    """Images of a group, which follow one another."""

    @property
    def unit_advantages(self) -> torch.Tensor:
        """Advantages [B] in [-1, 1]."""
        return (self.advantages / self.adv_clip_max).clamp(-1, 1)

    @property
    def optimality(self) -> torch.Tensor:
        """Advantages [B], moved to [0, 1]."""
        return self.unit_advantages / 2 + 0.5

    def errors(self, output: torch.Tensor) -> torch.Tensor:
        """Return the mean squared errors [B] of an output [B, ...]."""
        return squared_distance(output, self.target)

    def by_group(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape [B] to [B / group_size, group_size]."""
        return values.reshape(-1, self.group_size)


def denoising_loss(*reads: str, metric: str = "actor/pg_loss") -> Callable[[_Loss], _Loss]:
    """Declare which fields of a `DenoisingStep` a loss reads, and the metric that its mean is.

    It is a function of a step and a `DenoisingPolicyConfig`; see `forward_loss` for the rest.
    """

    def declare(loss: _Loss) -> _Loss:
        loss.__dict__.update(reads=reads, metric=metric)
        return loss

    return declare


def forward_loss(
    *,
    needs_old: bool = False,
    samples_by_old: bool = True,
    needs_reference: bool = False,
    groups: LossGroups = "none",
) -> Callable[[_Loss], _Loss]:
    """Declare what a loss of a `ForwardPass` needs.

    Its keyword-only parameters are its options. It returns losses, [B] or one for each group, and as many metrics by
    name, whose means are reported.

    Args:
        needs_old: an old policy is kept apart from the one that learns.
        samples_by_old: the old policy samples, where there is one.
        groups: which images a loss compares; see `LossGroups`.
    """

    def declare(loss: _Loss) -> _Loss:
        loss.__dict__.update(
            needs_old=needs_old,
            samples_by_old=samples_by_old,
            needs_reference=needs_reference,
            groups=groups,
        )
        return loss

    return declare


def safe_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), bounded: an infinite one has a gradient of NaN, even where a clip leaves it out."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_ratio_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_ratio: float
) -> LossAndMetrics:
    """Compute PPO's clipped surrogate [B] of log-ratios [B], and its metrics."""
    ratio = safe_ratio(log_ratio)
    losses, is_clipped = clipped_surrogate(ratio, advantages, low=clip_ratio, high=clip_ratio)
    deviation = (ratio.detach() - 1).abs()
    return losses, {"actor/pg_clipfrac": is_clipped, "actor/ratio_dev": deviation}


def squared_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute [B] means over dimensions of the squared difference of [B, ...]."""
    return ((one - other) ** 2).flatten(1).mean(1)


def gaussian_kl(means: torch.Tensor, ref_means: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Compute [B] KL divergences of Gaussians with one std, means over dimensions of (m - m_ref)^2 / 2 std^2."""
    return ((means - ref_means) ** 2 / (2 * column(std, means) ** 2)).flatten(1).mean(1)
