"""Flow-GRPO-Fast (arXiv 2505.05470) written straight on diffusers, in one process.

The same model, prompts, reward, window of noisy steps, loss and optimizer as gcore-diffusion's embedded run; nothing
else: no evaluation, no checkpoints, no recovery.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_diffusion.demo.digits import PROMPTS, DigitReward
from gcore_diffusion.recipes import embedded
from gcore_rollout import load_pipeline

_RECIPE = embedded()
NUM_INFERENCE_STEPS = _RECIPE.rollout.num_inference_steps
WINDOW_SIZE = _RECIPE.rollout.window_size
NOISE_LEVEL = _RECIPE.rollout.noise_level
CLIP_RATIO = _RECIPE.actor.loss.clip_ratio
NUM_UPDATES = _RECIPE.actor.num_updates
MICRO_BATCH_SIZE = _RECIPE.actor.micro_batch_size
ADV_CLIP_MAX = _RECIPE.algorithm.adv_clip_max


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the process is to do."""

    model: str
    prompts: int
    n: int
    steps: int
    threads: int
    seed: int


def main() -> None:
    """Make the steps of ``argv[1]``; seconds of each, by stage, go to the file ``argv[2]``."""
    spec = Spec(**json.loads(sys.argv[1]))
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    pipeline: Any = load_pipeline(spec.model, dtype=torch.float32)
    loop = Loop(pipeline, spec)
    Path(sys.argv[2]).write_text(json.dumps([loop.step() for _ in range(spec.steps)]))


@dataclass(frozen=True, kw_only=True)
class _Images:
    """A batch and the noisy steps that it was made by."""

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    told: tuple[torch.Tensor, torch.Tensor]
    steps: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]
    """Number of the step, latents before and behind it, log-probabilities."""


class Loop:
    """Model, optimizer and reward; see `step`.

    Args:
        pipeline: a Stable Diffusion 3 of diffusers.
        spec: batch and seed.
    """

    def __init__(self, pipeline: Any, spec: Spec) -> None:
        self._spec = spec
        self._pipeline = pipeline
        self.model = pipeline.transformer
        pipeline.scheduler.set_timesteps(NUM_INFERENCE_STEPS)
        self._timesteps: torch.Tensor = pipeline.scheduler.timesteps
        self.sigmas: torch.Tensor = pipeline.scheduler.sigmas
        self._reward = DigitReward()
        optim = _RECIPE.actor.optim
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay)
        self._rng = np.random.default_rng(spec.seed)

    def step(self) -> dict[str, float]:
        """One step; seconds by stage."""
        spec, began_s = self._spec, time.perf_counter()
        chosen = [PROMPTS[i] for i in self._rng.permutation(len(PROMPTS))[: spec.prompts]]
        prompts = [prompt for prompt in chosen for _ in range(spec.n)]
        with torch.no_grad():
            images = self._sampled(prompts)
        sampled_s = time.perf_counter()
        scores = torch.from_numpy(self._reward(images.pixels, prompts, [{}] * len(prompts))).float()
        scored_s = time.perf_counter()
        groups = scores.view(spec.prompts, spec.n)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (scores.std() + 1e-4)).flatten()
        self._update(images, advantages.clamp(-ADV_CLIP_MAX, ADV_CLIP_MAX))
        ended_s = time.perf_counter()
        return {
            "step": ended_s - began_s,
            "gen": sampled_s - began_s,
            "reward": scored_s - sampled_s,
            "train": ended_s - scored_s,
        }

    def _sampled(self, prompts: list[str]) -> _Images:
        # A prompt's embedding is that of all its images.
        told, _, pooled, _ = self._pipeline.encode_prompt(
            prompt=prompts[:: self._spec.n],
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=1,
        )
        told, pooled = (tensor.repeat_interleave(self._spec.n, 0) for tensor in (told, pooled))
        config = self.model.config
        latents = torch.randn(len(prompts), config.in_channels, config.sample_size, config.sample_size)
        # A window for each prompt would need a batch for each.
        first = int(self._rng.integers(NUM_INFERENCE_STEPS // 2 - WINDOW_SIZE + 1))
        steps: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for i in range(NUM_INFERENCE_STEPS):
            velocity = self._velocity(latents, i, (told, pooled))
            if not first <= i < first + WINDOW_SIZE:
                latents = latents + velocity * (self.sigmas[i + 1] - self.sigmas[i])
                continue
            mean, std = self.gaussian(velocity, latents, i)
            drawn = mean + std * torch.randn_like(mean)
            steps.append((i, latents, drawn, _log_prob(drawn, mean, std)))
            latents = drawn
        pixels = ((latents / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        return _Images(pixels=pixels, told=(told, pooled), steps=steps)

    def _update(self, images: _Images, advantages: torch.Tensor) -> None:
        for share in torch.randperm(len(advantages)).chunk(NUM_UPDATES):
            self._optimizer.zero_grad()
            for rows in share.split(MICRO_BATCH_SIZE):
                told = images.told[0][rows], images.told[1][rows]
                for i, latents, drawn, old in images.steps:
                    mean, std = self.gaussian(self._velocity(latents[rows], i, told), latents[rows], i)
                    ratio = torch.exp(_log_prob(drawn[rows], mean, std) - old[rows])
                    gained = -advantages[rows] * ratio
                    clipped = -advantages[rows] * ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
                    loss = torch.maximum(gained, clipped).sum() / (len(share) * WINDOW_SIZE)
                    torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()

    def _velocity(self, latents: torch.Tensor, i: int, told: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.model(
            hidden_states=latents,
            timestep=self._timesteps[i].expand(len(latents)),
            encoder_hidden_states=told[0],
            pooled_projections=told[1],
            return_dict=False,
        )[0]

    def gaussian(self, velocity: torch.Tensor, latents: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [B, ...] and standard deviation of the latents behind a step (Flow-GRPO, eq. 9)."""
        sigma, after = self.sigmas[i], self.sigmas[i + 1]
        dt = after - sigma
        spread = NOISE_LEVEL * torch.sqrt(sigma / (1 - torch.where(sigma == 1, after, sigma)))
        mean = latents * (1 + spread**2 / (2 * sigma) * dt)
        mean = mean + velocity * (1 + spread**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, spread * torch.sqrt(-dt)


def _log_prob(drawn: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    density = -((drawn - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * np.log(2 * np.pi)
    return density.flatten(1).mean(1)


if __name__ == "__main__":
    main()
