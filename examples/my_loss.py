"""Train with a policy loss of your own.

``uv run python examples/my_loss.py`` runs the loss below in place of PPO's clip, on the embedded model and task, and
prints the accuracy before and after: about a minute on one core. On the command line, with any model:

    uv run gcore-llm train --actor.loss.loss-mode examples/my_loss.py:asymmetric
"""

import tempfile
from dataclasses import replace

import torch

from gcore_llm import embedded, train
from gcore_runs import Result
from gcore_trainer import PolicyLossConfig, PolicyTokens


def asymmetric(tokens: PolicyTokens, config: PolicyLossConfig) -> torch.Tensor:
    """Clip the ratio of what should become more likely, and weight what should become less likely by 0.5.

    ``-A min(r, 1 + clip_ratio_high)`` for advantages A > 0 and ``-0.5 A r`` for others: both [N], N tokens.
    """
    ratio, advantages = tokens.ratio, tokens.advantages
    better = -advantages * ratio.clamp(max=1 + config.clip_ratio_high)
    worse = -0.5 * advantages * ratio
    return torch.where(advantages > 0, better, worse)


def main(*, warmup_steps: int = 300, steps: int = 20) -> Result:
    """Train for a few steps in a folder that is removed afterwards."""
    recipe = embedded()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            recipe,
            runs_dir=folder,
            warmup=replace(recipe.warmup, max_steps=warmup_steps),
            actor=replace(recipe.actor, loss=PolicyLossConfig(loss_mode=f"{__file__}:asymmetric")),
            trainer=replace(recipe.trainer, total_training_steps=steps),
        )
        return train(config)


if __name__ == "__main__":
    result = main()
    for name in ("val/sampled/score/mean", "val/greedy/score/mean"):
        print(f"{name}: {result.before[name]:.2f} before, {result.after[name]:.2f} after")
