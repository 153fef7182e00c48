"""A language model that is asked for verdicts: its engine, its tokens and its question."""

import hashlib
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore_rollout.engine import Engine
from gcore_rollout.errors import RewardConfigError, RewardError
from gcore_rollout.types import Request, SamplingParams


@dataclass(frozen=True, kw_only=True)
class JudgeModel:
    """What `JudgeReward` and `PairwiseJudge` ask."""

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
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RewardConfigError(f"n is {self.n}: at least 1 is needed")

    async def ask(self, questions: Sequence[str]) -> list[list[str]]:
        """The ``n`` verdicts on each question, in one call of the engine.

        Raises:
            RequestError: a question that the engine cannot take, such as one longer than its context.
        """
        requests = [self._request(question) for question in questions]
        verdicts = {request.request_id: [""] * self.n for request in requests}
        async for completion in self.engine.generate(requests):
            verdicts[completion.request_id][completion.index] = self.decode(completion.token_ids.tolist())
        return [verdicts[request.request_id] for request in requests]

    def _request(self, question: str) -> Request:
        digest = hashlib.blake2b(f"{self.seed} {question}".encode("utf-8", "surrogatepass"), digest_size=7).digest()
        return Request(
            request_id=f"verdict-{id(self):x}-{next(self._numbers)}",
            prompt_token_ids=tuple(self.encode(question)),
            sampling=self.sampling,
            n=self.n,
            seed=int.from_bytes(digest, "big"),
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
                raise RewardConfigError(f"template has the field {{{name}}}: names alone are needed")
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
