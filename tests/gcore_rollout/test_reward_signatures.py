"""Reward functions with the parameters of verl and TRL: one file serves both libraries and gcore."""

import asyncio
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gcore_rollout import (
    NoScoreError,
    ProcessLimits,
    RetryPolicy,
    RewardError,
    RewardRunner,
    RewardRunnerConfig,
    Scored,
    build_reward,
    evaluate,
)
from gcore_rollout.rewards.registry import load_reward

MESSAGES = [{"role": "user", "content": "2+2="}]
ROW: dict[str, Any] = {
    "prompt": MESSAGES,
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
    "answer": "4",
    "level": 2,
}
SOURCE = """
import asyncio

def verl(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "index": extra_info["index"], "pred": solution_str, "of": data_source}

async def verl_async(solution_str, ground_truth, **kwargs):
    await asyncio.sleep(0)
    assert kwargs == {"data_source": "sums", "extra_info": {"index": 3}}
    return float(solution_str == ground_truth)

def verl_without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}

def trl(completions, prompts=None, **columns):
    assert prompts == [[{"role": "user", "content": "2+2="}]] and "prompt" not in columns
    return [float(c[0]["content"] == a) for c, a in zip(completions, columns["answer"], strict=True)]

async def trl_async(prompts, completions, answer, log_metric=None):
    await asyncio.sleep(0)
    log_metric("length", len(completions[0][0]["content"]))
    return [float(answer[0])]

def trl_of_text(completions, level, **kwargs):
    return [len(c) * l for c, l in zip(completions, level)]

def trl_of_hard_ones(completions, level, **kwargs):
    return [None if l < 5 else 1.0 for l in level]

same = trl_of_hard_ones

def trl_two(completions, **kwargs):
    return [1.0, 2.0]

def trl_state(completions, trainer_state, **kwargs):
    return [0.0]

def ours(prompt, completion, row):
    return row["level"]

def other(text, *, gold):
    return 0.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("name", "completion", "expected"),
    [
        ("verl", "4", Scored(score=1.0, parts={"acc": 1.0, "index": 3.0})),
        ("verl", "5", Scored(score=0.0, parts={"acc": 0.0, "index": 3.0})),
        ("verl_async", "4", Scored(score=1.0)),
        ("trl", "4", Scored(score=1.0)),
        ("trl", "5", Scored(score=0.0)),
        ("trl_async", "55", Scored(score=4.0, parts={"length": 2.0})),
        ("ours", "", Scored(score=2.0)),
    ],
)
async def test_a_form_is_recognised_by_its_parameters(
    file: Path, name: str, completion: str, expected: Scored
) -> None:
    reward = load_reward(f"{file}:{name}")
    assert await evaluate(reward, prompt="<user>2+2=", completion=completion, row=ROW) == expected


async def test_the_prompt_is_of_the_column_that_the_run_names(file: Path) -> None:
    """A prompt of text comes with completions of text, as in TRL's standard format."""
    reward = load_reward(f"{file}:trl_of_text", prompt_key="question")
    scored = await evaluate(
        reward, prompt="", completion="abc", row={"question": "2+2=", "level": 2}
    )
    assert scored.score == 6.0
    with pytest.raises(RewardError, match="the row has no 'question' for a reward of TRL's form"):
        await evaluate(reward, prompt="", completion="abc", row=ROW)


async def test_none_adds_nothing_to_a_sum(file: Path) -> None:
    both = build_reward(f"0.5 * {file}:trl + 2 * {file}:trl_of_hard_ones")
    easy = await evaluate(both, prompt="", completion="4", row=ROW)
    hard = await evaluate(both, prompt="", completion="4", row=ROW | {"level": 5})
    assert easy == Scored(score=0.5, parts={"trl": 1.0})
    assert hard == Scored(score=2.5, parts={"trl": 1.0, "trl_of_hard_ones": 1.0})
    for alone in (f"{file}:trl_of_hard_ones", f"{file}:trl_of_hard_ones + 2 * {file}:same"):
        with pytest.raises(NoScoreError, match="does not apply"):
            await evaluate(build_reward(alone), prompt="", completion="4", row=ROW)


BATCHES = """
import time

sizes = []

def lists(prompts, completions, rows, scale=1.0):
    sizes.append(len(prompts))
    return [None if c == "skip" else scale * (c == r["answer"]) for c, r in zip(completions, rows, strict=True)]

def slow_lists(prompts, completions, rows, scale=1.0):
    if "slow" in completions:
        time.sleep(0.8)
    while "hang" in completions:
        pass
    return lists(prompts, completions, rows, scale)

def scaled(prompt, completion, row, scale=1.0):
    return scale

async def waits(prompt, completion, row):
    return 1.0

def trl_scaled(completions, level, scale=1.0):
    return [scale * level[0]]

def too_few(prompts, completions, rows):
    return [1.0]
"""


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "batches.py"
    path.write_text(BATCHES)
    return path


