"""A vision-language model that gives each image a score."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.http import png
from gcore_rollout.images.reward import Images
from gcore_rollout.rewards.kinds.judge import JudgeStats, Reduce, ScorePattern, check_reduce, reduced_score
from gcore_rollout.rewards.kinds.judge_model import JudgeModel, QuestionTemplate


class ImageJudgeReward:
    """The score that a vision-language model gives an image for its prompt, through any engine that reads images.

    `JudgeReward` for images: every image is a question of its own, and all of a call are one batch of the engine.

    Args:
        model: what is asked, and how often; with `JudgeModel.vision`.
        template: the question, with ``{prompt}`` and columns of the row as ``{column}``.
        parse: the score in an answer, or None if there is none.
        reduce: how several verdicts become one score.
        unparsable_score: of a verdict without a score.

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
            raise RewardConfigError("vision is None: a vision-language model is needed to judge images")
        if not math.isfinite(unparsable_score):
            raise RewardConfigError(f"unparsable_score is {unparsable_score}; expected a finite number")
        check_reduce(reduce)
        self._model = model
        self._template = QuestionTemplate(template, needed=["prompt"])
        self._parse = parse or ScorePattern()
        self._reduce: Reduce = reduce
        self._unparsable_score = unparsable_score
        self._num_verdicts = self._num_unparsable = 0

    def check(self, height: int, width: int) -> None:
        """Images are resized to what the model takes."""

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """[B] scores.

        Raises:
            RewardError: a row lacks a column of the template.
        """
        questions = [self._template.fill(row, prompt=prompt) for prompt, row in zip(prompts, rows, strict=True)]
        verdicts = await self._model.ask(questions, [[png(image)] for image in images])
        return [self._score(texts) for texts in verdicts]

    def stats(self) -> JudgeStats:
        """Of all verdicts so far."""
        return JudgeStats(num_verdicts=self._num_verdicts, num_unparsable=self._num_unparsable)

    def _score(self, texts: Sequence[str]) -> float:
        parsed = [self._parse(text) for text in texts]
        self._num_verdicts += len(parsed)
        self._num_unparsable += parsed.count(None)
        return reduced_score([self._unparsable_score if score is None else score for score in parsed], self._reduce)
