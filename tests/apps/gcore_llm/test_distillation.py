"""Runs that learn from teachers: alone, with rewards, by source; and what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, assert_same_metrics, read_rows, step_rows, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.learning.config import AlgorithmConfig, DistillationConfig
from gcore_llm.sections import DataConfig
from gcore_llm.simulate import SimulatedConfig
from gcore_llm.tiny_model import make_tiny_model
from gcore_runs import UserError

ALONE = AlgorithmConfig(adv_estimator="distillation", filter_groups=False)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the policy's tokenizer whose next tokens are far from even."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    make_tiny_model(folder, seed=7)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(12)
    model.save_pretrained(folder)
    return folder


def job(cwd: Path, model: Path, *options: str) -> list[str]:
    """Distillation without a reward, one response a prompt."""
    rows = [
        {"prompt": f"{i}+{i % 7}=", "data_source": "sums" if i % 4 else "others"} for i in range(64)
    ]
    write_rows(cwd / "prompts.jsonl", rows)
    return [
        *(
            "train",
            "--threads",
            "1",
            "--device",
            "cpu",
            "--model",
            str(model),
            "--data.train-files",
            "prompts.jsonl",
        ),
        *(
            "--algorithm.adv-estimator",
            "distillation",
            "--algorithm.filter-groups",
            "False",
            "--rollout.n",
            "1",
        ),
        *(
            "--data.train-batch-size",
            "16",
            "--data.max-response-length",
            "8",
            "--data.max-prompt-length",
            "8",
        ),
        *("--actor.optim.lr", "3e-3", "--trainer.tensorboard", "False", *options),
    ]


@pytest.mark.slow
def test_the_divergence_to_the_teacher_falls_and_runs_resume(
    cli: Cli, tiny: Path, teacher: Path
) -> None:
    args = job(cli.cwd, tiny, "--distillation.teachers", str(teacher), "--trainer.test-freq", "100")
    args += ["--rollout.n", "4", "--data.max-response-length", "4"]
    args += ["--trainer.total-training-steps", "24", "--trainer.save-freq", "22"]
    cli.ok(*args)
    run = cli.cwd / "runs/default"
    rows = step_rows(run)
    divergence = [row["distillation/reverse_kl"] for row in rows]
    assert divergence[0] > 3
    assert sum(divergence[-5:]) / 5 < 0.35 * divergence[0]
    assert all(row["distillation/taught"] == 1 and row["training/has_signal"] == 1 for row in rows)
    assert all(row["critic/score/mean"] == 0 for row in rows)
    _, last = sorted((run / "checkpoints").glob("step-*"))
    shutil.rmtree(last)
    assert "resuming after step 22 of 24" in cli.ok(*args)
    resumed = step_rows(run)
    assert [row["step"] for row in resumed] == [row["step"] for row in rows]
    for row, other in zip(resumed[-2:], rows[-2:], strict=True):
        for name in ("distillation/reverse_kl", "actor/pg_loss", "actor/grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-4)


def test_teachers_by_source_add_to_rewards(cli: Cli, tiny: Path, teacher: Path) -> None:
    (cli.cwd / "evens.py").write_text(
        "def reward(prompt, completion, row):\n    return completion.count('2')\n"
    )
    options = [
        "--distillation.teachers",
        str(teacher),
        str(tiny),
        "--distillation.sources",
        "sums",
        "nothing",
    ]
    args = job(
        cli.cwd,
        tiny,
        *options,
        "--trainer.total-training-steps",
        "1",
        "--reward",
        "evens.py:reward",
    )
    args += ["--algorithm.adv-estimator", "grpo", "--rollout.n", "2", "--data.val-size", "0"]
    cli.ok(*args, "--data.train-batch-size", "64")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["distillation/taught"] == 0.75
    assert row["distillation/reverse_kl"] > 0.3
    assert row["actor/grad_norm"] > 0


@pytest.mark.slow
def test_controllers_and_ranks_are_taught_alike(cli: Cli, tiny: Path, teacher: Path) -> None:
    teachers = [
        "--distillation.teachers",
        str(teacher),
        str(tiny),
        "--distillation.weights",
        "3",
        "1",
    ]
    args = job(
        cli.cwd, tiny, *teachers, "--trainer.total-training-steps", "2", "--data.val-size", "0"
    )
    cli.ok(*args, "--name", "alone")
    cli.ok(*args, "--name", "ranks", "--controllers", "2", "--trainer.num-processes", "2")
    assert_same_metrics(cli.cwd / "runs/ranks", cli.cwd / "runs/alone")
    first = step_rows(cli.cwd / "runs/alone")[0]
    # Of two teachers one is the policy itself, at first.
    assert first["distillation/reverse_kl"] > 0.3


def test_a_teacher_with_another_tokenizer_is_refused(
    cli: Cli, tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(teacher)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(other)
    tokenizer.save_pretrained(other)
    file = other / "tokenizer.json"
    settings = json.loads(file.read_text())
    vocab = settings["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(settings))
    message = cli.refused(*job(cli.cwd, tiny, "--distillation.teachers", str(teacher), str(other)))
    assert (
        f"distillation.teachers holds {str(other)!r}; expected models with the policy's tokenizer: of 2"
        in message
    )
    message = cli.refused(*job(cli.cwd, tiny, "--distillation.teachers", "nowhere"))
    assert (
        "distillation.teachers is 'nowhere'; expected a Hugging Face folder with config.json"
        in message
    )
    assert not (cli.cwd / "runs").exists()


def test_a_reward_whose_feedback_teaches_some_responses(cli: Cli, tiny: Path) -> None:
    """Those that get feedback, here a quarter of all, are taught; all learn from their rewards."""
    (cli.cwd / "critic.py").write_text(
        "from gcore_rollout import Scored\n"
        "def reward(prompt, completion, row):\n"
        "    feedback = 'too long' if row['data_source'] == 'others' else ''\n"
        "    return Scored(score=float(len(completion)), feedback=feedback)\n"
    )
    options = ["--distillation.prompt", "{prompt}{feedback}", "--reward", "critic.py:reward"]
    args = job(cli.cwd, tiny, *options, "--trainer.total-training-steps", "1")
    args += ["--algorithm.adv-estimator", "grpo", "--rollout.n", "2", "--data.val-size", "0"]
    cli.ok(*args, "--data.train-batch-size", "64")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["distillation/taught"] == 0.25
    assert row["distillation/reverse_kl"] != 0
    assert row["actor/grad_norm"] > 0


def expected_advantages(model: Path, rows: list[dict[str, Any]]) -> dict[int, float]:
    """The mean over a response of log p(y | solution, prompt) - log p(y | prompt) by transformers, by index of a row.

    Responses that are not tokenized as they were sampled are left out.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    advantages: dict[int, float] = {}
    for i, row in enumerate(rows):
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        if len(response) != row["response_tokens"]:
            continue
        solution = eval(row["prompt"].removesuffix("="))
        log_probs: list[torch.Tensor] = []
        for prompt in (row["prompt"], f"{solution}: {row['prompt']}"):
            ids = torch.tensor(tokenizer(prompt)["input_ids"] + response)
            with torch.no_grad():
                logits = plain(input_ids=ids[None]).logits[0, -len(response) - 1 : -1]
            log_probs.append(logits.log_softmax(-1)[range(len(response)), response])
        advantages[i] = (log_probs[1] - log_probs[0]).mean().item()
    return advantages


