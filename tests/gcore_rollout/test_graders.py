"""Graders of short answers on texts that mislead, and code tests in the formats of HumanEval and MBPP."""

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gcore_rollout import (
    CodeReward,
    RewardError,
    Sandbox,
    Scored,
    build_reward,
    evaluate,
)
from gcore_rollout.rewards.kinds.graders import (
    MultipleChoiceReward,
    final_integer,
    final_letter,
    final_number,
    make_aime_reward,
    make_gsm8k_reward,
)
from gcore_rollout.rewards.kinds.verifiers import MathVerifyReward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 5 = 10, so\n#### 10", 10),
        ("#### $1,234.50 dollars, of 3 purses", "1234.50"),
        ("#### 7\nQuestion: 3\n#### 9", 9),
        ("#### \u22123", -3),
        ("####\nthe total is 12.", 12),
        ("Work: 12.\n#### none", 12),
        ("The answer is \\boxed{42}. I used 3 steps.", 42),
        ("First \\boxed{1}, and then \\boxed{x = 2}", 2),
        ("\\boxed{\\frac{3}{4}} of 9", "3/4"),
        ("\\boxed{1\\frac{1}{2}}", "3/2"),
        ("\\boxed{12,\\!345}", 12345),
        ("\\boxed{never closed 5", 5),
        ("from 10-7=3 remain 10-7", 7),
        ("it fell by -5", -5),
        ("owes -$5 or $-6", -6),
        ("It takes 1 1/2 hours", "3/2"),
        ("one half, 1/2", "1/2"),
        ("on 1/0 we stop", 0),
        ("12,345,678 people", 12345678),
        ("the set 1,2,3", 3),
        ("costs 18.", 18),
        ("a rise of 50%", 50),
        ("0.50", "1/2"),
        (".5", "1/2"),
        ("room A7 has 3kg", 3),
        ("no number at all", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: int | str | None) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


def test_gsm8k() -> None:
    row = {"answer": "Natalia sold 48/2 = <<48/2=24>>24 clips.\n48+24 = 72\n#### 1,072"}
    assert make_gsm8k_reward()("", "so 1072.00 in all", row) == Scored(score=1.0, answer="1072")
    assert make_gsm8k_reward()("", "72", row) == Scored(score=0.0, answer="72")
    assert make_gsm8k_reward(answer_key="gold")("", "none", {"gold": 3}) == Scored(score=0.0)
    with pytest.raises(
        RewardError, match="the row's 'answer' is 'none'; expected a text with a number"
    ):
        make_gsm8k_reward()("", "1", {"answer": "none"})


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("\\boxed{033}", 33),
        ("\\boxed{204} and later \\boxed{113}", 113),
        ("\\boxed{m+n = 33}", 33),
        ("\\boxed{\\text{33}}", 33),
        ("\\fbox{$33$}.", 33),
        ("\\boxed{1,024}", 1024),
        ("\\boxed{33.0}", 33),
        ("\\boxed{33^\\circ}", 33),
        ("\\boxed{33\\text{ degrees}}", 33),
        ("\\boxed{-7}", -7),
        ("\\boxed{\\frac{33}{1}}", None),
        ("\\boxed{33\\pi}", None),
        ("\\boxed{33.5}", None),
        ("\\boxed{2^{10}}", None),
        ("\\boxed{}, so the answer is 12", 12),
        ("Therefore the answer is **204**.", 204),
        ("about 20.5", None),
        ("none", None),
    ],
)
def test_final_integer(text: str, integer: int | None) -> None:
    assert final_integer(text) == integer


