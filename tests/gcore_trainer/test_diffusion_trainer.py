"""The diffusion trainer, on a real model of diffusers: every objective raises a reward; state, splits, adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from tiny_pipelines import flow_pipeline
from torch._dynamo.utils import counters

from gcore_trainer import (
    BatchError,
    ConfigError,
    Denoiser,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    DiffusionObjective,
    DiffusionSample,
    DiffusionTrainer,
    FlowProcess,
    ForwardObjective,
    LoRAConfig,
    OptimizerConfig,
    RewardGradientObjective,
    StateError,
    TrainerError,
    UnsupportedModelError,
)
from gcore_trainer.diffusion.conditions import Conditioned
from gcore_trainer.diffusion.trainer import score_steps

STEPS = 4
LEVELS = np.linspace(1.0, 0.0, STEPS + 1).astype(np.float32)


@dataclass(frozen=True)
class Step:
    """A Gaussian of a fixed std: what a sampler in an application would be."""

    mean: torch.Tensor
    std: torch.Tensor

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        normal = torch.distributions.Normal(self.mean, self.std.expand_as(self.mean))
        return normal.log_prob(next_latents).flatten(1).mean(1)


def kernel(
    output: torch.Tensor, latents: torch.Tensor, level: torch.Tensor, next_level: torch.Tensor
) -> Step:
    dt = (next_level - level).reshape(-1, 1, 1, 1)
    return Step(latents + output * dt, 0.3 * torch.sqrt(-dt))


def reward(latents: torch.Tensor, prompts: Sequence[str] = ()) -> torch.Tensor:
    """How bright the first channel is against the second; differentiable."""
    del prompts
    return torch.tanh(latents[:, 0].flatten(1).mean(1) - latents[:, 1].flatten(1).mean(1))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flow_pipeline(tmp_path_factory.mktemp("pipelines"))


def conditions(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    given = (
        torch.randn((4, 3, 32), generator=generator).numpy(),
        torch.randn((4, 32), generator=generator).numpy(),
    )
    return [
        {"encoder_hidden_states": given[0][i % 4], "pooled_projections": given[1][i % 4]}
        for i in range(count)
    ]


@torch.no_grad()
def sampled(
    denoiser: Denoiser, count: int, seed: int, *, has_noise: bool = True
) -> list[DiffusionSample]:
    """Images and their steps, with the mean reward taken from each as its advantage."""
    generator = torch.Generator().manual_seed(seed)
    given = [
        DiffusionSample(clean_latents=np.zeros(0, np.float32), conditions=c)
        for c in conditions(count)
    ]
    batch = Conditioned.of(given, denoiser.device)
    x = torch.randn((count, 3, 8, 8), generator=generator)
    steps: list[dict[str, Any]] = []
    for level, next_level in pairwise(LEVELS):
        levels, next_levels = (
            torch.full((count,), float(level)),
            torch.full((count,), float(next_level)),
        )
        drawn = kernel(denoiser(x, 1000 * levels, batch), x, levels, next_levels)
        following = drawn.mean + (
            drawn.std * torch.randn(x.shape, generator=generator) if has_noise else 0.0
        )
        log_probs = drawn.log_prob(following)
        steps.append({"x": x, "next": following, "mean": drawn.mean, "log_probs": log_probs})
        x = following
    scores = reward(x)
    advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
    return [
        DiffusionSample(
            clean_latents=x[i].numpy(),
            conditions=given[i].conditions,
            advantage=float(advantages[i]),
            latents=np.stack([s["x"][i].numpy() for s in steps]),
            next_latents=np.stack([s["next"][i].numpy() for s in steps]),
            old_means=np.stack([s["mean"][i].numpy() for s in steps]),
            old_log_probs=np.array([float(s["log_probs"][i]) for s in steps], np.float32),
            levels=LEVELS[:-1],
            next_levels=LEVELS[1:],
            timesteps=1000 * LEVELS[:-1],
            noise_seed=seed * 1000 + i,
        )
        for i in range(count)
    ]


def as_pairs(samples: list[DiffusionSample]) -> list[DiffusionSample]:
    """Best against worst, second against last but one, ..."""
    order = sorted(samples, key=lambda s: -(s.advantage or 0.0))
    half = len(order) // 2
    return [s for i in range(half) for s in (order[i], order[-1 - i])]


def mean_reward(denoiser: Denoiser) -> float:
    images = sampled(denoiser, 64, seed=10_000, has_noise=False)
    return float(reward(torch.from_numpy(np.stack([s.clean_latents for s in images]))).mean())


POLICY: dict[str, Callable[[], DiffusionObjective]] = {
    "ddpo": lambda: DenoisingPolicyObjective(DenoisingPolicyConfig(clip_ratio=0.01), kernel),
    "guard": lambda: DenoisingPolicyObjective(
        DenoisingPolicyConfig(clip_ratio=0.01), kernel, "grpo_guard"
    ),
    "flow-dppo": lambda: DenoisingPolicyObjective(
        DenoisingPolicyConfig(), kernel, "flow_dppo", kl_mask_threshold=1e-3
    ),
    "flow-grpo with kl": lambda: DenoisingPolicyObjective(
        DenoisingPolicyConfig(clip_ratio=0.01, kl_loss_coef=0.01), kernel
    ),
}
OBJECTIVES: dict[str, Callable[[], DiffusionObjective]] = {
    **POLICY,
    "nft": lambda: ForwardObjective("nft", num_timesteps=2),
    "awm": lambda: ForwardObjective("awm", num_timesteps=2, ghuber_power=0.25),
    "dgpo": lambda: ForwardObjective("dgpo", group_size=4, num_timesteps=2, beta=20.0),
    "crd": lambda: ForwardObjective("crd", group_size=4, num_timesteps=2),
    "dpo": lambda: ForwardObjective("dpo", num_timesteps=2, beta=20.0),
    "reward gradient": lambda: RewardGradientObjective(kernel, reward),
}


def trainer_of(
    pipeline: Path, objective: DiffusionObjective, *, lr: float = 2e-3, **options: Any
) -> DiffusionTrainer:
    denoiser = Denoiser.from_pretrained(pipeline, lora=options.pop("lora", None))
    reference = denoiser.initial() if objective.needs_reference else None
    optimizer = OptimizerConfig(lr=lr, weight_decay=0.0)
    return DiffusionTrainer(
        denoiser, optimizer=optimizer, objective=objective, reference=reference, **options
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_raises_the_reward(pipeline: Path, name: str) -> None:
    objective = OBJECTIVES[name]()
    denoiser = Denoiser.from_pretrained(pipeline)
    reference = denoiser.initial()
    trainer = DiffusionTrainer(
        denoiser,
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.0),
        objective=objective,
        reference=reference if objective.needs_reference else None,
    )
    before = mean_reward(denoiser)
    for step in range(12):
        samples = sampled(denoiser, 32, seed=step, has_noise=name in POLICY)
        if name == "dpo":
            samples = as_pairs(samples)
        elif name == "reward gradient":
            samples = [s.at_steps([2, 3]) for s in samples]
        elif name == "flow-grpo with kl":
            means = [score[0] for score in score_steps(reference, [samples], kernel)[0]]
            samples = [replace(s, ref_means=m) for s, m in zip(samples, means, strict=True)]
        metrics = trainer.train_step([samples[:16], samples[16:]])
        assert np.isfinite(list(metrics.values())).all()
    assert mean_reward(denoiser) > before + 0.03


@pytest.mark.parametrize("has_noise", [True, False])
def test_the_policy_learns_a_teachers_steps(pipeline: Path, has_noise: bool) -> None:
    """DiffusionOPD, of steps with noise and without: the policy's images get the reward of the teacher's."""

    def step(*args: torch.Tensor) -> Step:
        drawn = kernel(*args)
        return drawn if has_noise else Step(drawn.mean, 0.0 * drawn.std)

    teacher = Denoiser.from_pretrained(pipeline)
    final = teacher.model.proj_out.bias
    with torch.no_grad():
        # Latents move by minus the output: the first channel brighter, the second darker.
        final.view(-1, 3)[:, 0] -= 0.5
        final.view(-1, 3)[:, 1] += 0.5
    objective = DenoisingPolicyObjective(DenoisingPolicyConfig(), step, "opd", teacher="folder")
    policy = Denoiser.from_pretrained(pipeline)
    before = mean_reward(policy)
    trainer = DiffusionTrainer(
        policy,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        objective=objective,
        reference=teacher,
    )
    losses: list[float] = []
    for seed in range(20):
        batch = sampled(policy, 8, seed=seed, has_noise=has_noise)
        scores = trainer.score_steps([batch], step, by_reference=True)[0]
        taught = [replace(s, ref_means=m) for s, (m, _) in zip(batch, scores, strict=True)]
        losses.append(trainer.train_step([taught])["actor/distillation_loss"])
    assert losses[-1] < 0.1 * losses[0]
    assert mean_reward(policy) - before > 0.8 * (mean_reward(teacher) - before) > 0.1


def test_before_the_first_update_the_ratio_is_1(pipeline: Path) -> None:
    trainer = trainer_of(pipeline, POLICY["ddpo"]())
    samples = sampled(Denoiser.from_pretrained(pipeline), 8, seed=0)
    metrics = trainer.train_step([samples])
    assert metrics["actor/ratio_dev"] < 1e-6
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert trainer.train_step([samples])["actor/ratio_dev"] > 1e-6


@pytest.mark.parametrize("name", ["ddpo", "guard"])
def test_scores_of_the_policy_make_the_first_ratio_1_whatever_the_samplers_type(
    pipeline: Path, name: str
) -> None:
    samples = sampled(Denoiser.from_pretrained(pipeline, compute_dtype=torch.bfloat16), 8, seed=0)
    micro_batches = [samples[:5], samples[5:]]
    assert trainer_of(pipeline, POLICY[name]()).train_step(micro_batches)["actor/ratio_dev"] > 1e-5
    trainer = trainer_of(pipeline, POLICY[name]())
    again = [
        [
            replace(s, old_means=means, old_log_probs=log_probs)
            for s, (means, log_probs) in zip(batch, scores, strict=True)
        ]
        for batch, scores in zip(
            micro_batches, trainer.score_steps(micro_batches, kernel), strict=True
        )
    ]
    assert trainer.train_step(again)["actor/ratio_dev"] < 1e-7
    trainer.sleep()
    with pytest.raises(TrainerError, match="asleep"):
        trainer.score_steps(micro_batches, kernel)


def test_scores_are_the_samplers_where_the_types_are_one(pipeline: Path) -> None:
    def noiseless_at_last(*args: torch.Tensor) -> Step:
        drawn = kernel(*args)
        return Step(drawn.mean, drawn.std * (args[3] > 0).reshape(-1, 1, 1, 1))

    denoiser = Denoiser.from_pretrained(pipeline)
    samples = sampled(denoiser, 3, seed=0)
    [scores] = score_steps(denoiser, [samples], noiseless_at_last)
    for sample, (means, log_probs) in zip(samples, scores, strict=True):
        assert sample.old_log_probs is not None
        assert sample.old_means is not None
        np.testing.assert_allclose(means, sample.old_means, atol=1e-6)
        np.testing.assert_allclose(log_probs[:-1], sample.old_log_probs[:-1], atol=1e-6)
        assert np.isnan(log_probs[-1])
    assert score_steps(denoiser, [], kernel) == []


def test_both_forms_of_the_kl_term(pipeline: Path) -> None:
    """Before the first update: of a reference whose means are elsewhere, in float64, over g = 0.3 and g sqrt(-dt)."""
    samples = sampled(Denoiser.from_pretrained(pipeline), 4, seed=0)
    rng = np.random.default_rng(0)
    distances = [0.1 * rng.standard_normal((STEPS, 3, 8, 8)) for _ in samples]
    samples = [
        replace(s, ref_means=s.old_means + d.astype(np.float32))
        for s, d in zip(samples, distances, strict=True)
        if s.old_means is not None
    ]
    configs = {
        0.3**2: DenoisingPolicyConfig(kl_loss_coef=0.01, kl_loss_type="flow_grpo"),
        0.3**2 / STEPS: DenoisingPolicyConfig(kl_loss_coef=0.01),
    }
    for variance, config in configs.items():
        found = trainer_of(pipeline, DenoisingPolicyObjective(config, kernel)).train_step([samples])
        assert found["actor/kl_loss"] == pytest.approx(
            np.mean(np.square(distances)) / (2 * variance), rel=1e-4
        )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_how_a_batch_is_split_changes_nothing(pipeline: Path, name: str) -> None:
    samples = sampled(Denoiser.from_pretrained(pipeline), 8, seed=3)
    samples = [replace(s, ref_means=s.old_means) for s in samples]
    metrics: list[dict[str, float]] = []
    # Of dgpo and crd, groups of four stay together.
    for size in (8, 4 if name in ("dgpo", "crd") else 2):
        trainer = trainer_of(pipeline, OBJECTIVES[name](), lr=1e-3)
        metrics.append(trainer.train_step([samples[i : i + size] for i in range(0, 8, size)]))
    for key, value in metrics[0].items():
        assert metrics[1][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", ["ddpo", "nft"])
def test_a_resumed_trainer_continues_to_the_bit(pipeline: Path, name: str) -> None:
    batches = [sampled(Denoiser.from_pretrained(pipeline), 4, seed=k) for k in range(4)]
    whole, first, second = (
        trainer_of(pipeline, OBJECTIVES[name](), ema_decay=0.9) for _ in range(3)
    )
    for batch in batches:
        whole.train_step([batch])
    for batch in batches[:2]:
        first.train_step([batch])
    second.load_state(first.state())
    for batch in batches[2:]:
        second.train_step([batch])
    for averaged in (False, True):
        expected = dict(whole.export_weights(averaged=averaged))
        for key, tensor in second.export_weights(averaged=averaged):
            assert torch.equal(tensor, expected[key]), key
    with pytest.raises(StateError, match="names on one side only"):
        trainer_of(pipeline, OBJECTIVES[name]()).load_state(first.state())


@pytest.mark.parametrize("name", ["dpo", "nft", "nft with adapters"])
def test_sleep_between_updates_changes_nothing(pipeline: Path, name: str) -> None:
    """Of the policy, its average, the reference or the policy that samples, and the optimizer: nothing stays behind."""
    batches = [as_pairs(sampled(Denoiser.from_pretrained(pipeline), 4, seed=k)) for k in range(3)]
    lora = LoRAConfig(rank=2) if "adapters" in name else None
    objective = OBJECTIVES[name.split()[0]]()
    awake, rested = (trainer_of(pipeline, objective, ema_decay=0.9, lora=lora) for _ in range(2))
    for batch in batches:
        assert rested.train_step([batch]) == awake.train_step([batch])
        rested.sleep()
        # Nothing else says what memory is held: the state of a sleeper is in host memory.
        groups = rested._stored_tensors()  # pyright: ignore[reportPrivateUsage]
        # Parameters are mapped from a file here, whose pages are not this process's to free.
        del groups["model"]
        assert not any(
            t.untyped_storage().nbytes() for group in groups.values() for t in group.values()
        )
        with pytest.raises(TrainerError, match="asleep"):
            rested.train_step([batch])
        rested.wake()
    for averaged in (False, True):
        expected = dict(awake.export_weights(averaged=averaged))
        for key, tensor in rested.export_weights(averaged=averaged):
            assert torch.equal(tensor, expected[key]), key


def test_adapters_alone_learn_and_are_merged(pipeline: Path, tmp_path: Path) -> None:
    trainer = trainer_of(pipeline, POLICY["ddpo"](), lora=LoRAConfig(rank=2), lr=1e-2)
    before = dict(Denoiser.from_pretrained(pipeline).weights())
    for key, tensor in trainer.export_weights():
        assert torch.equal(tensor, before[key])
    trainer.train_step([sampled(Denoiser.from_pretrained(pipeline), 8, seed=0)])
    after = dict(trainer.export_weights())
    assert after.keys() == before.keys()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed
    assert all(key.endswith(".weight") for key in changed)
    trainer.save_pretrained(tmp_path)
    loaded = SD3Transformer2DModel.from_pretrained(tmp_path)
    for key, parameter in loaded.named_parameters():
        assert torch.equal(parameter, after[key]), key


class Apart(Denoiser):
    """Its copies are models of their own, adapters or not."""

    def copy(self, name: str = "old") -> Denoiser:
        del name
        twin = Denoiser.from_pretrained(
            Path(self.model.config._name_or_path).parent, lora=self.lora
        )
        twin.model.requires_grad_(False)
        return twin


@pytest.mark.parametrize("name", ["flow-grpo with kl", "nft with kl", "dpo"])
def test_models_that_share_frozen_weights_are_those_apart(pipeline: Path, name: str) -> None:
    """The reference is the policy without its adapters, and DiffusionNFT's sampling policy is a second set of them."""
    objective = (
        ForwardObjective("nft", num_timesteps=2, kl_loss_coef=0.1, old_decay=0.25)
        if "nft" in name
        else OBJECTIVES[name]()
    )
    lora, batches = (
        LoRAConfig(rank=2),
        [sampled(Denoiser.from_pretrained(pipeline), 4, seed=k) for k in range(3)],
    )
    found: list[tuple[Any, ...]] = []
    for kind in (Denoiser, Apart):
        policy = kind.from_pretrained(pipeline, lora=lora)
        reference = policy.initial() if kind is Denoiser else Denoiser.from_pretrained(pipeline)
        options: dict[str, Any] = {
            "objective": objective,
            "reference": reference,
        }
        trainer = DiffusionTrainer(
            policy, optimizer=OptimizerConfig(lr=2e-3), ema_decay=0.9, **options
        )
        metrics: list[dict[str, float]] = []
        for batch in batches:
            scores = trainer.score_steps([batch], kernel, by_reference=True)[0]
            given = [
                replace(s, ref_means=means) for s, (means, _) in zip(batch, scores, strict=True)
            ]
            metrics.append(trainer.train_step([as_pairs(given)]))
        assert any(
            row.get("actor/kl_loss", row.get("actor/dpo_accuracy", 0.0)) > 0 for row in metrics[1:]
        )
        found.append((metrics, dict(trainer.export_weights()), trainer.state()))
        if kind is Denoiser:
            own = sum(p.numel() for p in policy.parameters().values())
            trained = sum(p.numel() for p in policy.trained_parameters().values())
            assert (
                sum(p.numel() for p in policy.model.parameters())
                == own + trained * objective.needs_old
            )
    (metrics, weights, state), (others, expected, other_state) = found
    for row, other in zip(metrics, others, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert weights.keys() == expected.keys()
    assert state.keys() == other_state.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-6)


