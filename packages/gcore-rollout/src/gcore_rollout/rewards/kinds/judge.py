"""Scores of completions and of images by a language model."""

import hashlib
import itertools
import math
import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, get_args

from gcore_rollout.engines.protocol import Engine, Request, SamplingParams
from gcore_rollout.errors import NoScoreError, RewardConfigError, RewardError
from gcore_rollout.images.reward import Images, Rows, png
from gcore_rollout.rewards.registry import JudgeOptions, Reduce
from gcore_rollout.rewards.reward import Scored

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import VisionProcessor

T = TypeVar("T")
_QUESTION = """Here are a request and an answer to it.

Request:
{prompt}

Answer:
{completion}

How good is the answer? Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""
_IMAGE_QUESTION = """How well does the image show this: {prompt}

Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""


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

    @classmethod
    def with_options(cls, options: JudgeOptions, **fields: Any) -> Self:
        """Return a model that is asked as the settings say; ``fields`` are the others."""
        sampling = SamplingParams(max_tokens=options.max_response_length, temperature=options.temperature)
        return cls(sampling=sampling, n=options.n, **fields)

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
        if missing := [name for name in needed if name not in self._fields]:
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


def check_pattern(pattern: str, *, wanted: str) -> None:
    """Raise `RewardConfigError` unless it is a regular expression with a group, which is to hold what is wanted."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise RewardConfigError(f"pattern is {pattern!r}: {error}") from None
    if groups < 1:
        raise RewardConfigError(f"pattern is {pattern!r}; expected a group around {wanted}")


@dataclass(frozen=True, kw_only=True)
class ScorePattern:
    """Reads ``Score: 7``: the last match in an answer, scaled from [low, high] to [0, 1].

    A number outside of the range is no score.

    Raises:
        RewardConfigError: no regular expression with a group, or no such range.
    """

    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number."""
    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        check_pattern(self.pattern, wanted="the number")
        if not -math.inf < self.low < self.high < math.inf:
            raise RewardConfigError(
                f"low and high are {self.low} and {self.high}; expected finite numbers, low below high"
            )

    @classmethod
    def with_options(cls, options: JudgeOptions) -> Self:
        """Return the pattern that the settings name."""
        return cls(pattern=options.pattern or cls.pattern, low=options.low, high=options.high)

    def __call__(self, text: str) -> float | None:
        matches = list(re.finditer(self.pattern, text))
        try:
            number = float(matches[-1][1] or "") if matches else math.nan
        except ValueError:
            return None
        return (number - self.low) / (self.high - self.low) if self.low <= number <= self.high else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One answer of a judge."""

    score: float | None
    """None: the verdict could not be parsed."""
    text: str


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
    """The base of judges: asks the model, and reads its verdicts."""

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


class _ScoreJudge(Judge[float]):
    """The base of judges whose verdicts are scores; ``substitute`` is that of a verdict that cannot be parsed."""

    def __init__(
        self,
        model: JudgeModel,
        template: str,
        *,
        needed: Sequence[str],
        parse: Callable[[str], float | None] | None,
        reduce: Reduce,
        substitute: float | None,
    ) -> None:
        if reduce not in get_args(Reduce):
            raise RewardConfigError(f"reduce is {reduce!r}; expected one of {', '.join(get_args(Reduce))}")
        super().__init__(model, template, needed=needed, parse=parse or ScorePattern())
        self._reduce: Reduce = reduce
        self._substitute = substitute

    def _counted(self, verdicts: Sequence[float | None]) -> list[float | None]:
        return [self._substitute if score is None else score for score in verdicts]

    def _reduced(self, scores: Sequence[float]) -> float:
        """Reduce the scores of one or more verdicts to one score."""
        match self._reduce:
            case "mean":
                return statistics.fmean(scores)
            case "median":
                return float(statistics.median(scores))
            case "majority":
                counts = Counter(scores)
                return min(counts, key=lambda score: (-counts[score], score))


class JudgeReward(_ScoreJudge):
    """The score that a language model gives (a generative reward model, "LLM as a judge", arXiv 2306.05685, sec. 3.1).

    Its feedback is the text of the verdict nearest to the score. Parts: ``parsed``, the fraction of verdicts that could
    be read, and ``spread``, the largest score less the smallest.

    Args:
        model: the model, and how often it is asked.
        template: the question, with ``{prompt}``, ``{completion}`` and columns of the row as ``{column}``; empty: how
            good the answer is, from 0 to 10.
        parse: reads the score of a verdict; None: it has none.
        reduce: how several verdicts become one score.
        on_unparsable: "drop" leaves such verdicts out, and gives no score if none is left; a number counts as their
            score.
    """

    def __init__(
        self,
        *,
        model: JudgeModel,
        template: str = "",
        parse: Callable[[str], float | None] | None = None,
        reduce: Reduce = "mean",
        on_unparsable: Literal["drop"] | float = "drop",
    ) -> None:
        substitute = None if isinstance(on_unparsable, str) else float(on_unparsable)
        super().__init__(
            model, template or _QUESTION, needed=["completion"], parse=parse, reduce=reduce, substitute=substitute
        )
        if on_unparsable != "drop" and not (substitute is not None and math.isfinite(substitute)):
            raise RewardConfigError(f"on_unparsable is {on_unparsable!r}; expected 'drop' or a finite number")

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion.

        Raises:
            NoScoreError: no verdict could be parsed, and ``on_unparsable`` is "drop".
            RewardError: the row lacks a column of the template.
        """
        verdicts = await self.verdicts(prompt, completion, row)
        found = self._counted([verdict.score for verdict in verdicts])
        counted = [(score, v.text) for score, v in zip(found, verdicts, strict=True) if score is not None]
        if not counted:
            raise NoScoreError(
                f"none of {len(verdicts)} verdicts could be parsed, the first is {verdicts[0].text!r:.300}"
            )
        scores = [score for score, _ in counted]
        reduced = self._reduced(scores)
        num_parsed = sum(verdict.score is not None for verdict in verdicts)
        return Scored(
            score=reduced,
            parts={"parsed": num_parsed / len(verdicts), "spread": max(scores) - min(scores)},
            feedback=min(counted, key=lambda pair: abs(pair[0] - reduced))[1],
        )

    async def verdicts(self, prompt: str, completion: str, row: Mapping[str, Any]) -> list[Verdict]:
        """Return every verdict on a completion, with its text."""
        [texts] = await self._model.ask([self._template.fill(row, prompt=prompt, completion=completion)])
        return [Verdict(score=score, text=text) for score, text in zip(self._read(texts), texts, strict=True)]


