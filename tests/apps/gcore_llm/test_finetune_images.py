"""`gcore-llm sft`, `dpo`, `eval` and `sample` with images: losses and answers of transformers, one sample at a time."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from command_line import Cli, metrics_of, read_rows, write_rows
from tiny_vision_model import END, IMAGE, Reference, noise, save_vision_model
from transformers import AutoTokenizer

PICTURES = {"small": noise(28, 56, seed=0), "wide": noise(56, 84, seed=1)}
VARIETY = """
def reward(prompt, completion, row):
    return float(len(set(completion)))
"""
TEXT = {"type": "text", "text": "Which?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.load(model)


@pytest.fixture(autouse=True)
def pictures(cli: Cli) -> None:
    """The pictures as files, next to the rows."""
    for name, picture in PICTURES.items():
        (cli.cwd / f"{name}.png").write_bytes(picture)


def place(picture: bytes) -> str:
    """As many image tokens as transformers' model has features of a picture, between their marks."""
    rows = {PICTURES["small"]: 2, PICTURES["wide"]: 6}
    return f"<|vision_start|>{'<|image_pad|>' * rows[picture]}<|vision_end|>"


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def log_probs(
    reference: Reference, model: Path, given: str, pictures: Sequence[bytes], answer: str
) -> torch.Tensor:
    """[R] of an answer and its end after a text, by one forward of transformers' model."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(given)["input_ids"]
    response = [*tokenizer(answer)["input_ids"], END]
    assert prompt.count(IMAGE) == sum(place(p).count("image_pad") for p in pictures)
    with torch.no_grad():
        return reference.log_probs(prompt, pictures, response)


def options(command: str, model: Path, *more: str) -> list[str]:
    """One step on all rows of rows.jsonl, which are also held out."""
    return [
        *(command, "--threads", "1", "--device", "cpu", "--model", str(model), "--name", "run"),
        *("--data.train-files", "rows.jsonl", "--data.val-files", "rows.jsonl"),
        *("--data.image-key", "images", "--data.train-batch-size", "4"),
        *("--trainer.total-training-steps", "1", "--optim.lr", "1e-3", *more),
    ]


def test_the_loss_of_sft_is_that_of_transformers(
    cli: Cli, model: Path, reference: Reference
) -> None:
    small, wide = PICTURES["small"], PICTURES["wide"]
    later = [
        {"role": "user", "content": [{"type": "image"}, TEXT]},
        {"role": "assistant", "content": [{"type": "text", "text": "this"}]},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "that"},
        {"role": "user", "content": "<image> is not read."},
    ]
    uri = f"data:image/png;base64,{base64.b64encode(wide).decode()}"
    rows = [
        {"messages": later, "images": ["small.png", uri, "wide.png"]},
        {"prompt": "<image>?", "completion": "one", "images": {"bytes": None, "path": "wide.png"}},
        {"prompt": "<image> or <image>", "completion": "two", "images": ["wide.png", "small.png"]},
        {"prompt": "None?", "completion": "no", "images": None},
    ]
    write_rows(cli.cwd / "rows.jsonl", rows)
    cli.ok(*options("sft", model))

    first = turn("user", f"{place(small)}Which?")
    answered = first + turn("assistant", "this") + turn("user", f"And {place(wide)}?")
    start = "<|im_start|>assistant\n"
    learned = [
        (first + start, [small], "this"),
        (answered + start, [small, wide], "that"),
        (turn("user", f"{place(wide)}?") + start, [wide], "one"),
        (turn("user", f"{place(wide)} or {place(small)}") + start, [wide, small], "two"),
        (turn("user", "None?") + start, [], "no"),
    ]
    expected = torch.cat([log_probs(reference, model, *row) for row in learned])
    metrics = metrics_of(cli.cwd / "runs/run")
    [step] = [row for row in metrics if "sft/loss" in row]
    assert step["sft/loss"] == pytest.approx(-float(expected.mean()), abs=1e-5)
    assert step["actor/grad_norm"] > 0
    before, after = [row["val/sft/loss"] for row in metrics if "val/sft/loss" in row]
    assert before == pytest.approx(-float(expected.mean()), abs=1e-5)
    trained = Reference.load(cli.cwd / "runs/run/export")
    expected = torch.cat([log_probs(trained, model, *row) for row in learned])
    assert after == pytest.approx(-float(expected.mean()), abs=1e-5)
    assert after < before
    name = "model.visual.patch_embed.proj.weight"
    assert not trained.model.get_parameter(name).equal(reference.model.get_parameter(name))


def test_the_loss_of_dpo_is_that_of_transformers(
    cli: Cli, model: Path, reference: Reference
) -> None:
    small, wide = PICTURES["small"], PICTURES["wide"]
    message = {"role": "user", "content": "<image>?"}
    rows = [
        {"prompt": "<image>?", "chosen": "one", "rejected": "three", "images": "wide.png"},
        {
            "chosen": [message, {"role": "assistant", "content": "aye"}],
            "rejected": [message, {"role": "assistant", "content": "no"}],
            "images": ["small.png"],
        },
    ]
    write_rows(cli.cwd / "rows.jsonl", rows)
    cli.ok(*options("dpo", model, "--loss.beta", "0.5"))

    run = cli.cwd / "runs/run"
    trained = Reference.load(run / "export")
    references: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    for picture, answers in ((wide, ("one", "three")), (small, ("aye", "no"))):
        given = turn("user", f"{place(picture)}?") + "<|im_start|>assistant\n"
        gains: list[torch.Tensor] = []
        for answer in answers:
            references.append(log_probs(reference, model, given, [picture], answer))
            now = log_probs(trained, model, given, [picture], answer)
            gains.append(now.sum() - references[-1].sum())
        losses.append(-torch.nn.functional.logsigmoid(0.5 * (gains[0] - gains[1])))
    with np.load(run / "reference_log_probs.npz") as file:
        # Of the training pairs and then of the held-out ones, which are the same.
        expected = torch.cat(references).repeat(2).numpy()
        np.testing.assert_allclose(file["log_probs"], expected, atol=1e-5)
    after = metrics_of(run)[-1]["val/dpo/loss"]
    assert after == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert after < 0.69


def test_eval_and_sample_answer_as_transformers_generates(
    cli: Cli, model: Path, reference: Reference
) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "<image>?", "picture": {"bytes": PICTURES["small"], "path": None}},
        {"question": "<image>!", "picture": {"bytes": None, "path": "wide.png"}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), cli.cwd / "rows.parquet")
    (cli.cwd / "variety.py").write_text(VARIETY)
    keys = ("--prompt-key", "question", "--image-key", "picture", "--reward", "variety.py:reward")
    cli.ok(
        "eval", model, "--on", "rows.parquet", *keys, "--n", "0", "--max-tokens", "6", "--out", "e"
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected: list[str] = []
    for picture, mark in ((PICTURES["small"], "?"), (PICTURES["wide"], "!")):
        given = turn("user", place(picture) + mark) + "<|im_start|>assistant\n"
        answer = reference.greedy(tokenizer(given)["input_ids"], [picture], 6)
        expected.append(tokenizer.decode(answer, skip_special_tokens=True))
    assert len(set(expected)) == 2
    answers = {row["prompt"]: row["responses"] for row in read_rows(cli.cwd / "e/responses.jsonl")}
    assert [answers[0][0]["text"], answers[1][0]["text"]] == expected

    write_rows(cli.cwd / "train.jsonl", [{"prompt": "<image>?", "images": "small.png"}] * 8)
    files = ("--data.train-files", "train.jsonl", "--data.image-key", "images")
    cli.ok(
        *("train", "--threads", "1", "--device", "cpu", "--model", model, "--name", "run", *files),
        *("--reward", "variety.py:reward", "--trainer.total-training-steps", "1"),
        *("--data.train-batch-size", "2", "--rollout.n", "2", "--data.max-response-length", "6"),
        *("--actor.optim.lr", "1e-30", "--algorithm.filter-groups", "False"),
    )
    answer = cli.ok("sample", "runs/run", "<image>!", "--images", "wide.png")
    assert answer.rstrip("\n") == expected[1]
    refusal = cli.refused("sample", "runs/run", "<image>!")
    assert "images: a prompt has 0 images; expected 1, for which it has places" in refusal


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        (
            "reward-model",
            (),
            "data.image_key is 'images'; expected '': reward models see no images",
        ),
        (
            "sft",
            ("--trainer.backend", "megatron"),
            "data.image_key is 'images'; expected '' without",
        ),
        (
            "dpo",
            ("--trainer.num-processes", "2", "--trainer.parallel.context-parallel-size", "2"),
            "data.image_key is 'images'; expected '' without a model, with trainer.backend 'meg",
        ),
    ],
)
def test_what_cannot_see_is_refused(
    cli: Cli, model: Path, command: str, more: tuple[str, ...], message: str
) -> None:
    assert message in cli.refused(*options(command, model, *more))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            ["small.png"],
            "row 1, images: a prompt has 1 images; expected 2, for which it has places",
        ),
        (["small.png", "a.png"], "images of row 1 is 'a.png'; expected an existing file"),
        (
            ["small.png", "https://host/a.png"],
            "images of row 1 is 'https://host/a.png'; expected a path, a data: URI or the bytes of an image file: "
            "nothing is fetched from the web, so download it first",
        ),
        (
            ["small.png", "data:image/png,AAAA"],
            "images of row 1 is 'data:image/png,AAAA'; expected data:image/png;base64, and base64",
        ),
        (["small.png", "rows.jsonl"], "row 1, images: an image of "),
    ],
)
def test_images_that_do_not_fit_are_refused_before_the_start(
    cli: Cli, model: Path, images: list[str], message: str
) -> None:
    row = {"prompt": "<image> or <image>?", "completion": "one", "images": images}
    write_rows(cli.cwd / "rows.jsonl", [row])
    assert message in cli.refused(*options("sft", model))
    assert not (cli.cwd / "runs").exists()


def test_a_model_that_sees_nothing_is_refused(cli: Cli, tiny: Path) -> None:
    row = {"prompt": "<image>", "completion": "one", "images": "small.png"}
    (cli.cwd / "rows.jsonl").write_text(json.dumps(row))
    error = cli.refused(*options("sft", tiny))
    assert "data.image_key is 'images': model type of" in error
    assert "is 'qwen3'; expected" in error
