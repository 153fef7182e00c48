"""Scores of images by a vision-language model."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.http import png
from gcore_rollout.images.reward import Images
from gcore_rollout.rewards.kinds.judge import Reduce, ScorePattern, check_reduce, reduced_score
from gcore_rollout.rewards.kinds.judge_model import Judge, JudgeModel


class ImageJudgeReward(Judge[float]):
    """The score that a vision-language model gives an image for its prompt, through any engine that takes images.

    `JudgeReward` for images: every image is a question of its own, and all images of a call are one batch.

    Args:
        model: the model with its `JudgeModel.vision`, and how often it is asked.
        template: the question, with ``{prompt}`` and columns of the row as ``{column}``.
        parse: reads the score of a verdict; None: it has none.
        reduce: how several verdicts become one score.
        unparsable_score: score of a verdict that cannot be parsed.

    Raises:
        RewardConfigError: one of these cannot be used.
    """

    def __init__(
        self,
        *,
        model: JudgeModel,
        template: str,
        parse: Callable[[str], float | None] | None = None,
        reduce: Reduce = "mean",
        unparsable_score: float = 0.0,
    ) -> None:
        if model.vision is None:
            raise RewardConfigError("vision is None; expected a vision-language model to judge images")
        if not math.isfinite(unparsable_score):
            raise RewardConfigError(f"unparsable_score is {unparsable_score}; expected a finite number")
        check_reduce(reduce)
        super().__init__(model, template, needed=["prompt"], parse=parse or ScorePattern())
        self._reduce: Reduce = reduce
        self._unparsable_score = unparsable_score

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return scores [B].

        Raises:
            RewardError: a row lacks a column of the template.
        """
        questions = [self._template.fill(row, prompt=prompt) for prompt, row in zip(prompts, rows, strict=True)]
        verdicts = await self._model.ask(questions, [[png(image)] for image in images])
        return [self._score(texts) for texts in verdicts]

    def _score(self, texts: Sequence[str]) -> float:
        scores = self._read(texts)
        return reduced_score([self._unparsable_score if score is None else score for score in scores], self._reduce)
