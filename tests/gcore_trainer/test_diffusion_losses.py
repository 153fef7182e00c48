"""Losses of diffusion policies, against implementations of their formulas in float64 and plain Python."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gcore_trainer import (
    ConfigError,
    DDPMProcess,
    DenoisingPolicyConfig,
    DiffusionDPOConfig,
    FlowProcess,
    NFTConfig,
)
from gcore_trainer.diffusion.losses import (
    clipped_step_loss,
    diffusion_dpo_loss,
    gaussian_kl,
    guard_step_loss,
    nft_loss,
)

seeds = st.integers(0, 10_000)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_density(x: np.ndarray[Any, Any], mean: np.ndarray[Any, Any], std: float) -> float:
    """Mean over dimensions."""
    return float(
        np.mean(-((x - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi))
    )


@given(seed=seeds, clip=st.floats(1e-3, 0.5))
def test_clipped_step(seed: int, clip: float) -> None:
    new, old, advantages = drawn(seed, 3, 8)
    losses, metrics = clipped_step_loss(new, old, advantages, clip_ratio=clip)
    for i in range(8):
        ratio, a = math.exp(float(new[i] - old[i])), float(advantages[i])
        kept = min(max(ratio, 1 - clip), 1 + clip)
        assert float(losses[i]) == pytest.approx(-min(ratio * a, kept * a))
        assert bool(metrics["actor/pg_clipfrac"][i]) == (kept * a < ratio * a)


@given(seed=seeds, std=st.floats(0.05, 2.0), dt=st.floats(-0.5, -0.01))
def test_guard_takes_the_bias_and_the_scale_out_of_the_ratio(
    seed: int, std: float, dt: float
) -> None:
    """By the paper's own words: the log-ratio, plus |dm|^2 / 2 std^2, times std; the loss over -dt."""
    x, mean, old_mean = drawn(seed, 3, 4, 2, 3)
    mean = old_mean + 0.1 * mean
    advantages = drawn(seed + 1, 4)
    ones = torch.full((4,), std, dtype=torch.float64)
    losses, metrics = guard_step_loss(
        x, mean, old_mean, ones, torch.full_like(ones, dt), advantages, clip_ratio=0.01
    )
    for i in range(4):
        new, old = (log_density(x[i].numpy(), m[i].numpy(), std) for m in (mean, old_mean))
        bias = float(((mean[i] - old_mean[i]) ** 2).mean()) / (2 * std**2)
        ratio, a = math.exp((new - old + bias) * std), float(advantages[i])
        deviation = float(metrics["actor/ratio_dev"][i])
        assert deviation == pytest.approx(abs(ratio - 1), rel=1e-6, abs=1e-9)
        kept = min(max(ratio, 0.99), 1.01)
        assert float(losses[i]) == pytest.approx(-min(ratio * a, kept * a) / -dt)


@given(seed=seeds, std=st.floats(0.05, 2.0))
def test_kl_is_torchs(seed: int, std: float) -> None:
    one, other = drawn(seed, 2, 3, 2, 4)
    normals = [torch.distributions.Normal(mean, std) for mean in (one, other)]
    expected = torch.distributions.kl_divergence(*normals).flatten(1).mean(1)
    found = gaussian_kl(one, other, torch.full((3,), std, dtype=torch.float64))
    torch.testing.assert_close(found, expected)


@given(seed=seeds, beta=st.floats(0.05, 1.0))
def test_nft(seed: int, beta: float) -> None:
    velocity, old, clean, noise = drawn(seed, 4, 3, 2, 4)
    level, optimality = (drawn(seed + 1, 2, 3).sigmoid()).unbind()
    noised = FlowProcess().add_noise(clean, noise, level)
    found = nft_loss(velocity, old, noised, clean, level, optimality, beta=beta)
    for i in range(3):
        s, r = float(level[i]), float(optimality[i])
        total = 0.0
        for weight, sign in ((r, 1.0), (1 - r, -1.0)):
            implicit = (1 - sign * beta) * old[i] + sign * beta * velocity[i]
            error = (noised[i] - s * implicit - clean[i]).numpy()
            total += weight * float(np.mean(error**2)) / max(float(np.mean(np.abs(error))), 1e-5)
        assert float(found[i]) == pytest.approx(total / beta)


def test_nft_has_its_minimum_where_good_images_pull() -> None:
    """At r = 1 the policy that gives the target velocity at the old one's place has no loss at all."""
    clean, noise = drawn(0, 2, 1, 2, 4)
    level = torch.tensor([0.5], dtype=torch.float64)
    noised, target = (
        FlowProcess().add_noise(clean, noise, level),
        FlowProcess().target(clean, noise, level),
    )
    loss = nft_loss(
        target, target, noised, clean, level, torch.ones(1, dtype=torch.float64), beta=0.1
    )
    assert float(loss) == pytest.approx(0.0, abs=1e-12)


@given(seed=seeds, beta=st.floats(0.1, 50.0))
def test_diffusion_dpo(seed: int, beta: float) -> None:
    errors, ref_errors = drawn(seed, 2, 6).abs()
    found, is_right = diffusion_dpo_loss(errors, ref_errors, beta=beta)
    for pair in range(3):
        chosen, rejected = (float(errors[2 * pair + k] - ref_errors[2 * pair + k]) for k in (0, 1))
        margin = -beta / 2 * (chosen - rejected)
        assert float(found[pair]) == pytest.approx(
            math.log1p(math.exp(-abs(margin))) + max(-margin, 0.0)
        )
        assert bool(is_right[pair]) == (margin > 0)


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


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: DenoisingPolicyConfig(clip_ratio=0.0), "clip_ratio is 0.0"),
        (lambda: DenoisingPolicyConfig(kl_loss_coef=-1.0), "kl_loss_coef is -1.0"),
        (lambda: DenoisingPolicyConfig(kl_loss_type="k3"), "kl_loss_type is 'k3'"),  # pyright: ignore[reportArgumentType]
        (lambda: NFTConfig(beta=0.0), "beta is 0.0"),
        (lambda: NFTConfig(num_timesteps=0), "num_timesteps is 0"),
        (lambda: NFTConfig(old_decay_max=1.0), "old_decay_max is 1.0"),
        (lambda: DiffusionDPOConfig(beta=math.inf), "beta is inf"),
    ],
)
def test_settings_are_bounded(make: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


@pytest.mark.parametrize("log_ratio", [-1000.0, 100.0, 1000.0])
def test_ratios_beyond_all_bounds_have_a_finite_loss_and_gradient(log_ratio: float) -> None:
    log_probs = torch.full((3,), log_ratio, requires_grad=True)
    losses, _ = clipped_step_loss(
        log_probs, torch.zeros(3), torch.tensor([1.0, -1.0, 0.0]), clip_ratio=0.1
    )
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