@pytest.mark.slow
def test_a_policy_that_sees_the_solution_is_its_own_teacher(cli: Cli, teacher: Path) -> None:
    """With the demo task; advantages of the first step are those of transformers, and the divergence falls."""
    args = ["train", "--threads", "1", "--device", "cpu", "--model", str(teacher)]
    args += ["--task.name", "chain_sum", "--task.num-train", "64", "--task.num-val", "4"]
    args += ["--algorithm.adv-estimator", "distillation", "--algorithm.filter-groups", "False"]
    args += ["--distillation.prompt", "{answer}: {prompt}", "--rollout.n", "2"]
    args += ["--data.train-batch-size", "16", "--data.max-response-length", "6"]
    args += ["--actor.optim.lr", "1e-4", "--trainer.total-training-steps", "8"]
    args += ["--trainer.log-samples", "32", "--trainer.test-freq", "100"]
    cli.ok(*args, "--trainer.tensorboard", "False")
    run = cli.cwd / "runs/default"
    rows = step_rows(run)
    assert all(row["distillation/taught"] == 1 for row in rows)
    assert rows[0]["training/has_signal"] == 1
    samples = [row for row in read_rows(run / "samples.jsonl") if row["step"] == 1]
    assert len(samples) == 32
    advantages = expected_advantages(teacher, samples)
    assert len(advantages) > 20
    for i, advantage in advantages.items():
        assert samples[i]["advantage"] == pytest.approx(advantage, abs=1e-5)
    divergence = [row["distillation/reverse_kl"] for row in rows]
    assert sum(divergence[-3:]) < 0.7 * sum(divergence[:3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": ALONE},
            r"adv_estimator is 'distillation'; expected another one without distillation.teachers",
        ),
        (
            {"distillation": DistillationConfig(teachers=("a",))},
            r"algorithm.filter_groups is true; expected false with distillation.teachers",
        ),
        (
            {"distillation": DistillationConfig(prompt="{answer}")},
            r"algorithm.filter_groups is true; expected false with distillation.teachers or distillation.prompt",
        ),
        (
            {
                "distillation": DistillationConfig(prompt="{answer}"),
                "algorithm": ALONE,
                "data": DataConfig(image_key="image"),
            },
            r"distillation.prompt is '{answer}'; expected '' with data.image_key 'image'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(rollout=RolloutConfig(n=2), **settings)


def test_a_simulation_has_no_teachers() -> None:
    with pytest.raises(
        UserError, match=r"distillation.teachers is \('a',\); expected none in a simulation"
    ):
        SimulatedConfig(
            rollout=RolloutConfig(n=2),
            distillation=DistillationConfig(teachers=("a",)),
            algorithm=ALONE,
        )


def test_settings_of_teachers() -> None:
    with pytest.raises(
        UserError,
        match=r"distillation.weights is \(1.0,\); expected none, or 2, one for each teacher",
    ):
        DistillationConfig(teachers=("a", "b"), weights=(1.0,))
    with pytest.raises(UserError, match=r"distillation.sources is \('x',\); expected none, or 0"):
        DistillationConfig(sources=("x",))
    with pytest.raises(
        UserError, match=r"distillation.coef is 0.0; expected a finite number above 0"
    ):
        DistillationConfig(coef=0.0)
    config = DistillationConfig(
        teachers=("a", "b", "c"), weights=(1.0, 3.0, 2.0), sources=("x", "*", "y")
    )
    assert config.shares("x") == {"teacher-0": 0.25, "teacher-1": 0.75}
    assert config.shares("z") == {"teacher-1": 1.0}
    assert DistillationConfig(teachers=("a",), sources=("x",)).shares("z") == {}
