"""Check before a run that its sequences fit the model's positions."""

from pathlib import Path
from typing import Any

from gcore_llm.config import TrainConfig
from gcore_llm.data.prompts import PromptSets
from gcore_llm.demo.tiny_model import MAX_POSITION_EMBEDDINGS
from gcore_runs.errors import UserError


def longest_sequence(model: Path | None) -> int | None:
    """Return how many tokens a model takes, prompt and response together; None: any number.

    Beyond that, a model with learned positions has no embedding, and one with rotary positions was not trained.

    Args:
        model: its folder; None: the embedded model.
    """
    if model is None:
        return MAX_POSITION_EMBEDDINGS
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model).get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return max(limit, round(original * factor)) if original and factor else limit


def check_lengths(config: TrainConfig, prompts: PromptSets) -> None:
    """
    Raises:
        UserError: the longest prompt and the longest response together are more than the policy or the critic takes.
    """
    longest = max(len(prompt.token_ids) for prompt in (*prompts.train, *prompts.val))
    critic = config.critic.model if config.algorithm.estimator.needs_critic else ""
    for setting, model in (("model", config.model), ("critic.model", critic)):
        limit = longest_sequence(Path(model) if model else None) if model or setting == "model" else None
        if limit is not None and longest + config.data.max_response_length > limit:
            raise UserError(
                f"data.max_response_length is {config.data.max_response_length}; expected at most {limit - longest}: "
                f"the longest prompt has {longest} tokens and the model takes at most {limit} together ({setting} is "
                f"{model!r}, max_position_embeddings); a lower data.max_prompt_length leaves longer prompts out"
            )
