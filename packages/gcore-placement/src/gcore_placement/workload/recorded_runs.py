"""Traces of runs that gcore-llm or a publication recorded, from the few numbers that they tell of a step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import PlacementError, check_above_0, check_share, refusal
from gcore_placement.workload.traces import RecordedStep, Trace, recorded_trace

JUDGE_SIGMA = 0.6
"""Of judgements, whose lengths no run records."""
_PROBABILITIES = np.concatenate([np.linspace(0.001, 0.99, 100), 1 - np.geomspace(0.009, 1e-6, 40)])

Quantiles = Sequence[tuple[float, float]]


def log_normal_quantiles(*, mean: float, longest: float, share_longest: float) -> Quantiles:
    """Log-normal lengths of this mean, of which a share is cut at the longest; see `RecordedStep`.

    Raises:
        PlacementError: the mean is below 1 or beyond the longest, or the share is not above 0 and at most 1.
    """
    check_share("share_longest", share_longest)
    if not 1 <= mean <= longest < np.inf:
        raise refusal("mean", mean, f"at least 1 and at most the longest ({longest})")
    normal = NormalDist()
    deviations = np.array([normal.inv_cdf(float(p)) for p in _PROBABILITIES])
    cut = normal.inv_cdf(1 - min(share_longest, 1 - 1e-9))
    weights = np.diff(np.concatenate([[0.0], (_PROBABILITIES[1:] + _PROBABILITIES[:-1]) / 2, [1.0]]))

    def lengths(sigma: float) -> NDArray[np.float64]:
        return np.clip(longest * np.exp(np.minimum(sigma * (deviations - cut), 0.0)), 1, longest)

    few, many = 0.0, 20.0
    for _ in range(60):
        middle = (few + many) / 2
        few, many = (middle, many) if weights @ lengths(middle) > mean else (few, middle)
    return list(zip(_PROBABILITIES.tolist(), lengths(few).tolist(), strict=True))


def run_trace(folder: str | Path, *, n: int, judge_median: float, max_judge_length: float, seed: int = 0) -> Trace:
    """The steps of a run of gcore-llm, from its `metrics.jsonl`.

    A step has its prompts, waves, acceptance, and responses of its mean, longest and cut share; prompts have its mean.
    A later wave has what the one before it did not keep. Judgements are not recorded: they are log-normal.

    Args:
        folder: of the run.
        n: responses to a prompt.
        judge_median: tokens of a judgement; half are longer.
        max_judge_length: most tokens of one.
        seed: of what the record does not tell.

    Raises:
        PlacementError: the folder is no such run, or `judge_median` is not above 0.
    """
    check_above_0("judge_median", judge_median)
    folder = Path(folder)
    try:
        complete = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
        rows = [json.loads(line) for line in complete.splitlines()]
    except (OSError, ValueError) as error:
        raise PlacementError(
            f"{str(folder)!r} is no folder of a gcore-llm run, with metrics.jsonl: {error!r}"
        ) from error
    sampled = [row for row in rows if "response_length/mean" in row]
    if not sampled:
        raise PlacementError(f"{str(folder)!r} has no step with responses in metrics.jsonl")
    judge = _cut_log_normal(max(1.0, min(judge_median, max_judge_length)), JUDGE_SIGMA, max_judge_length)
    return recorded_trace(folder.resolve().name, [_step(row, n, judge) for row in sampled], n=n, seed=seed)


def _step(row: Mapping[str, float], n: int, judge: Quantiles) -> RecordedStep:
    tokens = row["response_length/mean"] + row["prompt_length/mean"]
    num_responses = max(1, round(row["perf/total_num_tokens"] / tokens))
    num_prompts = max(1, round(num_responses / n))
    return RecordedStep(
        num_prompts=num_prompts,
        num_accepted=min(num_prompts, round(row["sampling/acceptance"] * num_prompts)),
        num_waves=int(row["sampling/waves"]),
        prompt_quantiles=((0.5, max(1.0, row["prompt_length/mean"])),),
        response_quantiles=log_normal_quantiles(
            mean=max(1.0, row["response_length/mean"]),
            longest=max(1.0, row["response_length/max"]),
            # The longest of as many stands for half of its share.
            share_longest=max(row["response_length/clip_ratio"], 0.5 / num_responses),
        ),
        judge_quantiles=judge,
    )


def _cut_log_normal(median: float, sigma: float, longest: float) -> Quantiles:
    normal = NormalDist()
    deviations = np.array([normal.inv_cdf(float(p)) for p in _PROBABILITIES])
    lengths = np.clip(median * np.exp(sigma * deviations), 1, longest)
    return list(zip(_PROBABILITIES.tolist(), lengths.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class PublishedCurve:
    """How long responses were over a run, as a publication shows it: coarse points, between which lines are drawn.

    Everything else is an assumption: prompts and judgements that stay, and no group that is dropped.
    """

    name: str
    source: str
    points: Sequence[tuple[float, float, float]]
    """Step, mean tokens of a response, and most that were allowed from there on."""
    sigma: float = 0.9
    """Of responses."""
    prompt_length: float = 300
    judge_median: float = 800
    max_judge_length: float = 8192

    def trace(self, *, num_steps: int, num_prompts: int, n: int = 16, seed: int = 0) -> Trace:
        """So many steps, evenly from the whole run."""
        steps, means, limits = np.array(self.points).T
        moments = np.linspace(steps[0], steps[-1], num_steps)
        judge = _cut_log_normal(self.judge_median, JUDGE_SIGMA, self.max_judge_length)
        recorded = [
            RecordedStep(
                num_prompts=num_prompts,
                num_accepted=num_prompts,
                prompt_quantiles=((0.5, self.prompt_length),),
                response_quantiles=self._responses(mean, limits[np.searchsorted(steps, moment, side="right") - 1]),
                judge_quantiles=judge,
            )
            for moment, mean in zip(moments, np.interp(moments, steps, means), strict=True)
        ]
        return recorded_trace(self.name, recorded, n=n, seed=seed)

    def _responses(self, mean: float, longest: float) -> Quantiles:
        return _cut_log_normal(mean * float(np.exp(-(self.sigma**2) / 2)), self.sigma, longest)
