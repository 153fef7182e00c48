"""Settings of the rewards of images."""

from dataclasses import dataclass, field
from typing import Literal

from gcore_rollout import EngineKind, RequestError, engine_kind, engine_names
from gcore_runs import Checked, Count, NonNegative, UserError
from gcore_runs.settings.judge_options import JudgeOptions


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(JudgeOptions):
    """A vision-language model that judges images: its engine, how it is asked, and how its verdicts are read."""

    section = "reward.judge"

    engine: str = "hf"
    """hf: transformers; vllm: vLLM."""
    num_processes: NonNegative = 0
    """Replicas, each a process of its own that is replaced if it dies; 0: one, in the main process, or on ray one."""
    max_num_seqs: Count = 64
    """Largest number of verdicts that an engine writes at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of its weights."""
    template: str = ""
    """File with the question: a text with {prompt}, and optionally columns of the row in braces; empty: how well the
    image shows the prompt, from 0 to 10."""
    temperature: float = 0.0
    """Temperature of its sampling; 0: greedy."""
    max_response_length: int = 256
    """Longest verdict in tokens."""
    unparsable_score: float = 0.0
    """Score of a verdict that cannot be read."""

    @property
    def kind(self) -> EngineKind:
        """The needs of the engine."""
        return engine_kind(self.engine)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            kind = self.kind
        except RequestError as error:
            raise UserError(f"{self.section}.{error}") from None
        if not (kind.takes_images or kind.is_own):
            names = " or ".join(engine_names(lambda kind: kind.takes_images))
            raise UserError(f"{self.section}.engine is {self.engine!r}; expected {names}, which take images")
        if kind.needs_own_process and not self.num_processes:
            raise UserError(
                f"{self.section}.num_processes is 0; expected 1 or more with {self.section}.engine {self.engine!r}"
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Checked):
    """The reward that is trained on, and one that is only measured."""

    section = "reward"

    kind: str = ""
    """jpeg_compressibility, jpeg_incompressibility, clip, pick_score, aesthetic, image_reward, judge, an http(s) URL,
    or PATH.py:function of (images [B, H, W, 3] uint8, prompts, rows) that returns B numbers; with the embedded model
    also digit or colour."""
    held_out: str = ""
    """A reward of the same kinds, except judge, that is not trained on: if it falls while the other rises, the other
    is being hacked."""
    path: str = ""
    """A local Hugging Face folder: of a CLIP model, for clip, pick_score and aesthetic; of the tokenizer, for
    image_reward; of a vision-language model, for judge."""
    head: str = ""
    """A file of weights: aesthetic's head as safetensors, or ImageReward.pt."""
    jpeg_size: NonNegative = 0
    """Pixels that a side is resized to before it is compressed; 0: as it is."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def is_judged(self) -> bool:
        """True if a judge scores the images."""
        return self.kind == "judge"

    @property
    def needs_embedded_model(self) -> bool:
        """True if the reward knows only the images of the embedded model."""
        return self.kind in ("", "digit", "colour")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out == "judge":
            raise UserError("reward.held_out is 'judge'; expected another kind, because the judge is reward.kind")
