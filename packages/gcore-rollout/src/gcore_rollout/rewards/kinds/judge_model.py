"""A language model that is asked for verdicts, maybe on images: its engine, its tokens and its question."""

import hashlib
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.engines.types import Request, SamplingParams
from gcore_rollout.errors import RewardConfigError, RewardError

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import VisionProcessor


@dataclass(frozen=True, kw_only=True)
class JudgeModel:
    """What `JudgeReward`, `PairwiseJudge` and `ImageJudgeReward` ask."""

    engine: Engine
    """One of its own, or shared: verdicts of many calls run in it as one continuous batch."""
    encode: Callable[[str], Sequence[int]]
    """The token ids of a question, with the model's chat template around it if it has one."""
    decode: Callable[[Sequence[int]], str]
    """The text of a verdict's token ids."""
    sampling: SamplingParams
    n: int = 1
    """Verdicts on each question."""
    seed: int = 0
    """With the question it fixes the verdicts, whatever else is asked at the same time."""
    vision: "VisionProcessor | None" = None
    """What reads images for the model; their tokens come from `encode`, one for each image."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RewardConfigError(f"n is {self.n}; expected at least 1")

    async def ask(self, questions: Sequence[str], images: Sequence[Sequence[bytes]] | None = None) -> list[list[str]]:
        """The ``n`` verdicts on each question, in one call of the engine.

        Args:
            questions: any number.
            images: of each, as encoded files; None: there are none.

        Raises:
            RequestError: a question that the engine cannot take, such as one longer than its context.
            RewardConfigError: there are images, and no `vision`.
        """
        if images is not None and self.vision is None:
            raise RewardConfigError("vision is None: a vision-language model is needed for questions with images")
        of_each = [tuple(own) for own in images] if images is not None else [()] * len(questions)
        requests = [self._request(question, own) for question, own in zip(questions, of_each, strict=True)]
        verdicts = {request.request_id: [""] * self.n for request in requests}
        async for completion in self.engine.generate(requests):
            verdicts[completion.request_id][completion.index] = self.decode(completion.token_ids.tolist())
        return [verdicts[request.request_id] for request in requests]

    def _request(self, question: str, images: tuple[bytes, ...]) -> Request:
        asked = hashlib.blake2b(f"{self.seed} {question}".encode("utf-8", "surrogatepass"), digest_size=7)
        token_ids = self.encode(question)
        if images:
            assert self.vision is not None
            token_ids = self.vision.expand(token_ids, images)
            for image in images:
                asked.update(image)
        return Request(
            request_id=f"verdict-{id(self):x}-{next(self._numbers)}",
            prompt_token_ids=tuple(token_ids),
            sampling=self.sampling,
            n=self.n,
            seed=int.from_bytes(asked.digest(), "big"),
            images=images,
        )


class QuestionTemplate:
    """A text with fields in braces: those it is made for, and columns of the row.

    Values are put in as they are: braces in them mean nothing.

    Args:
        template: as for `str.format`, without attributes and indexes; a brace of its own is doubled.
        needed: fields that it must have.

    Raises:
        RewardConfigError: it cannot be read, or lacks a field that is needed.
    """

    def __init__(self, template: str, *, needed: Sequence[str]) -> None:
        try:
            self._fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise RewardConfigError(f"template is {template!r}: {error}") from None
        for name in self._fields:
            if not name.isidentifier():
                raise RewardConfigError(f"template has the field {{{name}}}; expected names alone")
        missing = [name for name in needed if name not in self._fields]
        if missing:
            raise RewardConfigError(f"template is {template!r}: {{{missing[0]}}} is needed in it")
        self._template = template

    def fill(self, row: Mapping[str, Any], **texts: str) -> str:
        """The question; ``texts`` go before columns of the same name.

        Raises:
            RewardError: the row has no such column.
        """
        values = {**row, **texts}
        for name in self._fields:
            if name not in values:
                raise RewardError(f"the row has no {name!r} for the judge's template: it has {sorted(row)}")
        return self._template.format_map(values)
