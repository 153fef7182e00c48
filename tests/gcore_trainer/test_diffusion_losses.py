"""Losses of diffusion policies, against implementations of their formulas in float64 and plain Python."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gcore_trainer import (
    ConfigError,
    DDPMProcess,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    FlowProcess,
    ForwardObjective,
)
from gcore_trainer.diffusion.losses import DenoisingStep, ForwardPass, gaussian_kl
from gcore_trainer.losses.denoising.flow_dppo import flow_dppo
from gcore_trainer.losses.denoising.flow_grpo import flow_grpo
from gcore_trainer.losses.denoising.grpo_guard import grpo_guard
from gcore_trainer.losses.denoising.opd import opd
from gcore_trainer.losses.forward.awm import awm
from gcore_trainer.losses.forward.crd import crd
from gcore_trainer.losses.forward.dgpo import dgpo
from gcore_trainer.losses.forward.dpo import dpo
from gcore_trainer.losses.forward.nft import nft

seeds = st.integers(0, 10_000)
BOUND = 5.0


class Normal:
    """Gaussians whose log-probabilities are means over dimensions, by torch.distributions."""

    def __init__(self, mean: torch.Tensor, std: float) -> None:
        self.mean = mean
        self.std = torch.full((len(mean), 1, 1), std, dtype=torch.float64)

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        normal = torch.distributions.Normal(self.mean, self.std.expand_as(self.mean))
        return normal.log_prob(next_latents).flatten(1).mean(1)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_of(seed: int, *, std: float, distance: float = 0.1, dt: float = -0.1) -> DenoisingStep:
    """Four images [2, 3] whose latents were drawn from Gaussians near the policy's."""
    noise, shift, old_means, ref_means = drawn(seed, 4, 4, 2, 3)
    next_latents = old_means + std * noise
    means = (old_means + distance * shift).requires_grad_()
    return DenoisingStep(
        drawn=Normal(means, std),
        dt=torch.full((4,), dt, dtype=torch.float64),
        next_latents=next_latents,
        old_log_probs=Normal(old_means, std).log_prob(next_latents),
        advantage=drawn(seed + 1, 4),
        old_means=old_means,
        ref_means=ref_means,
    )


def forward_pass(seed: int, size: int = 1) -> ForwardPass:
    """Six images [2, 4] with noise, in groups of a size."""
    policy, old, reference, clean, noise = drawn(seed, 5, 6, 2, 4)
    level = drawn(seed + 1, 6).sigmoid()
    process = FlowProcess()
    return ForwardPass(
        clean=clean,
        noised=process.add_noise(clean, noise, level),
        level=level,
        target=process.target(clean, noise, level),
        policy=policy.requires_grad_(),
        old=old,
        reference=reference,
        advantages=3 * drawn(seed + 2, 6),
        adv_clip_max=BOUND,
        group_size=size,
    )


def numbers(values: torch.Tensor | None) -> list[float]:
    assert values is not None
    return values.detach().tolist()


def array(values: torch.Tensor | None) -> np.ndarray[Any, Any]:
    assert values is not None
    return values.detach().numpy()


def errors(forward: ForwardPass, output: torch.Tensor | None) -> list[float]:
    """|v - (e - x_0)|^2 of each image, the mean over dimensions."""
    return [float(np.mean(row**2)) for row in array(output) - array(forward.target)]


