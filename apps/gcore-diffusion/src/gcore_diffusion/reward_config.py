"""Settings of what scores images."""

from dataclasses import dataclass, field
from typing import Literal

from gcore_rollout import Reduce
from gcore_runs.errors import UserError, check_at_least


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """How a vision-language model is asked for its verdict on an image, and read."""

    engine: Literal["hf", "vllm"] = "hf"
    """hf: transformers; vllm: vLLM."""
    num_processes: int = 0
    """Replicas, each a process of its own that is replaced if it dies; 0: one, in the main process, or on ray one."""
    max_num_seqs: int = 64
    """Most verdicts that an engine writes at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of its weights."""
    template: str = ""
    """File with the question: a text with {prompt}, and as it likes columns of the row in braces; empty: how well the
    image shows the prompt, from 0 to 10."""
    n: int = 1
    """Verdicts on each image."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: float = 0.0
    """Of its sampling; 0: greedy."""
    max_response_length: int = 256
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score; its last match in a verdict counts. Empty: "Score: 7"."""
    low: float = 0.0
    """The score that becomes 0 ..."""
    high: float = 10.0
    """... and the one that becomes 1."""
    unparsable_score: float = 0.0
    """Of a verdict without a score."""

    def __post_init__(self) -> None:
        for name in ("n", "max_response_length", "max_num_seqs"):
            check_at_least(f"reward.judge.{name}", getattr(self, name), 1)
        check_at_least("reward.judge.temperature", self.temperature, 0)
        if self.low == self.high:
            raise UserError(f"reward.judge.low and reward.judge.high are both {self.low}; expected two scores")
        check_at_least("reward.judge.num_processes", self.num_processes, 0)
        if self.engine == "vllm" and not self.num_processes:
            raise UserError("reward.judge.num_processes is 0 and reward.judge.engine is 'vllm': 1 or more is needed")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is trained on, and what is only looked at."""

    kind: str = ""
    """jpeg_compressibility, jpeg_incompressibility, clip, pick_score, aesthetic, image_reward, judge, an http(s) URL,
    or PATH.py:function of (images [B, H, W, 3] uint8, prompts, rows) that returns B numbers; with the embedded model
    also digit or colour."""
    held_out: str = ""
    """A reward of the same kinds, but judge, that is not trained on: where it falls while the other rises, that is
    being hacked."""
    path: str = ""
    """A local Hugging Face folder: of a CLIP model, for clip, pick_score and aesthetic; of the tokenizer, for
    image_reward; of a vision-language model, for judge."""
    head: str = ""
    """A file of weights: aesthetic's head as safetensors, or ImageReward.pt."""
    jpeg_size: int = 0
    """Pixels that a side is resized to before it is compressed; 0: as it is."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        check_at_least("reward.jpeg_size", self.jpeg_size, 0)
        if self.held_out == "judge":
            raise UserError("reward.held_out is 'judge': another kind is needed, the judge is reward.kind")
