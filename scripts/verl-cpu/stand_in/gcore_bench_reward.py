"""The rewards of gcore's bench as verl calls them, in an environment without gcore."""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import reasoning_gym


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, reward: str = "", **_: Any
) -> float:
    """Score a completion by ``reward``, PATH.py:function, or, if it is empty, by its task's own verifier.

    The verifier's full marks are 1 and all others 0, as in `gcore_rollout.ReasoningGymReward`.

    Args:
        ground_truth: the problem as reasoning-gym made it, in JSON.
    """
    del data_source, extra_info
    if reward:
        return _function(reward)("", solution_str, {})
    entry: dict[str, Any] = json.loads(ground_truth)
    return float(_verifier(entry["metadata"]["source_dataset"])(solution_str.strip(), entry) >= 1.0)


@cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.get_score_answer_fn(task)


@cache
def _function(reward: str) -> Callable[[str, str, dict[str, Any]], float]:
    path, _, name = reward.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
