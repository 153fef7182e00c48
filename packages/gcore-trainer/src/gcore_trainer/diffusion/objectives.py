"""Objectives of diffusion trainers: parts of a batch's loss add up over passes, micro-batches and ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from gcore_trainer.diffusion.conditions import Conditioned
from gcore_trainer.diffusion.config import DenoisingPolicyConfig, DiffusionDPOConfig, NFTConfig
from gcore_trainer.diffusion.losses import (
    FlowProcess,
    NoiseProcess,
    clipped_step_loss,
    diffusion_dpo_loss,
    gaussian_kl,
    guard_step_loss,
    nft_loss,
)
from gcore_trainer.diffusion.sample import (
    DiffusionMicroBatch,
    DiffusionSample,
    require_fields,
    stack_fields,
)
from gcore_trainer.errors import BatchError
from gcore_trainer.objectives.objective import PartialLoss

if TYPE_CHECKING:
    from gcore_trainer.diffusion.denoiser import Denoiser


class Gaussian(Protocol):
    """The distribution of the next latents."""

    @property
    def mean(self) -> torch.Tensor: ...
    @property
    def std(self) -> torch.Tensor: ...
    def log_prob(self, next_latents: torch.Tensor, /) -> torch.Tensor: ...


TransitionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Gaussian]
"""A sampler's step: from the model's output, the latents, their noise level and the next one to the next latents'
distribution."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that an objective may call."""

    policy: "Denoiser"
    old: "Denoiser | None" = None
    """The policy that samples, where that is kept apart."""
    reference: "Denoiser | None" = None


class DiffusionObjective(ABC):
    """A loss over images.

    Example:
        >>> objective: DiffusionObjective = DiffusionDPOObjective(DiffusionDPOConfig(), FlowProcess())
        >>> objective.needs_reference
        True
    """

    needs_old: bool = False
    """The policy that samples is kept apart from the one that learns."""
    needs_reference: bool = False
    """The initial policy is asked in training."""
    reads: Sequence[str] = ()
    """Fields of the images that the loss reads, besides their conditions."""
    num_timesteps: int = 1
    """Passes over each micro-batch, where they do not depend on it."""

    def check(self, samples: Sequence[DiffusionSample]) -> None:
        """Raise `BatchError` if the images lack something that the loss reads."""
        require_fields(samples, self.reads)

    def num_passes(self, samples: Sequence[DiffusionSample]) -> int:  # noqa: ARG002 - of objectives over recorded steps
        """Return the number of passes over each micro-batch; the same on all ranks."""
        return self.num_timesteps

    def weight(self, samples: Sequence[DiffusionSample]) -> int:
        """Return the images' share of the batch's denominator, in each pass."""
        return len(samples)

    @abstractmethod
    def partial_loss(
        self, index: int, models: Models, samples: DiffusionMicroBatch, total: int
    ) -> PartialLoss:
        """Compute the part of the batch's loss that a pass over these images makes up.

        Args:
            total: the batch's denominator: weights of all images, times passes.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Compute metrics from the batch's sums."""
        return sums


