"""Settings of generation."""

from dataclasses import dataclass, field

from gcore_llm.settings.engine_config import EngineConfig, SpeculativeConfig
from gcore_rollout import MultiTurnConfig
from gcore_runs import UserError, check_finite, check_lowest


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
        check_lowest("rollout", self, n=1, max_staleness=1, max_num_seqs=1)
        check_finite("rollout.over_sample_rate", self.over_sample_rate)
        if self.partial_rollout and self.multi_turn.is_used:
            raise UserError(
                "rollout.partial_rollout is true; expected false with several turns (rollout.multi_turn): an "
                "environment cannot wait for the next step"
            )
        if not self.temperature > 0:
            raise UserError(f"rollout.temperature is {self.temperature}; expected above 0: greedy samples never differ")
