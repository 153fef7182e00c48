"""Rewards that compare the responses of a group with each other."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcore_rollout.engines.protocol import Completion
from gcore_rollout.errors import RewardError
from gcore_rollout.groups import Group
from gcore_rollout.prompts import Prompt
from gcore_rollout.rewards.runner import RewardRunner


@dataclass(frozen=True, kw_only=True)
class GroupComparison:
    """Adds to each response's own score a weighted score against the other responses of its group.

    Example:
        >>> async def prefer_short(prompt, completions, row):
        ...     return [Scored(score=float(text == min(completions, key=len))) for text in completions]
        >>> comparison = GroupComparison(runner=RewardRunner(prefer_short), weight=0.5)
        >>> completions = ["It is 2.", "2"]
        >>> scored = asyncio.run(comparison.runner.score_group(prompt="1 + 1 =", completions=completions, row={}))
        >>> [comparison.weight * result.score for result in scored]  # what `run` adds to the responses' scores
        [0.0, 0.5]
    """

    runner: RewardRunner
    weight: float

    async def run(self, groups: Sequence[tuple[Group, Prompt]], tokenizer: Any) -> list[Group]:
        """Return the groups with their new scores, without those whose comparison failed and is dropped."""
        tasks = [
            asyncio.create_task(self._compare(group, prompt, tokenizer)) for group, prompt in groups
        ]
        try:
            return list(filter(None, await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()

    async def try_on(self, prompt: Prompt) -> None:
        """Compare two empty responses, so that a broken comparison is found before a run starts."""
        await self.runner.score_group(prompt=prompt.text, completions=["", ""], row=prompt.row)

    async def _compare(self, group: Group, prompt: Prompt, tokenizer: Any) -> Group | None:
        texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in group.responses]
        scored = await self.runner.score_group(
            prompt=prompt.text, completions=texts, row=prompt.row
        )
        if isinstance(scored, RewardError):
            return None
        responses: list[Completion] = []
        for response, comparison in zip(group.responses, scored, strict=True):
            score = response.score + self.weight * comparison.score
            parts = {**response.parts, **comparison.as_parts("model")}
            responses.append(replace(response, score=score, parts=parts))
        return replace(group, responses=responses)