class DenoisingPolicyObjective(DiffusionObjective):
    """DDPO, Flow-GRPO and GRPO-Guard: a pass for each recorded step.

    ``is_guarded`` takes the ratio's bias and scale out of it (GRPO-Guard); otherwise it is PPO's clipped ratio.

    Metrics: ``actor/pg_loss``, ``actor/pg_clipfrac``, ``actor/ppo_kl`` (mean of old minus new log-prob),
    ``actor/ratio_dev`` (mean of the ratio's distance from 1) and ``actor/kl_loss``.

    Example:
        >>> from gcore_rollout import FlowSDE
        >>> objective = DenoisingPolicyObjective(DenoisingPolicyConfig(kl_loss_coef=0.01), FlowSDE())
        >>> [name for name in objective.reads if name.startswith("ref")]
        ['ref_means']
    """

    def __init__(
        self, config: DenoisingPolicyConfig, kernel: TransitionKernel, *, is_guarded: bool = False
    ) -> None:
        self._config = config
        self._kernel = kernel
        self._is_guarded = is_guarded
        self.reads = (
            "latents",
            "next_latents",
            "old_log_probs",
            "levels",
            "next_levels",
            "timesteps",
            "advantage",
        )
        if is_guarded:
            self.reads += ("old_means",)
        if config.kl_loss_coef:
            self.reads += ("ref_means",)

    def check(self, samples: Sequence[DiffusionSample]) -> None:
        num_steps = {s.num_steps for s in samples}
        if len(num_steps) != 1 or not samples[0].num_steps:
            raise BatchError(f"latents have {sorted(num_steps)} steps; expected one number above 0")
        super().check(samples)

    def num_passes(self, samples: Sequence[DiffusionSample]) -> int:
        return samples[0].num_steps

    def partial_loss(
        self, index: int, models: Models, samples: DiffusionMicroBatch, total: int
    ) -> PartialLoss:
        device = models.policy.device
        following, old_log_probs = stack_fields(
            samples, device, "next_latents", "old_log_probs", step=index
        )
        [advantages] = stack_fields(samples, device, "advantage")
        drawn, dt = drawn_at(models.policy, self._kernel, samples, index)
        log_probs = drawn.log_prob(following)
        if self._is_guarded:
            [old_means] = stack_fields(samples, device, "old_means", step=index)
            std = drawn.std.flatten()
            clip_ratio = self._config.clip_ratio
            losses, metrics = guard_step_loss(
                following, drawn.mean, old_means, std, dt, advantages, clip_ratio=clip_ratio
            )
        else:
            losses, metrics = clipped_step_loss(
                log_probs, old_log_probs, advantages, clip_ratio=self._config.clip_ratio
            )
        loss = losses.sum() / total
        sums = {
            "actor/pg_loss": loss.detach(),
            "actor/ppo_kl": (old_log_probs - log_probs.detach()).sum() / total,
        }
        for name, values in metrics.items():
            sums[name] = values.sum() / total
        if self._config.kl_loss_coef:
            [ref_means] = stack_fields(samples, device, "ref_means", step=index)
            std = drawn.std.flatten()
            if self._config.kl_loss_type == "flow_grpo":
                std = std / (-dt).sqrt()
            kl_loss = gaussian_kl(drawn.mean, ref_means, std).sum() / total
            loss = loss + self._config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        return loss, sums


class NFTObjective(DiffusionObjective):
    """DiffusionNFT: no step of the sampler is looked at, any sampler will do; of flow-matching models.

    ``adv_clip_max`` is the advantage of the best image there can be, and its negative that of the worst.

    Metrics: ``actor/pg_loss``, and ``actor/kl_loss`` where there is one.

    Example:
        >>> NFTObjective(NFTConfig(num_timesteps=2)).num_passes([])
        2
    """

    needs_old = True
    reads = ("clean_latents", "advantage", "timestep_map")

    def __init__(
        self, config: NFTConfig, process: FlowProcess | None = None, *, adv_clip_max: float = 5.0
    ) -> None:
        self._config = config
        self._adv_clip_max = adv_clip_max
        self._process = process or FlowProcess()
        self.num_timesteps = config.num_timesteps
        self.needs_reference = config.kl_loss_coef > 0

    def partial_loss(
        self, index: int, models: Models, samples: DiffusionMicroBatch, total: int
    ) -> PartialLoss:
        assert models.old is not None
        device = models.policy.device
        bound = self._adv_clip_max
        clean, advantages = stack_fields(samples, device, "clean_latents", "advantage")
        level, noise = drawn_noise(samples, index, clean)
        noised = self._process.add_noise(clean, noise, level)
        timesteps = model_timesteps(samples, self._process.timesteps(level))
        conditions = Conditioned.of(samples, device)
        with torch.no_grad():
            old = models.old(noised, timesteps, conditions)
            reference = None
            if models.reference is not None and self._config.kl_loss_coef:
                reference = models.reference(noised, timesteps, conditions)
        velocity = models.policy(noised, timesteps, conditions)
        optimality = (advantages.clamp(-bound, bound) / bound / 2 + 0.5).clamp(0, 1)
        losses = nft_loss(velocity, old, noised, clean, level, optimality, beta=self._config.beta)
        loss = bound * losses.sum() / total
        sums = {"actor/pg_loss": loss.detach()}
        if reference is not None:
            kl_loss = ((velocity - reference) ** 2).flatten(1).mean(1).sum() / total
            loss = loss + self._config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        return loss, sums


