"""One step of an RLHF job: its models, and the lengths of prompts and responses as distributions."""

from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import Checked, Positive, Share, check_above_0, check_amount_list, check_amounts, refusal
from gcore_placement.workload.transformer import ModelShape

_EDGES = np.concatenate([np.linspace(0, 1, 513)[:-1], 1 - 2.0 ** -np.arange(10, 42), [1.0]])
"""Edges of the probabilities that the lengths of a law stand for, finer and finer in the long tail."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lengths:
    """A distribution over tokens, as rising values and their weights; use `log_normal` or `recorded`."""

    values: NDArray[np.float64]
    """[num_values], rising."""
    edges: NDArray[np.float64]
    """[num_values + 1]: value i stands for probabilities from edge i to edge i + 1."""

    @classmethod
    def log_normal(cls, *, median: float, sigma: float, longest: float) -> Self:
        """Return log-normal lengths, cut at `longest`; `sigma` is the standard deviation of their logarithm.

        Raises:
            PlacementError: median or longest is not above 0, sigma is negative, or the median is beyond the longest.
        """
        check_above_0("median", median)
        check_above_0("longest", longest)
        check_amounts("sigma", sigma)
        if median > longest:
            raise refusal("median", median, f"at most longest ({longest})")
        with np.errstate(over="ignore"):  # infinite ones are cut too
            values = median * np.exp(sigma * _deviations())
        return cls(values=np.clip(values, 1, longest), edges=_EDGES)

    @classmethod
    def recorded(cls, lengths: ArrayLike) -> Self:
        """Return the distribution of recorded lengths, at least one.

        Raises:
            PlacementError: there is none, or one is negative or not finite.
        """
        values = np.sort(check_amount_list("lengths", lengths))
        if not values.size:
            raise refusal("lengths", [], "at least one length")
        return cls(values=values, edges=np.linspace(0, 1, values.size + 1))

    def __repr__(self) -> str:
        return f"Lengths(mean={self.mean:.1f}, longest={self.longest:.0f})"

    @property
    def weights(self) -> NDArray[np.float64]:
        """[num_values], of sum 1."""
        return np.diff(self.edges)

    @property
    def mean(self) -> float:
        return float(self.weights @ self.values)

    @property
    def mean_square(self) -> float:
        return float(self.weights @ self.values**2)

    @property
    def longest(self) -> float:
        return float(self.values[-1])

    def expected_longest(self, count: float) -> float:
        """Return the mean of the longest of ``count`` draws."""
        return float(self.values @ np.diff(self.edges ** max(1.0, count)))

    def cut(self, longest: float) -> "Lengths":
        """Return the lengths cut at `longest`."""
        return Lengths(values=np.minimum(self.values, longest), edges=self.edges)

    def remaining(self) -> "Lengths":
        """Return the remaining lengths of sequences at a random moment of steady work.

        Their density is (1 - F) / mean (the renewal equation's residual life). Only its values' grid is coarser.
        """
        rising = np.concatenate([[0.0], self.values])
        alive = 1 - self.edges[:-1]
        cumulated = np.concatenate([[0.0], np.cumsum(np.diff(rising) * alive)])
        middles = (_EDGES[1:] + _EDGES[:-1]) / 2
        return Lengths(values=np.interp(middles, cumulated / cumulated[-1], rising), edges=_EDGES)

    def most_alive(self, offset: float) -> float:
        """Return the most tokens held per sequence if all start together and leave as they end; offset: of prompts."""
        alive = 1 - self.edges[:-1]
        return float(np.max(alive * (offset + self.values)))


@cache
def _deviations() -> NDArray[np.float64]:
    """Return the standard normal quantiles at the middles between `_EDGES`."""
    return normal_quantiles((_EDGES[1:] + _EDGES[:-1]) / 2)


def normal_quantiles(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles of a standard normal variable, of the shape of the probabilities."""
    return np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])(probabilities)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job(Checked):
    """The mean work of a step. Raises PlacementError where a number is out of its bounds, or a judge has no lengths."""

    policy: ModelShape
    prompt_lengths: Lengths
    response_lengths: Lengths
    train_batch_size: Positive
    """Prompts that a step trains on."""
    n: Positive
    """Responses to each."""
    acceptance: Share = 1.0
    """Share of prompts whose responses do not all score alike; the others are sampled again (dynamic sampling)."""
    judge: ModelShape | None = None
    """A generative reward model, which reads the prompt and the response and writes a judgement; None: scores are made
    elsewhere, at once."""
    judge_lengths: Lengths | None = None
    """Lengths of judgements."""
    reference: bool = False
    """A frozen copy of the policy scores all responses (KL)."""
    critic: ModelShape | None = None
    """A value model that is trained as the policy is."""
    compute_bytes: Positive = 2
    """Bytes of a number in matrix products, activations, keys and values, and engine weights: 2 is bfloat16. Trained
    parameters, gradients and moments are float32."""
    old_log_probs: bool = False
    """The policy scores all responses again before it trains; else the engine's log-probs serve."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.judge is None) != (self.judge_lengths is None):
            raise refusal("judge_lengths", self.judge_lengths, "given with a judge, and only then")

    @property
    def trained(self) -> list[ModelShape]:
        """The policy, and the critic where there is one."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def num_forward_passes(self) -> int:
        """Passes that only score, in preparation."""
        return int(self.reference) + int(self.old_log_probs) + int(self.critic is not None)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return int(np.ceil(self.prompt_lengths.longest + self.response_lengths.longest))

    @cached_property
    def wave_prompts(self) -> NDArray[np.float64]:
        """Prompts of each wave of sampling, [num_waves].

        The first wave is sized by the acceptance rate. Where that is below 1, it falls short as often as not, by about
        the standard deviation of how many are accepted, and a second wave makes up for it.
        """
        total = self.train_batch_size / self.acceptance
        short = min(float(np.sqrt(self.train_batch_size * (1 - self.acceptance))) / self.acceptance, total)
        return np.array([total - short / 2, short] if short else [total])

    @cached_property
    def wave_chances(self) -> NDArray[np.float64]:
        """Share of the steps that have the wave, [num_waves]."""
        return np.array([1.0, 0.5])[: self.wave_prompts.size]

    @cached_property
    def judge_prompt_lengths(self) -> Lengths | None:
        """Lengths that the judge reads: the mean prompt and a response."""
        if self.judge is None:
            return None
        return Lengths(
            values=self.response_lengths.values + self.prompt_lengths.mean, edges=self.response_lengths.edges
        )

    @cached_property
    def training_tokens(self) -> float:
        """Tokens that a step trains on, a group's prompt computed once."""
        return self.train_batch_size * (self.prompt_lengths.mean + self.n * self.response_lengths.mean)

    @cached_property
    def training_pairs(self) -> float:
        """Pairs of a query token and a key token it attends to; see `TransformerWorkload.group_flops`."""
        prompts, responses = self.prompt_lengths, self.response_lengths
        in_prompt = (prompts.mean_square + prompts.mean) / 2
        in_response = prompts.mean * responses.mean + (responses.mean_square + responses.mean) / 2
        return self.train_batch_size * (in_prompt + self.n * in_response)