def test_the_sampling_policy_follows(pipeline: Path) -> None:
    """DiffusionNFT's: the first update takes all of the new one, later ones less and less."""
    trainer = trainer_of(pipeline, ForwardObjective("nft", num_timesteps=2, old_decay=0.25))
    before = {key: tensor.clone() for key, tensor in trainer.export_weights()}
    trainer.train_step([sampled(Denoiser.from_pretrained(pipeline), 4, seed=0)])
    state = trainer.state()
    for key, tensor in trainer.export_weights():
        expected = torch.lerp(before[key], state["model"][key], 0.75)
        torch.testing.assert_close(tensor, expected)


def test_the_average_of_crd_does_not_sample(pipeline: Path) -> None:
    """Its old policy is apart from the one that makes images, unlike that of DiffusionNFT."""
    batch = sampled(Denoiser.from_pretrained(pipeline), 4, seed=0)
    for name in ("crd", "nft"):
        trainer = trainer_of(pipeline, ForwardObjective(name, group_size=4, old_decay=0.5))
        trainer.train_step([batch])
        model = trainer.state()["model"]
        is_policy = all(torch.equal(t, model[key]) for key, t in trainer.export_weights())
        assert is_policy == (name == "crd")


class Levels(FlowProcess):
    """Keeps the levels, and the noise, that were drawn."""

    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []  # noqa: RUF012 - of one test

    def add_noise(
        self, clean: torch.Tensor, noise: torch.Tensor, level: torch.Tensor
    ) -> torch.Tensor:
        self.drawn.append((level, noise))
        return super().add_noise(clean, noise, level)


