"""Settings of generation."""

import math
from dataclasses import dataclass, field

from gcore_llm.engine_config import EngineConfig, SpeculativeConfig
from gcore_runs.errors import UserError, check_at_least


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Responses of several turns, in an environment or with tools."""

    environment: str = ""
    """PATH.py:function, which makes from a row an environment of one episode (gcore_rollout.Environment),
    such as a ToolEnvironment; it rewards turns, and the reward, if there is one, scores the last. Empty: one turn."""
    max_revisions: int = 0
    """In the place of an environment: so many times a response is handed back with its reward's feedback, such as a
    judge's verdict, for the policy to do better; the last one's score counts."""
    good_enough: float = 1.0
    """A response of this score is not handed back."""
    max_assistant_turns: int = 8
    """Most turns of the policy; all of them together have data.max-response-length tokens, with what it is told."""
    max_tokens_per_turn: int = 0
    """Most tokens of one turn; 0: what is left."""
    step_timeout_s: float = 60.0
    """For the environment to answer one turn."""

    def __post_init__(self) -> None:
        check_at_least("rollout.multi_turn.max_assistant_turns", self.max_assistant_turns, 1)
        check_at_least("rollout.multi_turn.max_tokens_per_turn", self.max_tokens_per_turn, 0)
        check_at_least("rollout.multi_turn.max_revisions", self.max_revisions, 0)
        if not math.isfinite(self.good_enough):
            raise UserError(f"rollout.multi_turn.good_enough is {self.good_enough}: a finite number is needed")
        if self.environment and self.max_revisions:
            raise UserError(
                f"rollout.multi_turn.environment is {self.environment!r} and rollout.multi_turn.max_revisions is "
                f"{self.max_revisions}: one of them is needed"
            )
        if not self.step_timeout_s > 0:
            raise UserError(f"rollout.multi_turn.step_timeout_s is {self.step_timeout_s}: above 0 is needed")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(EngineConfig):
    """Generation."""

    weights_dir: str = ""
    """Existing folder that this machine and the servers see under the same path: new weights go through it."""
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    n: int = 8
    """Responses a prompt: the size of a group; at least 2 where the responses of a group are compared."""
    temperature: float = 1.0
    """Divides the logits when sampling, and when the trainer scores."""
    max_num_seqs: int = 256
    """Most responses generated at once, by each replica."""
    partial_rollout: bool = False
    """Begin more prompts than are needed, stop when enough groups are complete, and go on with the others in the next
    step, under its weights: nobody waits for the longest responses."""
    over_sample_rate: float = 0.5
    """In partial rollout, how many more prompts are begun, as a share of those that are needed."""
    max_staleness: int = 8
    """Responses with a token by weights of more than so many steps before are made anew."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)

    def __post_init__(self) -> None:
        self.check_engine("rollout")
        if self.is_on_servers != bool(self.weights_dir):
            raise UserError(
                f"rollout.engine is {self.engine!r} and rollout.weights_dir is {self.weights_dir!r}: "
                "a folder is needed with vllm_server and sglang_server, none with other engines"
            )
        if self.speculative.num_speculative_tokens and not self.takes_speculation:
            raise UserError(
                f"rollout.speculative.num_speculative_tokens is {self.speculative.num_speculative_tokens} and "
                f"rollout.engine is {self.engine!r}: 'vllm' is needed; a server is told when it is started"
            )
        check_at_least("rollout.n", self.n, 1)
        check_at_least("rollout.max_staleness", self.max_staleness, 1)
        if not 0 <= self.over_sample_rate < math.inf:
            raise UserError(
                f"rollout.over_sample_rate is {self.over_sample_rate}: a finite number, 0 or more is needed"
            )
        if self.partial_rollout and (self.multi_turn.environment or self.multi_turn.max_revisions):
            raise UserError(
                "rollout.partial_rollout is true and rollout.multi_turn makes several turns: one of them is needed, "
                "for an environment cannot wait for the next step"
            )
        check_at_least("rollout.max_num_seqs", self.max_num_seqs, 1)
        if not self.temperature > 0:
            raise UserError(
                f"rollout.temperature is {self.temperature}: above 0 is needed, greedy samples never differ"
            )
