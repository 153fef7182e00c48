"""Held-out evaluation: images sampled without noise, and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.roles import Roles
from gcore_diffusion.sampling.image_sampling import images, scored
from gcore_diffusion.sampling.prompts import Prompt
from gcore_rollout import ImageRequest, ImageSampling


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Images and scores of all held-out prompts, in their order."""

    prompts: list[str]
    """[P * n], each prompt n times."""
    images: NDArray[np.uint8]
    """[P * n, H, W, 3]."""
    scores: NDArray[np.float64]
    """[P * n], by the reward that is trained on."""
    held_out: NDArray[np.float64] | None
    """[P * n], by a reward that is not trained on."""
    accuracy: float | None = None
    """Fraction of images that a classifier recognizes as their prompts; None: there is no classifier."""

    def metrics(self) -> dict[str, float]:
        """Return the means by their names in metrics.jsonl."""
        found = {"val/score/mean": float(self.scores.mean())}
        if self.held_out is not None:
            found["val/held_out/mean"] = float(self.held_out.mean())
        if self.accuracy is not None:
            found["val/accuracy"] = self.accuracy
        return found


async def evaluate(ctx: Context[Roles], config: DiffusionConfig, prompts: Sequence[Prompt]) -> Evaluation:
    """Sample and score held-out images, divided among the controllers; the result is the same on each of them."""
    rollout, roles, rewards = config.rollout, ctx.roles, ctx.roles.rewards
    sampling = ImageSampling(
        num_inference_steps=rollout.eval_num_inference_steps or rollout.num_inference_steps,
        guidance_scale=rollout.eval_guidance_scale or rollout.guidance_scale,
        size=rollout.size if rollout.size != (0, 0) else None,
    )
    mine = list(range(ctx.rank, len(prompts), ctx.world_size))
    own: list[tuple[int, Any, list[float], list[float], list[bool]]] = []
    if mine:
        requests = [
            ImageRequest(request_id=f"val/{i}", prompt=prompts[i].text, sampling=sampling, n=rollout.eval_n, seed=i)
            for i in mine
        ]
        with ctx.timer.stage("gen"):
            samples = await images(roles.policy, requests)
        repeated = [prompts[i] for i in mine for _ in range(rollout.eval_n)]
        with ctx.timer.stage("reward"):
            scores = await scored(ctx, rewards.trained, samples, repeated)
            others = await scored(ctx, rewards.held_out, samples, repeated) if rewards.held_out is not None else []
        pixels = np.stack([s.image for s in samples])
        check = getattr(rewards.trained, "accuracy", None)
        right = check(pixels, [p.text for p in repeated]).tolist() if check is not None else []
        n = rollout.eval_n
        for place, i in enumerate(mine):
            part = slice(place * n, (place + 1) * n)
            own.append((i, pixels[part], scores[part], others[part], right[part]))
    everyones = sorted((entry for part in await ctx.group.all_gather(own) for entry in part), key=lambda e: e[0])
    held_out = [score for _, _, _, found, _ in everyones for score in found]
    is_right = [one for *_, found in everyones for one in found]
    return Evaluation(
        prompts=[prompts[i].text for i, *_ in everyones for _ in range(rollout.eval_n)],
        images=np.concatenate([found for _, found, *_ in everyones]),
        scores=np.array([score for _, _, found, *_ in everyones for score in found]),
        held_out=np.array(held_out) if held_out else None,
        accuracy=float(np.mean(is_right)) if is_right else None,
    )