def gradient(losses: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(losses.sum(), of)[0]


@given(seed=seeds, clip=st.floats(1e-3, 0.5))
def test_clipped_step(seed: int, clip: float) -> None:
    step = step_of(seed, std=0.5)
    losses, metrics = flow_grpo(step, DenoisingPolicyConfig(clip_ratio=clip))
    for i, (log_ratio, a) in enumerate(
        zip(step.log_ratio.tolist(), numbers(step.advantage), strict=True)
    ):
        ratio = math.exp(log_ratio)
        kept = min(max(ratio, 1 - clip), 1 + clip)
        assert numbers(losses)[i] == pytest.approx(-min(ratio * a, kept * a))
        assert bool(metrics["actor/pg_clipfrac"][i]) == (kept * a < ratio * a)


@given(seed=seeds, std=st.floats(0.05, 2.0), dt=st.floats(-0.5, -0.01))
def test_guard_takes_the_bias_and_the_scale_out_of_the_ratio(
    seed: int, std: float, dt: float
) -> None:
    """By the paper's own words: the log-ratio, plus |dm|^2 / 2 std^2, times std; the loss over -dt."""
    step = step_of(seed, std=std, dt=dt)
    losses, metrics = grpo_guard(step, DenoisingPolicyConfig(clip_ratio=0.01))
    distances = array(step.drawn.mean) - array(step.old_means)
    for i, (log_ratio, a) in enumerate(
        zip(step.log_ratio.tolist(), numbers(step.advantage), strict=True)
    ):
        bias = float(np.mean(distances[i] ** 2)) / (2 * std**2)
        ratio = math.exp((log_ratio + bias) * std)
        deviation = float(metrics["actor/ratio_dev"][i])
        assert deviation == pytest.approx(abs(ratio - 1), rel=1e-6, abs=1e-9)
        kept = min(max(ratio, 0.99), 1.01)
        assert numbers(losses)[i] == pytest.approx(-min(ratio * a, kept * a) / -dt)


@given(seed=seeds, std=st.floats(0.1, 2.0), threshold=st.floats(1e-4, 1.0))
def test_flow_dppo(seed: int, std: float, threshold: float) -> None:
    """Equations 17 and 18, image by image; the gradient is that of -M A r."""
    step = step_of(seed, std=std)
    losses, metrics = flow_dppo(step, DenoisingPolicyConfig(), kl_mask_threshold=threshold)
    distances = array(step.drawn.mean) - array(step.old_means)
    masks: list[float] = []
    for i, (log_ratio, a) in enumerate(
        zip(step.log_ratio.tolist(), numbers(step.advantage), strict=True)
    ):
        ratio = math.exp(log_ratio)
        divergence = float(np.mean(distances[i] ** 2)) / (2 * std**2)
        leads_away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
        masks.append(0.0 if leads_away and divergence > threshold else 1.0)
        assert numbers(losses)[i] == pytest.approx(-masks[i] * ratio * a)
        assert float(metrics["actor/old_kl"][i]) == pytest.approx(divergence)
    assert metrics["actor/pg_clipfrac"].tolist() == [not mask for mask in masks]
    assert step.advantage is not None
    surrogate = -torch.tensor(masks) * torch.exp(step.log_ratio) * step.advantage
    means = step.drawn.mean
    torch.testing.assert_close(gradient(losses, means), gradient(surrogate, means))


def test_flow_dppo_masks_by_the_divergence_whatever_the_ratio_is() -> None:
    """One divergence, and latents that make the ratio larger or smaller: only what leads away is left out."""
    step = step_of(0, std=1.0)
    old_means = torch.zeros(4, 2, 3, dtype=torch.float64)
    noise = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).reshape(-1, 1, 1)
    step = replace(
        step,
        drawn=Normal(old_means + 0.1, 1.0),
        old_means=old_means,
        next_latents=old_means + noise,
        old_log_probs=Normal(old_means, 1.0).log_prob(old_means + noise),
        advantage=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
    )
    for threshold, masked in ((0.004, [True, False, False, True]), (0.006, [False] * 4)):
        _, metrics = flow_dppo(step, DenoisingPolicyConfig(), kl_mask_threshold=threshold)
        assert metrics["actor/pg_clipfrac"].tolist() == masked


@given(seed=seeds, std=st.floats(0.05, 2.0))
def test_kl_is_torchs(seed: int, std: float) -> None:
    one, other = drawn(seed, 2, 3, 2, 4)
    normals = [torch.distributions.Normal(mean, std) for mean in (one, other)]
    expected = torch.distributions.kl_divergence(*normals).flatten(1).mean(1)
    found = gaussian_kl(one, other, torch.full((3,), std, dtype=torch.float64))
    torch.testing.assert_close(found, expected)


@given(seed=seeds, std=st.floats(0.05, 2.0))
def test_opd(seed: int, std: float) -> None:
    """The divergence of torch's Gaussians and its gradient; without noise half the squared distance."""
    step = step_of(seed, std=std)
    means = step.drawn.mean
    assert step.ref_means is not None
    policy, teacher = (torch.distributions.Normal(m, std) for m in (means, step.ref_means))
    expected = torch.distributions.kl_divergence(policy, teacher).flatten(1).mean(1)
    losses, _ = opd(step, DenoisingPolicyConfig())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradient(losses, means), gradient(expected, means))
    noiseless, _ = opd(replace(step, drawn=Normal(means, 0.0)), DenoisingPolicyConfig())
    torch.testing.assert_close(noiseless, expected * std**2)


@given(seed=seeds, beta=st.floats(0.05, 1.0))
def test_nft(seed: int, beta: float) -> None:
    forward = forward_pass(seed)
    found, _ = nft(forward, beta=beta)
    for i in range(6):
        s, r = float(forward.level[i]), 0.5 + float(forward.advantages[i]) / BOUND / 2
        r = min(max(r, 0.0), 1.0)
        total = 0.0
        for weight, sign in ((r, 1.0), (1 - r, -1.0)):
            old = array(forward.old)[i]
            implicit = (1 - sign * beta) * old + sign * beta * array(forward.policy)[i]
            error = array(forward.noised)[i] - s * implicit - array(forward.clean)[i]
            total += weight * float(np.mean(error**2)) / max(float(np.mean(np.abs(error))), 1e-5)
        assert numbers(found)[i] == pytest.approx(BOUND * total / beta)