@pytest.mark.parametrize(("name", "num_noises"), [("dgpo", 2), ("crd", 8)])
def test_levels_and_noise_of_groups(pipeline: Path, name: str, num_noises: int) -> None:
    """Levels are above the least one; the images of a group have one noise in DGPO, and their own in CRD."""
    Levels.drawn.clear()
    objective = ForwardObjective(name, Levels(), group_size=4, min_level=0.6, num_timesteps=3)
    trainer = trainer_of(pipeline, objective)
    trainer.train_step([sampled(Denoiser.from_pretrained(pipeline), 8, seed=0)])
    assert len(Levels.drawn) == 3
    for level, noise in Levels.drawn:
        assert level.min() > 0.6
        assert level.max() <= 1.0
        assert len(level.unique()) == len(noise.unique(dim=0)) == num_noises


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_compute_the_same(pipeline: Path) -> None:
    """By the policy with adapters, the reference without them, and the sampling policy, which has others."""
    torch.compiler.reset()
    counters.clear()
    objective = ForwardObjective("nft", num_timesteps=1, kl_loss_coef=0.1)
    # To compile takes most of the time: each adapted layer is as much code as the rest of it.
    lora = LoRAConfig(rank=2, target_modules=("to_q",))
    plain, other = (trainer_of(pipeline, objective, lora=lora) for _ in range(2))
    other.compile(backend="aot_eager")
    for seed in range(2):
        batches = [sampled(Denoiser.from_pretrained(pipeline), 4, seed=seed)]
        assert other.train_step(batches) == pytest.approx(
            plain.train_step(batches), rel=1e-4, abs=1e-6
        )
    assert counters["stats"]["unique_graphs"] > 0