def test_aime() -> None:
    assert make_aime_reward()("", "\\boxed{33}", {"answer": "033"}) == Scored(
        score=1.0, answer="33"
    )
    assert make_aime_reward()("", "\\boxed{34}", {"answer": 33}).score == 0.0
    with pytest.raises(RewardError, match="the row's 'answer' is '1/2'; expected an integer"):
        make_aime_reward()("", "1", {"answer": "1/2"})


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("The correct answer is: **B**", "B"),
        ("Answer: $D$", "D"),
        ("ANSWER: B because A is wrong", "B"),
        ("the answer is (b)", "B"),
        ("\\boxed{C}", "C"),
        ("\\boxed{\\text{(A)} 4 m}", "A"),
        ("\\boxed{A} no, \\boxed{D}", "D"),
        ("\\boxed{42}. Answer: C", "C"),
        ("The answer is A. Wait, the answer is B.", "B"),
        ("The answer is A because it moves", "A"),
        ("The answer is A man who moves.\n(D)", "D"),
        ("The answer is a vector, which is option C", None),
        ("The best choice is option C", "C"),
        ("The answer is not A", None),
        ("I think that A man saw B", None),
        ("Consider A.\n\n**C**\n", "C"),
        ("C) Paris", "C"),
        ("A. is wrong\nB. is right", None),
        ("(A) is too small and (B) too large, so it must be (C)", "C"),
        ("Answer: E", None),
        ("A", "A"),
        ("", None),
    ],
)
def test_final_letter(text: str, letter: str | None) -> None:
    assert final_letter(text, "ABCD") == letter


def test_multiple_choice() -> None:
    grade = MultipleChoiceReward()
    assert grade("", "The answer is (C)", {"answer": 2, "choices": ["1", "2", "3", "4"]}) == Scored(
        score=1.0, answer="C"
    )
    assert (
        grade("", "The answer is I think (J)", {"answer": "J", "options": list(range(10))}).score
        == 1.0
    )
    assert grade("", "Answer: E", {"answer": "(D)", "choices": ["", "", "", ""]}) == Scored(
        score=0.0
    )
    with pytest.raises(
        RewardError, match="the row's 'answer' is 4; expected one of A, B, or a number below 2"
    ):
        grade("", "A", {"answer": 4, "choices": ["x", "y"]})


GOLD_ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"answer": "#### 1"},
    "aime": {"answer": 1},
    "multiple-choice": {"answer": "A"},
    "math-verify": {"answer": "1"},
}


def test_graders_are_named_and_take_any_text() -> None:
    rng = random.Random(0)
    for name, row in GOLD_ROWS.items():
        # Without the process of its own, which math-verify has by its name.
        grade: Any = MathVerifyReward() if name == "math-verify" else build_reward(name)
        assert (
            grade(
                "", "The answer is (A), \\boxed{A1}" if name[:2] == "mu" else "\\boxed{1}", row
            ).score
            == 1.0
        )
        for _ in range(50 if name == "math-verify" else 300):
            text = "".join(
                rng.choices(
                    ["\\boxed{", "}", "#### ", "1", ",", "/", "0", "-", "(A)", " ", "\n", "."], k=12
                )
            )
            assert grade("", text, row).score in (0.0, 1.0), text


@pytest.mark.parametrize(
    "answer", [None, float("nan"), np.float32("nan"), "", " ", [], ["1"], True]
)
@pytest.mark.parametrize("name", GOLD_ROWS)
def test_a_row_without_a_right_answer_is_refused(name: str, answer: object) -> None:
    reward: Any = build_reward(name)
    reward.check_row(GOLD_ROWS[name])
    with pytest.raises(RewardError, match=r"the row's 'answer' is .*; expected a text or a number"):
        reward.check_row({"answer": answer})


HUMAN_EVAL = {
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Return the sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
MBPP = {
    "test_list": ["assert root(4) == 2", "assert root(9) == 3"],
    "test_imports": ["import math"],
}
FUNCTION = "def total(xs: List[int]) -> int:\n    return sum(xs)"


@pytest.mark.parametrize(
    ("program", "row", "passed"),
    [
        (f"import math\n\n{FUNCTION}", HUMAN_EVAL, 1.0),
        ("    return sum(xs)", HUMAN_EVAL, 1.0),
        (FUNCTION.replace("sum", "max"), HUMAN_EVAL, 0.0),
        ("def root(x):\n    return x**0.5", MBPP, 1.0),
        ("def root(x):\n    return x / 2", MBPP, 0.5),
    ],
)
async def test_published_code_tests(program: str, row: dict[str, Any], passed: float) -> None:
    reward = CodeReward(Sandbox(isolation="limits", wall_s=2), partial=True)
    scored = await evaluate(reward, prompt="", completion=f"```python\n{program}\n```", row=row)
    assert (scored.score, scored.answer) == (passed, None)
