"""Scores of completions and of images by a language model."""

import hashlib
import itertools
import math
import re
import statistics
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from gcore_rollout.engines.protocol import Engine, Request, SamplingParams
from gcore_rollout.errors import NoScoreError, RewardConfigError, require, require_one_of
from gcore_rollout.images.reward import Images, Rows, png
from gcore_rollout.rewards.kinds.rubric import CRITERION_QUESTION, read_rubric, score_rubric
from gcore_rollout.rewards.reward import Scored, column, locate_errors
from gcore_rollout.rewards.steps import STEP_REDUCTIONS, StepReduction, score_steps, split_steps

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import VisionProcessor

Reduce = Literal["mean", "median", "majority"]
"""How several verdicts become one. The majority is the most frequent score, and the lowest of those on a tie."""

_SCORE_PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"

_QUESTION = """Here are a request and an answer to it.

Request:
{prompt}

Answer:
{completion}

How good is the answer? Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""
_STEP_QUESTION = """Here are a request, an answer to it as far as it was written, and the last step of that.

Request:
{prompt}

Answer:
{completion}

Last step:
{step}

Is the last step right? Think about it briefly, then end with "Score: N", where N is a whole number from 0, if it is
wrong, to 10, if it is right.
"""
_IMAGE_QUESTION = """How well does the image show this: {prompt}

Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""


