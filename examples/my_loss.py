"""Train with a policy loss of your own.

``uv run python examples/my_loss.py`` trains the embedded model with the loss below in place of PPO's clip, and prints
its accuracy before and after: one or two minutes on one core. From the command line, with any settings:

    uv run gcore-llm train --actor.loss.loss-mode examples/my_loss.py:halved_negatives
"""

import tempfile
from dataclasses import replace

import torch

from gcore_llm import TrainConfig, embedded, train
from gcore_trainer import PolicyLossConfig, PolicyTokens


def halved_negatives(tokens: PolicyTokens, config: PolicyLossConfig) -> torch.Tensor:
    """Clip the ratio r of tokens with advantage A > 0, and learn from the others at half the rate.

    L = -A min(r, 1 + clip_ratio_high) if A > 0, else -A r / 2

    Returns:
        [N] the loss of every token; the run's ``loss_agg_mode`` aggregates them.
    """
    ratio, advantages = tokens.ratio, tokens.advantages
    good = -advantages * ratio.clamp(max=1 + config.clip_ratio_high)
    bad = -advantages * ratio / 2
    return torch.where(advantages > 0, good, bad)


def with_my_loss(config: TrainConfig) -> TrainConfig:
    """Return the settings with this loss. A loss is named, so that every process of a run finds it."""
    loss = replace(config.actor.loss, loss_mode=f"{__file__}:halved_negatives")
    return replace(config, actor=replace(config.actor, loss=loss))


def main() -> None:
    recipe = embedded()
    with tempfile.TemporaryDirectory() as folder:
        trainer = replace(recipe.trainer, total_training_steps=40)
        result = train(with_my_loss(replace(recipe, runs_dir=folder, trainer=trainer)))
    for name in ("val/greedy/score/mean", "val/sampled/score/mean"):
        print(f"{name}: {result.before[name]:.2f} before, {result.after[name]:.2f} after")


if __name__ == "__main__":
    main()
