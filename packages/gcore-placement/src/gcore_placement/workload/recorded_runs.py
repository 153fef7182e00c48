"""Traces of runs that gcore-llm or a publication recorded, from a few numbers for each step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import Floats, check_above_0, normal_quantiles
from gcore_placement.workload.traces import RecordedStep, Trace, recorded_trace

_NUM_QUANTILES = 4096
_MAX_SIGMA = 3.0


@dataclass(frozen=True, kw_only=True)
class SampledLengths:
    """The response lengths of one step, in tokens.

    Example:
        >>> row = {"response_length/mean": 500.0, "response_length/max": 1900, "prompt_length/mean": 100.0,
        ...     "perf/total_num_tokens": 38400}
        >>> step = SampledLengths.of_metrics(row, n=8, limit=2048)
        >>> step.number
        64
        >>> median, sigma = SampledLengths.fit([step])
        >>> lengths = step.spread(sigma=sigma)
        >>> int(lengths.sum()), int(lengths.max())
        (32000, 1900)
    """

    number: int
    mean: float
    longest: int
    num_cut: int
    """Responses that were cut at ``limit``."""
    limit: int
    """Longest response that the run allows."""

    @classmethod
    def of_metrics(cls, row: Mapping[str, float], *, n: int, limit: int) -> Self:
        """Read a step's line of a gcore-llm run's `metrics.jsonl`; ``n`` is the number of responses to a prompt."""
        mean = row.get("response_length/mean", 0.0)
        number = 0
        if mean:
            num_responses = row["perf/total_num_tokens"] / (mean + row["prompt_length/mean"])
            number = round(num_responses / n) * n
        return cls(
            number=number,
            mean=mean,
            longest=max(1, int(row.get("response_length/max", 0))),
            num_cut=round(row.get("response_length/clip_ratio", 0.0) * number),
            limit=limit,
        )

    @staticmethod
    def fit(steps: "Sequence[SampledLengths]") -> tuple[float, float]:
        """Fit one log-normal to the lengths of all steps; return its median, and standard deviation of the logarithm.

        Its mean, cut at the limit, is theirs. Where a step cuts more than one response on average, so is the share that
        is cut; otherwise the mean of the steps' maxima is met. Raises PlacementError if none has responses.
        """
        steps = [step for step in steps if step.number]
        if not steps:
            raise refusal("steps", [], "at least one step with responses")
        number = np.array([step.number for step in steps])
        mean = float(np.average([step.mean for step in steps], weights=number))
        longest = float(np.mean([step.longest for step in steps]))
        num_cut = float(np.mean([step.num_cut for step in steps]))
        limit = steps[0].limit
        size = float(number.mean())
        u = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
        z = normal_quantiles(u)
        # The maximum of N draws has the quantiles of one draw, at the N-th root.
        z_top = normal_quantiles(u ** (1 / size))

        def fit_median(sigma: float) -> float:
            return _find_root(
                lambda m: float(_cut(m * np.exp(sigma * z), limit).mean()),
                mean,
                highest=float(limit),
            )

        def predict_cut_share(sigma: float) -> float:
            return float((fit_median(sigma) * np.exp(sigma * z) >= limit - 0.5).mean())

        def predict_longest(sigma: float) -> float:
            return float(_cut(fit_median(sigma) * np.exp(sigma * z_top), limit).mean())

        if num_cut > 1:
            sigma = _find_root(predict_cut_share, num_cut / size, highest=_MAX_SIGMA)
        else:
            sigma = _find_root(predict_longest, longest, highest=_MAX_SIGMA)
        return fit_median(sigma), sigma

    def spread(self, *, sigma: float) -> NDArray[np.int64]:
        """Return [number] ascending lengths with the step's sum and maximum, the others of a log-normal's quantiles."""
        num_top = min(self.number, max(1, self.num_cut))
        rest = self.number - num_top
        top = np.full(num_top, self.longest)
        if not rest:
            return top
        total = min(
            max(round(self.number * self.mean) - num_top * self.longest, rest), rest * self.longest
        )
        shape = np.exp(sigma * normal_quantiles((np.arange(rest) + 0.5) / self.number))
        scale = _find_root(
            lambda s: float(_cut(s * shape, self.longest).sum()),
            total,
            highest=self.longest / shape[0],
        )
        exact = _cut(scale * shape, self.longest)
        lengths = np.floor(exact).astype(np.int64)
        # The tokens that rounding down has removed go to the lengths that lost most.
        lost = np.argsort(lengths - exact, kind="stable")
        lengths[lost[: total - int(lengths.sum())]] += 1
        return np.concatenate([np.sort(lengths), top])


def _cut(lengths: Floats, limit: int) -> Floats:
    return np.clip(lengths, 1, limit)


def _find_root(function: Callable[[float], float], value: float, *, highest: float) -> float:
    """Return the argument from 0 to ``highest`` at which a non-decreasing function has a value, or the nearer end."""
    low = 0.0
    high = highest
    while high - low > 1e-9 * highest and not math.isclose(low, high):
        middle = (low + high) / 2
        if function(middle) < value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


JUDGE_SIGMA = 0.6
"""Standard deviation of the logarithm of judgement lengths, which no run records."""
_PUBLISHED_PROMPT_LENGTH = 300
_PUBLISHED_JUDGE_MEDIAN = 800
_PUBLISHED_JUDGE_LENGTH = 8192
_PROBABILITIES = np.concatenate([np.linspace(0.001, 0.99, 100), 1 - np.geomspace(0.009, 1e-6, 40)])

Quantiles = Sequence[tuple[float, float]]


def run_trace(
    folder: str | Path, *, n: int, judge_median: float, max_judge_length: float, seed: int = 0
) -> Trace:
    """Read the trace of a gcore-llm run from its `metrics.jsonl`; PlacementError if the folder is not a run.

    A step has its prompts, waves and acceptance, and responses whose sum, maximum and cut share are its own; prompts
    have its mean length. Judgements are not recorded: they are drawn from a log-normal distribution of this median, cut
    at `max_judge_length`.
    """
    check_above_0("judge_median", judge_median)
    folder = Path(folder)
    try:
        complete = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
        rows = [json.loads(line) for line in complete.splitlines()]
    except (OSError, ValueError) as error:
        raise PlacementError(
            f"folder is {str(folder)!r}; expected that of a gcore-llm run, with metrics.jsonl ({error!r})"
        ) from error
    sampled = [row for row in rows if "response_length/mean" in row]
    if not sampled:
        raise PlacementError(
            f"{folder}/metrics.jsonl has no step with responses; expected at least one"
        )
    judge = _cut_log_normal(
        max(1.0, min(judge_median, max_judge_length)), JUDGE_SIGMA, max_judge_length
    )
    limit = max(int(row["response_length/max"]) for row in sampled)
    lengths = [SampledLengths.of_metrics(row, n=n, limit=limit) for row in sampled]
    _, sigma = SampledLengths.fit(lengths)
    steps: list[RecordedStep] = []
    for row, step_sample in zip(sampled, lengths, strict=True):
        num_prompts = max(1, step_sample.number // n)
        responses = replace(step_sample, number=num_prompts * n).spread(sigma=sigma)
        steps.append(
            RecordedStep(
                num_prompts=num_prompts,
                num_accepted=min(num_prompts, round(row["sampling/acceptance"] * num_prompts)),
                num_waves=int(row["sampling/waves"]),
                prompt_quantiles=((0.5, max(1.0, row["prompt_length/mean"])),),
                response_quantiles=_quantiles(np.linspace(0, 1, len(responses)), responses),
                judge_quantiles=judge,
            )
        )
    return recorded_trace(folder.resolve().name, steps, n=n, seed=seed)


def _cut_log_normal(median: float, sigma: float, longest: float) -> Quantiles:
    lengths = np.clip(median * np.exp(sigma * normal_quantiles(_PROBABILITIES)), 1, longest)
    return _quantiles(_PROBABILITIES, lengths)


def _quantiles(probabilities: Floats, lengths: NDArray[Any]) -> Quantiles:
    return list(zip(probabilities.tolist(), lengths.tolist(), strict=True))


def published_trace(
    name: str,
    *,
    points: Sequence[tuple[float, float, float]],
    num_steps: int,
    num_prompts: int,
    seed: int,
    sigma: float = 0.9,
) -> Trace:
    """Return a trace of the length of responses as a publication shows it, its steps spread evenly over the run.

    Everything else is an assumption: groups of 16 responses of which none is dropped, and lengths of prompts and
    judgements that stay.

    Args:
        points: a few, joined by lines: step, mean tokens of a response, and most that were allowed from there on.
        sigma: standard deviation of the logarithm of response lengths.
    """
    steps, means, limits = np.array(points).T
    moments = np.linspace(steps[0], steps[-1], num_steps)
    limits = limits[np.searchsorted(steps, moments, side="right") - 1]
    medians = np.interp(moments, steps, means) * float(np.exp(-(sigma**2) / 2))
    judge = _cut_log_normal(_PUBLISHED_JUDGE_MEDIAN, JUDGE_SIGMA, _PUBLISHED_JUDGE_LENGTH)
    recorded: list[RecordedStep] = []
    for median, limit in zip(medians.tolist(), limits.tolist(), strict=True):
        step = RecordedStep(
            num_prompts=num_prompts,
            num_accepted=num_prompts,
            prompt_quantiles=((0.5, _PUBLISHED_PROMPT_LENGTH),),
            response_quantiles=_cut_log_normal(median, sigma, limit),
            judge_quantiles=judge,
        )
        recorded.append(step)
    return recorded_trace(name, recorded, n=16, seed=seed)
