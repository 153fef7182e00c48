"""Prompts with images: a vision-language model trained from rows that have them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command_line import Cli, option_set, read_rows, reproducible, step_rows, val_rows, write_rows
from tiny_vision_model import Reference, png, save_vision_model

from gcore_llm.learning.preparation import sample_flops, workload_of
from gcore_rollout import PromptImages
from gcore_trainer import Images, Sample

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}

# The share of the name's letters that are there: a random model has groups that differ, too.
REWARD = """
def reward(prompt, completion, row):
    return sum(letter in completion for letter in row["colour"]) / len(row["colour"])
"""


def square(colour: str, size: int) -> bytes:
    return png(np.full((size, size, 3), COLOURS[colour], np.uint8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def job(cli: Cli, model: Path) -> list[str]:
    """Two steps of four prompts from squares.parquet: squares of three colours and two sizes."""
    rows: list[dict[str, Any]] = []
    for i in range(24):
        colour = list(COLOURS)[i % 3]
        parts = [{"type": "image", "text": None}, {"type": "text", "text": "Colour?"}]
        image = {"bytes": square(colour, 28 + 28 * (i % 2)), "path": None}
        rows.append(
            {"prompt": [{"role": "user", "content": parts}], "images": [image], "colour": colour}
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), cli.cwd / "squares.parquet")
    (cli.cwd / "colour.py").write_text(REWARD)
    return [
        *("train", "--threads", "1", "--device", "cpu", "--model", str(model), "--name", "run"),
        *(
            "--data.train-files",
            "squares.parquet",
            "--data.image-key",
            "images",
            "--reward",
            "colour.py:reward",
        ),
        *("--data.train-batch-size", "4", "--rollout.n", "4", "--data.max-response-length", "8"),
        *(
            "--data.max-prompt-length",
            "64",
            "--actor.optim.lr",
            "1e-3",
            "--trainer.total-training-steps",
            "2",
        ),
        *("--data.val-size", "2", "--trainer.save-freq", "1", "--trainer.test-freq", "1"),
    ]


def fresh(job: list[str]) -> list[str]:
    """Without a group that is left over for the next step, whose weights are others."""
    return [*option_set(job, "--data.train-batch-size", "8"), "--algorithm.filter-groups", "False"]


def test_a_model_learns_from_rows_with_images(cli: Cli, job: list[str], model: Path) -> None:
    cli.ok(*fresh(job), "--algorithm.old-log-probs", "trainer", "--actor.loss.kl-loss-coef", "0.01")
    run = cli.cwd / "runs" / "run"
    rows = step_rows(run)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        # The engine's and the trainer's, of the same tokens behind the same images.
        assert row["training/rollout_probs_diff_mean"] < 1e-5
    before, after = Reference.load(model), Reference.load(run / "export")
    moved = [
        n for n, p in after.model.named_parameters() if not p.equal(before.model.get_parameter(n))
    ]
    assert any(name.startswith("model.visual.") for name in moved)
    prompts = [row["prompt"] for row in read_rows(run / "samples" / "after.jsonl")]
    assert all("<|image_pad|>" in prompt and "Colour?" in prompt for prompt in prompts)
    # A checkpoint's weights, too, have the names that the engine knows.
    score = val_rows(run)[-1]["val/greedy/score/mean"]
    assert f"{score:.3f}" in cli.ok("eval", run)


@pytest.mark.slow
def test_a_longer_run_continues_with_its_images(cli: Cli, job: list[str]) -> None:
    """In surplus groups and in samples that were cut short, too."""
    job = [
        *option_set(job, "--data.max-response-length", "64"),
        "--rollout.partial-rollout",
        "True",
        "--rollout.over-sample-rate",
        "1.0",
        "--rollout.max-num-seqs",
        "24",
    ]
    for name, totals in (("straight", ("3",)), ("extended", ("1", "3"))):
        for total in totals:
            args = option_set(
                option_set(job, "--trainer.total-training-steps", total), "--name", name
            )
            cli.ok(*args)
    straight, extended = (step_rows(cli.cwd / "runs" / name) for name in ("straight", "extended"))
    assert straight[0]["sampling/unfinished_groups"] > 0
    assert straight[2]["sampling/oldest_version"] == 1, (
        "not 2: samples that were cut short are continued"
    )
    assert [reproducible(row) for row in straight] == [reproducible(row) for row in extended]


@pytest.mark.slow
def test_two_ranks_learn_from_text_with_marks_and_paths(cli: Cli, job: list[str]) -> None:
    (cli.cwd / "squares").mkdir()
    rows: list[dict[str, Any]] = []
    for i, colour in enumerate([*COLOURS, *COLOURS]):
        (cli.cwd / "squares" / f"{i}.png").write_bytes(square(colour, 28))
        path = f"squares/{i}.png"
        rows.append(
            {"prompt": f"<image>{i}?", "images": [path] if i % 2 else path, "colour": colour}
        )
    # A row of text alone, and one of two images in another order of parts.
    rows.append({"prompt": "red?", "images": None, "colour": "red"})
    rows.append(
        {
            "prompt": "Is <image> as <image>?",
            "images": ["squares/0.png", "squares/1.png"],
            "colour": "blue",
        }
    )
    write_rows(cli.cwd / "rows.jsonl", rows)
    cli.ok(
        *option_set(fresh(job), "--data.train-files", "rows.jsonl"), "--trainer.num-processes", "2"
    )
    for row in step_rows(cli.cwd / "runs" / "run"):
        assert row["sampling/groups"] == 8
        assert row["training/rollout_probs_diff_mean"] < 1e-5


@pytest.mark.slow
def test_vllm_sees_what_the_trainer_sees(vllm_cli: Cli, job: list[str]) -> None:
    assert vllm_cli(*fresh(job), "--rollout.engine", "vllm").code == 0
    rows = step_rows(vllm_cli.cwd / "runs" / "run")
    assert len(rows) == 2
    assert all(row["training/rollout_probs_diff_mean"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "no mark", "images": ["a.png"]}, "a prompt has 1 images; expected 0"),
        ({"prompt": "<image><image>", "images": ["a.png"]}, "a prompt has 1 images; expected 2"),
        ({"prompt": "<image>", "images": None}, "a prompt has 0 images; expected 1"),
        ({"prompt": "<image>", "images": ["b.png"]}, "is 'b.png'; expected an existing file"),
        (
            {"prompt": "<image>", "images": [3]},
            "is 3; expected a path, or the bytes of an image file",
        ),
        ({"prompt": "<image>", "images": ["rows.jsonl"]}, "no image file that Pillow reads"),
    ],
)
def test_rows_whose_images_do_not_fit_are_refused(
    cli: Cli, job: list[str], row: dict[str, Any], message: str
) -> None:
    (cli.cwd / "a.png").write_bytes(square("red", 28))
    write_rows(cli.cwd / "rows.jsonl", [{"colour": "red", **row}])
    error = cli.refused(*option_set(job, "--data.train-files", "rows.jsonl"))
    assert message in error
    assert "rows.jsonl: images of row 1" in error
    assert not (cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--trainer.backend", "megatron"], "trainer.backend is 'megatron'"),
        (
            ["--trainer.num-processes", "2", "--trainer.parallel.context-parallel-size", "2"],
            "context_parallel_size is 2",
        ),
        (["--rollout.multi-turn.max-revisions", "1"], "rollout makes several turns"),
        (["--algorithm.adv-estimator", "gae"], "algorithm.adv_estimator is 'gae'"),
    ],
)
def test_what_cannot_see_is_refused_before_the_start(
    cli: Cli, job: list[str], extra: list[str], message: str
) -> None:
    error = cli.refused(*job, *extra)
    assert "with data.image_key 'images'" in error
    assert message in error
    assert not (cli.cwd / "runs").exists()


def test_the_embedded_model_cannot_see(cli: Cli) -> None:
    assert "model is ''; expected a vision-language model" in cli.refused(
        "train", "--data.image-key", "images"
    )


def test_a_model_that_sees_nothing_is_refused(cli: Cli, job: list[str], tiny: Path) -> None:
    (cli.cwd / "a.png").write_bytes(square("red", 28))
    write_rows(cli.cwd / "rows.jsonl", [{"prompt": "<image>", "images": "a.png", "colour": "red"}])
    error = cli.refused(
        *option_set(option_set(job, "--data.train-files", "rows.jsonl"), "--model", str(tiny))
    )
    assert "is 'qwen3'; expected" in error
    assert "qwen2_vl, " in error


def test_equal_tokens_after_other_images_are_computed_twice(model: Path) -> None:
    workload = workload_of(model)

    def cost(*pixels: float) -> float:
        grid_thw = np.array([[1, 4, 6]])
        images = [
            Images(pixel_values=np.full((24, 1176), p, np.float32), grid_thw=grid_thw)
            for p in pixels
        ]
        samples = [
            Sample(prompt_ids=np.arange(20), response_ids=np.arange(3), images=i) for i in images
        ]
        return sample_flops(workload, samples)

    assert cost(0.0, 1.0) == 2 * cost(0.0)
    assert cost(0.0, 0.0) < cost(0.0, 1.0)


def test_images_come_back_from_a_checkpoint() -> None:
    images = PromptImages(model="folder", sources=(b"\x00file", Path("squares/1.png")))
    assert PromptImages.from_state(images.state()) == images
