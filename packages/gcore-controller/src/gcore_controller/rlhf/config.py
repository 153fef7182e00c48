"""Settings of the RLHF loop, and the point that a run starts from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Schedule = Literal["sync", "one_step_off", "async"]

State = dict[str, Any]
"""A controller's state in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RLHFConfig:
    """Settings of the loop that do not depend on what is trained."""

    total_steps: int
    train_batch_size: int
    """Groups per step over all controllers."""
    test_freq: int
    """Steps between evaluations; the last step is evaluated, too."""
    schedule: Schedule = "sync"
    filter_groups: bool = False
    """Drop groups without a learning signal and sample other prompts in their place."""
    max_num_gen_batches: int = 1
    """Most waves of sampling per step, with ``filter_groups``."""
    partial_rollout: bool = False
    """Stop sampling when enough groups are complete, and continue the others in the next step."""
    over_sample_rate: float = 0.0
    """Additional prompts started with ``partial_rollout``, as a fraction of those needed."""
    max_staleness: int = 1
    """Oldest weights that a trained token may come from, in weight versions, where they may be older at all."""
    shuffle_seed: int = 0
    num_workers: int = 0
    """Threads that read prompts ahead."""
    max_failed_share: float = 1.0
    """Largest fraction of failed reward calls that a run tolerates."""

    @property
    def is_on_policy(self) -> bool:
        """True if every trained token must come from the present weights."""
        return self.schedule == "sync" and not self.partial_rollout

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the policy is evaluated after this step."""
        return step % self.test_freq == 0 or step == self.total_steps


class RunStart(Protocol):
    """The point that a run starts or resumes from."""

    @property
    def first_step(self) -> int:
        """Steps completed before."""
        ...

    @property
    def is_evaluated(self) -> bool:
        """True if the evaluation after these steps is recorded already, or none is due."""
        ...

    @property
    def controllers(self) -> Sequence[State] | None:
        """The controllers' states to resume from, by rank; None: the run starts from scratch."""
        ...

    @property
    def is_policy_behind(self) -> bool:
        """True if the engines lack the trained models' present weights."""
        ...
