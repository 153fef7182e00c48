"""Objectives of diffusion trainers: parts of a batch's loss add up over passes, micro-batches and ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch

from gcore_trainer.config import (
    AT_LEAST_0,
    BELOW_ONE,
    Fraction,
    NotNegative,
    options_type,
    read_options,
)
from gcore_trainer.diffusion.conditions import Conditioned
from gcore_trainer.diffusion.config import (
    DENOISING_LOSSES,
    FORWARD_LOSSES,
    DenoisingPolicyConfig,
)
from gcore_trainer.diffusion.losses import (
    DenoisingStep,
    FlowProcess,
    ForwardPass,
    Gaussian,
    LossGroups,
    NoiseProcess,
    gaussian_kl,
    squared_distance,
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
        >>> objective: DiffusionObjective = ForwardObjective("dpo", FlowProcess())
        >>> objective.needs_reference
        True
    """

    needs_old: bool = False
    """An old policy is kept apart from the one that learns."""
    samples_by_old: bool = True
    """The old policy samples, where there is one."""
    old_decay: tuple[float, float] = (0.0, 0.0)
    """Growth per update and bound of the old policy's EMA decay."""
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
    """Losses over the steps that a sampler recorded: a pass for each of them.

    They are DDPO and Flow-GRPO (flow_grpo), GRPO-Guard (grpo_guard), Flow-DPPO (flow_dppo) and the distillation of a
    teacher (opd), whose means are the samples' ``ref_means``: those that `DiffusionTrainer.score_steps` computes by its
    reference.

    Metrics: ``actor/pg_loss`` (of opd ``actor/distillation_loss``), ``actor/pg_clipfrac``, ``actor/ppo_kl`` (mean of
    old minus new log-prob), ``actor/ratio_dev`` (mean of the ratio's distance from 1) and ``actor/kl_loss``.

    Args:
        loss: name of a file of `gcore_trainer.losses.denoising`.
        options: the loss's own parameters; see `diffusion_options`.

    Raises:
        ConfigError: there is no such loss or option, or a value is out of its bounds.

    Example:
        >>> from gcore_rollout import FlowSDE
        >>> objective = DenoisingPolicyObjective(DenoisingPolicyConfig(kl_loss_coef=0.01), FlowSDE())
        >>> [name for name in objective.reads if name.startswith("ref")]
        ['ref_means']
    """

    def __init__(
        self,
        config: DenoisingPolicyConfig,
        kernel: TransitionKernel,
        loss: str = "flow_grpo",
        **options: Any,
    ) -> None:
        self._config = config
        self._kernel = kernel
        self._loss = DENOISING_LOSSES.load(loss)
        self._options = read_options(options_type(self._loss), options)
        self._step_fields: list[str] = list(self._loss.reads)
        if config.kl_loss_coef:
            self._step_fields.append("ref_means")
        self.reads = ("latents", "levels", "next_levels", "timesteps", *self._step_fields)

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
        drawn, dt = drawn_at(models.policy, self._kernel, samples, index)
        values: dict[str, torch.Tensor] = {}
        for name in self._step_fields:
            step = None if name == "advantage" else index
            [values[name]] = stack_fields(samples, models.policy.device, name, step=step)
        step = DenoisingStep(drawn=drawn, dt=dt, **values)
        losses, metrics = self._loss(step, self._config, **self._options)
        if "old_log_probs" in values:
            metrics["actor/ppo_kl"] = -step.log_ratio.detach()
        loss, sums = add_parts(losses, metrics, total, name=self._loss.metric)
        if self._config.kl_loss_coef:
            std = drawn.std.flatten()
            if self._config.kl_loss_type == "flow_grpo":
                std = std / (-dt).sqrt()
            kl_loss = gaussian_kl(drawn.mean, values["ref_means"], std).sum() / total
            loss = loss + self._config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        return loss, sums


