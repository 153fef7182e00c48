"""Recipes of traces: lengths that grow, acceptance that falls, long tails, slow and fast judges, jumps."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import check_above_0, check_amounts, check_positive, check_share
from gcore_placement.workload.traces import Trace

_MAX_WAVES = 4


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A value that goes evenly from `first` to `last` over a run; or at once, in step `jump_step`, and maybe back."""

    first: float
    last: float
    jump_step: int | None = None
    back_step: int | None = None
    """Step from which the value is `first` again after a jump."""

    def over(self, num_steps: int) -> NDArray[np.float64]:
        """Return the value of each step, which grows by equal ratios unless it jumps: [num_steps]."""
        if self.jump_step is not None:
            step = np.arange(num_steps)
            has_jumped = (step >= self.jump_step) & (step < (num_steps if self.back_step is None else self.back_step))
            return np.where(has_jumped, self.last, self.first)
        return np.geomspace(self.first, self.last, num_steps)


def steady(value: float) -> Drift:
    """Return a value that does not change."""
    return Drift(first=value, last=value)


@dataclass(frozen=True, kw_only=True)
class TraceRecipe:
    """Log-normal lengths with a part that a group's responses share, and waves of dynamic sampling.

    Raises:
        PlacementError: a number is out of its bounds.
    """

    name: str
    num_steps: int
    train_batch_size: int
    """Prompts that a step trains on."""
    n: int = 16
    """Responses to a prompt."""
    prompt_median: float = 512
    prompt_sigma: float = 0.5
    max_prompt_length: int = 4096
    response_median: Drift
    """Half of the responses are longer."""
    response_sigma: float = 0.9
    """Standard deviation of the logarithm of lengths."""
    group_correlation: float = 0.3
    """Share of that variance that the prompt explains."""
    max_response_length: int = 16_384
    judge_median: Drift
    judge_sigma: float = 0.6
    max_judge_length: int = 8192
    acceptance: Drift
    """Share of the groups whose scores differ; others are dropped and sampled again, in up to four waves."""
    gen_batch_ratio: float = 1.0
    """Prompts of a first wave, and most of any other, over `train_batch_size`: 3 in DAPO's recipe."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's medians, in addition to the drift."""
    payload_median_bytes: float = 0.0
    """Median bytes of a prompt in addition to its tokens."""
    payload_sigma: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_steps",
            "train_batch_size",
            "n",
            "max_prompt_length",
            "max_response_length",
            "max_judge_length",
        ):
            check_positive(name, getattr(self, name))
        for name in ("prompt_sigma", "response_sigma", "judge_sigma", "noise", "payload_median_bytes", "payload_sigma"):
            check_amounts(name, getattr(self, name))
        check_above_0("prompt_median", self.prompt_median)
        check_above_0("gen_batch_ratio", self.gen_batch_ratio)
        for field in fields(self):
            drift = getattr(self, field.name)
            if isinstance(drift, Drift):
                check = check_share if field.name == "acceptance" else check_above_0
                check(f"{field.name}.first", drift.first)
                check(f"{field.name}.last", drift.last)

    def trace(self) -> Trace:
        """Return the trace; it is the same at each call."""
        rng = np.random.default_rng(self.seed)
        noise = np.exp(self.noise * rng.standard_normal((2, self.num_steps)))
        responses = self.response_median.over(self.num_steps) * noise[0]
        judges = self.judge_median.over(self.num_steps) * noise[1]
        acceptance = self.acceptance.over(self.num_steps)
        waves = [self._waves(float(share), rng) for share in acceptance]
        groups_W = np.array([len(wave) for step in waves for wave in step])
        steps_W = np.repeat(np.arange(self.num_steps), [len(step) for step in waves])
        step_G = np.repeat(steps_W, groups_W)
        wave_G = np.repeat(np.concatenate([np.arange(len(step)) for step in waves]), groups_W)
        num_groups = len(step_G)

        def drawn(
            median: NDArray[np.float64], sigma: float, shape: tuple[int, ...], longest: int
        ) -> NDArray[np.float64]:
            own, shared = np.sqrt(1 - self.group_correlation), np.sqrt(self.group_correlation)
            deviation = own * rng.standard_normal(shape) + shared * rng.standard_normal((shape[0], 1))
            return np.clip(np.round(median[step_G, None] * np.exp(sigma * deviation)), 1, longest)

        sizes = (num_groups, self.n)
        prompts = self.prompt_median * np.exp(self.prompt_sigma * rng.standard_normal(num_groups))
        payloads = self.payload_median_bytes * np.exp(self.payload_sigma * rng.standard_normal(num_groups))
        return Trace(
            name=self.name,
            step=step_G,
            wave=wave_G,
            accepted=np.concatenate([wave for step in waves for wave in step]),
            prompt_length=np.clip(np.round(prompts), 1, self.max_prompt_length),
            response_length=drawn(responses, self.response_sigma, sizes, self.max_response_length),
            judge_length=drawn(judges, self.judge_sigma, sizes, self.max_judge_length),
            payload_bytes=np.round(payloads),
        )

    def _waves(self, acceptance: float, rng: np.random.Generator) -> list[NDArray[np.bool_]]:
        """Return, for each wave, which groups the step trains on.

        A wave has what is missing still, over the acceptance so far, and `gen_batch_ratio` batches at most. More than
        a batch are left out of the training; where the last wave leaves it short, it is smaller.
        """
        waves: list[NDArray[np.bool_]] = []
        most = max(1, round(self.gen_batch_ratio * self.train_batch_size))
        missing, seen, kept = self.train_batch_size, 0, 0
        while missing > 0 and len(waves) < _MAX_WAVES:
            size = min(round(missing / max(kept, 1) * seen), most) if seen else most
            accepted = rng.random(size) < acceptance
            accepted &= np.cumsum(accepted) <= missing
            waves.append(accepted)
            seen, kept = seen + len(accepted), kept + int(accepted.sum())
            missing = self.train_batch_size - kept
        return waves