class ImageJudgeReward(_ScoreJudge):
    """The score that a vision-language model gives an image for its prompt, through any engine that takes images.

    `JudgeReward` for images: every image is a question of its own, and all images of a call are one batch.

    Args:
        model: the model with its `JudgeModel.vision`, and how often it is asked.
        template: the question, with ``{prompt}`` and columns of the row as ``{column}``; empty: how well the image
            shows the prompt, from 0 to 10.
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
        template: str = "",
        parse: Callable[[str], float | None] | None = None,
        reduce: Reduce = "mean",
        unparsable_score: float = 0.0,
    ) -> None:
        if model.vision is None:
            raise RewardConfigError("vision is None; expected a vision-language model to judge images")
        if not math.isfinite(unparsable_score):
            raise RewardConfigError(f"unparsable_score is {unparsable_score}; expected a finite number")
        super().__init__(
            model,
            template or _IMAGE_QUESTION,
            needed=["prompt"],
            parse=parse,
            reduce=reduce,
            substitute=unparsable_score,
        )

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Rows) -> list[float]:
        """Return scores [B].

        Raises:
            RewardError: a row lacks a column of the template.
        """
        questions = [self._template.fill(row, prompt=prompt) for prompt, row in zip(prompts, rows, strict=True)]
        verdicts = await self._model.ask(questions, [[png(image)] for image in images])
        counted = [self._counted(self._read(texts)) for texts in verdicts]
        return [self._reduced([score for score in scores if score is not None]) for scores in counted]
