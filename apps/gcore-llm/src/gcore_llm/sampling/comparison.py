"""Scores of responses against the others of their group."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gcore_rollout import Failed, Group, GroupRewardRunner, Prompt, Response, Scored


class Comparison:
    """Add to each response's own score a weighted score against the other responses of its group.

    Args:
        runner: scores the responses of a group against each other.
        weight: factor of that score.

    Attributes:
        runner: The same.
    """

    def __init__(self, runner: GroupRewardRunner, *, weight: float) -> None:
        self.runner = runner
        self._weight = weight

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
        await self.runner.score(prompt=prompt.text, completions=["", ""], row=prompt.row)

    async def _compared(self, group: Group, prompt: Prompt, tokenizer: Any) -> Group | None:
        texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in group.responses]
        scored = await self.runner.score(prompt=prompt.text, completions=texts, row=prompt.row)
        if isinstance(scored, Failed):
            return None
        return replace(group, responses=[self._added(r, s) for r, s in zip(group.responses, scored, strict=True)])

    def _added(self, response: Response, scored: Scored) -> Response:
        parts = {"model": scored.score, **{f"model/{name}": part for name, part in scored.parts.items()}}
        return replace(response, score=response.score + self._weight * scored.score, parts={**response.parts, **parts})
