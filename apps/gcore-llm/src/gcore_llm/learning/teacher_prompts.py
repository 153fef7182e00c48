"""Prompts that teachers see in place of the policy's: with its row's solution, feedback or a better response."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from gcore_llm.config import TrainConfig
from gcore_llm.learning.config import OF_RESPONSES, template_fields
from gcore_llm.prompts import Problem, are_messages, longest_sequence, make_prompts
from gcore_rollout import Completion, Group, Prompt
from gcore_runs import UserError, model_folder
from gcore_trainer import Sample

_NUM_CHECKED = 1000


TaughtGroup = tuple[Group, list[Sample], list[Sample]]
"""A group after a prompt of teachers, its samples after that prompt, and the same after the policy's own."""


def count_teacher_tokens(config: TrainConfig) -> int:
    """Return the most tokens of prompt and response that fit the teachers and a micro-batch."""
    max_tokens = config.actor.ppo_max_token_len
    for name in config.distillation.teachers or [config.model]:
        limit = longest_sequence(model_folder(name) if name else None)
        max_tokens = min(max_tokens, limit or max_tokens)
    return max_tokens


def show_to_teachers(
    groups: Sequence[Group],
    samples: Sequence[list[Sample]],
    tokenizer: Any,
    config: TrainConfig,
    *,
    max_tokens: int,
) -> list[TaughtGroup]:
    """Return the responses that can be taught, after distillation.prompt: by groups with equal prompts.

    Without such a prompt they are the responses as they are. One that lacks a field of it is not taught, nor one of
    more than ``max_tokens`` with its prompt.
    """
    template = config.distillation.prompt
    if not template:
        return list(zip(groups, samples, samples, strict=True))
    taught: list[TaughtGroup] = []
    for group, group_samples in zip(groups, samples, strict=True):
        members: dict[tuple[int, ...], list[tuple[Completion, Sample]]] = {}
        for response, sample in zip(group.responses, group_samples, strict=True):
            value = _fill(template, group, response, tokenizer)
            if value is None:
                continue
            problem = Problem(value=value, row={}, where="distillation.prompt")
            [prompt] = make_prompts([problem], tokenizer, config.data)
            if len(prompt.token_ids) + response.token_ids.size <= max_tokens:
                members.setdefault(prompt.token_ids, []).append((response, sample))
        for token_ids, pairs in members.items():
            prompt_ids = np.array(token_ids, np.int64)
            responses = [response for response, _ in pairs]
            seen_group = replace(group, responses=responses, prompt_ids=prompt_ids)
            seen: list[Sample] = []
            for _, sample in pairs:
                seen_sample = Sample(
                    prompt_ids=prompt_ids,
                    response_ids=sample.response_ids,
                    response_mask=sample.response_mask,
                    kept_counts=sample.kept_counts,
                    kept_ids=sample.kept_ids,
                )
                seen.append(seen_sample)
            taught.append((seen_group, seen, [sample for _, sample in pairs]))
    return taught


def _fill(template: str, group: Group, response: Completion, tokenizer: Any) -> object:
    """Return the prompt as text, or as the messages of a column; None: the response lacks a field."""
    values: dict[str, Any] = {**group.columns, "feedback": response.feedback}
    best = max(group.responses, key=lambda other: other.score)
    if best.score > response.score:
        values["success"] = tokenizer.decode(best.token_ids, skip_special_tokens=True)
    texts: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    for name in template_fields(template):
        value = values.get(name)
        if are_messages(value):
            messages = value
            value = messages[-1]["content"]
        if not value:
            return None
        texts[name] = str(value)
    text = template.format_map(texts)
    if messages:
        return [*messages[:-1], {**messages[-1], "content": text}]
    return text


def check_columns(config: TrainConfig, prompts: Sequence[Prompt]) -> None:
    """Raise `UserError` for a field of distillation.prompt that none of the first rows has."""
    known = set(OF_RESPONSES)
    for prompt in islice(prompts, _NUM_CHECKED):
        known.update(prompt.row)
    for name in template_fields(config.distillation.prompt):
        if name not in known:
            expected = f"expected {', '.join(sorted(known))}"
            raise UserError(f"distillation.prompt has the field {{{name}}}; {expected}")