def test_shared_conditions_are_those_of_each_image(pipeline: Path) -> None:
    """Images that share arrays, in bfloat16, against images with float32 copies of their own."""
    samples = sampled(Denoiser.from_pretrained(pipeline), 8, seed=0)
    rounded = [{name: v.astype(ml_dtypes.bfloat16) for name, v in c.items()} for c in conditions(4)]
    copied = [{name: v.astype(np.float32) for name, v in rounded[i % 4].items()} for i in range(8)]
    denoiser, found = Denoiser.from_pretrained(pipeline), list[Any]()
    for given in (rounded * 2, copied):
        batch = [replace(s, conditions=c) for s, c in zip(samples, given, strict=True)]
        trainer_of(pipeline, POLICY["ddpo"]()).train_step([batch])
        found.append(np.stack([score[1] for score in score_steps(denoiser, [batch], kernel)[0]]))
    np.testing.assert_array_equal(*found)
    rounded[0]["pooled_projections"][3] = np.inf
    with pytest.raises(
        BatchError, match=r"micro_batches\[0\]\[0\]\.conditions\['pooled_projections'\]\[3\] is inf"
    ):
        trainer_of(pipeline, POLICY["ddpo"]()).train_step(
            [[replace(samples[0], conditions=rounded[0])]]
        )


