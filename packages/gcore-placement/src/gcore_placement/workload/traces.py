"""Traces: the work of each step of a run, recorded or made from a recipe, stored in one file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import (
    Above0,
    Amount,
    CheckedQuantities,
    Floats,
    Ints,
    Positive,
    check_above_0,
    check_amounts,
    check_lengths,
    check_positive,
    check_share,
)

FORMAT = 1
"""Format of the file; others are refused."""
_OF_RESPONSES = ("response_length", "judge_length")


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceWave:
    """Groups that are sampled together: generated, judged, and kept or dropped. Fields are those of `Trace`."""

    prompt_length: Floats
    response_length: Floats
    judge_length: Floats

    @property
    def judged_length(self) -> Floats:
        """Tokens that each judgement reads: [G, N]."""
        return self.prompt_length[:, None] + self.response_length


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """G groups of all steps, in order of step and wave: arrays are [G], or [G, N] of a group's N responses.

    A step's waves follow one another, as dynamic sampling draws again once it knows the scores; it trains on the groups
    that were accepted. Lengths are in tokens, at least 1. Steps rise from 0 without gaps, and waves in each step.

    Example:
        >>> trace = Trace(
        ...     name="run", step=np.array([0, 0]), wave=np.array([0, 1]), accepted=np.array([True, False]),
        ...     prompt_length=np.array([10.0, 20.0]), response_length=np.array([[30.0, 50.0], [8.0, 8.0]]),
        ...     judge_length=np.ones((2, 2)), payload_bytes=np.zeros(2))
        >>> trace.training_tokens(0)
        (100.0, 2650.0)
        >>> trace.save("trace.npz")
        >>> len(list(Trace.load("trace.npz").waves(0)))
        2
    """

    name: str
    step: NDArray[np.int64]
    wave: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    """Whether the step trains on the group."""
    prompt_length: Floats
    response_length: Floats
    """[G, N]"""
    judge_length: Floats
    """[G, N] of the judgement of each response."""
    payload_bytes: Floats
    """Bytes of a prompt in addition to its tokens, such as images and video."""

    def __post_init__(self) -> None:
        num_groups = self.response_length.shape[0]
        if self.response_length.ndim != 2 or not self.response_length.size:
            raise refusal(
                "response_length.shape", self.response_length.shape, "(groups, n), neither 0"
            )
        for field in fields(self):
            if field.name == "name":
                continue
            value = getattr(self, field.name)
            shape = self.response_length.shape if field.name in _OF_RESPONSES else (num_groups,)
            if value.shape != shape:
                raise refusal(f"{field.name}.shape", value.shape, str(shape))
        for name in ("prompt_length", "response_length", "judge_length"):
            shortest = float(check_lengths(name, getattr(self, name)).min())
            if shortest < 1:
                raise refusal(name, shortest, "at least 1 token each")
        check_amounts("payload_bytes", self.payload_bytes)
        step_change = np.diff(self.step)
        wave_change = np.diff(self.wave)
        same_step = (step_change == 0) & np.isin(wave_change, (0, 1))
        next_step = (step_change == 1) & (self.wave[1:] == 0)
        if self.step[0] or self.wave[0] or not (same_step | next_step).all():
            accepted = "both from 0, rising by 1, waves from 0 in each step"
            raise PlacementError(f"step and wave are out of order; expected {accepted}")

    @property
    def num_steps(self) -> int:
        return int(self.step[-1]) + 1

    @cached_property
    def _step_bounds(self) -> Ints:
        return np.searchsorted(self.step, np.arange(self.num_steps + 1))

    def step_slice(self, step: int) -> slice:
        """Return the slice of a step's groups."""
        return slice(int(self._step_bounds[step]), int(self._step_bounds[step + 1]))

    def waves(self, step: int) -> Iterator[TraceWave]:
        """Yield the waves of a step in order."""
        groups = self.step_slice(step)
        waves = self.wave[groups]
        bounds = groups.start + np.searchsorted(waves, np.arange(int(waves[-1]) + 2))
        for first, end in pairwise(bounds.tolist()):
            yield TraceWave(
                prompt_length=self.prompt_length[first:end],
                response_length=self.response_length[first:end],
                judge_length=self.judge_length[first:end],
            )

    def training_tokens(self, step: int) -> tuple[float, float]:
        """Return the tokens that the step trains on, a prompt with each response, and pairs of query and key tokens."""
        groups = self.step_slice(step)
        kept = self.accepted[groups]
        lengths = (self.prompt_length[groups, None] + self.response_length[groups])[kept]
        return float(lengths.sum()), float((lengths * (lengths + 1) / 2).sum())

    def save(self, path: str | Path) -> None:
        """Write one `.npz` file: the fields under their names, and `format`."""
        arrays = {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}
        np.savez_compressed(Path(path), allow_pickle=False, format=np.int64(FORMAT), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a file that `save` has written. Raises PlacementError if it is not one, or has another format."""
        try:
            with np.load(Path(path), allow_pickle=False) as stored:
                arrays: dict[str, Any] = dict(stored)
        except (BadZipFile, EOFError, ValueError, TypeError) as error:
            accepted = f"an .npz file written by Trace.save ({error})"
            raise PlacementError(f"{path} is not a trace; expected {accepted}") from error
        names = {field.name for field in fields(cls)}
        if set(arrays) != names | {"format"} or int(arrays["format"]) != FORMAT:
            raise PlacementError(
                f"{path} holds {sorted(arrays)}; expected a trace of format {FORMAT}"
            )
        del arrays["format"]
        arrays["name"] = str(arrays["name"])
        return cls(**arrays)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The record of one step of a run: numbers of prompts and waves, and lengths.

    `quantiles` are pairs of a probability and a length in tokens, both rising, such as ((0, 12), (0.5, 900), (1, 8192))
    for the shortest, the median and the longest. Between them the logarithm of lengths is interpolated.

    Example:
        >>> step = RecordedStep(
        ...     num_prompts=8, num_accepted=6, prompt_quantiles=((0.5, 200),),
        ...     response_quantiles=((0, 12), (0.5, 900), (1, 8192)), judge_quantiles=((0.5, 300),))
        >>> trace = recorded_trace("run", [step], n=4)
        >>> int(trace.response_length.min()), int(trace.response_length.max())
        (12, 8192)
        >>> int(trace.accepted.sum())
        6
    """

    num_prompts: int
    num_accepted: int
    prompt_quantiles: Sequence[tuple[float, float]]
    response_quantiles: Sequence[tuple[float, float]]
    judge_quantiles: Sequence[tuple[float, float]]
    payload_bytes: float = 0.0
    """Mean bytes of a prompt."""
    num_waves: int = 1
    """Waves of sampling: each has the prompts that the one before it did not keep, at least one."""


def recorded_trace(name: str, steps: Sequence[RecordedStep], *, n: int, seed: int = 0) -> Trace:
    """Return a trace with the steps, waves, sizes and lengths of a recorded run, of at least one step."""
    check_positive("n", n)
    if not steps:
        raise refusal("steps", 0, "at least 1")
    rng = np.random.default_rng(seed)
    rows: list[dict[str, NDArray[Any]]] = []
    for number, step in enumerate(steps):
        groups = step.num_prompts
        for count in ("num_prompts", "num_waves"):
            check_positive(f"steps[{number}].{count}", getattr(step, count))
        if not 0 <= step.num_accepted <= groups:
            raise refusal(f"steps[{number}].num_accepted", step.num_accepted, f"from 0 to {groups}")
        if step.num_waves > groups:
            raise refusal(
                f"steps[{number}].num_waves", step.num_waves, f"at most num_prompts ({groups})"
            )
        row = {
            "step": np.full(groups, number),
            "wave": _waves(step),
            "accepted": rng.permutation(groups) < step.num_accepted,
            "prompt_length": lengths_from_quantiles(step.prompt_quantiles, groups, rng),
            "response_length": lengths_from_quantiles(
                step.response_quantiles, groups * n, rng
            ).reshape(-1, n),
            "judge_length": lengths_from_quantiles(step.judge_quantiles, groups * n, rng).reshape(
                -1, n
            ),
            "payload_bytes": np.full(groups, step.payload_bytes),
        }
        rows.append(row)
    columns: dict[str, NDArray[Any]] = {}
    for key in rows[0]:
        columns[key] = np.concatenate([row[key] for row in rows])
    return Trace(name=name, **columns)


def _waves(step: RecordedStep) -> NDArray[np.int64]:
    """Return the wave of each prompt: [num_prompts]."""
    dropped = 1 - step.num_accepted / step.num_prompts
    sizes = np.maximum(dropped ** np.arange(step.num_waves), 1 / step.num_prompts)
    ends = np.cumsum(sizes) / sizes.sum() * step.num_prompts
    # Rounding leaves each wave one prompt at least.
    waves = np.arange(step.num_waves)
    first = np.maximum(np.round(np.concatenate([[0.0], ends[:-1]])), waves)
    first = np.minimum(first, step.num_prompts - step.num_waves + waves)
    return np.asarray(
        np.searchsorted(first, np.arange(step.num_prompts), side="right") - 1, dtype=np.int64
    )


def lengths_from_quantiles(quantiles: ArrayLike, count: int, rng: np.random.Generator) -> Floats:
    """Return [count] whole lengths, shuffled, with the given quantiles: one from each of `count` equal shares."""
    table = np.atleast_2d(np.asarray(quantiles, dtype=np.float64))
    if table.shape[1] != 2:
        raise refusal(
            "quantiles.shape", table.shape, "(number, 2): a probability and a length each"
        )
    probabilities, lengths = table.T
    rises = (np.diff(probabilities) > 0).all() and (np.diff(lengths) >= 0).all()
    inside = (
        probabilities[0] >= 0
        and probabilities[-1] <= 1
        and lengths[0] >= 1
        and lengths[-1] < np.inf
    )
    if not (rises and inside):
        accepted = "probabilities rising from 0 to 1, with rising lengths of at least 1"
        raise refusal("quantiles", table.tolist(), accepted)
    shares = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    sampled = np.exp(np.interp(shares, probabilities, np.log(lengths)))
    return np.asarray(rng.permutation(np.round(sampled)), dtype=np.float64)


_MAX_WAVES = 4
_MAX_LOG_NOISE = 10.0
"""Beyond which any median is outside the limits of lengths."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A value that goes evenly from `first` to `last` over a run; at once, in step `jump_step`, and maybe back; or back
    and forth, with a period.

    Example:
        >>> Drift(first=100, last=400).over(3).round().tolist()
        [100.0, 200.0, 400.0]
        >>> Drift(first=100, last=400, jump_step=1, back_step=3).over(5).tolist()
        [100, 400, 400, 100, 100]
        >>> Drift(first=100, last=400, period=4).over(4).tolist()
        [100, 100, 400, 400]
    """

    first: float
    last: float
    jump_step: int | None = None
    back_step: int | None = None
    """Step from which the value is `first` again after a jump."""
    period: int | None = None
    """Steps after which the value starts again from `first`, however many steps the run has; None: it has none."""
    shape: Literal["square", "sine", "pulse"] = "square"
    """Course over a period. square: `last` in its second half; sine: to `last` and back, by the logarithm; pulse:
    `last` in its last step."""

    def __post_init__(self) -> None:
        if self.shape not in ("square", "sine", "pulse"):
            raise refusal("shape", self.shape, "square, sine or pulse")
        if self.period is None:
            return
        check_positive("period", self.period)
        if self.period == 1 or self.jump_step is not None:
            raise refusal("period", self.period, "at least 2, and no jump_step")

    def over(self, num_steps: int) -> Floats:
        """Return the value of each step, which grows by equal ratios unless it jumps or has a period: [num_steps]."""
        step = np.arange(num_steps)
        if self.period is not None:
            phase = step % self.period / self.period
            if self.shape == "sine":
                return self.first * (self.last / self.first) ** (
                    (1 - np.cos(2 * np.pi * phase)) / 2
                )
            last_from = 0.5 if self.shape == "square" else 1 - 1 / self.period
            return np.where(phase >= last_from, self.last, self.first)
        if self.jump_step is None:
            return np.geomspace(self.first, self.last, num_steps)
        back_step = num_steps if self.back_step is None else self.back_step
        has_jumped = (step >= self.jump_step) & (step < back_step)
        return np.where(has_jumped, self.last, self.first)


def steady(value: float) -> Drift:
    """Return a value that does not change."""
    return Drift(first=value, last=value)


@dataclass(frozen=True, kw_only=True)
class TraceRecipe(CheckedQuantities):
    """Log-normal lengths with a part that a group's responses share, and waves of dynamic sampling.

    Example:
        >>> recipe = TraceRecipe(
        ...     name="longer responses", num_steps=20, train_batch_size=16, n=4, acceptance=Drift(first=1.0, last=1.0),
        ...     response_median=Drift(first=500, last=4000), judge_median=Drift(first=300, last=300))
        >>> trace = recipe.trace()
        >>> trace.response_length.shape
        (320, 4)
        >>> bool(trace.response_length[:16].mean() < trace.response_length[-16:].mean())
        True
    """

    name: str
    num_steps: Positive
    train_batch_size: Positive
    """Prompts that a step trains on."""
    n: Positive = 16
    """Responses to a prompt."""
    prompt_median: Above0 = 512
    prompt_sigma: Amount = 0.5
    max_prompt_length: Positive = 4096
    response_median: Drift
    """Half of the responses are longer."""
    response_sigma: Amount = 0.9
    """Standard deviation of the logarithm of lengths."""
    group_correlation: float = 0.3
    """Share of that variance that the prompt explains."""
    max_response_length: Positive = 16_384
    judge_median: Drift
    judge_sigma: Amount = 0.6
    max_judge_length: Positive = 8192
    acceptance: Drift
    """Share of the groups whose scores differ; others are dropped and sampled again, in up to four waves."""
    gen_batch_ratio: Above0 = 1.0
    """Prompts of a first wave, and most of any other, over `train_batch_size`: 3 in DAPO's recipe."""
    noise: Amount = 0.0
    """Standard deviation of the logarithm of a step's medians, in addition to the drift."""
    noise_freedom: float | None = None
    """Degrees of freedom of Student's t distribution of scale `noise`, with heavier tails the fewer they are; None:
    the noise is normal."""
    is_shuffled: bool = False
    """Steps come in an order drawn at random: of a square wave each then has one value or the other, as by a coin."""
    payload_median_bytes: Amount = 0.0
    """Median bytes of a prompt in addition to its tokens."""
    payload_sigma: Amount = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_0("response_median.first", self.response_median.first)
        check_above_0("response_median.last", self.response_median.last)
        check_above_0("judge_median.first", self.judge_median.first)
        check_above_0("judge_median.last", self.judge_median.last)
        check_share("acceptance.first", self.acceptance.first)
        check_share("acceptance.last", self.acceptance.last)
        if self.noise_freedom is not None:
            check_above_0("noise_freedom", self.noise_freedom)

    def trace(self) -> Trace:
        """Return the trace; it is the same at each call."""
        rng = np.random.default_rng(self.seed)
        size = (2, self.num_steps)
        freedom = self.noise_freedom
        deviation = rng.standard_normal(size) if freedom is None else rng.standard_t(freedom, size)
        noise = np.exp(np.clip(self.noise * deviation, -_MAX_LOG_NOISE, _MAX_LOG_NOISE))
        order = rng.permutation(self.num_steps) if self.is_shuffled else np.arange(self.num_steps)
        accepted: list[NDArray[np.bool_]] = []
        step_W: list[int] = []
        wave_W: list[int] = []
        for step, share in enumerate(self.acceptance.over(self.num_steps)[order].tolist()):
            waves = self._waves(share, rng)
            accepted.extend(waves)
            step_W.extend([step] * len(waves))
            wave_W.extend(range(len(waves)))
        groups_W = [len(wave) for wave in accepted]
        step_G = np.repeat(step_W, groups_W)
        num_groups = len(step_G)

        def draw_lengths(median: Floats, sigma: float, longest: int) -> Floats:
            response_share = np.sqrt(1 - self.group_correlation)
            group_share = np.sqrt(self.group_correlation)
            deviation = response_share * rng.standard_normal((num_groups, self.n))
            deviation = deviation + group_share * rng.standard_normal((num_groups, 1))
            return np.clip(np.round(median[step_G, None] * np.exp(sigma * deviation)), 1, longest)

        prompts = self.prompt_median * np.exp(self.prompt_sigma * rng.standard_normal(num_groups))
        payloads = self.payload_median_bytes * np.exp(
            self.payload_sigma * rng.standard_normal(num_groups)
        )
        responses = self.response_median.over(self.num_steps)[order] * noise[0]
        judgements = self.judge_median.over(self.num_steps)[order] * noise[1]
        return Trace(
            name=self.name,
            step=step_G,
            wave=np.repeat(wave_W, groups_W),
            accepted=np.concatenate(accepted),
            prompt_length=np.clip(np.round(prompts), 1, self.max_prompt_length),
            response_length=draw_lengths(responses, self.response_sigma, self.max_response_length),
            judge_length=draw_lengths(judgements, self.judge_sigma, self.max_judge_length),
            payload_bytes=np.round(payloads),
        )

    def _waves(self, acceptance: float, rng: np.random.Generator) -> list[NDArray[np.bool_]]:
        """Return, for each wave, which groups the step trains on: a batch in all, or less after the last wave.

        A wave has as many groups as are missing, over the acceptance so far, and at most `gen_batch_ratio` batches.
        """
        waves: list[NDArray[np.bool_]] = []
        max_size = max(1, round(self.gen_batch_ratio * self.train_batch_size))
        size = max_size
        num_sampled = 0
        num_accepted = 0
        missing = self.train_batch_size
        while missing > 0 and len(waves) < _MAX_WAVES:
            accepted = rng.random(size) < acceptance
            accepted &= np.cumsum(accepted) <= missing
            waves.append(accepted)
            num_sampled += size
            num_accepted += int(accepted.sum())
            missing = self.train_batch_size - num_accepted
            size = min(round(missing / max(num_accepted, 1) * num_sampled), max_size)
        return waves
