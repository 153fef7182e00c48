"""What a batch of rewards adds up to."""

import math
from collections.abc import Iterable

from gcore_rollout.rewards.reward import Scored
from gcore_rollout.rewards.runner import Failed


def reward_metrics(outcomes: Iterable[Scored | Failed]) -> dict[str, float]:
    """Means over completions: ``reward/mean``, ``reward/PART/mean`` and ``reward/failed_fraction``.

    A part's mean is over the completions that have it. Without outcomes the result is empty.
    """
    values: dict[str, list[float]] = {}
    num_failed = num_all = 0
    for outcome in outcomes:
        num_all += 1
        if isinstance(outcome, Failed):
            num_failed += 1
            continue
        values.setdefault("reward/mean", []).append(outcome.score)
        for name, part in outcome.parts.items():
            values.setdefault(f"reward/{name}/mean", []).append(part)
    if not num_all:
        return {}
    means = {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}
    return means | {"reward/failed_fraction": num_failed / num_all}
