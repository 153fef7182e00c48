"""Settings of rewards, of their models and of a judge."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gcore_rollout import RewardConfigError, engine_names, image_reward_kind, reward_terms
from gcore_runs import Checked, Count, Fraction, NonNegative, UserError
from gcore_runs.settings.sections import JudgeOptions

DEMO_REWARDS = ("digit", "digit_judge", "colour")
"""Rewards of the embedded model's images."""


@dataclass(frozen=True, kw_only=True)
class DiffusionJudgeConfig(JudgeOptions, section="reward.judge"):
    """A vision-language model that judges images: its engine, how it is asked, and how its verdicts are read.

    Example:
        >>> judge = DiffusionJudgeConfig(max_num_seqs=16, max_response_length=32)
        >>> reward = RewardConfig(kind="judge", path="vision-language-model", judge=judge)
        >>> reward.judge_path
        'vision-language-model'
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        names = " or ".join(engine_names(lambda engine: engine.takes_images))
        self.require(
            "engine", self.kind.takes_images or self.kind.is_own, f"{names}, which take images"
        )


@dataclass(frozen=True, kw_only=True)
class NamedRewardConfig(Checked, section="reward.models"):
    """A reward under a name of its own, which reward.kind and reward.held_out may use.

    Example:
        >>> models = {"text": NamedRewardConfig(kind="ocr", path="reader")}
        >>> reward = RewardConfig(kind="0.8 * pick_score + 0.2 * text", path="clip", models=models)
        >>> reward.find_reward("text").path
        'reader'
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: str = ""
    """As reward.kind, without a sum; empty: the name."""
    path: str = ""
    """As reward.path."""
    head: str = ""
    """As reward.head."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Checked, section="reward"):
    """The reward that is trained on, and one that is only measured.

    Example:
        >>> reward = RewardConfig(kind="0.8 * pick_score + 0.2 * ocr", held_out="jpeg_compressibility", path="clip")
        >>> dict(reward.trained_weights)
        {'pick_score': 0.8, 'ocr': 0.2}
        >>> list(reward.measured_weights)
        ['jpeg_compressibility']
    """

    kind: str = ""
    """jpeg_compressibility, jpeg_incompressibility, clip, pick_score, hps, aesthetic, image_reward, ocr, geneval,
    judge, an http(s) URL, or PATH.py:function of (images [B, H, W, 3] uint8 or videos [B, F, H, W, 3], prompts, rows)
    that returns B numbers; with the embedded model also digit, digit_judge or colour. Or a weighted sum, such as
    0.8 * pick_score + 0.2 * ocr, whose terms are also metrics: of such kinds, or of names in reward.models."""
    held_out: str = ""
    """A reward as in reward.kind that is not trained on: if it falls while the other rises, the other is being
    hacked."""
    path: str = ""
    """A local Hugging Face folder: of a CLIP model, for clip, pick_score, hps and aesthetic; of the tokenizer, for
    image_reward; of a model that reads text in images, for ocr; of an object detector, for geneval; of a
    vision-language model, for judge."""
    head: str = ""
    """A file of weights: aesthetic's head as safetensors, ImageReward.pt, or HPS_v2.1_compressed.pt; for geneval the
    folder of a CLIP model, which names colours."""
    models: dict[str, NamedRewardConfig] = field(default_factory=dict[str, NamedRewardConfig])
    """Rewards by the names that they have in sums and in metrics, with a kind, a path and a head of their own:
    reward.models.NAME.path and so on."""
    text_key: str = ""
    """Column of the text that an image is to show, for ocr; empty: the first in double quotes in the prompt."""
    thresholds: tuple[Fraction, Fraction] = (0.3, 0.9)
    """Confidence of the objects that a detector finds, and of those to be counted, for geneval."""
    num_frames: Count = 8
    """Frames of a video, evenly spaced, whose mean score is the video's; a function gets the whole video."""
    jpeg_size: NonNegative = 0
    """Pixels that a side is resized to before it is compressed; 0: as it is."""
    judge: DiffusionJudgeConfig = field(default_factory=DiffusionJudgeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        rewards = self._all_rewards()
        for name in self.models:
            if not name.isidentifier():
                raise UserError(
                    f"reward.models has the name {name!r}; expected letters, digits and underscores"
                )
        judges = [name for name, reward in rewards.items() if reward.kind == "judge"]
        if len(judges) > 1:
            raise UserError(
                f"reward.kind and held_out have the judges {', '.join(judges)}; expected one at most"
            )
        if judges and not rewards[judges[0]].path:
            raise UserError(
                "reward.path is not set; expected a local folder of a vision-language model for judge"
            )

    @property
    def trained_weights(self) -> Mapping[str, float]:
        """Weights of the rewards that are trained on, by name."""
        return _terms("kind", self.kind)

    @property
    def measured_weights(self) -> Mapping[str, float]:
        """Weights of the rewards of held_out, by name."""
        return _terms("held_out", self.held_out)

    def find_reward(self, name: str) -> NamedRewardConfig:
        """Return the kind, path and head of a reward in a sum."""
        entry = self.models.get(name, NamedRewardConfig())
        return NamedRewardConfig(
            kind=entry.kind or name, path=entry.path or self.path, head=entry.head or self.head
        )

    def _all_rewards(self) -> dict[str, NamedRewardConfig]:
        """Return the rewards that are trained on or only measured, by name."""
        return {
            name: self.find_reward(name)
            for name in {**self.trained_weights, **self.measured_weights}
        }

    @property
    def judge_path(self) -> str:
        """The folder of the judge's model; empty: there is no judge."""
        for reward in self._all_rewards().values():
            if reward.kind == "judge":
                return reward.path
        return ""

    @property
    def is_judged(self) -> bool:
        """True if a judge scores images."""
        return bool(self.judge_path)

    @property
    def has_models(self) -> bool:
        """True if a model that is no judge scores images, in the process that has them."""
        registered = [image_reward_kind(reward.kind) for reward in self._all_rewards().values()]
        return any(entry is not None and entry.is_model for entry in registered)


def _terms(setting: str, text: str) -> Mapping[str, float]:
    if not text:
        return {}
    try:
        return reward_terms(text, setting=f"reward.{setting}")
    except RewardConfigError as error:
        raise UserError(str(error)) from None
