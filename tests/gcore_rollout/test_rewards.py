import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gcore_rollout.errors import RewardError
from gcore_rollout.rewards import MathVerifyReward, ReasoningGymReward, import_reasoning_gym, load_reward, score


async def _score(reward: Any) -> float:
    return await score(reward, prompt="2+3=", completion="5", row={"answer": "5"})


async def test_plain_and_async_functions_are_called_with_prompt_completion_and_row() -> None:
    def plain(prompt: str, completion: str, row: Mapping[str, Any]) -> bool:
        return prompt == "2+3=" and completion == row["answer"]

    async def later(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        return 0.25 + plain(prompt, completion, row)

    assert await _score(plain) == 1.0
    assert await _score(later) == 1.25


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "returned nan"), (math.inf, "returned inf"), ("high", "returned 'high'"), (None, "returned None")],
)
async def test_a_score_that_is_no_finite_number_is_an_error(value: object, message: str) -> None:
    def reward(prompt: str, completion: str, row: object) -> object:
        return value

    with pytest.raises(RewardError, match=rf"reward 'reward' on prompt '2\+3=', completion '5': {message}"):
        await _score(reward)


async def test_a_reward_that_raises_is_an_error_that_says_so() -> None:
    def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        return row["missing"]

    with pytest.raises(RewardError, match="KeyError: 'missing'"):
        await _score(reward)


def test_load_reward(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(prompt, completion, row):\n    return float(len(completion))\n")
    assert load_reward(f"{file}:length")("", "abc", {}) == 3.0


@pytest.mark.parametrize(
    ("content", "spec", "message"),
    [
        (None, "mine.py:f", "no such file"),
        ("", "mine.py", "PATH.py:function is needed"),
        ("", "mine.txt:f", "PATH.py:function is needed"),
        ("def g(p, c, r): return 0.0", "mine.py:f", r"has no function 'f', it has \['g'\]"),
        ("import nothing_of_this_name", "mine.py:f", "does not import: ModuleNotFoundError"),
        ("f = 3", "mine.py:f", "has no function 'f'"),
    ],
)
def test_load_reward_errors(tmp_path: Path, content: str | None, spec: str, message: str) -> None:
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(RewardError, match=message):
        load_reward(str(tmp_path / spec))


def test_reasoning_gym_gives_full_marks_or_none() -> None:
    entry = import_reasoning_gym().create_dataset("chain_sum", size=1, seed=1)[0]
    answer = entry["answer"]
    whole, last = ReasoningGymReward(), ReasoningGymReward(answer_after="=")
    assert whole("", answer, {"entry": entry}) == 1.0
    assert whole("", f"1+1={answer}", {"entry": entry}) == 0.0
    assert last("", f"1+1= {answer} ", {"entry": entry}) == 1.0
    # The library gives partial marks to whatever contains the answer.
    assert whole("", f"{answer}0", {"entry": entry}) == 0.0
    with pytest.raises(RewardError, match="no 'entry'"):
        whole("", answer, {"answer": answer})


def test_math_verify_compares_values() -> None:
    reward = MathVerifyReward()
    assert reward("", r"so it is \boxed{\frac{1}{2}}", {"answer": "0.5"}) == 1.0
    assert reward("", "so it is 3", {"answer": "4"}) == 0.0
    assert MathVerifyReward(answer_key="gold")("", r"\boxed{7}", {"gold": 7}) == 1.0
    with pytest.raises(RewardError, match=r"no 'answer' .* it has \['gold'\]"):
        reward("", "7", {"gold": 7})