def test_nft_has_its_minimum_where_good_images_pull() -> None:
    """At r = 1 the policy that gives the target velocity at the old one's place has no loss at all."""
    forward = forward_pass(0)
    best = torch.full((6,), BOUND, dtype=torch.float64)
    target = forward.target
    loss, _ = nft(replace(forward, policy=target, old=target, advantages=best), beta=0.1)
    assert float(loss.detach().sum()) == pytest.approx(0.0, abs=1e-12)


@given(
    seed=seeds,
    clip=st.floats(0.01, 1.0),
    power=st.sampled_from([0.0, 0.25, 1.0]),
    coef=st.floats(0, 2),
)
def test_awm(seed: int, clip: float, power: float, coef: float) -> None:
    """Ratios of weighted matching errors, clipped, and the distance to the old policy."""
    forward = forward_pass(seed)
    found, _ = awm(forward, clip_ratio=clip, ghuber_power=power, old_kl_coef=coef)
    new, old = errors(forward, forward.policy), errors(forward, forward.old)
    distances = array(forward.policy) - array(forward.old)
    for i in range(6):
        s, a = float(forward.level[i]), float(forward.advantages[i]) / BOUND
        a = min(max(a, -1.0), 1.0)
        costs = [new[i], old[i]]
        if power:
            costs = [s / power * ((e + 1e-10) ** power - 1e-10**power) for e in costs]
        ratio = math.exp(costs[1] - costs[0])
        kept = min(max(ratio, 1 - clip), 1 + clip)
        expected = -min(ratio * a, kept * a) + coef * float(np.mean(distances[i] ** 2))
        assert numbers(found)[i] == pytest.approx(expected)


@given(seed=seeds)
def test_awm_of_the_present_policy_weighs_the_gradient_of_pretraining(seed: int) -> None:
    """On-policy the gradient is that of the advantage times the flow matching loss (the paper's point)."""
    forward = forward_pass(seed)
    forward = replace(forward, old=forward.policy.detach())
    losses, metrics = awm(forward)
    weights = (forward.advantages / BOUND).clamp(-1, 1)
    matching = torch.nn.functional.mse_loss(forward.policy, forward.target, reduction="none")
    expected = gradient(weights * matching.flatten(1).mean(1), forward.policy)
    torch.testing.assert_close(gradient(losses, forward.policy), expected)
    assert metrics["actor/ratio_dev"].abs().max() == 0.0


@given(seed=seeds, beta=st.floats(0.1, 50.0))
def test_dgpo(seed: int, beta: float) -> None:
    """Equation 17 over beta, of groups of three; the gradient is that of the published, equivalent loss."""
    forward = forward_pass(seed, size=3)
    found, _ = dgpo(forward, beta=beta)
    new, reference = errors(forward, forward.policy), errors(forward, forward.reference)
    weights: list[float] = []
    for group in range(2):
        good, bad = 0.0, 0.0
        for i in range(3 * group, 3 * group + 3):
            a = float(forward.advantages[i])
            change = abs(a) * (new[i] - reference[i])
            good += change if a > 0 else 0.0
            bad += change if a <= 0 else 0.0
        argument = beta * (good - bad) / 3
        expected = max(argument, 0.0) + math.log1p(math.exp(-abs(argument)))
        assert numbers(found)[group] == pytest.approx(expected / beta)
        weights += [1 / (1 + math.exp(-argument))] * 3
    matching = ((forward.policy - forward.target) ** 2).flatten(1).mean(1)
    published = torch.tensor(weights, dtype=torch.float64) * forward.advantages * matching / 3
    torch.testing.assert_close(gradient(found, forward.policy), gradient(published, forward.policy))


@given(seed=seeds, beta=st.floats(0.1, 5.0))
def test_crd(seed: int, beta: float) -> None:
    """Squared gaps of centered implicit rewards to centered rewards, of groups of three."""
    forward = forward_pass(seed, size=3)
    found, _ = crd(forward, beta=beta)
    new, old = errors(forward, forward.policy), errors(forward, forward.old)
    for group in range(2):
        members = range(3 * group, 3 * group + 3)
        gains = [old[i] - new[i] for i in members]
        rewards = [
            min(max(float(forward.advantages[i]) / BOUND / 2 + 0.5, 0.0), 1.0) for i in members
        ]
        total = 0.0
        for gain, reward in zip(gains, rewards, strict=True):
            total += (beta * (gain - sum(gains) / 3) - (reward - sum(rewards) / 3)) ** 2
        assert numbers(found)[group] == pytest.approx(BOUND / beta * total / 3)


