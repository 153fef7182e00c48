"""Programs in completions against tests in rows."""

import asyncio
from typing import Any

import pytest

from gcore_rollout import CodeReward, RewardError, Sandbox, Scored, evaluate
from gcore_rollout.rewards.kinds.verifiers import last_code_block

RIGHT = "I think so:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
ASSERTS = ["assert add(1, 2) == 3", "assert add(5, 0) == 5", "assert add(-1, 1) == 0"]
ADDS = "```python\nprint(sum(map(int, input().split())))\n```"
CASES = [
    {"input": "1 2\n", "output": "3\n"},
    {"input": "5 0", "output": "5"},
    {"input": "-1 1", "output": "0"},
]


def reward(**options: Any) -> CodeReward:
    # Isolation has tests of its own; these also run where the kernel gives none.
    return CodeReward(Sandbox(isolation="limits", wall_s=2), **options)


async def judged(completion: str, tests: Any, **options: Any) -> Scored:
    return await evaluate(reward(**options), prompt="", completion=completion, row={"tests": tests})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```Python3 title\na\nb\n```  \n", "a\nb\n"),
        ("```python\nx = '''```'''\n```", "x = '''```'''\n"),
        ("```python\nnever closed", None),
        ("print(1)", None),
        ("```bash\nls\n```", None),
        ("", None),
    ],
)
def test_the_last_block(text: str, code: str | None) -> None:
    assert last_code_block(text) == code


@pytest.mark.parametrize("tests", [ASSERTS, "\n".join(ASSERTS), ASSERTS[0]])
async def test_statements(tests: Any) -> None:
    parts = {"passed": 1.0, "has_code": 1.0, "timed_out": 0.0}
    assert await judged(RIGHT, tests) == Scored(score=1.0, parts=parts)
    assert (await judged(WRONG, tests)).score == 0.0


async def test_input_and_output() -> None:
    assert (await judged(ADDS, CASES)).score == 1.0
    assert (await judged("```\nprint(input())\n```", CASES)).score == 0.0
    assert (await judged(ADDS, CASES[0:1])).parts == {
        "passed": 1.0,
        "has_code": 1.0,
        "timed_out": 0.0,
    }
    crashes = ADDS.replace("\n```", "\nraise SystemExit(1)\n```")
    assert (await judged(crashes, CASES)).score == 0.0, "the right output, and then an error"
    padded = "```\na, b = map(int, input().split())\nprint(f'\\n{a + b}   \\n\\n')\n```"
    assert (await judged(padded, CASES)).score == 1.0


async def test_part_of_the_marks() -> None:
    minus = await judged(WRONG, ASSERTS, partial=True)
    assert (minus.score, minus.parts["passed"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    constant = await judged("```\nprint(0)\n```", CASES, partial=True)
    assert constant.score == pytest.approx(1 / 3)
    assert (await judged("```\nprint(0)\n```", CASES)).score == 0.0


async def test_no_code_and_no_time() -> None:
    assert await judged("I do not know", ASSERTS) == Scored(
        score=0.0, parts={"passed": 0.0, "has_code": 0.0, "timed_out": 0.0}
    )
    slow = await judged("```\nwhile True: pass\n```", CASES)
    assert slow == Scored(score=0.0, parts={"passed": 0.0, "has_code": 1.0, "timed_out": 1.0})


@pytest.mark.parametrize(
    "trick",
    ["exit()", "import os; os._exit(0)", "print('3')\nprint('passed')\nraise SystemExit(0)"],
)
async def test_leaving_early_scores_nothing(trick: str) -> None:
    for tests in (ASSERTS, CASES):
        assert (await judged(f"```\n{trick}\n```", tests, partial=True)).score == 0.0


async def test_the_expected_output_is_not_in_the_sandbox() -> None:
    """Nothing in the process or its folder holds it, so it can only be computed."""
    look = (
        "```\nimport gc, os, sys\nheld = [o.values() if type(o) is dict else o for o in gc.get_objects() "
        "if type(o) in (dict, list, tuple)]\nfound = [s for o in held for s in list(o) + sys.argv + os.listdir() "
        "if type(s) is str and 'egdelwonk' in s[::-1]]\nprint(found, sys.stdin.read())\n```"
    )
    secret = "the fruit of knowledge"
    assert (await judged(look, [{"input": "all", "output": "[] all"}])).score == 1.0, "it runs"
    assert (await judged(look, [{"input": secret, "output": f"[] {secret}"}])).score == 1.0
    cases = [{"input": "", "output": "[]"}, {"input": "", "output": secret}]
    assert (await judged(look, cases, partial=True)).score == 0.5, "it finds nothing"


async def test_many_at_once() -> None:
    one = reward()
    right = [evaluate(one, prompt="", completion=RIGHT, row={"tests": ASSERTS}) for _ in range(6)]
    wrong = [evaluate(one, prompt="", completion=WRONG, row={"tests": ASSERTS}) for _ in range(6)]
    scores = [s.score for s in await asyncio.gather(*right, *wrong)]
    assert scores == [1.0] * 6 + [0.0] * 6


@pytest.mark.parametrize(
    "tests",
    [
        [],
        3,
        None,
        [1],
        ["pass", {"input": "", "output": ""}],
        [{"input": "1"}],
        [{"input": 1, "output": "1"}],
    ],
)
async def test_other_tests(tests: Any) -> None:
    with pytest.raises(RewardError, match=r"the row's 'tests' is .*; expected Python statements"):
        await judged(RIGHT, tests)


async def test_no_tests() -> None:
    with pytest.raises(
        RewardError, match=r"the row has no 'cases' for its program to pass: it has \['tests'\]"
    ):
        await judged(RIGHT, ASSERTS, tests_key="cases")
