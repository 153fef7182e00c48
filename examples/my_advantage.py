"""Train with an advantage estimator of your own.

``uv run python examples/my_advantage.py`` trains the embedded model with the estimator below in place of GRPO's, and
prints its accuracy before and after: one or two minutes on one core. From the command line, with any settings:

    uv run gcore-llm train --algorithm.adv-estimator examples/my_advantage.py:win_rate
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gcore_llm import TrainConfig, embedded, train
from gcore_trainer import ScoredGroup, advantage_estimator


# The decorator declares what the estimator needs; see it for a critic, a greedy response or whitened advantages.
@advantage_estimator(min_group_size=2)
def win_rate(group: ScoredGroup) -> Sequence[NDArray[np.floating]]:
    """Compare every response to a prompt with every other: only the order of scores counts, and not their scale.

    A_i = (number of responses that i beats - number that beat it) / (n - 1)
    """
    scores = group.scores
    wins = np.sign(scores[:, None] - scores).sum(axis=1)
    return group.at_every_token(wins / (len(scores) - 1))


def with_my_advantage(config: TrainConfig) -> TrainConfig:
    """Return the settings with this estimator. An estimator is named, so that every process of a run finds it."""
    return replace(
        config, algorithm=replace(config.algorithm, adv_estimator=f"{__file__}:win_rate")
    )


def main() -> None:
    recipe = embedded()
    with tempfile.TemporaryDirectory() as folder:
        trainer = replace(recipe.trainer, total_training_steps=40)
        result = train(with_my_advantage(replace(recipe, runs_dir=folder, trainer=trainer)))
    for name in ("val/greedy/score/mean", "val/sampled/score/mean"):
        print(f"{name}: {result.before[name]:.2f} before, {result.after[name]:.2f} after")


if __name__ == "__main__":
    main()
