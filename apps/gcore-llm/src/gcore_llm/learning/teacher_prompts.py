"""Prompts that teachers see in place of the policy's: with its row's solution, feedback or a better response."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from gcore_llm.config import TrainConfig
from gcore_llm.prompts import Problem, are_messages, longest_sequence, make_prompts
from gcore_llm.sections import DataConfig, template_fields
from gcore_rollout import Completion, Group, Prompt
from gcore_runs import UserError, model_folder
from gcore_trainer import Sample

_NUM_CHECKED = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class TaughtResponses:
    """Responses as teachers see them, and as the policy wrote them."""

    groups: list[Group] = field(default_factory=list[Group])
    seen: list[list[Sample]] = field(default_factory=list[list[Sample]])
    """The samples of each group, after the teachers' prompt."""
    written: list[list[Sample]] = field(default_factory=list[list[Sample]])
    """The same after the policy's own prompt."""


@dataclass(frozen=True, kw_only=True)
class TeacherPrompts:
    """Fills the template of distillation.prompt and tokenizes it.

    Example:
        >>> TeacherPrompts(template="{prompt} ({answer})", data=DataConfig(), max_tokens=4096).max_tokens
        4096
    """

    template: str
    data: DataConfig
    max_tokens: int
    """Most tokens of prompt and response; a response with more is not taught."""

    @classmethod
    def of(cls, config: TrainConfig) -> "TeacherPrompts | None":
        """Return the prompts of a run; None: its teachers see the policy's."""
        if not config.distillation.prompt:
            return None
        max_tokens = config.actor.ppo_max_token_len
        for name in config.distillation.teachers or [config.model]:
            limit = longest_sequence(model_folder(name) if name else None)
            max_tokens = min(max_tokens, limit or max_tokens)
        return cls(template=config.distillation.prompt, data=config.data, max_tokens=max_tokens)

    def apply(
        self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]], tokenizer: Any
    ) -> TaughtResponses:
        """Return the responses that can be taught, by groups with equal prompts."""
        taught = TaughtResponses()
        for group, group_samples in zip(groups, samples, strict=True):
            members: dict[tuple[int, ...], list[tuple[Completion, Sample]]] = {}
            for response, sample in zip(group.responses, group_samples, strict=True):
                value = self._fill(group, response, tokenizer)
                if value is None:
                    continue
                problem = Problem(value=value, row={}, where="distillation.prompt")
                [prompt] = make_prompts([problem], tokenizer, self.data)
                if len(prompt.token_ids) + response.token_ids.size <= self.max_tokens:
                    members.setdefault(prompt.token_ids, []).append((response, sample))
            for token_ids, pairs in members.items():
                written = [sample for _, sample in pairs]
                seen_group = replace(group, responses=[response for response, _ in pairs])
                seen_group.prompt_ids = np.array(token_ids, np.int64)
                taught.groups.append(seen_group)
                taught.written.append(written)
                taught.seen.append(
                    [
                        Sample(
                            prompt_ids=seen_group.prompt_ids,
                            response_ids=sample.response_ids,
                            response_mask=sample.response_mask,
                        )
                        for sample in written
                    ]
                )
        return taught

    def _fill(self, group: Group, response: Completion, tokenizer: Any) -> object:
        """Return the prompt as text, or as the messages of a column; None: the response lacks a field."""
        values: dict[str, Any] = {**group.columns, "feedback": response.feedback}
        best = max(group.responses, key=lambda other: other.score)
        if best.score > response.score:
            values["success"] = tokenizer.decode(best.token_ids, skip_special_tokens=True)
        texts: dict[str, str] = {}
        messages: list[dict[str, Any]] = []
        for name in template_fields(self.template):
            value = values.get(name)
            if are_messages(value):
                messages = value
                value = messages[-1]["content"]
            if not value:
                return None
            texts[name] = str(value)
        text = self.template.format_map(texts)
        if messages:
            return [*messages[:-1], {**messages[-1], "content": text}]
        return text


def check_columns(config: TrainConfig, prompts: Sequence[Prompt]) -> None:
    """Raise `UserError` for a column of distillation.prompt that none of the first rows has."""
    rows = [prompt.row for prompt in islice(prompts, _NUM_CHECKED)]
    for name in template_fields(config.distillation.prompt):
        if name in config.distillation.columns and not any(name in row for row in rows):
            raise UserError(
                f"distillation.prompt has the field {{{name}}}; expected feedback, success, or one of the columns "
                f"{', '.join(rows[0])}"
            )