async def test_lists_have_all_calls_that_wait(batches: Path) -> None:
    runner = RewardRunner(
        build_reward(f"{batches}:lists", kwargs={"scale": 2.0}), RewardRunnerConfig(on_error="drop")
    )
    texts = ["4", "5", "skip", *["4"] * 7]
    scored = await asyncio.gather(
        *(runner.score(prompt="p", completion=text, row=ROW) for text in texts)
    )
    assert [one.score if isinstance(one, Scored) else None for one in scored] == [
        2.0,
        0.0,
        None,
        *[2.0] * 7,
    ]
    assert sys.modules["gcore_user_batches"].sizes == [10]
    few = RewardRunner(build_reward(f"{batches}:too_few"), RewardRunnerConfig(on_error="drop"))
    failed = await asyncio.gather(
        *(few.score(prompt="p", completion=text, row=ROW) for text in "ab")
    )
    message = "returned 1 scores; expected one for each of 2"
    assert all(isinstance(one, RewardError) and message in str(one) for one in failed)


@pytest.mark.slow
async def test_lists_in_a_process_of_their_own(batches: Path) -> None:
    """All calls of a batch that takes too long fail, and no others; the time of calls that wait does not run."""
    limits = ProcessLimits(call_s=2.0)
    reward = build_reward(f"{batches}:slow_lists", kwargs={"scale": 2.0}, process_limits=limits)
    retry = RetryPolicy(max_retries=0)
    runner = RewardRunner(reward, RewardRunnerConfig(on_error="drop", timeout_s=2.4, retry=retry))
    first = asyncio.create_task(runner.score(prompt="p", completion="slow", row=ROW))
    # Longer than a batch waits for more calls.
    await asyncio.sleep(0.1)
    hung = await asyncio.gather(
        *(runner.score(prompt="p", completion=text, row=ROW) for text in ("4", "hang"))
    )
    assert await first == Scored(score=0.0)
    for one in hung:
        assert isinstance(one, RewardError)
        assert "did not answer within 2 s" in str(one)
    assert await runner.score(prompt="p", completion="4", row=ROW) == Scored(score=2.0)
    assert runner.stats().num_timeouts == 0


def test_what_cannot_have_a_process_is_refused(batches: Path) -> None:
    spec = f"{batches}:waits"
    expected = (
        f"reward_calls.in_process is True; expected False with reward '{spec}', which is async"
    )
    with pytest.raises(RewardError, match=re.escape(expected)):
        build_reward(spec, process_limits=ProcessLimits())


async def test_arguments_of_settings(batches: Path) -> None:
    """Each reward of a sum gets those that it has a parameter for; a column of the same name does not replace them."""
    spec = f"{batches}:scaled + 10 * {batches}:trl_scaled"
    row = ROW | {"scale": 7.0}
    scored = await evaluate(
        build_reward(spec, kwargs={"scale": 0.5}), prompt="", completion="", row=row
    )
    assert scored.parts == {"scaled": 0.5, "trl_scaled": 1.0}
    gold = await evaluate(
        build_reward("aime", kwargs={"answer_key": "gold"}),
        prompt="",
        completion="3",
        row={"gold": 3},
    )
    assert gold.score == 1.0
    for wrong in ({"scael": 0.5}, {"row": {}}):
        with pytest.raises(
            RewardError,
            match=r"reward_kwargs\.(scael|row) is .*; expected the name of a parameter of ",
        ):
            build_reward(spec, kwargs=wrong)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "other",
            r"reward is other\(text, \*, gold\); expected the parameters \(prompt, completion, row\), \(",
        ),
        ("trl_state", "expected no trainer_state, which gcore does not pass"),
    ],
)
def test_other_parameters_are_refused_in_a_line(file: Path, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as error:
        load_reward(f"{file}:{name}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "verl",
            {"prompt": "x"},
            r"the row has neither reward_model\.ground_truth nor ground_truth: it has \['prompt'\]",
        ),
        (
            "verl_without_score",
            ROW,
            r"returned a dict with \['acc'\]; expected a number, or a dict with 'score'",
        ),
        ("trl_two", ROW, "returned 2 scores; expected one for each of 1 completions"),
    ],
)
async def test_what_goes_wrong_in_a_call(
    file: Path, name: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        await evaluate(load_reward(f"{file}:{name}"), prompt="", completion="4", row=row)


@pytest.mark.slow
async def test_functions_of_the_libraries_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's scorer of GSM8K and TRL's rewards of format, as they are installed."""
    # What the import of verl does to them is undone.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(logging.root, "handlers", logging.root.handlers[:])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    file = tmp_path / "theirs.py"
    file.write_text(
        "from trl.rewards import think_format_reward\n"
        "from verl.utils.reward_score.gsm8k import compute_score\n"
        "def gsm8k(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return compute_score(solution_str, ground_truth)\n"
    )
    gsm8k, think = (load_reward(f"{file}:{name}") for name in ("gsm8k", "think_format_reward"))
    assert (await evaluate(gsm8k, prompt="", completion="So #### 4", row=ROW)).score == 1.0
    assert (await evaluate(gsm8k, prompt="", completion="So 4", row=ROW)).score == 0.0
    assert (
        await evaluate(think, prompt="", completion="<think>2+2</think>4", row=ROW)
    ).score == 1.0
    assert (await evaluate(think, prompt="", completion="4", row=ROW)).score == 0.0
