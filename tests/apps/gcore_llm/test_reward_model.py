"""`gcore-llm reward-model`: what transformers makes of its export, and runs that resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, metrics_of, write_rows
from finetune_cases import TEMPLATE, finished, interrupt_and_resume, pairs, with_template
from transformers import AutoModelForSequenceClassification, AutoTokenizer


@pytest.fixture
def job(cli: Cli, tiny: Path) -> list[str]:
    """Ten steps on eight pairs each, about two seconds."""
    write_rows(cli.cwd / "pairs.jsonl", pairs(80, seed=0))
    write_rows(cli.cwd / "val.jsonl", pairs(12, seed=1))
    return [
        *("reward-model", "--threads", "1", "--device", "cpu", "--model", str(tiny)),
        *(
            "--data.train-files",
            "pairs.jsonl",
            "--data.val-files",
            "val.jsonl",
            "--data.train-batch-size",
            "8",
        ),
        *(
            "--data.max-length",
            "64",
            "--optim.lr",
            "5e-4",
            "--trainer.save-freq",
            "4",
            "--trainer.test-freq",
            "5",
        ),
    ]


def rewards(export: Path, texts: list[str]) -> torch.Tensor:
    """Of whole texts in one padded batch, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForSequenceClassification.from_pretrained(export)
    assert model.config.num_labels == 1
    batch = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
            :, 0
        ]


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_transformers_scores_as_the_run_did(
    cli: Cli, job: list[str], tiny: Path, chat: bool
) -> None:
    if chat:
        job[job.index(str(tiny))] = str(with_template(tiny, cli.cwd / "chat", TEMPLATE))
    cli.ok(*job)
    run = cli.cwd / "runs/reward-model"
    first, *_, last = [row for row in metrics_of(run) if "val/rm/loss" in row]
    assert first["val/rm/loss"] == pytest.approx(math.log(2))
    form = "<user>{}</user><assistant>{}</assistant><eos>" if chat else "{}{}<eos>"
    held_out = pairs(12, seed=1)
    chosen, rejected = (
        rewards(run / "export", [form.format(p["prompt"], p[side]) for p in held_out])
        for side in ("chosen", "rejected")
    )
    assert last["val/rm/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert last["val/rm/accuracy"] > 0.8
    assert last["val/rm/chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert last["val/rm/margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)


def test_whole_texts_without_a_prompt(cli: Cli, job: list[str]) -> None:
    """What two texts share is their prompt; it makes no difference to have it named."""
    named = pairs(80, seed=0)
    cli.ok(*job, "--name", "named", "--trainer.total-training-steps", "3")
    whole = [{side: p["prompt"] + p[side] for side in ("chosen", "rejected")} for p in named]
    write_rows(cli.cwd / "pairs.jsonl", whole)
    cli.ok(*job, "--name", "whole", "--trainer.total-training-steps", "3")
    first, second = (finished(cli.cwd / "runs" / name) for name in ("named", "whole"))
    assert first == second


def test_interrupted_run_ends_as_if_nothing_had_happened(cli: Cli, job: list[str]) -> None:
    args = [*job, "--loss.center-rewards-coefficient", "0.01", "--trainer.total-epochs", "2"]
    cli.ok(*args, "--name", "whole")
    run = interrupt_and_resume(cli, args, after_step=2)
    assert finished(run) == finished(cli.cwd / "runs/whole")


def test_a_tokenizer_that_pads_with_its_end(cli: Cli, job: list[str], tiny: Path) -> None:
    """transformers would score before its end any text that ends in padding: the export pads with another token."""
    model = cli.cwd / "padded"
    with_template(tiny, model, TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(model)
    job[job.index(str(tiny))] = str(model)
    cli.ok(*job, "--trainer.total-training-steps", "1")
    export = cli.cwd / "runs/reward-model/export"
    padding = AutoTokenizer.from_pretrained(export).pad_token_id
    assert AutoModelForSequenceClassification.from_pretrained(export).config.pad_token_id == padding
    assert padding != tokenizer.eos_token_id
    texts = ["1:2<eos>", "1:23<eos>"]
    assert rewards(export, texts).tolist() == pytest.approx(
        [rewards(export, [text]).item() for text in texts]
    )
    exported: Any = AutoModelForSequenceClassification.from_pretrained(export)
    hidden = exported.model(
        AutoTokenizer.from_pretrained(export)(texts[0], return_tensors="pt")["input_ids"]
    )
    last = exported.score(hidden.last_hidden_state)[0, -1, 0].item()
    assert rewards(export, texts)[0].item() == pytest.approx(last, abs=1e-6)


def test_demo(cli: Cli) -> None:
    """What the command does without any option, in small."""
    small = ["--task.num-train", "200", "--task.num-val", "16", "--warmup-steps", "3"]
    out = cli.ok("reward-model", *small, "--trainer.total-training-steps", "3")
    assert "held-out rows" in out
    assert "Accuracy per step" in (cli.cwd / "runs/reward-model/report.html").read_text()
