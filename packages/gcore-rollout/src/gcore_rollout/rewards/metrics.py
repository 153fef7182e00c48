"""What a batch of rewards adds up to."""

import math
from collections.abc import Iterable, Mapping

from gcore_rollout.rewards.reward import Scored
from gcore_rollout.rewards.runner import Failed


def part_means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """``reward/PART/mean`` of every part, over the completions that have it."""
    values: dict[str, list[float]] = {}
    for one in parts:
        for name, part in one.items():
            values.setdefault(name, []).append(part)
    return {f"reward/{name}/mean": math.fsum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


def reward_metrics(outcomes: Iterable[Scored | Failed]) -> dict[str, float]:
    """Means over completions: ``reward/mean``, those of `part_means`, and ``reward/failed_fraction``.

    Without outcomes the result is empty.
    """
    everything = list(outcomes)
    scored = [outcome for outcome in everything if isinstance(outcome, Scored)]
    if not everything:
        return {}
    mean = {"reward/mean": math.fsum(one.score for one in scored) / len(scored)} if scored else {}
    failed = {"reward/failed_fraction": (len(everything) - len(scored)) / len(everything)}
    return mean | part_means(one.parts for one in scored) | failed