class ForwardObjective(DiffusionObjective):
    """Losses over finished images to which noise is added again: any sampler will do, and none of its steps is read.

    The losses are DiffusionNFT (nft), AWM (awm), DGPO (dgpo), CRD (crd) and Diffusion-DPO (dpo). A micro-batch holds
    whole groups of those that compare images: of dpo pairs, the chosen image before the rejected one.

    Metrics: ``actor/pg_loss``, of dpo ``actor/dpo_loss`` in its place, ``actor/kl_loss`` where there is one, and those
    of the loss.

    Args:
        loss: name of a file of `gcore_trainer.losses.forward`.
        process: the noise process that the model was trained on; None: `FlowProcess`.
        adv_clip_max: the advantage of the best image there can be, and its negative that of the worst.
        group_size: images of a group, of dgpo and crd.
        options: the loss's own parameters, and those of all losses; see `diffusion_options`.

    Raises:
        ConfigError: there is no such loss or option, or a value is out of its bounds.

    Example:
        >>> ForwardObjective("nft", num_timesteps=2, beta=0.5).num_passes([])
        2
    """

    def __init__(
        self,
        loss: str,
        process: NoiseProcess | None = None,
        *,
        adv_clip_max: float = 5.0,
        group_size: int = 2,
        **options: Any,
    ) -> None:
        self._loss = FORWARD_LOSSES.load(loss)
        self._process = process or FlowProcess()
        self._adv_clip_max = adv_clip_max
        self._groups: LossGroups = self._loss.groups
        self._group_size = {"none": 1, "pairs": 2}.get(self._groups, group_size)
        is_paired = self._groups == "pairs"
        self._metric = "actor/dpo_loss" if is_paired else "actor/pg_loss"
        self.reads = ("clean_latents", "timestep_map")
        if not is_paired:
            self.reads += ("advantage",)
        options = read_options(diffusion_options(loss), options)
        self.num_timesteps = options.pop("num_timesteps") or (1 if is_paired else 4)
        self._kl_loss_coef: float = options.pop("kl_loss_coef")
        self._min_level: float = options.pop("min_level")
        self.needs_reference = self._loss.needs_reference or self._kl_loss_coef > 0
        self.needs_old = self._loss.needs_old
        if self.needs_old:
            self.samples_by_old = self._loss.samples_by_old
            self.old_decay = (options.pop("old_decay"), options.pop("old_decay_max"))
        self._options = options

    def check(self, samples: Sequence[DiffusionSample]) -> None:
        if len(samples) % self._group_size:
            raise BatchError(
                f"micro_batches hold {len(samples)} images; expected whole groups of {self._group_size}"
            )
        super().check(samples)

    def weight(self, samples: Sequence[DiffusionSample]) -> int:
        return len(samples) // self._group_size

    def partial_loss(
        self, index: int, models: Models, samples: DiffusionMicroBatch, total: int
    ) -> PartialLoss:
        device = models.policy.device
        size = self._group_size
        [clean] = stack_fields(samples, device, "clean_latents")
        seeded = samples
        if self._groups in ("pairs", "shared_noise"):
            seeded = [samples[i - i % size] for i in range(len(samples))]
        level, noise = drawn_noise(seeded, index, clean)
        level = self._min_level + (1 - self._min_level) * level
        noised = self._process.add_noise(clean, noise, level)
        timesteps = model_timesteps(samples, self._process.timesteps(level))
        conditions = Conditioned.of(samples, device)
        values: dict[str, torch.Tensor] = {}
        if "advantage" in self.reads:
            [values["advantages"]] = stack_fields(samples, device, "advantage")
        with torch.no_grad():
            if models.old is not None:
                values["old"] = models.old(noised, timesteps, conditions)
            if models.reference is not None and self.needs_reference:
                values["reference"] = models.reference(noised, timesteps, conditions)
        forward = ForwardPass(
            clean=clean,
            noised=noised,
            level=level,
            target=self._process.target(clean, noise, level),
            policy=models.policy(noised, timesteps, conditions),
            adv_clip_max=self._adv_clip_max,
            group_size=size,
            **values,
        )
        losses, metrics = self._loss(forward, **self._options)
        loss, sums = add_parts(losses, metrics, total, name=self._metric)
        if self._kl_loss_coef:
            kl_loss = squared_distance(forward.policy, forward.reference).sum() / (total * size)
            loss = loss + self._kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        return loss, sums


def add_parts(
    losses: torch.Tensor,
    metrics: Mapping[str, torch.Tensor],
    total: int,
    *,
    name: str,
) -> PartialLoss:
    """Return the part of the batch's loss that these losses make up, and those of its metrics, the loss's as well."""
    loss = losses.sum() / total
    sums = {name: loss.detach()}
    for metric, values in metrics.items():
        sums[metric] = values.sum() / total
    return loss, sums


def diffusion_options(loss: str) -> type[Any]:
    """Return the dataclass of the options of a loss, of a sampler's steps or of finished images.

    They are its own, and of finished images those of `forward_options`, with an old policy those of `old_options`.

    Raises:
        ConfigError: there is no such loss.
    """
    if loss not in FORWARD_LOSSES.names:
        return options_type(DENOISING_LOSSES.load(loss))
    function = FORWARD_LOSSES.load(loss)
    if function.needs_old:
        return options_type(forward_options, old_options, function)
    return options_type(forward_options, function)


def forward_options(
    *,
    num_timesteps: Annotated[int, AT_LEAST_0] = 0,
    kl_loss_coef: NotNegative = 0.0,
    min_level: Annotated[float, BELOW_ONE] = 0.0,
) -> None:
    """Declare the options of all losses of finished images.

    Args:
        num_timesteps: noise levels drawn for each image and update; 0: 4, and of pairs 1.
        kl_loss_coef: weight of the squared distance to the reference's output; 0 needs no reference.
        min_level: levels of noise are drawn from (min_level, 1].
    """


def old_options(
    *, old_decay: Fraction = 0.001, old_decay_max: Annotated[float, BELOW_ONE] = 0.5
) -> None:
    """Declare the options of losses that keep an old policy.

    Args:
        old_decay: growth per update of the fraction that the old policy keeps of itself.
        old_decay_max: largest such fraction.
    """


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
