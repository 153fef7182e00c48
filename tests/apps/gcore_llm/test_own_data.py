"""The user's own model, prompts and reward, in every form that they may have."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from command_line import Cli, metrics_of, option_set, read_rows, write_rows
from transformers import AutoTokenizer

from gcore_llm.config import TrainConfig
from gcore_runs.run_folder import RunFolder

# What the reward is called with goes into seen.jsonl.
LOGGING = """
import json
from pathlib import Path


def reward(prompt, completion, row):
    with Path("seen.jsonl").open("a") as log:
        log.write(json.dumps([prompt, completion, row]) + "\\n")
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""

# A lock belongs to the event loop that first waits for it, as a client session does.
ASYNC = """
import asyncio

lock = asyncio.Lock()


async def reward(prompt, completion, row):
    async with lock:
        await asyncio.sleep(0.001)
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def job(cli: Cli, tiny: Path) -> list[str]:
    """Two steps of four prompts from train.jsonl, with the reward that logs."""
    (cli.cwd / "mine.py").write_text(LOGGING)
    return [
        *("train", "--threads", "1", "--device", "cpu", "--model", str(tiny)),
        *("--data.train-files", "train.jsonl", "--reward", "mine.py:reward"),
        *("--data.train-batch-size", "4", "--rollout.n", "2", "--data.max-response-length", "6"),
        *("--data.max-prompt-length", "40", "--trainer.total-training-steps", "2"),
    ]


def seen(cli: Cli) -> list[Any]:
    return read_rows(cli.cwd / "seen.jsonl")


def test_text_and_extra_columns(cli: Cli, job: list[str]) -> None:
    """Text reaches model and reward as it is, whatever characters it has, and every column reaches the reward."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}+1=\u2028", "answer": i + 1, "tags": ["a", {"b": None}]} for i in range(20)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (cli.cwd / "train.jsonl").write_text(text)
    assert "18 training prompts, 2 held out" in cli.ok(*job)
    by_prompt = {row["prompt"]: row for row in rows}
    assert len({prompt for prompt, _, _ in seen(cli)}) >= 10
    assert all(row == by_prompt[prompt] for prompt, _, row in seen(cli))


