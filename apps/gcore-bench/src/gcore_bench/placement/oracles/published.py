"""A step of another system, as its report has it: what was run, and the seconds that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gcore_placement import TrainingLayout

Backend = Literal["torch", "megatron"]
Schedule = Literal["turns", "one step off", "stream", "stale stream"]
Stage = Literal["generation", "preparation", "training", "step"]


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A row of a report."""

    study: str
    """Its source."""
    program: str
    """Steps of a program on a device have the same constants, until a later study fits its own; a study has lengths of
    responses of its own where it fits them."""
    model: str
    """One of CONFIGS."""
    device: str
    devices_per_node: int = 8
    """Devices with links to each other."""
    engine: tuple[int, int]
    """Devices that generate, and those of each engine."""
    training: TrainingLayout
    schedule: Schedule
    """turns: all devices generate, then train. The others train on devices of their own: one step off, on responses
    of the step before; stream, on those of this step as they come, in four parts of which each has a quarter; stale
    stream: as stream, but sampling is never waited for, and responses go over to the next step."""
    prompts: int
    ppo_mini_batch_size: int
    """Prompts of an update."""
    n: int
    prompt_tokens: float
    response_tokens: float | None
    """Mean; None where the report has none."""
    most_response_tokens: int
    reference: bool = False
    old_log_probs: bool = True
    is_even: bool = True
    """Ranks have about the same tokens in each update; False: over a whole step only, and in an update each has the
    samples that it happens to have."""
    host_moves: int | None = None
    """Times in a step that trained states leave for the host and come back; None: once where roles take turns."""
    fits: tuple[str, ...] = ()
    """Names of the constants that are fitted to the study's steps that have any; the others are predicted. Fields of
    `Efficiency`, and response_tokens and sigma, the mean of responses and the deviation of their logarithms."""
    measured: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
    """Seconds."""
    tokens_per_s: float | None = None
    """Tokens of prompts and responses a second on each device, where the report has it, rounded by itself."""

    @property
    def release(self) -> str:
        """The system and its version, as the study names it."""
        return self.study.split(",")[0]

    @property
    def name(self) -> str:
        """The model, the devices and the schedule, as text."""
        engines, ranks = self.engine[0], self.training.num_ranks
        devices = f"{ranks}" if self.schedule == "turns" else f"{engines} + {ranks}"
        return f"{self.model} on {devices} {self.device}, {self.schedule}"


def layout_of(
    backend: Backend, tokens: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, ranks: int
) -> TrainingLayout:
    """Return the layout of so many ranks, with gradient checkpointing and so many tokens a micro-batch."""
    return TrainingLayout(
        backend=backend,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        data_parallel_size=ranks // (tp * cp * pp),
        gradient_checkpointing=True,
        ppo_max_token_len=tokens,
    )
