"""One step of an RLHF job: its models and their work."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import check_positive, check_share, refusal
from gcore_placement.workload.lengths import Lengths
from gcore_placement.workload.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The mean work of a step.

    Raises:
        PlacementError: a number is out of its bounds, or a judge has no lengths.
    """

    policy: ModelShape
    prompt_lengths: Lengths
    response_lengths: Lengths
    train_batch_size: int
    """Prompts that a step trains on."""
    n: int
    """Responses to each."""
    acceptance: float = 1.0
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
    compute_bytes: int = 2
    """Bytes of a number in matrix products, activations, keys and values, and engine weights: 2 is bfloat16. Trained
    parameters, gradients and moments are float32."""
    old_log_probs: bool = False
    """The policy scores all responses again before it trains; else the engine's log-probs serve."""

    def __post_init__(self) -> None:
        check_positive("train_batch_size", self.train_batch_size)
        check_positive("n", self.n)
        check_positive("compute_bytes", self.compute_bytes)
        check_share("acceptance", self.acceptance)
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