def test_a_batch_that_lacks_something_is_refused(pipeline: Path, tmp_path: Path) -> None:
    samples = sampled(Denoiser.from_pretrained(pipeline), 4, seed=0)
    trainer = trainer_of(pipeline, POLICY["ddpo"]())
    with pytest.raises(BatchError, match="advantage is None"):
        trainer.train_step([[replace(s, advantage=None) for s in samples]])
    with pytest.raises(BatchError, match="holds no image"):
        trainer.train_step([])
    with pytest.raises(BatchError, match="steps; expected one number above 0"):
        trainer.train_step([[samples[0], samples[1].at_steps([0])]])
    with pytest.raises(BatchError, match="ref_means is None"):
        trainer_of(pipeline, POLICY["flow-grpo with kl"]()).train_step([samples])
    with pytest.raises(BatchError, match="3 images; expected whole groups of 2"):
        trainer_of(pipeline, OBJECTIVES["dpo"]()).train_step([samples[:3]])
    with pytest.raises(BatchError, match="end before sampling does"):
        trainer_of(pipeline, OBJECTIVES["reward gradient"]()).train_step(
            [[s.at_steps([0]) for s in samples]]
        )
    with pytest.raises(ConfigError, match="reference is None"):
        DiffusionTrainer(
            Denoiser.from_pretrained(pipeline),
            optimizer=OptimizerConfig(),
            objective=OBJECTIVES["dpo"](),
        )
    with pytest.raises(UnsupportedModelError, match=r"no model_index\.json"):
        Denoiser.from_pretrained(tmp_path)
    with pytest.raises(BatchError, match="levels has 3 steps"):
        replace(samples[0], levels=LEVELS[:3])


def test_numbers_that_are_not_finite_are_named_before_anything_is_learned(pipeline: Path) -> None:
    samples = sampled(Denoiser.from_pretrained(pipeline), 4, seed=0)
    trainer = trainer_of(pipeline, POLICY["ddpo"]())
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    bad = samples[3].old_log_probs
    assert bad is not None
    for field, place, value in (
        ("advantage", "", np.nan),
        ("old_log_probs", r"\[2\]", np.where(np.arange(STEPS) == 2, np.inf, bad)),
        ("next_latents", r"\[0\]\[0\]\[0\]\[0\]", np.full_like(samples[3].next_latents, np.nan)),
        ("conditions", r"\['x'\]\[1\]", {**samples[3].conditions, "x": np.array([0.0, -np.inf])}),
    ):
        broken: Any = replace(samples[3], **{field: value})
        with pytest.raises(
            BatchError,
            match=rf"^micro_batches\[1\]\[1\]\.{field}{place} is .*; expected a finite float32",
        ):
            trainer.train_step([samples[:2], [samples[2], broken]])
    assert trainer.step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())
