"""Scores of responses against the others of their group."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcore_rollout import Failed, Group, Prompt, RewardRunner


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Adds to each response's own score a weighted score against the other responses of its group."""

    runner: RewardRunner
    weight: float

    async def run(self, groups: Sequence[tuple[Group, Prompt]], tokenizer: Any) -> list[Group]:
        """Return the groups with their new scores, without those whose comparison failed.

        Raises:
            RewardError: a comparison failed, and failures are not dropped.
        """
        tasks = [asyncio.create_task(self._compared(group, prompt, tokenizer)) for group, prompt in groups]
        try:
            return [group for group in await asyncio.gather(*tasks) if group is not None]
        finally:
            for task in tasks:
                task.cancel()

    async def try_on(self, prompt: Prompt) -> None:
        """Compare two empty responses, so that a broken comparison is found before a run starts.

        Raises:
            RewardError: it failed, and failures are not dropped.
        """
        await self.runner.score_group(prompt=prompt.text, completions=["", ""], row=prompt.row)

    async def _compared(self, group: Group, prompt: Prompt, tokenizer: Any) -> Group | None:
        texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in group.responses]
        scored = await self.runner.score_group(prompt=prompt.text, completions=texts, row=prompt.row)
        if isinstance(scored, Failed):
            return None
        responses = [
            replace(
                response,
                score=response.score + self.weight * one.score,
                parts={**response.parts, **one.as_parts("model")},
            )
            for response, one in zip(group.responses, scored, strict=True)
        ]
        return replace(group, responses=responses)
