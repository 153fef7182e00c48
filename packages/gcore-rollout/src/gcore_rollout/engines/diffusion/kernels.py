"""Transition kernels of samplers: Gaussians of known density from one noise level to the next.

Shapes: latents and model outputs are [B, ...], B images; levels are [B] or scalars. All in float32.

A flow-matching model (rectified flow, x_s = (1 - s) x_0 + s e, model output v = e - x_0) goes from sigma s to a lower
one; DDIM from alpha-bar to a higher one. ``level`` and ``next_level`` are these.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from gcore_rollout.errors import RequestError

PredictionType = Literal["epsilon", "v_prediction", "sample"]
"""The output of a model trained for DDPM or DDIM."""


@dataclass(frozen=True, eq=False)
class Transition:
    """A Gaussian over the next latents."""

    mean: torch.Tensor
    """[B, ...]."""
    std: torch.Tensor
    """[B, 1, ...], the same in all dimensions of an image; 0: the next latents are the mean."""
    is_normalized: bool = True
    """False: `log_prob` is the negative squared error, without the factor 1 / 2 std^2 and constants."""

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """Return the log-density [B] of the next latents, averaged over their dimensions.

        The mean, instead of the sum that a density has, defines the clipped ratio in the code of Flow-GRPO and DDPO.
        Sums over 10,000s of dimensions would make every ratio 0 or infinite.

        Raises:
            ValueError: there is no noise, and so no density.
        """
        if not bool((self.std > 0).all()):
            raise ValueError("std is 0: a step without noise has no log-probability")
        squared_errors = (next_latents - self.mean) ** 2
        if not self.is_normalized:
            return -squared_errors.flatten(1).mean(1)
        exponents = squared_errors / (2 * self.std**2)
        minus_log_densities = exponents + torch.log(self.std) + 0.5 * math.log(2 * math.pi)
        return -minus_log_densities.flatten(1).mean(1)


class Kernel(ABC):
    """A step of a sampler.

    Example:
        >>> def draw(kernel: Kernel, output: torch.Tensor, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ...     step = kernel(output, latents, torch.tensor(0.8), torch.tensor(0.6))
        ...     drawn = step.mean + step.std * torch.randn_like(latents)
        ...     return drawn, step.log_prob(drawn)
        >>> latents, log_probs = draw(FlowSDE(), torch.zeros(2, 4, 8, 8), torch.ones(2, 4, 8, 8))
        >>> log_probs.shape
        torch.Size([2])
    """

    def __call__(
        self,
        output: torch.Tensor,
        latents: torch.Tensor,
        level: torch.Tensor,
        next_level: torch.Tensor,
    ) -> Transition:
        """Return the distribution of the next latents.

        Args:
            output: [B, ...] of the model.
            latents: [B, ...] that it saw.
            level: [B] of the latents.
            next_level: [B] to go to.
        """
        shape = (-1,) + (1,) * (latents.ndim - 1)
        level = level.to(latents).expand(latents.shape[0]).reshape(shape)
        next_level = next_level.to(latents).expand(latents.shape[0]).reshape(shape)
        return self._transition(output, latents, level, next_level)

    @abstractmethod
    def _transition(
        self, v: torch.Tensor, x: torch.Tensor, s: torch.Tensor, s_next: torch.Tensor
    ) -> Transition:
        """Return it for the model's output v and latents x [B, ...], and levels [B, 1, ...]."""


@dataclass(frozen=True, kw_only=True)
class FlowODE(Kernel):
    """Euler's step of the probability flow: x + v dt, without noise.

    Example:
        >>> latents = torch.tensor([[2.0, 4.0]])
        >>> step = FlowODE()(torch.ones(1, 2), latents, torch.tensor(1.0), torch.tensor(0.5))
        >>> step.mean
        tensor([[1.5000, 3.5000]])
        >>> step.std.item()
        0.0
    """

    def _transition(
        self, v: torch.Tensor, x: torch.Tensor, s: torch.Tensor, s_next: torch.Tensor
    ) -> Transition:
        return Transition(x + v * (s_next - s), torch.zeros_like(s))


@dataclass(frozen=True, kw_only=True)
class _NoisyFlow(Kernel):
    noise_level: float

    def __post_init__(self) -> None:
        if not 0 < self.noise_level < math.inf:
            raise RequestError(
                f"noise_level is {self.noise_level}; expected a finite number above 0"
            )


@dataclass(frozen=True, kw_only=True)
class FlowSDE(_NoisyFlow):
    """Flow-GRPO's (arXiv 2505.05470, eq. 9): the SDE with the flow's marginals, g = a sqrt(s / (1 - s)).

    mean = x (1 + g^2 dt / 2s) + v (1 + g^2 (1 - s) / 2s) dt, std = g sqrt(-dt). At s = 1, where g has no value, the
    published code has 1 - s' in the denominator. To bound std also just below 1, the denominator here is
    max(1 - s, (1 - s') - 4 (1 - s)): the published one at s = 1, and 1 - s itself where the step is at most four times
    as long as the distance to 1, as it is in samplers. Then std <= 2 a sqrt(s).

    Example:
        >>> kernel = FlowSDE(noise_level=0.5)
        >>> step = kernel(torch.ones(1, 2), torch.ones(1, 2), torch.tensor(0.5), torch.tensor(0.25))
        >>> step.std.item()
        0.25
        >>> sampling = ImageSampling(num_inference_steps=10, kernel=kernel, window=(0, 3))
    """

    noise_level: float = 0.7
    """The a of the formula."""

    def _transition(
        self, v: torch.Tensor, x: torch.Tensor, s: torch.Tensor, s_next: torch.Tensor
    ) -> Transition:
        dt = s_next - s
        g = self.noise_level * torch.sqrt(s / torch.maximum(1 - s, -dt - 3 * (1 - s)))
        x_term = x * (1 + g**2 / (2 * s) * dt)
        v_term = v * (1 + g**2 * (1 - s) / (2 * s)) * dt
        return Transition(x_term + v_term, g * torch.sqrt(-dt))


@dataclass(frozen=True, kw_only=True)
class DanceSDE(_NoisyFlow):
    """DanceGRPO's (arXiv 2505.07818, eq. 8): the same family of SDEs with a constant g = eta.

    mean = x + v dt + eta^2 / 2 (x - (1 - s) x_0) / s^2 dt, with x_0 = x - s v; std = eta sqrt(-dt).

    Example:
        >>> kernel = DanceSDE(noise_level=0.5)
        >>> step = kernel(torch.ones(1, 2), torch.ones(1, 2), torch.tensor(0.5), torch.tensor(0.25))
        >>> step.std.item()
        0.25
    """

    noise_level: float = 0.3
    """The eta of the formula."""

    def _transition(
        self, v: torch.Tensor, x: torch.Tensor, s: torch.Tensor, s_next: torch.Tensor
    ) -> Transition:
        dt = s_next - s
        clean = x - s * v
        against_score = (x - (1 - s) * clean) / s**2
        mean = x + v * dt + 0.5 * self.noise_level**2 * against_score * dt
        return Transition(mean, self.noise_level * torch.sqrt(-dt))


@dataclass(frozen=True, kw_only=True)
class FlowCPS(_NoisyFlow):
    """Coefficient-preserving sampling (Flow-CPS, arXiv 2509.05952): as in DDIM, the level is kept whatever the noise.

    std = s' sin(eta pi / 2), mean = (1 - s') x_0 + sqrt(s'^2 - std^2) e, with x_0 = x - s v and e = x + (1 - s) v. The
    last step, to s' = 0, has no noise.

    Example:
        >>> kernel = FlowCPS(noise_level=1.0)
        >>> step = kernel(torch.ones(1, 2), torch.ones(1, 2), torch.tensor(0.5), torch.tensor(0.25))
        >>> step.std.item()
        0.25
        >>> step.log_prob(step.mean + 2)  # The negative squared error.
        tensor([-4.])
    """

    noise_level: float = 0.7
    """The eta of the formula, in (0, 1]."""
    normalized: bool = False
    """True: log-probabilities are the Gaussian's own, whose ratios grow without bound as std falls with the level;
    False: they are the negative squared error, as in the published code, and its clip ranges hold."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_level > 1:
            raise RequestError(f"noise_level is {self.noise_level}; expected at most 1")

    def _transition(
        self, v: torch.Tensor, x: torch.Tensor, s: torch.Tensor, s_next: torch.Tensor
    ) -> Transition:
        std = s_next * math.sin(self.noise_level * math.pi / 2)
        clean = x - s * v
        noise = x + (1 - s) * v
        mean = (1 - s_next) * clean + torch.sqrt(s_next**2 - std**2) * noise
        return Transition(mean, std, is_normalized=self.normalized)


@dataclass(frozen=True, kw_only=True)
class DDIM(Kernel):
    """DDIM's (arXiv 2010.02502, eq. 12 and 16), for models of DDPM's kind: DDPO (arXiv 2305.13301) samples by it.

    With a = alpha-bar: std = eta sqrt((1 - a') / (1 - a)) sqrt(1 - a / a'), mean = sqrt(a') x_0 + sqrt(1 - a' - std^2)
    e. To a' = 1 there is no noise.

    Example:
        >>> latents = torch.ones(1, 2)
        >>> output = torch.zeros(1, 2)
        >>> DDIM(eta=0.0)(output, latents, torch.tensor(0.25), torch.tensor(0.64)).mean
        tensor([[1.6000, 1.6000]])
        >>> round(DDIM(eta=1.0)(output, latents, torch.tensor(0.25), torch.tensor(0.64)).std.item(), 4)
        0.5408
    """

    eta: float = 1.0
    """0: without noise; 1: as much as DDPM."""
    prediction_type: PredictionType = "epsilon"
    clip_sample_range: float | None = None
    """x_0 is clipped to +-this, as the scheduler's ``clip_sample`` says; e is the model's all the same."""

    def _transition(
        self, v: torch.Tensor, x: torch.Tensor, s: torch.Tensor, s_next: torch.Tensor
    ) -> Transition:
        a = s
        a_next = s_next
        match self.prediction_type:
            case "epsilon":
                noise = v
                clean = (x - torch.sqrt(1 - a) * noise) / torch.sqrt(a)
            case "v_prediction":
                clean = torch.sqrt(a) * x - torch.sqrt(1 - a) * v
                noise = torch.sqrt(a) * v + torch.sqrt(1 - a) * x
            case "sample":
                clean = v
                noise = (x - torch.sqrt(a) * clean) / torch.sqrt(1 - a)
        if self.clip_sample_range is not None:
            clean = clean.clamp(-self.clip_sample_range, self.clip_sample_range)
        variance = (1 - a_next) / (1 - a) * (1 - a / a_next)
        std = self.eta * torch.sqrt(variance.clamp(min=0.0))
        return Transition(torch.sqrt(a_next) * clean + torch.sqrt(1 - a_next - std**2) * noise, std)
