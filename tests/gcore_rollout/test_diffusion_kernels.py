"""Transition kernels: against closed forms in float64, diffusers' own steps, and marginals of a known flow."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from hypothesis import given, strategies as st

from gcore_rollout import DDIM, DanceSDE, FlowCPS, FlowODE, FlowSDE, Kernel, RequestError
from gcore_rollout.engines.diffusion.kernels import Transition

levels = st.floats(min_value=0.05, max_value=1.0)
noise_levels = st.floats(min_value=0.05, max_value=1.0)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


def latents(seed: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, v = torch.randn((2, count, 3, 4, 4), generator=generator)
    return x, v


def flow_sde(x: Any, v: Any, s: float, s_next: float, a: float) -> tuple[Any, float]:
    dt, to_one = s_next - s, 1 - s
    g2 = a * a * s / (to_one if 4 * to_one >= -dt else 1 - s_next - 4 * to_one)
    mean = x + (v + g2 / (2 * s) * (x + (1 - s) * v)) * dt
    return mean, math.sqrt(-g2 * dt)


def dance_sde(x: Any, v: Any, s: float, s_next: float, a: float) -> tuple[Any, float]:
    dt = s_next - s
    score = -(x - (1 - s) * (x - s * v)) / s**2
    return x + (v - a * a / 2 * score) * dt, a * math.sqrt(-dt)


def flow_cps(x: Any, v: Any, s: float, s_next: float, a: float) -> tuple[Any, float]:
    std = s_next * math.sin(a * math.pi / 2)
    return (1 - s_next) * (x - s * v) + math.sqrt(max(s_next**2 - std**2, 0.0)) * (
        x + (1 - s) * v
    ), std


FORMULAS: dict[str, tuple[Callable[[float], Kernel], Callable[..., tuple[Any, float]]]] = {
    "flow-grpo": (lambda a: FlowSDE(noise_level=a), flow_sde),
    "dance": (lambda a: DanceSDE(noise_level=a), dance_sde),
    "cps": (lambda a: FlowCPS(noise_level=a, normalized=True), flow_cps),
}


@pytest.mark.parametrize("name", FORMULAS)
@given(
    level=levels,
    share=st.floats(min_value=0.1, max_value=0.95),
    a=noise_levels,
    seed=st.integers(0, 99),
)
def test_steps_are_the_papers_in_float64(
    name: str, level: float, share: float, a: float, seed: int
) -> None:
    """Mean, std and log-prob."""
    make, formula = FORMULAS[name]
    x, v = latents(seed)
    next_level = level * share
    found = make(a)(v, x, scalar(level), scalar(next_level))
    level, next_level = float(scalar(level)), float(scalar(next_level))
    mean, std = formula(x.double(), v.double(), level, next_level, a)
    torch.testing.assert_close(found.mean.double(), mean, rtol=1e-4, atol=1e-4)
    assert found.std.flatten().tolist() == pytest.approx([std, std], rel=1e-4)
    drawn = found.mean + found.std * latents(seed + 1)[0]
    normal = torch.distributions.Normal(found.mean.double(), found.std.double())
    expected = normal.log_prob(drawn.double()).flatten(1).mean(1)
    torch.testing.assert_close(found.log_prob(drawn).double(), expected, rtol=1e-5, atol=1e-5)


@given(
    level=levels,
    share=st.floats(min_value=0.1, max_value=0.95),
    a=noise_levels,
    seed=st.integers(0, 99),
)
def test_cps_by_default_has_the_published_log_prob(
    level: float, share: float, a: float, seed: int
) -> None:
    """The squared error alone, of the same steps."""
    x, v = latents(seed)
    arguments = v, x, scalar(level), scalar(level * share)
    found, density = (
        FlowCPS(noise_level=a, normalized=normalized)(*arguments) for normalized in (False, True)
    )
    mean = found.mean
    std = found.std
    assert torch.equal(mean, density.mean)
    assert torch.equal(std, density.std)
    drawn = mean + std * latents(seed + 1)[0]
    errors = (drawn.double() - mean.double()).square().flatten(1)
    expected = torch.tensor(
        [-sum(error) / len(error) for error in errors.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(found.log_prob(drawn).double(), expected, rtol=1e-5, atol=1e-9)


def test_ratios_of_cps_do_not_grow_as_its_noise_falls() -> None:
    """Of a policy whose output changed by 1 %, at each step of a sampler."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    x, v = latents(0, count=64)

    def deviations(kernel: Kernel) -> list[float]:
        found: list[float] = []
        for level, next_level in pairwise(scheduler.sigmas[:-1]):
            old, new = (kernel(output, x, level, next_level) for output in (v, 1.01 * v))
            drawn = old.mean + old.std * latents(1, count=64)[0]
            found.append(
                float((torch.exp(new.log_prob(drawn) - old.log_prob(drawn)) - 1).abs().mean())
            )
        return found

    published, density = deviations(FlowCPS()), deviations(FlowCPS(normalized=True))
    assert published[-1] < 3e-4
    assert max(published) < max(deviations(FlowSDE()))
    assert density[-1] > 100 * published[-1]


def published_std(s: float, s_next: float, a: float) -> float:
    """Flow-GRPO's code's, in float64."""
    return a * math.sqrt(s / (1 - (s_next if s == 1 else s)) * (s - s_next))


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [4, 6, 10, 28, 50])
def test_noise_of_flow_sde_is_the_published_at_levels_of_samplers(
    shift: float, num_steps: int
) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    x, v = latents(0)
    assert scheduler.sigmas[0] == 1.0
    for level, next_level in pairwise(scheduler.sigmas):
        found = FlowSDE(noise_level=0.7)(v, x, level, next_level)
        assert float(found.std[0]) == pytest.approx(
            published_std(float(level), float(next_level), 0.7), rel=1e-4
        )


