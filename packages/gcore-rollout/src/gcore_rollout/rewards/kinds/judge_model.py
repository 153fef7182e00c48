"""Generative reward models: the model that is asked for verdicts, its question, and the base of all judges."""

import hashlib
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gcore_rollout.engines.protocol import Engine, Request, SamplingParams
from gcore_rollout.errors import RewardConfigError, RewardError

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import VisionProcessor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JudgeModel:
    """The language model that judges ask; a vision-language model for images."""

    engine: Engine
    """The verdicts of concurrent calls run in it as one continuous batch; it may be shared."""
    encode: Callable[[str], Sequence[int]]
    """The token ids of a question, with the model's chat template around it if it has one."""
    decode: Callable[[Sequence[int]], str]
    """The text of a verdict's token ids."""
    sampling: SamplingParams
    n: int = 1
    """Verdicts on each question."""
    seed: int = 0
    """Together with the question, determines the verdicts, whatever else is asked at the same time."""
    vision: "VisionProcessor | None" = None
    """The model's image processor; `encode` returns one image token for each image."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RewardConfigError(f"n is {self.n}; expected at least 1")

    async def ask(self, questions: Sequence[str], images: Sequence[Sequence[bytes]] | None = None) -> list[list[str]]:
        """Return ``n`` verdicts on each question, in one call of the engine.

        Args:
            questions: any number of texts.
            images: encoded files of each question; None: there are no images.

        Raises:
            RequestError: a question that the engine cannot take, such as one longer than its context.
            RewardConfigError: there are images, and no `vision`.
        """
        if images is not None and self.vision is None:
            raise RewardConfigError("vision is None; expected a vision-language model for questions with images")
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
    """A text with fields in braces: given texts, and columns of the row.

    Braces in values have no meaning.

    Args:
        template: as for `str.format`, without attributes and indexes; a literal brace is doubled.
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
            raise RewardConfigError(f"template is {template!r}; expected {{{missing[0]}}} in it")
        self._template = template

    def fill(self, row: Mapping[str, Any], **texts: str) -> str:
        """Return the question; ``texts`` take precedence over columns of the same name.

        Raises:
            RewardError: the row has no such column.
        """
        values = {**row, **texts}
        for name in self._fields:
            if name not in values:
                raise RewardError(f"the row has no {name!r} for the judge's template: it has {sorted(row)}")
        return self._template.format_map(values)


@dataclass(frozen=True, kw_only=True)
class JudgeStats:
    """Counters since the judge was made."""

    num_verdicts: int
    num_unparsable: int

    @property
    def parse_rate(self) -> float:
        """Fraction of verdicts that could be read; 1 before the first."""
        return 1.0 - self.num_unparsable / max(1, self.num_verdicts)


class Judge(Generic[T]):
    """The base of judges: asks the model, and reads its verdicts.

    Args:
        model: the model, and how often it is asked.
        template: the question.
        needed: fields that the template must have.
        parse: reads a verdict; None: it has none.
    """

    def __init__(
        self, model: JudgeModel, template: str, *, needed: Sequence[str], parse: Callable[[str], T | None]
    ) -> None:
        self._model = model
        self._template = QuestionTemplate(template, needed=needed)
        self._parse = parse
        self._num_verdicts = self._num_unparsable = 0

    def stats(self) -> JudgeStats:
        return JudgeStats(num_verdicts=self._num_verdicts, num_unparsable=self._num_unparsable)

    def _read(self, texts: Sequence[str]) -> list[T | None]:
        """Read verdicts; None: it could not be parsed."""
        verdicts = [self._parse(text) for text in texts]
        self._num_verdicts += len(verdicts)
        self._num_unparsable += verdicts.count(None)
        return verdicts
