"""`gcore-llm train` with process reward models: scores of steps, as an outcome and as process supervision."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli, option_set, read_rows, step_rows
from transformers import Qwen3Config, Qwen3ForTokenClassification

from gcore_llm.cli import parse_train
from gcore_llm.sampling import TextRewards
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import Scored
from gcore_runs.settings.resources import resolve

PROCESS = ["--algorithm.adv-estimator", "grpo_process"]
LENGTH = ["--data.max-response-length", "64"]
"""A random policy writes any character, so that a digit ends a step of one in two of its responses."""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    """A tiny token classifier of two labels."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 128, "num_labels": 2, "pad_token_id": 0, "initializer_range": 0.5}
    config = Qwen3Config(**sizes)
    Qwen3ForTokenClassification(config).save_pretrained(tmp_path / "scorer")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


def use(scorer: Path, *options: str) -> list[str]:
    """Return options with which the token classifier scores steps that end with a digit 1."""
    kind = ["--reward-model.kind", "classifier", "--reward-model.path", str(scorer)]
    return [*kind, "--reward-model.step-separator", "1", *options]


def probabilities(scorer: Path, text: str, end: str) -> list[float]:
    """Return transformers' own probability of label 1 at each token of ``end``."""
    model: Any = Qwen3ForTokenClassification.from_pretrained(scorer)
    token_ids: Any = tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
    places = [i for i, character in enumerate(text) if character == end]
    assert token_ids.shape[1] == len(text)
    return model(token_ids).logits[0, places].softmax(-1)[:, 1].tolist()


def test_steps_after_a_prompt_in_the_markup_of_the_classifier(
    own_args: list[str], scorer: Path
) -> None:
    """Chats are rendered by its template, and a prompt of plain text stands as it is."""
    options = use(scorer, "--reward-model.step-end", ";", "--reward-model.steps", "last")
    calls = [("[user]1+1=[a]", "21so 3", "1+1="), ("1+1=", "2", "1+1=")]

    async def score() -> list[Scored]:
        config = resolve(parse_train([*option_set(own_args, "--reward", "")[1:], *options]))
        rewards = await TextRewards.start(config)
        scored: list[Any] = []
        for prompt, completion, messages in calls:
            row = {"prompt": messages}
            scored.append(await rewards.runner.score(prompt=prompt, completion=completion, row=row))
        await rewards.close()
        return scored

    chat, plain = asyncio.run(score())
    tokenizer = tiny_tokenizer()
    model: Any = Qwen3ForTokenClassification.from_pretrained(scorer)
    text = "<user>1+1=<eos><assistant>21;so 3;"
    token_ids: Any = tokenizer(text, return_tensors="pt")["input_ids"]
    ends = torch.nonzero(token_ids[0] == tokenizer.convert_tokens_to_ids(";"))[:, 0]
    expected = model(token_ids).logits[0, ends].softmax(-1)[:, 1].tolist()
    assert [*chat.steps.values()] == pytest.approx(expected, abs=1e-5)
    assert chat.score == pytest.approx(expected[-1], abs=1e-5)
    assert [*chat.steps] == [2, 6]
    assert plain.score == pytest.approx(probabilities(scorer, "1+1=2;", ";")[0], abs=1e-5)


@pytest.mark.parametrize("reduction", ["min", "product"])
def test_steps_as_an_outcome(cli: Cli, own_args: list[str], scorer: Path, reduction: str) -> None:
    """Responses learn from one score, to which that of the reward function is added."""
    options = use(scorer, "--reward-model.steps", reduction, "--trainer.log-samples", "9")
    cli.ok(*option_set(own_args, *LENGTH), *options)
    for row in step_rows(cli.cwd / "runs/default"):
        parts = row["reward/function/mean"] + row["reward/model/mean"]
        assert row["critic/score/mean"] == pytest.approx(parts)
        assert row["reward/model/steps/mean"] > 1
        assert row["actor/grad_norm"] > 0
    for sample in read_rows(cli.cwd / "runs/default/samples.jsonl"):
        steps = [step for step in sample["response"].split("1") if step.strip()]
        assert sample["parts"]["model/steps"] <= max(len(steps), 1)


def test_process_supervision(cli: Cli, own_args: list[str], scorer: Path) -> None:
    """A response of several steps has several advantages."""
    args = option_set(option_set(own_args, "--reward", ""), *LENGTH)
    cli.ok(*args, *use(scorer), *PROCESS, "--trainer.log-samples", "64")
    rows = step_rows(cli.cwd / "runs/default")
    for row in rows:
        assert row["critic/advantages/max"] > 0 > row["critic/advantages/min"]
        assert row["actor/grad_norm"] > 0
        assert row["training/has_signal"] == 1
    advantages = [row["advantage"] for row in read_rows(cli.cwd / "runs/default/samples.jsonl")]
    assert len(set(advantages)) > 8
    assert np.isfinite([value for value in advantages if value is not None]).all()


def test_a_judge_of_steps(cli: Cli, own_args: list[str], tiny: Path) -> None:
    """A tiny judge's last digit is its verdict on a step."""
    (cli.cwd / "question.txt").write_text("{completion}? {step} ")
    judge = {
        "kind": "judge",
        "path": tiny,
        "step-separator": "1",
        "judge.method": "steps",
        "judge.template": "question.txt",
        "judge.pattern": r"(\d)",
        "judge.max-response-length": 12,
        "judge.unparsable-score": 0.25,
    }
    options = [f"--reward-model.{name}={value}" for name, value in judge.items()]
    cli.ok(*option_set(option_set(own_args, "--reward", ""), *LENGTH), *options, *PROCESS)
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["reward/model/steps/mean"] > 1
        assert 0 < row["reward/model/parsed/mean"] < 1
        assert row["critic/advantages/max"] > 0 > row["critic/advantages/min"]
        assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PROCESS, "algorithm.adv_estimator is 'grpo_process'; expected another one unless"),
        (
            [*PROCESS, "--rollout.agent.run", "a.py:f", "--rollout.agent.credit", "turns"],
            "rollout.agent.credit turns and turn_discount 0",
        ),
        (
            ["--reward-model.steps", "last"],
            "reward_model.steps is 'last'; expected 'min' with reward_model.kind 'none'",
        ),
        (
            ["--reward-model.kind", "classifier", "--reward-model.step-separator", ""],
            "reward_model.step_separator is ''; expected one or more characters",
        ),
    ],
)
def test_bad_settings(cli: Cli, own_args: list[str], options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*own_args, *options).split())


def test_a_classifier_of_responses_has_no_steps(
    cli: Cli, own_args: list[str], tmp_path: Path, scorer: Path
) -> None:
    from transformers import Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(scorer, num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(scorer)
    refused = cli.refused(*own_args, *use(scorer), *PROCESS)
    expected = "expected a token classifier with algorithm.adv_estimator 'grpo_process'"
    assert expected in " ".join(refused.split())