def test_crd_does_not_see_what_a_prompt_adds_to_all_its_images() -> None:
    """The unknown constant of the best policy under a KL penalty: a shift of a group's rewards changes nothing."""
    forward = forward_pass(0, size=3)
    calm = replace(forward, advantages=forward.advantages.clamp(-1, 1))
    shifted = replace(calm, advantages=calm.advantages + 1.5)
    torch.testing.assert_close(crd(calm)[0], crd(shifted)[0])


@given(seed=seeds, beta=st.floats(0.1, 50.0))
def test_diffusion_dpo(seed: int, beta: float) -> None:
    forward = forward_pass(seed, size=2)
    found, metrics = dpo(forward, beta=beta)
    new, reference = errors(forward, forward.policy), errors(forward, forward.reference)
    changes = [one - other for one, other in zip(new, reference, strict=True)]
    for pair in range(3):
        margin = -beta / 2 * (changes[2 * pair] - changes[2 * pair + 1])
        assert numbers(found)[pair] == pytest.approx(
            math.log1p(math.exp(-abs(margin))) + max(-margin, 0.0)
        )
        assert bool(metrics["actor/dpo_accuracy"][pair]) == (margin > 0)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_ddpm_process_is_diffusers(prediction_type: Any) -> None:
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    scheduler: Any = DDPMScheduler(prediction_type=prediction_type)
    process = DDPMProcess(
        alphas_cumprod=scheduler.alphas_cumprod.tolist(), prediction_type=prediction_type
    )
    clean, noise = drawn(1, 2, 5, 3, 4, 4).float()
    level = torch.tensor([0.001, 0.2, 0.5, 0.9, 1.0])
    timesteps = process.timesteps(level)
    assert timesteps.tolist() == [1, 200, 500, 900, 999]
    torch.testing.assert_close(
        process.add_noise(clean, noise, level), scheduler.add_noise(clean, noise, timesteps)
    )
    found = process.target(clean, noise, level)
    expected = {
        "epsilon": noise,
        "sample": clean,
        "v_prediction": scheduler.get_velocity(clean, noise, timesteps),
    }
    torch.testing.assert_close(found, expected[prediction_type])


def forward_objective(loss: str, options: Mapping[str, Any]) -> Any:
    return lambda: ForwardObjective(loss, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenoisingPolicyConfig(clip_ratio=0.0), "clip_ratio is 0.0"),
        (lambda: DenoisingPolicyConfig(kl_loss_coef=-1.0), "kl_loss_coef is -1.0"),
        (lambda: DenoisingPolicyConfig(kl_loss_type="k3"), "kl_loss_type is 'k3'"),  # pyright: ignore[reportArgumentType]
        (forward_objective("nft", {"beta": 0.0}), "beta is 0.0"),
        (forward_objective("nft", {"num_timesteps": -1}), "num_timesteps is -1"),
        (forward_objective("nft", {"old_decay_max": 1.0}), "old_decay_max is 1.0"),
        (forward_objective("awm", {"ghuber_power": 1.5}), "ghuber_power is 1.5"),
        (forward_objective("dgpo", {"min_level": 1.0}), "min_level is 1.0"),
        (forward_objective("dpo", {"beta": math.inf}), "beta is inf"),
        (forward_objective("dpo", {"old_decay": 0.1}), "an option is 'old_decay'; expected num"),
        (forward_objective("flow_grpo", {}), "loss is 'flow_grpo'; expected one of awm, crd, dgpo"),
        (
            lambda: DenoisingPolicyObjective(
                DenoisingPolicyConfig(), lambda *_: Normal(torch.zeros(1, 1, 1), 1.0), "nft"
            ),
            "loss is 'nft'; expected one of flow_dppo, flow_grpo, grpo_guard, opd",
        ),
    ],
)
def test_settings_are_bounded(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("log_ratio", [-1000.0, 100.0, 1000.0])
@pytest.mark.parametrize("loss", [flow_grpo, flow_dppo])
def test_ratios_beyond_all_bounds_have_a_finite_loss_and_gradient(
    loss: Any, log_ratio: float
) -> None:
    step = step_of(0, std=1.0, distance=0.0)
    step = replace(step, old_log_probs=step.drawn.log_prob(step.next_latents).detach() - log_ratio)  # pyright: ignore[reportArgumentType]
    losses, _ = loss(step, DenoisingPolicyConfig())
    assert losses.isfinite().all()
    assert gradient(losses, step.drawn.mean).isfinite().all()
