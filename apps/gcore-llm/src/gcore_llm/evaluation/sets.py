"""Sets of prompts to evaluate on: those that `data.val_files` names, and published ones that are known by name."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gcore_runs import UserError, columns

Row = Mapping[str, Any]

_NAMED = re.compile(r"(\w+)=(.+)", re.DOTALL)
_GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_BOX = "Reason step by step, and put the final answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """A published set: where its rows are, how they become prompts, and its grader."""

    source: str
    """Its rows on the Hub, for `read_rows`."""
    reward: str
    """Name of its grader, a registered reward."""
    columns: tuple[str, ...]
    """Columns that its rows must have."""
    prompt: Callable[[Row], str]
    """Returns the text of the prompt."""
    of_row: Callable[[Row], dict[str, Any]] = dict
    """Returns the row for the prompt and the grader."""
    data_source: str = ""
    """Column by which the scores are divided, such as a subject; empty: none."""

    def problem(self, row: Row, where: str) -> tuple[str, dict[str, Any]]:
        """Return a row's prompt, and the row for the grader; `UserError` if it lacks a column."""
        for name in self.columns:
            if name not in row:
                raise UserError(f"{where} has no column {name!r}; it has {columns(row)}")
        prompt_row = self.of_row(row)
        if self.data_source:
            prompt_row["data_source"] = str(row[self.data_source])
        return self.prompt(prompt_row), prompt_row


def _choices(row: Row) -> str:
    options = "\n".join(
        f"{chr(code)}. {option}" for code, option in enumerate(row["options"], ord("A"))
    )
    ending = 'Reason step by step, and end with a line "Answer: X", where X is the letter of the right choice.'
    return f"{row['question']}\n\n{options}\n\n{ending}"


def _gpqa(row: Row) -> dict[str, Any]:
    """Return a row with its choices in an order that depends on the question alone."""
    options = [row[name].strip() for name in _GPQA_ANSWERS]
    right = options[0]
    random.Random(row["Question"]).shuffle(options)
    letter = chr(ord("A") + options.index(right))
    return {"question": row["Question"], "options": options, "answer": letter}


def _code(row: Row) -> str:
    ask = "Complete this function of Python. Answer with the whole function, in one fenced block of code."
    return f"{ask}\n\n```python\n{row['prompt'].rstrip()}\n```"


PUBLISHED: dict[str, PublishedSet] = {
    "gsm8k": PublishedSet(
        source="hf://openai/gsm8k/main:test",
        reward="gsm8k",
        columns=("question", "answer"),
        prompt=lambda row: (
            f"{row['question']}\n\nReason step by step, and end with a line of #### and the number alone."
        ),
    ),
    "math500": PublishedSet(
        source="hf://HuggingFaceH4/MATH-500:test",
        reward="math-verify",
        columns=("problem", "answer", "subject"),
        prompt=lambda row: f"{row['problem']}\n\n{_BOX}",
        data_source="subject",
    ),
    "aime24": PublishedSet(
        source="hf://HuggingFaceH4/aime_2024:train",
        reward="aime",
        columns=("problem", "answer"),
        prompt=lambda row: f"{row['problem']}\n\n{_BOX}",
    ),
    "aime25": PublishedSet(
        source="hf://math-ai/aime25:test",
        reward="aime",
        columns=("problem", "answer"),
        prompt=lambda row: f"{row['problem']}\n\n{_BOX}",
    ),
    "gpqa_diamond": PublishedSet(
        source="hf://Idavidrein/gpqa/gpqa_diamond:train",
        reward="multiple-choice",
        columns=("Question", *_GPQA_ANSWERS),
        prompt=_choices,
        of_row=_gpqa,
    ),
    "mmlu_pro": PublishedSet(
        source="hf://TIGER-Lab/MMLU-Pro:test",
        reward="multiple-choice",
        columns=("question", "options", "answer", "category"),
        prompt=_choices,
        data_source="category",
    ),
    "humaneval": PublishedSet(
        source="hf://openai/openai_humaneval:test",
        reward="code",
        columns=("prompt", "entry_point", "test"),
        prompt=_code,
    ),
}
"""Published sets by name."""


class ValSource(NamedTuple):
    """One entry of `data.val_files`."""

    name: str
    """Name of the set; empty: the one set of all files without a name."""
    path: str
    """Its file, or of a published set the source of its rows."""
    published: PublishedSet | None


def val_sources(entries: Sequence[str], *, setting: str) -> list[ValSource]:
    """Return the sets that FILE, NAME=FILE, or the NAME of a published set stand for.

    ``NAME=FILE`` with the name of a published set is that set from a file of its own rows. `UserError` if two sets have
    the same name.
    """
    sources: list[ValSource] = []
    for entry in entries:
        match = _NAMED.fullmatch(entry)
        if match:
            source = ValSource(match[1], match[2], PUBLISHED.get(match[1]))
        elif entry in PUBLISHED:
            source = ValSource(entry, PUBLISHED[entry].source, PUBLISHED[entry])
        else:
            source = ValSource("", entry, None)
        sources.append(source)
    names = [source.name for source in sources if source.name]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{setting} has {name!r} twice; expected sets of different names")
    return sources


def with_sources(entries: Sequence[str]) -> tuple[str, ...]:
    """Return entries of `data.val_files` with the sources of published sets written out, so that they can be pinned."""
    return tuple(
        f"{entry}={PUBLISHED[entry].source}" if entry in PUBLISHED else entry for entry in entries
    )
