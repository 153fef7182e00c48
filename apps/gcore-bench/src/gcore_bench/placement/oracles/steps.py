"""Published steps of other systems: what was run, and the measured seconds.

`data/published_steps.csv` has one line per row of a report: all rows of GRPO in bfloat16 of NeMo-RL's performance
summaries, on policy ("turns") and one step off policy, and the steps of verl's studies of asynchronous training. Where
a table and a recipe of NeMo-RL disagree on a layout, the recipe counts (30B on 32 H100 in 0.4, and on 16 GB200 off
policy in 0.6). Prompts of NeMo-RL are taken to have 120 tokens, those of verl 150: no report has them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gcore_bench.placement.tables import read_json, read_rows
from gcore_placement import Device, ModelShape, TrainingLayout

Schedule = Literal["turns", "one step off", "stream", "stale stream"]
Stage = Literal["generation", "preparation", "training", "step"]
STAGES: tuple[Stage, ...] = ("generation", "preparation", "training", "step")


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A row of a report.

    Example:
        >>> steps = read_steps()
        >>> steps[0].name
        'Llama 3.1 8B on 16 H100, turns'
        >>> steps[0].measured_s
        {'step': 97.7}
    """

    release: str
    """The system and its version."""
    report: str
    """The file that has the row, with its date, and the recipe."""
    program: str
    """Steps of one program on one device share their constants, until a later study fits its own."""
    model: str
    device: str
    devices_per_node: int
    """Devices with fast links to each other."""
    schedule: Schedule
    """turns: all devices generate, then train. In the others ranks have devices of their own. one step off: they train
    on the responses of the step before; stream: on those of this step, in four parts as they arrive; stale stream: as
    stream, but sampling never waits, and unfinished responses continue in the next step."""
    engine_devices: int
    devices_per_engine: int
    ranks: int
    backend: Literal["torch", "megatron"]
    tp: int
    cp: int
    ep: int
    pp: int
    ppo_max_token_len: int
    prompts: int
    ppo_mini_batch_size: int
    n: int
    prompt_tokens: float
    response_tokens: float | None = None
    """Mean; None if the report has none."""
    max_response_tokens: int
    reference: bool
    old_log_probs: bool
    is_even: bool
    """False: a rank's samples of one update are drawn at random, so that updates wait for the slowest rank."""
    host_moves: int | None = None
    """Times per step that trained states go to the host and back; None: once if roles take turns."""
    fits: str = ""
    """Names of the constants that are fitted to this row: fields of `Efficiency`, response_tokens (the mean) and sigma
    (the deviation of the logarithms of response lengths). Rows without one are held out."""
    generation_s: float | None = None
    preparation_s: float | None = None
    training_s: float | None = None
    step_s: float
    tokens_per_s: float | None = None
    """Tokens of prompts and responses per second and device, if the report has them."""

    @property
    def study(self) -> str:
        """The rows of a study follow each other, and its constants are fitted together."""
        return f"{self.release}, {self.report}, {self.device}"

    @property
    def name(self) -> str:
        """The model, the devices and the schedule."""
        if self.schedule == "turns":
            return f"{self.model} on {self.ranks} {self.device}, turns"
        return (
            f"{self.model} on {self.engine_devices} + {self.ranks} {self.device}, {self.schedule}"
        )

    @property
    def measured_s(self) -> dict[Stage, float]:
        """Seconds of the stages that the report has, and of the whole step."""
        seconds: dict[Stage, float] = {}
        for stage in STAGES:
            value = getattr(self, f"{stage}_s")
            if value is not None:
                seconds[stage] = value
        return seconds

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return ModelShape.from_config(read_json("models.json")[self.model])

    @cached_property
    def hardware(self) -> Device:
        """The data sheet of the device."""
        return Device.named(self.device)

    @property
    def layout(self) -> TrainingLayout:
        """The layout of the training ranks."""
        return TrainingLayout(
            backend=self.backend,
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            data_parallel_size=self.ranks // (self.tp * self.cp * self.pp),
            gradient_checkpointing=True,
            ppo_max_token_len=self.ppo_max_token_len,
        )


def read_steps() -> list[PublishedStep]:
    """Return all published steps."""
    return [PublishedStep(**row) for row in read_rows("published_steps.csv")]