@given(to_one=st.floats(0.0, 0.2), step=st.floats(0.02, 0.8), a=noise_levels)
def test_noise_of_flow_sde_is_bounded_and_continuous_below_one(
    to_one: float, step: float, a: float
) -> None:
    x, v = latents(0)
    near = 1e-5
    stds: list[float] = []
    for s in (1 - to_one, 1 - to_one - near):
        found = FlowSDE(noise_level=a)(v, x, scalar(s), scalar(1 - to_one - step))
        assert found.mean.isfinite().all()
        assert float(found.std[0]) <= 2 * a * math.sqrt(s) * 1.001
        stds.append(float(found.std[0]))
    # The denominator is at least a quarter of a step, and changes at most four times as fast as the level.
    assert stds[1] == pytest.approx(stds[0], rel=16 * near / step + 1e-3)
    at_one = FlowSDE(noise_level=a)(v, x, scalar(1.0), scalar(1 - step))
    just_below = FlowSDE(noise_level=a)(v, x, scalar(1 - 1e-6), scalar(1 - step))
    torch.testing.assert_close(just_below.std, at_one.std, rtol=1e-3, atol=0)
    torch.testing.assert_close(just_below.mean, at_one.mean, rtol=1e-3, atol=1e-3)


def test_without_noise_a_step_is_diffusers_own() -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    x, v = latents(0)
    for i, timestep in enumerate(scheduler.timesteps):
        expected = scheduler.step(v, timestep, x, return_dict=False)[0]
        found = FlowODE()(v, x, scheduler.sigmas[i], scheduler.sigmas[i + 1])
        torch.testing.assert_close(found.mean, expected)
        x = expected


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_ddim_is_diffusers_own(prediction_type: Any, clip: float | None) -> None:
    options: dict[str, Any] = {"clip_sample": clip is not None, "clip_sample_range": clip or 1.0}
    scheduler = DDIMScheduler(prediction_type=prediction_type, **options)
    scheduler.set_timesteps(10)
    x, output = latents(1)
    noise = latents(2)[0]
    kernel = DDIM(eta=0.7, prediction_type=prediction_type, clip_sample_range=clip)
    for timestep in scheduler.timesteps.tolist():
        expected = scheduler.step(
            output, timestep, x, eta=0.7, variance_noise=noise, return_dict=False
        )[0]
        before = timestep - 100
        after = scheduler.alphas_cumprod[before] if before >= 0 else scheduler.final_alpha_cumprod
        drawn = kernel(output, x, scheduler.alphas_cumprod[timestep], after)
        mean = drawn.mean
        std = drawn.std
        torch.testing.assert_close(mean + std * noise, expected, rtol=1e-5, atol=1e-5)
        x = expected


@pytest.mark.parametrize(
    ("kernel", "std"),
    # Flow-CPS keeps the coefficients, and with them the marginals where the clean image is known.
    [
        (FlowODE(), 0.5),
        (FlowSDE(noise_level=0.5), 0.5),
        (DanceSDE(noise_level=0.4), 0.5),
        (FlowCPS(noise_level=0.6), 0),
    ],
)
def test_marginals_are_the_flows(kernel: Kernel, std: float) -> None:
    """Of a Gaussian target, whose velocity is known: mean and variance at every level, with noise and without."""
    mean, count = 0.7, 60_000
    torch.manual_seed(0)
    x = torch.randn(count, 1)
    steps = torch.linspace(1.0, 0.02, 200)
    for level, next_level in pairwise(steps):
        variance = (1 - level) ** 2 * std**2 + level**2
        score = -(x - (1 - level) * mean) / variance
        # Of the flow x_s = (1 - s) x_0 + s e: e = -s score, and x_0 from both.
        noise = -level * score
        clean = (x - level * noise) / (1 - level) if level < 1 else torch.full_like(x, mean)
        drawn = kernel(noise - clean, x, level, next_level)
        x = drawn.mean + drawn.std * torch.randn_like(x)
        if float(next_level) < 0.9:
            expected = math.sqrt((1 - next_level) ** 2 * std**2 + next_level**2)
            assert float(x.mean()) == pytest.approx(float((1 - next_level) * mean), abs=0.03)
            assert float(x.std()) == pytest.approx(expected, rel=0.04)


def test_where_there_is_no_noise_there_is_no_density() -> None:
    x, v = latents(0)
    last = FlowCPS()(v, x, scalar(0.2), scalar(0.0))
    assert not last.std.any()
    with pytest.raises(ValueError, match="no log-probability"):
        last.log_prob(x)


@pytest.mark.parametrize("make", [FlowSDE, DanceSDE, FlowCPS])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_noise_is_above_zero(make: Callable[..., Kernel], value: float) -> None:
    with pytest.raises(RequestError, match="noise_level is"):
        make(noise_level=value)


def test_kl_of_transitions_is_torchs() -> None:
    """What the trainer's exact KL is of."""
    x, v = latents(3)
    one, other = (FlowSDE()(output, x, scalar(0.6), scalar(0.5)) for output in (v, v + 0.1))
    normals = [torch.distributions.Normal(t.mean, t.std.expand_as(t.mean)) for t in (one, other)]
    expected = torch.distributions.kl_divergence(*normals).flatten(1).mean(1)
    found = ((one.mean - other.mean) ** 2 / (2 * one.std**2)).flatten(1).mean(1)
    torch.testing.assert_close(found, expected)
    assert isinstance(one, Transition)