@pytest.mark.slow
def test_parquet_is_the_same_as_jsonl(cli: Cli, job: list[str]) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "meta": {"level": [i]}} for i in range(20)]
    write_rows(cli.cwd / "train.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), cli.cwd / "train.parquet")
    cli.ok(*job, "--name", "jsonl")
    from_jsonl = seen(cli)
    (cli.cwd / "seen.jsonl").unlink()
    cli.ok(*option_set(job, "--data.train-files", "train.parquet"), "--name", "parquet")
    assert seen(cli) == from_jsonl
    first, second = (metrics_of(cli.cwd / "runs" / name) for name in ("jsonl", "parquet"))
    assert first == second


def with_template(cli: Cli, job: list[str], tiny: Path) -> list[str]:
    model = cli.cwd / "chat"
    shutil.copytree(tiny, model)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    return option_set(job, "--model", "chat")


def test_chat_messages_go_through_the_template(cli: Cli, job: list[str], tiny: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    write_rows(cli.cwd / "train.jsonl", [{"prompt": chat}, {"prompt": "2+2="}] * 10)
    args = [*with_template(cli, job, tiny), "--data.max-prompt-length", "80"]
    cli.ok(*args)
    messages, text = (
        "<system>Add.</system><user>1+1=</user><assistant>",
        "<user>2+2=</user><assistant>",
    )
    assert {prompt for prompt, _, _ in seen(cli)} == {messages, text}
    [longest] = {row["prompt_length/mean"] for row in metrics_of(cli.cwd / "runs/default")[1:2]}
    assert len(text) <= longest <= len(messages)
    # A run is asked in the form it was trained in: the template's letters, not the bare prompt.
    cli.ok("sample", "runs/default", "2+2=")
    exported = AutoTokenizer.from_pretrained(cli.cwd / "runs/default/export")
    assert exported.chat_template == TEMPLATE

    (cli.cwd / "seen.jsonl").unlink()
    write_rows(cli.cwd / "train.jsonl", [{"prompt": "2+2="}] * 10)
    cli.ok(*args, "--data.apply-chat-template", "never", "--name", "plain")
    assert {prompt for prompt, _, _ in seen(cli)} == {"2+2="}


@pytest.mark.slow
def test_async_reward_gives_what_a_plain_one_gives(cli: Cli, job: list[str]) -> None:
    write_rows(cli.cwd / "train.jsonl", [{"prompt": f"{i}+1="} for i in range(20)])
    (cli.cwd / "judge.py").write_text(ASYNC)
    cli.ok(*job, "--name", "plain")
    cli.ok(*option_set(job, "--reward", "judge.py:reward"), "--name", "async", "--controllers", "2")
    for plain, awaited in zip(
        *(metrics_of(cli.cwd / "runs" / name) for name in ("plain", "async")), strict=True
    ):
        assert {
            k: v for k, v in awaited.items() if k.startswith(("critic/", "val/"))
        } == pytest.approx({k: v for k, v in plain.items() if k.startswith(("critic/", "val/"))})


def test_config_file_and_options_over_it(cli: Cli, tiny: Path) -> None:
    (cli.cwd / "mine.py").write_text(LOGGING)
    write_rows(cli.cwd / "train.jsonl", [{"question": f"{i}+1="} for i in range(20)])
    (cli.cwd / "job.toml").write_text(
        f'name = "mine"\nmodel = "{tiny}"\nreward = "mine.py:reward"\nthreads = 1\ndevice = "cpu"\n'
        '[data]\ntrain_files = ["train.jsonl"]\nprompt_key = "question"\ntrain_batch_size = 4\n'
        "max_response_length = 6\nmax_prompt_length = 40\n"
        "[rollout]\nn = 4\n[actor.optim]\nlr = 1e-4\nbetas = [0.8, 0.9]\n[trainer]\ntotal_training_steps = 9\n"
    )
    cli.ok(
        "train", "--config", "job.toml", "--trainer.total-training-steps", "1", "--rollout.n", "2"
    )
    config = RunFolder(cli.cwd / "runs/mine").load_config(TrainConfig)
    assert (config.rollout.n, config.trainer.total_training_steps) == (2, 1)
    assert (config.data.prompt_key, config.data.train_batch_size) == ("question", 4)
    assert (config.actor.optim.lr, config.actor.optim.betas) == (1e-4, (0.8, 0.9))
    assert len(seen(cli)) == 1 + 2 * 2 * 2 + 2 * 4, (
        "the trial, two evaluations of two prompts, a wave of four"
    )
    # A run's own config is a config file that means the same.
    again = cli.ok("train", "--config", "runs/mine/config.toml")
    assert "complete: 1 of 1 steps are done" in again


def test_held_out_files(cli: Cli, job: list[str]) -> None:
    write_rows(cli.cwd / "train.jsonl", [{"prompt": f"{i}+1="} for i in range(20)])
    write_rows(cli.cwd / "val.jsonl", [{"prompt": "7*7="}, {"prompt": "8*8="}])
    write_rows(cli.cwd / "more.jsonl", [{"prompt": "9*9="}])
    assert "20 training prompts, 3 held out" in cli.ok(
        *job, "--data.val-files", "val.jsonl", "more.jsonl"
    )
    samples = read_rows(cli.cwd / "runs/default/samples/after.jsonl")
    assert [sample["prompt"] for sample in samples] == ["7*7=", "8*8=", "9*9="]
    assert all(sample["score"] is not None for sample in samples)


def test_without_held_out_prompts(cli: Cli, job: list[str]) -> None:
    write_rows(cli.cwd / "train.jsonl", [{"prompt": f"{i}+1="} for i in range(8)])
    out = cli.ok(*job)
    assert "8 training prompts, 0 held out" in out
    assert "held-out score" not in out
    assert "has no held-out prompts" in cli.refused("eval", "runs/default")


def test_long_prompts_are_left_out_and_counted(cli: Cli, job: list[str]) -> None:
    fitting, long = [{"prompt": "1" * 40}] * 12, [{"prompt": "2" * 41}] * 3
    write_rows(cli.cwd / "train.jsonl", fitting + long)
    write_rows(cli.cwd / "val.jsonl", [{"prompt": "3="}, {"prompt": "4" * 50}])
    out = cli.ok(*job, "--data.val-files", "val.jsonl")
    assert "left out 4 prompts longer than 40 tokens" in out
    assert "12 training prompts, 1 held out" in out
    assert {prompt for prompt, _, _ in seen(cli)} == {"1" * 40, "3="}


def test_math_verify(cli: Cli, job: list[str]) -> None:
    write_rows(
        cli.cwd / "train.jsonl", [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(20)]
    )
    args = option_set(job, "--reward", "math-verify")
    finished = cli(*args, "--algorithm.filter-groups", "False")
    # A random model is never right.
    assert (finished.code, finished.err) == (3, "")
    assert "held-out score" in finished.out
    write_rows(cli.cwd / "train.jsonl", [{"prompt": f"{i}+1="} for i in range(20)])
    assert "the row has no 'answer' for math-verify to compare with" in cli.refused(
        *args, "--name", "without"
    )
    write_rows(
        cli.cwd / "train.jsonl",
        [{"prompt": f"{i}+1=", "answer": None if i == 7 else "1"} for i in range(20)],
    )
    refused = cli.refused(*args, "--name", "null")
    assert "prompt of row 8: the row's 'answer' is None; expected a text or a number" in refused


def test_a_task_with_the_users_reward(cli: Cli, tiny: Path) -> None:
    """The task's rows reach the user's reward, with the task's own entry and answer."""
    (cli.cwd / "mine.py").write_text(LOGGING)
    task = ["--task.name", "chain_sum", "--task.num-train", "50", "--task.num-val", "2"]
    sizes = ["--data.train-batch-size", "4", "--rollout.n", "2", "--data.max-response-length", "6"]
    args = [
        "train",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--model",
        tiny,
        "--reward",
        "mine.py:reward",
        *task,
        *sizes,
    ]
    cli.ok(*args, "--data.max-prompt-length", "64", "--trainer.total-training-steps", "1")
    _, _, row = seen(cli)[-1]
    assert row["entry"]["metadata"]["source_dataset"] == "chain_sum"
    assert row["answer"] == row["entry"]["answer"]