class DiffusionDPOObjective(DiffusionObjective):
    """Diffusion-DPO: a micro-batch holds pairs, the chosen image of each before the rejected one.

    Metrics: ``actor/dpo_loss`` and ``actor/dpo_accuracy``.

    Example:
        >>> DiffusionDPOObjective(DiffusionDPOConfig(), FlowProcess()).needs_reference
        True
    """

    needs_reference = True
    reads = ("clean_latents", "timestep_map")

    def __init__(self, config: DiffusionDPOConfig, process: NoiseProcess) -> None:
        self._config = config
        self._process = process
        self.num_timesteps = config.num_timesteps

    def check(self, samples: Sequence[DiffusionSample]) -> None:
        if len(samples) % 2:
            raise BatchError(
                f"micro_batches hold {len(samples)} images; expected pairs of a chosen and a rejected one"
            )

    def weight(self, samples: Sequence[DiffusionSample]) -> int:
        return len(samples) // 2

    def partial_loss(
        self, index: int, models: Models, samples: DiffusionMicroBatch, total: int
    ) -> PartialLoss:
        assert models.reference is not None
        device = models.policy.device
        [clean] = stack_fields(samples, device, "clean_latents")
        # Both images of a pair get the chosen one's noise.
        seeded = [samples[i - i % 2] for i in range(len(samples))]
        level, noise = drawn_noise(seeded, index, clean)
        noised = self._process.add_noise(clean, noise, level)
        timesteps = model_timesteps(samples, self._process.timesteps(level))
        target = self._process.target(clean, noise, level)
        conditions = Conditioned.of(samples, device)

        def errors(model: "Denoiser") -> torch.Tensor:
            return ((model(noised, timesteps, conditions) - target) ** 2).flatten(1).mean(1)

        with torch.no_grad():
            ref_errors = errors(models.reference)
        losses, is_right = diffusion_dpo_loss(
            errors(models.policy), ref_errors, beta=self._config.beta
        )
        loss = losses.sum() / total
        return loss, {"actor/dpo_loss": loss.detach(), "actor/dpo_accuracy": is_right.sum() / total}


class RewardGradientObjective(DiffusionObjective):
    """The gradient of a differentiable reward, through the last steps of sampling: DRaFT-K (arXiv 2309.17400).

    The recorded steps, which are to be a sampler's last ones without noise, are made again, with their gradient, from
    the latents before the first of them. Metrics: ``actor/reward``.

    Args:
        reward: final latents [B, ...] and prompts to rewards [B], differentiable.

    Example:
        >>> from gcore_rollout import FlowODE
        >>> def brightness(latents: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        ...     return latents.mean(dim=(1, 2, 3))
        >>> RewardGradientObjective(FlowODE(), brightness).reads
        ('latents', 'levels', 'next_levels', 'timesteps')
    """

    reads = ("latents", "levels", "next_levels", "timesteps")

    def __init__(
        self,
        kernel: TransitionKernel,
        reward: Callable[[torch.Tensor, Sequence[str]], torch.Tensor],
    ) -> None:
        self._kernel = kernel
        self._reward = reward

    def check(self, samples: Sequence[DiffusionSample]) -> None:
        for sample in samples:
            if (
                not sample.num_steps
                or sample.next_levels is None
                or sample.next_levels[-1] not in (0.0, 1.0)
            ):
                raise BatchError(
                    "the recorded steps end before sampling does; expected the last steps of sampling"
                )

    def partial_loss(
        self, index: int, models: Models, samples: DiffusionMicroBatch, total: int
    ) -> PartialLoss:
        del index
        [latents] = stack_fields(samples, models.policy.device, "latents", step=0)
        for step in range(samples[0].num_steps):
            drawn, _ = drawn_at(models.policy, self._kernel, samples, step, latents)
            latents = drawn.mean
        reward = self._reward(latents, [s.prompt for s in samples]).sum() / total
        return -reward, {"actor/reward": reward.detach()}


def drawn_at(
    model: "Denoiser",
    kernel: TransitionKernel,
    samples: DiffusionMicroBatch,
    step: int,
    latents: torch.Tensor | None = None,
) -> tuple[Gaussian, torch.Tensor]:
    """Return a model's distribution at a recorded step, from other ``latents`` if given, and dt [B] of the step."""
    levels, next_levels, timesteps = stack_fields(
        samples, model.device, "levels", "next_levels", "timesteps", step=step
    )
    if latents is None:
        [latents] = stack_fields(samples, model.device, "latents", step=step)
    output = model(latents, timesteps, Conditioned.of(samples, model.device))
    return kernel(output, latents, levels, next_levels), next_levels - levels


def model_timesteps(samples: Sequence[DiffusionSample], timesteps: torch.Tensor) -> torch.Tensor:
    """Return the timesteps [B] that the sampler gave its model for timesteps [B] in training."""
    [maps] = stack_fields(samples, timesteps.device, "timestep_map")
    return maps[:, 0] * timesteps + maps[:, 1]


def drawn_noise(
    samples: Sequence[DiffusionSample], index: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw levels [B], uniform in (0, 1], and noise [B, ...], by each image's seed and the pass's index."""
    levels: list[torch.Tensor] = []
    noises: list[torch.Tensor] = []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample.noise_seed * 1009 + index)
        levels.append(1 - torch.rand((), generator=generator))
        noises.append(torch.randn(like.shape[1:], generator=generator))
    return torch.stack(levels).to(like), torch.stack(noises).to(like)