@dataclass(frozen=True, kw_only=True)
class JudgeModel:
    """The language model that judges ask; a vision-language model for images.

    Example:
        >>> import asyncio
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("model")
        >>> async def main():
        ...     engine = HFEngine.from_pretrained("model")
        ...     sampling = SamplingParams(max_tokens=4)
        ...     judge = JudgeModel(
        ...         engine=engine, encode=tokenizer.encode, decode=tokenizer.decode, sampling=sampling, n=2
        ...     )
        ...     verdicts = await judge.ask(["Is 4 even?", "Is 5 even?"])
        ...     await engine.close()
        ...     return verdicts
        >>> [len(texts) for texts in asyncio.run(main())]
        [2, 2]
    """

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
    _numbers: "itertools.count[int]" = field(
        default_factory=itertools.count, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        require("n", self.n, self.n >= 1, "at least 1")

    async def ask(
        self, questions: Sequence[str], images: Sequence[Sequence[bytes]] | None = None
    ) -> list[list[str]]:
        """Return ``n`` verdicts on each question, in one call of the engine; ``images`` are encoded files of each.

        `RequestError` for a question that the engine cannot take, such as one longer than its context, and
        `RewardConfigError` for images without `vision`.
        """
        if images is None:
            images = [()] * len(questions)
        requests = [
            self._request(question, tuple(files))
            for question, files in zip(questions, images, strict=True)
        ]
        verdicts = {request.request_id: [""] * self.n for request in requests}
        async for completion in self.engine.generate(requests):
            verdicts[completion.request_id][completion.index] = self.decode(
                completion.token_ids.tolist()
            )
        return [verdicts[request.request_id] for request in requests]

    def _request(self, question: str, images: tuple[bytes, ...]) -> Request:
        digest = hashlib.blake2b(
            f"{self.seed} {question}".encode("utf-8", "surrogatepass"), digest_size=7
        )
        token_ids = self.encode(question)
        if images:
            if self.vision is None:
                raise RewardConfigError(
                    "vision is None; expected a vision-language model for questions with images"
                )
            token_ids = self.vision.expand(token_ids, images)
            for image in images:
                digest.update(image)
        return Request(
            request_id=f"verdict-{id(self):x}-{next(self._numbers)}",
            prompt_token_ids=tuple(token_ids),
            sampling=self.sampling,
            n=self.n,
            seed=int.from_bytes(digest.digest(), "big"),
            images=images,
        )


def check_pattern(pattern: str, content: str) -> None:
    """Raise `RewardConfigError` unless a regular expression has a group, of this content."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise RewardConfigError(f"pattern is {pattern!r}: {error}") from None
    require("pattern", pattern, groups >= 1, f"a group around {content}")


def read_last_match(pattern: str, text: str, *, flags: int = 0) -> str:
    """Return the first group of the last match in a text; empty: there is no match, or the group took no part."""
    group: str | None = None
    for match in re.finditer(pattern, text, flags=flags):
        group = match[1]
    return group or ""


def make_score_parser(
    pattern: str = "", *, low: float = 0.0, high: float = 10.0
) -> Callable[[str], float | None]:
    """Return a function that reads ``Score: 7``: the last match in a verdict, scaled from [low, high] to [0, 1].

    A number outside of the range is no score. ``pattern`` is a regular expression whose first group is the number;
    empty: ``Score: 7``. `RewardConfigError` if it has no group, or ``low`` is not below ``high``.

    Example:
        >>> parse = make_score_parser()
        >>> parse("Nearly right. Score: 7")
        0.7
        >>> parse("Score: 11") is None
        True
        >>> make_score_parser(r"(.) of 5", low=1, high=5)("4 of 5")
        0.75
    """
    pattern = pattern or _SCORE_PATTERN
    check_pattern(pattern, "the number")
    if not -math.inf < low < high < math.inf:
        raise RewardConfigError(
            f"low and high are {low} and {high}; expected finite numbers, low below high"
        )

    def parse_score(text: str) -> float | None:
        try:
            number = float(read_last_match(pattern, text))
        except ValueError:
            return None
        if low <= number <= high:
            return (number - low) / (high - low)
        return None

    return parse_score


@dataclass(kw_only=True, eq=False)
class Judge:
    """The base of judges: asks the model a question with fields in braces, and reads its verdicts."""

    model: JudgeModel
    template: str = ""
    """The question, as for `str.format` without attributes and indexes; a literal brace is doubled, and braces in
    values have no meaning. Fields are those that the class names, and columns of the row. Empty: the class's own."""
    parse: Callable[[str], float | None] = field(default_factory=make_score_parser)
    """Reads the number in a verdict; None: it cannot be read."""

    question: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    """Fields that a template must have."""

    def __post_init__(self) -> None:
        self.template = template = self.template or self.question
        try:
            self._fields = [
                name for _, name, _, _ in string.Formatter().parse(template) if name is not None
            ]
        except ValueError as error:
            raise RewardConfigError(f"template is {template!r}: {error}") from None
        for name in self._fields:
            if not name.isidentifier():
                raise RewardConfigError(f"template has the field {{{name}}}; expected names alone")
        for name in self.needed:
            require("template", template, name in self._fields, f"{{{name}}} in it")

    async def ask(
        self, questions: Sequence[str], images: Sequence[Sequence[bytes]] | None = None
    ) -> list[list[tuple[float | None, str]]]:
        """Return each verdict on each question, None if it could not be read, with its text; see `JudgeModel.ask`."""
        answers = await self.model.ask(questions, images)
        verdicts: list[list[tuple[float | None, str]]] = []
        for texts in answers:
            parsed = [self.parse(text) for text in texts]
            verdicts.append(list(zip(parsed, texts, strict=True)))
        return verdicts

    def _fill_template(self, row: Mapping[str, Any], **texts: str) -> str:
        """Return the question; ``texts`` take precedence over columns of the same name."""
        columns = {
            name: column(row, name, "the judge's template")
            for name in self._fields
            if name not in texts
        }
        return self.template.format_map({**columns, **texts})


@dataclass(kw_only=True, eq=False)
class _ScoreJudge(Judge):
    """The base of judges whose verdicts are scores."""

    reduce: Reduce = "mean"
    """How several verdicts become one score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("reduce", self.reduce, get_args(Reduce))

    def _reduce(self, scores: Sequence[float]) -> float:
        """Reduce one or more scores to one."""
        if self.reduce == "majority":
            # Of scores that are as frequent, the mode is the first one.
            return statistics.mode(sorted(scores))
        if self.reduce == "median":
            return statistics.median(scores)
        return statistics.fmean(scores)


@dataclass(kw_only=True, eq=False)
class JudgeReward(_ScoreJudge):
    """The score that a language model gives (a generative reward model, "LLM as a judge", arXiv 2306.05685, sec. 3.1).

    The template has ``{prompt}`` and ``{completion}``; empty: how good the answer is, from 0 to 10. Its feedback is the
    text of the verdict nearest to the score. Parts: ``parsed``, the fraction of verdicts that could be read, and
    ``spread``, the largest score less the smallest.

    With a rubric (`rubric_key`), each of a row's criteria is a question of its own, whose template has ``{criterion}``,
    and the score is the weighted share of the criteria that are met; see `score_rubric`. Parts are ``parsed`` and, for
    each criterion, ``criterion/NAME``. Its feedback has the verdict on each.

    With a step separator it is a process reward model: each step is a question of its own, whose template has
    ``{step}``, and as ``{completion}`` what was written up to its end. The result has `Scored.steps`.

    A judge that writes principles of its own before it judges by them (DeepSeek-GRM, arXiv 2504.02495) is one whose
    template asks for them; the mean of several verdicts is the paper's vote.

    Example:
        >>> import asyncio
        >>> class Model:  # in place of a JudgeModel
        ...     async def ask(self, questions, images=None):
        ...         return [["Right. Score: 9", "Score: 7", "Hm."] for question in questions]
        >>> judge = JudgeReward(model=Model(), template="Is {completion} right? It is {answer}. Say Score: 0 to 10.")
        >>> asyncio.run(judge("2 + 2 =", "4", {"answer": "4"})).score
        0.8
    """

    question: ClassVar = _QUESTION
    needed: ClassVar = ("completion",)

    on_unparsable: Literal["drop"] | float = "drop"
    """ "drop" leaves such verdicts out, and gives no score if none is left; a number counts as their score."""
    rubric_key: str = ""
    """Column of the row with a rubric, a list of mappings with ``description``, ``weight`` (below 0 for a fault), and
    optionally ``name``, after which the criterion's part is called; without it, it is called after its place, from 1.
    Empty: the answer is scored as a whole."""
    step_separator: str = ""
    """The text between steps; empty: steps are not scored. Not with a rubric."""
    step_reduction: StepReduction = "min"
    """How the scores of steps become one: min, product, last or mean."""

    def __post_init__(self) -> None:
        self._part = "completion"
        if self.rubric_key:
            self._part = "criterion"
            self.template = self.template or CRITERION_QUESTION
        elif self.step_separator:
            self._part = "step"
            self.template = self.template or _STEP_QUESTION
        require_one_of("step_reduction", self.step_reduction, STEP_REDUCTIONS)
        super().__post_init__()
        require("template", self.template, self._part in self._fields, f"{{{self._part}}} in it")
        unparsable = self.on_unparsable
        is_accepted = (
            unparsable == "drop" if isinstance(unparsable, str) else math.isfinite(unparsable)
        )
        require("on_unparsable", unparsable, is_accepted, "'drop' or a finite number")

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion; `NoScoreError` if no verdict counts, `RewardError` if the row lacks a column."""
        rubric: Sequence[Mapping[str, Any]] = ()
        steps: list[str] = []
        parts: list[dict[str, str]] = []
        if self.rubric_key:
            rubric = read_rubric(row, self.rubric_key)
            parts = [{"criterion": criterion["description"]} for criterion in rubric]
        elif self.step_separator:
            steps = split_steps(completion, self.step_separator)
            prefixes = accumulate(steps)
            parts = [{"step": step.strip(), "completion": next(prefixes)} for step in steps]
        texts = {"prompt": prompt, "completion": completion}
        questions = [self._fill_template(row, **(texts | part)) for part in parts or [{}]]
        answers = await self.ask(questions)
        if not parts:
            return self._score_verdicts(answers[0])
        scores: list[Scored] = []
        for number, verdicts in enumerate(answers, 1):
            with locate_errors(f"{self._part} {number}"):
                scores.append(self._score_verdicts(verdicts))
        if rubric:
            return score_rubric(rubric, scores)
        scored = score_steps(steps, [step.score for step in scores], self.step_reduction)
        parsed = statistics.fmean(step.parts["parsed"] for step in scores)
        feedback = "\n\n".join(step.feedback for step in scores)
        return replace(scored, parts={**scored.parts, "parsed": parsed}, feedback=feedback)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` for a row without the rubric that its score is made of."""
        if self.rubric_key:
            read_rubric(row, self.rubric_key)

    def _score_verdicts(self, verdicts: Sequence[tuple[float | None, str]]) -> Scored:
        """Reduce the verdicts on one question, which are scores with their texts, to one score."""
        scores: list[float] = []
        texts: list[str] = []
        num_parsed = 0
        for score, text in verdicts:
            if score is not None:
                num_parsed += 1
            elif isinstance(self.on_unparsable, str):
                continue
            else:
                score = float(self.on_unparsable)
            scores.append(score)
            texts.append(text)
        if not scores:
            first = verdicts[0][1]
            raise NoScoreError(
                f"none of {len(verdicts)} verdicts could be parsed, the first is {first!r:.300}"
            )
        reduced = self._reduce(scores)
        distances = [abs(score - reduced) for score in scores]
        return Scored(
            score=reduced,
            parts={"parsed": num_parsed / len(verdicts), "spread": max(scores) - min(scores)},
            feedback=texts[distances.index(min(distances))],
        )


@dataclass(kw_only=True, eq=False)
class ImageJudgeReward(_ScoreJudge):
    """The score that a vision-language model gives an image for its prompt, through any engine that takes images.

    `JudgeReward` for images: every image is a question of its own, and all images of a call are one batch. The template
    has ``{prompt}``; empty: how well the image shows the prompt, from 0 to 10. The model needs its `JudgeModel.vision`.

    Example:
        >>> import asyncio
        >>> class Model:  # in place of a JudgeModel
        ...     vision = "its image processor"
        ...     async def ask(self, questions, images=None):
        ...         return [[f"Score: {min(len(question), 9)}"] for question in questions]
        >>> judge = ImageJudgeReward(model=Model(), template="{prompt}")
        >>> asyncio.run(judge(np.zeros((2, 8, 8, 3), np.uint8), ["a fox", "a red fox"], [{}, {}]))
        [0.5, 0.9]
    """

    question: ClassVar = _IMAGE_QUESTION
    needed: ClassVar = ("prompt",)
    uses_engine: ClassVar = True

    unparsable_score: float = 0.0
    """Score of a verdict that cannot be parsed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        vision = self.model.vision
        require("vision", vision, vision is not None, "a vision-language model to judge images")
        score = self.unparsable_score
        require("unparsable_score", score, math.isfinite(score), "a finite number")

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Rows) -> list[float]:
        """Return scores [B]; `RewardError` if a row lacks a column of the template."""
        questions = [
            self._fill_template(row, prompt=prompt)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        reduced: list[float] = []
        for verdicts in await self.ask(questions, [[png(image)] for image in images]):
            scores = [self.unparsable_score if score is None else score for score, _ in verdicts]
            reduced.append(self._reduce(scores))
        return reduced
