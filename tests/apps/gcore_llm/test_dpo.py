"""`gcore-llm dpo`: margins that transformers finds too, a policy that learns to prefer, and runs that resume."""

import math
from pathlib import Path

import numpy as np
import pytest
from command_line import Cli, metrics_of, write_rows
from finetune_cases import causal_lm, finished, interrupt_and_resume, log_prob, pairs
from transformers import AutoTokenizer

from gcore_llm.finetune.data import pair_tokens
from gcore_llm.finetune.tokens import Encoder
from gcore_llm.tiny_model import tiny_tokenizer


@pytest.fixture
def job(cli: Cli, tiny: Path) -> list[str]:
    """Ten steps on eight pairs each, about two seconds."""
    write_rows(cli.cwd / "pairs.jsonl", pairs(80, seed=0))
    write_rows(cli.cwd / "val.jsonl", pairs(10, seed=1))
    return [
        *(
            "dpo",
            "--threads",
            "1",
            "--device",
            "cpu",
            "--model",
            str(tiny),
            "--data.train-files",
            "pairs.jsonl",
        ),
        *(
            "--data.val-files",
            "val.jsonl",
            "--data.train-batch-size",
            "8",
            "--data.max-length",
            "32",
        ),
        *("--optim.lr", "5e-4", "--trainer.save-freq", "4", "--trainer.test-freq", "5"),
    ]


def test_the_policy_learns_to_prefer(cli: Cli, job: list[str], tiny: Path) -> None:
    cli.ok(*job, "--loss.beta", "0.2")
    run = cli.cwd / "runs/dpo"
    rows = metrics_of(run)
    first, *_, last = [row for row in rows if "val/dpo/loss" in row]
    assert first["val/dpo/loss"] == pytest.approx(math.log(2))
    assert first["val/dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert last["val/dpo/accuracy"] == 1
    assert last["val/dpo/loss"] < first["val/dpo/loss"] - 0.2
    step = next(row for row in rows if row["step"] == 1 and "dpo/loss" in row)
    assert step["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)

    before, after, tokenizer = (
        causal_lm(tiny),
        causal_lm(run / "export"),
        AutoTokenizer.from_pretrained(tiny),
    )
    rewards = {
        side: [
            0.2
            * (
                log_prob(after, tokenizer, p["prompt"], p[side])
                - log_prob(before, tokenizer, p["prompt"], p[side])
            )
            for p in pairs(10, seed=1)
        ]
        for side in ("chosen", "rejected")
    }
    for side, values in rewards.items():
        assert last[f"val/dpo/{side}_reward"] == pytest.approx(float(np.mean(values)), abs=1e-4)
    margin = float(np.mean(rewards["chosen"]) - np.mean(rewards["rejected"]))
    assert last["val/dpo/margin"] == pytest.approx(margin, abs=1e-4)


@pytest.mark.slow
def test_interrupted_run_ends_as_if_nothing_had_happened(cli: Cli, job: list[str]) -> None:
    args = [*job, "--max-token-len", "64", "--trainer.total-epochs", "2"]
    cli.ok(*args, "--name", "whole")
    run = interrupt_and_resume(cli, args, after_step=2)
    assert finished(run) == finished(cli.cwd / "runs/whole")


def test_a_resumed_run_wants_the_same_rows(cli: Cli, job: list[str]) -> None:
    cli.ok(*job, "--trainer.total-training-steps", "1")
    (cli.cwd / "runs/dpo/reference_log_probs.npz").unlink()
    longer = [*job, "--trainer.total-training-steps", "2"]
    assert "runs/dpo/reference_log_probs.npz is missing" in cli.refused(*longer)
    write_rows(cli.cwd / "pairs.jsonl", pairs(80, seed=2))
    changed = "runs/dpo was started with other settings (data.train_files: the content of its files has changed)"
    assert changed in cli.refused(*longer)


@pytest.mark.parametrize("options", [["--loss.loss-type", "ipo"], ["--loss.loss-type", "hinge"]])
def test_other_losses(cli: Cli, job: list[str], options: list[str]) -> None:
    cli.ok(*job, *options, "--trainer.total-training-steps", "6")
    margins = [
        row["val/dpo/margin"] for row in metrics_of(cli.cwd / "runs/dpo") if "val/dpo/margin" in row
    ]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[-1] > 1e-4


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASK = {"role": "user", "content": "1+1"}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": "30"},
        {"prompt": [ASK], "chosen": [answer("2")], "rejected": [answer("30")]},
        {"prompt": [ASK], "chosen": "2", "rejected": "30"},
        {"chosen": [ASK, answer("2")], "rejected": [ASK, answer("30")]},
        {"prompt": "1+1", "chosen": [ASK, answer("2")], "rejected": [ASK, answer("30")]},
    ],
    ids=["text", "messages", "mixed", "implicit prompt", "prompt repeated"],
)
def test_every_form_of_a_pair(row: dict[str, object]) -> None:
    """All mean the same tokens, and the same of them are learned."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    encoder = Encoder(tokenizer, eos_token_ids=[1], apply_chat_template=True)
    for side, text in zip(pair_tokens(encoder, row, "row 1"), ("2", "30"), strict=True):
        assert tokenizer.decode(side.ids) == f"<user>1+1<assistant>{text}<eos>"
        assert tokenizer.decode(side.ids[side.mask]) == f"{text}<eos>"


def test_demo(cli: Cli) -> None:
    """What the command does without any option, in small."""
    small = ["--task.num-train", "200", "--task.num-val", "16", "--warmup-steps", "3"]
    out = cli.ok("dpo", *small, "--trainer.total-training-steps", "3")
    assert "accuracy" in out
    run = cli.cwd / "runs/dpo"
    assert (run / "warmup.jsonl").is_file()
    assert "Accuracy per step" in (run / "report.html").read_text()
