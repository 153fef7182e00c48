"""Flow-GRPO-Fast (arXiv 2505.05470) written directly on diffusers, in one process.

It has the model, prompts, reward, window of noisy steps, loss and optimizer of gcore-diffusion's embedded run, and no
evaluation, checkpoints or recovery.
"""

import time
from typing import Any

import numpy as np
import torch

from gcore_bench.harness.processes import Spec
from gcore_bench.harness.report import Figures
from gcore_diffusion.config import embedded
from gcore_diffusion.demo.digits import PROMPTS
from gcore_diffusion.demo.rewards import DigitReward
from gcore_rollout import load_pipeline
from gcore_runs import keep_free_memory

_RECIPE = embedded()
ROLLOUT, ACTOR = _RECIPE.rollout, _RECIPE.actor
NUM_INFERENCE_STEPS, WINDOW_SIZE, NOISE_LEVEL = ROLLOUT.num_inference_steps, ROLLOUT.window_size, ROLLOUT.noise_level
ADV_CLIP_MAX = _RECIPE.algorithm.adv_clip_max


def run(spec: Spec) -> list[Figures]:
    """Make all steps; return the seconds of each by stage."""
    options = spec.options
    # As gcore's processes do, to compare what else differs.
    keep_free_memory()
    torch.manual_seed(options["seed"])
    pipeline = load_pipeline(options["model"], dtype=torch.float32)
    loop = Loop(pipeline, prompts=options["prompts"], n=options["n"], seed=options["seed"])
    return [loop.step() for _ in range(options["steps"])]


Conditions = tuple[torch.Tensor, torch.Tensor]
NoisySteps = list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]
"""Index of each step, latents before and after it, log-probabilities."""


class Loop:
    """Model, optimizer and reward; the pipeline is a Stable Diffusion 3 of diffusers."""

    def __init__(self, pipeline: Any, *, prompts: int, n: int, seed: int) -> None:
        self._num_prompts, self._n = prompts, n
        self._pipeline = pipeline
        self.model = pipeline.transformer
        pipeline.scheduler.set_timesteps(NUM_INFERENCE_STEPS)
        self._timesteps: torch.Tensor = pipeline.scheduler.timesteps
        self.sigmas: torch.Tensor = pipeline.scheduler.sigmas
        self._reward = DigitReward()
        optim = ACTOR.optim
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay)
        self._rng = np.random.default_rng(seed)

    def step(self) -> Figures:
        """Make one step; return seconds by stage."""
        start_s = time.perf_counter()
        chosen = [PROMPTS[i] for i in self._rng.permutation(len(PROMPTS))[: self._num_prompts]]
        prompts = [prompt for prompt in chosen for _ in range(self._n)]
        with torch.no_grad():
            pixels, conditions, steps = self._sampled(prompts)
        sampled_s = time.perf_counter()
        scores = torch.from_numpy(self._reward(pixels, prompts, [{}] * len(prompts))).float()
        scored_s = time.perf_counter()
        groups = scores.view(self._num_prompts, self._n)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (scores.std() + 1e-4)).flatten()
        self._update(conditions, steps, advantages.clamp(-ADV_CLIP_MAX, ADV_CLIP_MAX))
        end_s = time.perf_counter()
        gen_s, reward_s, train_s = sampled_s - start_s, scored_s - sampled_s, end_s - scored_s
        return {"step": end_s - start_s, "gen": gen_s, "reward": reward_s, "train": train_s}

    def _sampled(self, prompts: list[str]) -> tuple[Any, Conditions, NoisySteps]:
        """Return pixels as uint8, [B, height, width, 3], and what they were made of."""
        # All images of a prompt have its embedding.
        text, _, pooled, _ = self._pipeline.encode_prompt(
            prompt=prompts[:: self._n],
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=1,
        )
        conditions = text.repeat_interleave(self._n, 0), pooled.repeat_interleave(self._n, 0)
        sizes = self.model.config
        latents = torch.randn(len(prompts), sizes.in_channels, sizes.sample_size, sizes.sample_size)
        # A window for each prompt would need a batch for each.
        first = int(self._rng.integers(NUM_INFERENCE_STEPS // 2 - WINDOW_SIZE + 1))
        steps: NoisySteps = []
        for i in range(NUM_INFERENCE_STEPS):
            velocity = self._velocity(latents, i, conditions)
            if not first <= i < first + WINDOW_SIZE:
                latents = latents + velocity * (self.sigmas[i + 1] - self.sigmas[i])
                continue
            mean, std = self.gaussian(velocity, latents, i)
            drawn = mean + std * torch.randn_like(mean)
            steps.append((i, latents, drawn, _log_prob(drawn, mean, std)))
            latents = drawn
        pixels = ((latents / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        return pixels, conditions, steps

    def _update(self, conditions: Conditions, steps: NoisySteps, advantages: torch.Tensor) -> None:
        low, high = 1 - ACTOR.loss.clip_ratio, 1 + ACTOR.loss.clip_ratio
        for indices in torch.randperm(len(advantages)).chunk(ACTOR.num_updates):
            self._optimizer.zero_grad()
            for rows in indices.split(ACTOR.micro_batch_size):
                own = conditions[0][rows], conditions[1][rows]
                for i, latents, drawn, old in steps:
                    mean, std = self.gaussian(self._velocity(latents[rows], i, own), latents[rows], i)
                    ratio = torch.exp(_log_prob(drawn[rows], mean, std) - old[rows])
                    losses = torch.maximum(-advantages[rows] * ratio, -advantages[rows] * ratio.clamp(low, high))
                    loss = losses.sum() / (len(indices) * WINDOW_SIZE)
                    torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()

    def _velocity(self, latents: torch.Tensor, i: int, conditions: Conditions) -> torch.Tensor:
        return self.model(
            hidden_states=latents,
            timestep=self._timesteps[i].expand(len(latents)),
            encoder_hidden_states=conditions[0],
            pooled_projections=conditions[1],
            return_dict=False,
        )[0]

    def gaussian(self, velocity: torch.Tensor, latents: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean, [B, ...], and standard deviation of the latents after a step (Flow-GRPO, eq. 9)."""
        sigma, after = self.sigmas[i], self.sigmas[i + 1]
        dt = after - sigma
        spread = NOISE_LEVEL * torch.sqrt(sigma / (1 - torch.where(sigma == 1, after, sigma)))
        mean = latents * (1 + spread**2 / (2 * sigma) * dt)
        mean = mean + velocity * (1 + spread**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, spread * torch.sqrt(-dt)


def _log_prob(drawn: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    density = -((drawn - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * np.log(2 * np.pi)
    return density.flatten(1).mean(1)
