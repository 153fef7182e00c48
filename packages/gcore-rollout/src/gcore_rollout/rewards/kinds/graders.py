"""Graders of short answers: a number (GSM8K), an integer (AIME), or the letter of a choice (MMLU, GPQA)."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from gcore_rollout.errors import RewardError
from gcore_rollout.rewards.reward import Scored, gold_answer

_LETTERS = "ABCDEFGHIJ"
"""Letters of choices whose number the row does not say."""
_MARK = "####"
"""GSM8K's own answers end in this and a number."""
_NUMBER = re.compile(
    r"(?<![\w.)])(?P<sign>-?\$?-?)"  # a minus after a digit or a parenthesis subtracts
    r"(?:(?:(?P<whole>\d+)\s+)?(?P<over>\d+)\s?/\s?(?P<under>0*[1-9]\d*)(?![\d.,]\d)"
    r"|(?P<decimal>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.\d+|\d+))"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STYLES = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|mbox)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°")
_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.0+)?(?=(?:\s+[A-Za-z ]+)?\.?$)")
_STATED = re.compile(
    r"(?i:\b(?:answer|choice|option)\b)(?i:\s*(?:is|:|=)\s*:?)(?i:\s*(?:choice|option)\b)?"
    r"[\s*$_{\[]*(?:\((?P<inner>[A-Za-z])\)|(?P<letter>[A-Z])(?![\w'\u2019]))"
)
_ALONE = re.compile(r"^[^\w\n]*([A-Z])[^\w\n]*$", re.MULTILINE)
_FIRST = re.compile(r"\(?([A-Z])[).:]\s")
_ENCLOSED = re.compile(r"\(([A-Z])\)")
_BOXED_LETTER = re.compile(r"[\s*$({\[]*([A-Za-z])(?![A-Za-z])")
_AFTER_A_LETTER = {"and", "as", "because", "by", "due", "for", "from", "given", "since", "with"}


def find_boxes(text: str) -> list[str]:
    r"""Return the contents of every ``\boxed{...}`` that is closed and not empty, in their order."""
    contents: list[str] = []
    for opening in _BOXES.finditer(text):
        depth = 1
        for end in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                content = text[opening.end() : end].strip()
                if content:
                    contents.append(content)
                break
    return contents


def find_numbers(text: str) -> list[Fraction]:
    r"""Return the numbers in a text, in their order: ``-3``, ``$1,234.50``, ``3/4``, ``1 1/2`` and ``\frac{3}{4}``.

    Units are left out, and a percent sign is one: ``50%`` is 50.
    """
    plain = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "").replace("\\$", "$")
    plain = _FRACTION.sub(r"\1/\2", re.sub(r"(?<=\d)(?=\\[dt]?frac)", " ", plain))
    return [_to_fraction(match) for match in _NUMBER.finditer(plain)]


def _to_fraction(match: re.Match[str]) -> Fraction:
    if match["over"]:
        value = int(match["whole"] or 0) + Fraction(int(match["over"]), int(match["under"]))
    else:
        value = Fraction(match["decimal"].replace(",", ""))
    if "-" in match["sign"]:
        value = -value
    return value


def final_number(text: str) -> Fraction | None:
    r"""Return the number that a text gives as its answer; None: it has none.

    It is the first number after the last ``####``; without one, the last number in the last ``\boxed{...}`` that has
    any; without one, the last number of the text.
    """
    _, mark, after = text.rpartition(_MARK)
    if mark:
        numbers = find_numbers(after)
        if numbers:
            return numbers[0]
    boxes = find_boxes(text)
    boxes.reverse()
    for part in [*boxes, text]:
        numbers = find_numbers(part)
        if numbers:
            return numbers[-1]
    return None


def final_integer(text: str) -> int | None:
    r"""Return the integer that a text gives as its answer; None: it has none, or something else.

    It is what the last ``\boxed{...}`` has, after an equals sign if there is one, and with units left out; without a
    box, the text's last number.
    """
    boxes = find_boxes(text)
    if not boxes:
        number = final_number(text)
        if number is None or number.denominator != 1:
            return None
        return int(number)
    content = _DEGREES.sub("", _STYLES.sub(r" \1", boxes[-1])).rpartition("=")[2]
    for space in ("\\,", "\\!", "\\;", "\\ ", "$"):
        content = content.replace(space, "")
    match = _INTEGER.match(content.replace("{,}", ",").replace("\u2212", "-").strip())
    if match is None:
        return None
    return int(match[0].replace(",", "").partition(".")[0])


def final_letter(text: str, letters: Sequence[str] = _LETTERS) -> str | None:
    r"""Return the choice that a text gives as its answer; None: it gives none.

    It is the letter in the last ``\boxed{...}`` that has one; without one, the letter of the last statement such as
    "the answer is (C)" or "Answer: C"; then a letter that has a line of its own, the last one; then the last one in
    parentheses in the last line; then the letter that a text of one line begins with, "C. Paris". Words such as "A"
    and "I" in prose are not letters of choices.
    """
    allowed = {letter.upper() for letter in letters}
    for letter in _letters(text):
        if letter.upper() in allowed:
            return letter.upper()
    return None


