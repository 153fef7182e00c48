"""The data of the simulated program: prompts, a tokenizer, and the cost of a token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_llm.data.prompts import PromptSets
from gcore_llm.learning.micro_batches import workload_of
from gcore_llm.simulate.config import LengthConfig, SimulateConfig
from gcore_placement import TransformerWorkload, log_normal, uniform
from gcore_rollout import Prompt
from gcore_runs.errors import UserError

_BUILT_IN = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152_064,
}
"""The shape of Qwen2.5-7B (arXiv 2412.15115, table 1, and its config.json)."""

_PROMPT_STREAM = 1
_NUM_PROMPTS = 10_000


@dataclass(frozen=True, kw_only=True)
class CoarseWorkload(TransformerWorkload):
    """The work of sequences whose entries stand for ``token_unit`` tokens each.

    For L entries the linear term is exact. The attention term has u^2 L (L + 1) / 2 pairs, u = token_unit, where the
    tokens have u L (u L + 1) / 2: more by a share of nearly 1 / L.
    """

    token_unit: int

    @property
    def flops_per_token(self) -> float:
        return super().flops_per_token * self.token_unit

    @property
    def flops_per_attended_pair(self) -> float:
        return super().flops_per_attended_pair * self.token_unit**2


def coarse_workload(config: SimulateConfig) -> CoarseWorkload:
    """Return the cost model of the config's model, in its units.

    Raises:
        UserError: the model folder has no config.json that transformers knows.
    """
    if not config.model:
        return CoarseWorkload(**_BUILT_IN, token_unit=config.token_unit)
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise UserError(f"model is {config.model!r}; expected a Hugging Face folder with config.json")
    try:
        shape = workload_of(folder)
    except (ValueError, OSError) as error:
        raise UserError(f"model is {config.model!r}; expected a config.json that loads ({error})") from None
    return CoarseWorkload(**vars(shape), token_unit=config.token_unit)


def weights_bytes(workload: CoarseWorkload) -> float:
    """Return the size in bfloat16 of all matrices, the head, and an embedding that is not tied to it."""
    # Forward and backward pass take 6 FLOPs for each weight that a token meets; the embedding is looked up.
    met = workload.flops_per_token / workload.token_unit / 6
    return 2 * (met + workload.hidden_size * workload.vocab_size)


def drawn_length(u: float, config: LengthConfig, *, unit: int) -> int:
    """Return the ``u`` quantile of the lengths in units of ``unit`` tokens, at least one."""
    return max(1, round(log_normal(u, median=config.median, sigma=config.sigma) / unit))


def make_prompts(config: SimulateConfig) -> PromptSets:
    """Return prompts of drawn lengths, each made of one token of its own."""
    longest = config.max_prompt_length // config.token_unit
    lengths = [
        min(
            longest, drawn_length(uniform(config.seed, _PROMPT_STREAM, i), config.prompt_length, unit=config.token_unit)
        )
        for i in range(max(_NUM_PROMPTS, config.batch_size))
    ]
    train = [Prompt(text="", token_ids=(i,) * size, row={}) for i, size in enumerate(lengths)]
    return PromptSets(train=train, val=[], num_too_long=0)


class SampleNames:
    """A tokenizer whose text is the number that all tokens of a sample are: see `sample_name`."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        """Return the sample's name."""
        assert skip_special_tokens
        return str(int(token_ids[0]))


_INDEX_BITS = 16
_GROUP_MASK = (1 << 47) - 1


def sample_name(request_seed: int, index: int) -> int:
    """Return the number that stands for every token of a sample; `group_and_index` decodes it."""
    return ((request_seed & _GROUP_MASK) << _INDEX_BITS) | index


def group_and_index(name: int) -> tuple[int, int]:
    """Return the key of a sample's group, and its index there."""
    return name >> _INDEX_BITS, name & ((1 << _INDEX_BITS) - 1)
