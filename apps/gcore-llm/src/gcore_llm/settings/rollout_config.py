"""Settings of generation."""

import math
from dataclasses import dataclass, field

from gcore_llm.settings.engine_config import EngineConfig, SpeculativeConfig
from gcore_runs import UserError, check_at_least, check_finite


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Responses of several turns, in an environment or with tools."""

    environment: str = ""
    """PATH.py:function, which makes from a row an environment of one episode (gcore_rollout.Environment),
    such as a ToolEnvironment; it rewards turns, and the reward, if there is one, scores the last. Empty: one turn."""
    max_revisions: int = 0
    """Instead of an environment: how many times a response is returned with its reward's feedback, such as a judge's
    verdict, for the policy to revise; the last one's score counts."""
    good_enough: float = 1.0
    """A response of this score is not revised."""
    max_assistant_turns: int = 8
    """Most turns of the policy; together with the environment's answers they have data.max-response-length tokens."""
    max_tokens_per_turn: int = 0
    """Most tokens of one turn; 0: what is left."""
    step_timeout_s: float = 60.0
    """Seconds for the environment to answer one turn."""

    def __post_init__(self) -> None:
        check_at_least("rollout.multi_turn.max_assistant_turns", self.max_assistant_turns, 1)
        check_at_least("rollout.multi_turn.max_tokens_per_turn", self.max_tokens_per_turn, 0)
        check_at_least("rollout.multi_turn.max_revisions", self.max_revisions, 0)
        if not math.isfinite(self.good_enough):
            raise UserError(f"rollout.multi_turn.good_enough is {self.good_enough}; expected a finite number")
        if self.environment and self.max_revisions:
            raise UserError(
                f"rollout.multi_turn.max_revisions is {self.max_revisions}; expected 0 with "
                f"rollout.multi_turn.environment {self.environment!r}"
            )
        if not self.step_timeout_s > 0:
            raise UserError(f"rollout.multi_turn.step_timeout_s is {self.step_timeout_s}; expected above 0")


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
    """Start more prompts than are needed, stop when enough groups are complete, and continue the others in the next
    step, under its weights: no step waits for the longest responses."""
    over_sample_rate: float = 0.5
    """In partial rollout, how many more prompts are started, as a share of those that are needed."""
    max_staleness: int = 8
    """Responses with a token by weights of more than this many steps before are generated again from scratch."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)

    def __post_init__(self) -> None:
        self.check_engine("rollout")
        if self.is_on_servers != bool(self.weights_dir):
            raise UserError(
                f"rollout.weights_dir is {self.weights_dir!r}; expected a folder with rollout.engine vllm_server or "
                f"sglang_server, and none with others (now {self.engine!r})"
            )
        if self.speculative.num_speculative_tokens and not self.takes_speculation:
            raise UserError(
                f"rollout.engine is {self.engine!r}; expected 'vllm' with rollout.speculative.num_speculative_tokens "
                f"{self.speculative.num_speculative_tokens}; a server has an option of its own for it"
            )
        check_at_least("rollout.n", self.n, 1)
        check_at_least("rollout.max_staleness", self.max_staleness, 1)
        check_finite("rollout.over_sample_rate", self.over_sample_rate)
        if self.partial_rollout and (self.multi_turn.environment or self.multi_turn.max_revisions):
            raise UserError(
                "rollout.partial_rollout is true; expected false with several turns (rollout.multi_turn): an "
                "environment cannot wait for the next step"
            )
        check_at_least("rollout.max_num_seqs", self.max_num_seqs, 1)
        if not self.temperature > 0:
            raise UserError(f"rollout.temperature is {self.temperature}; expected above 0: greedy samples never differ")