def _letters(text: str) -> Iterator[str]:
    """Yield the letters that may be the answer, the likeliest first."""
    for content in reversed(find_boxes(text)):
        in_box = _BOXED_LETTER.match(_STYLES.sub(r"\1", content))
        if in_box is not None:
            yield in_box[1]
    for match in reversed(list(_STATED.finditer(text))):
        if match["inner"] or not _is_word(match["letter"], text[match.end() :]):
            yield match["inner"] or match["letter"]
    yield from reversed(_ALONE.findall(text))
    stripped = text.strip()
    yield from reversed(_ENCLOSED.findall(stripped.rpartition("\n")[2]))
    first = _FIRST.match(stripped)
    if first is not None and "\n" not in stripped:
        yield first[1]


def _is_word(letter: str, after: str) -> bool:
    """Return whether "A" or "I" is a word of the sentence, rather than a choice."""
    following = re.match(r"\s+([a-z]+)", after)
    return letter in "AI" and following is not None and following[1] not in _AFTER_A_LETTER


class NumberReward:
    """1 if the number of a completion equals that of the row's column ``answer_key``, else 0.

    ``name`` is that of the reward, for errors, and ``expected`` what a row's answer has to be. ``find`` returns the
    number that a text gives as its answer.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[str], Fraction | int | None],
        *,
        expected: str,
        answer_key: str,
    ) -> None:
        self.__name__ = name
        self._find = find
        self._expected = expected
        self._answer_key = answer_key

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        del prompt
        return _compare(self._find(completion), self._gold(row))

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a row has no answer to compare with."""
        self._gold(row)

    def _gold(self, row: Mapping[str, Any]) -> Fraction | int:
        text = gold_answer(row, self._answer_key, f"{self.__name__} to compare with")
        number = self._find(text)
        if number is None:
            raise RewardError(
                f"the row's {self._answer_key!r} is {row[self._answer_key]!r:.200}; expected {self._expected}"
            )
        return number


def make_gsm8k_reward(*, answer_key: str = "answer") -> NumberReward:
    """Return a reward of 1 if the completion's final number equals that of the row, else 0; see `final_number`.

    Example:
        >>> reward = make_gsm8k_reward()
        >>> reward("", "3 boxes of 6 eggs are 18 eggs.", {"answer": "3 * 6 = 18 #### 18"})
        Scored(score=1.0, parts={}, feedback='', answer='18')
        >>> reward("", "I do not know.", {"answer": "18"}).score
        0.0
    """
    return NumberReward(
        "gsm8k", final_number, expected="a text with a number", answer_key=answer_key
    )


def make_aime_reward(*, answer_key: str = "answer") -> NumberReward:
    """Return a reward of 1 if the completion's final integer equals that of the row, else 0; see `final_integer`.

    Example:
        >>> reward = make_aime_reward(answer_key="solution")
        >>> reward("", "So the answer is 033.", {"solution": 33})
        Scored(score=1.0, parts={}, feedback='', answer='33')
    """
    return NumberReward("aime", final_integer, expected="an integer", answer_key=answer_key)


class MultipleChoiceReward:
    """1 if the completion's letter is that of the row's column ``answer_key``, else 0; see `final_letter`.

    The column has a letter, or the number of the right choice, from 0. Letters beyond the choices in the row's column
    ``options`` or ``choices`` are no answers; without these columns they are A to J.

    Example:
        >>> reward = MultipleChoiceReward()
        >>> row = {"options": ["Rome", "Oslo", "Bern"], "answer": 1}
        >>> reward("Which is in Norway?", "The answer is (B).", row)
        Scored(score=1.0, parts={}, feedback='', answer='B')
    """

    def __init__(self, *, answer_key: str = "answer") -> None:
        self._answer_key = answer_key

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        del prompt
        letters = self._choices(row)
        return _compare(final_letter(completion, letters), self._gold(row, letters))

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a row has no letter or number of a choice."""
        self._gold(row, self._choices(row))

    def _choices(self, row: Mapping[str, Any]) -> Sequence[str]:
        options = row.get("options", row.get("choices"))
        if not isinstance(options, Sequence) or not options or isinstance(options, str):
            return _LETTERS
        return [chr(ord("A") + i) for i in range(len(options))]

    def _gold(self, row: Mapping[str, Any], letters: Sequence[str]) -> str:
        gold = gold_answer(row, self._answer_key, "multiple-choice to compare with")
        letter = gold.strip().strip("().").upper()
        if letter.isdecimal() and int(letter) < len(letters):
            letter = letters[int(letter)]
        if letter not in letters:
            expected = f"one of {', '.join(letters)}, or a number below {len(letters)}"
            raise RewardError(
                f"the row's {self._answer_key!r} is {row[self._answer_key]!r:.200}; expected {expected}"
            )
        return letter


def _compare(answer: Fraction | int | str | None, gold: Fraction | int | str) -> Scored:
    if answer is None:
        return Scored(score=0.0)
    return Scored(score=float(answer == gold), answer=str(answer))
