"""Where the images of a run are seen: TensorBoard, Weights & Biases, and the report's gallery."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli, Server, option_set, read_rows, write_rows
from PIL import Image
from tiny_pipelines import flow_pipeline
from wandb_files import records

from gcore_ckpt import Checkpointer
from gcore_diffusion.sampling.grids import MAX_SHEETS, draw_pictures, write_sheets
from gcore_diffusion.sampling.image_sampling import ImageEvaluation
from gcore_diffusion.training import KINDS
from gcore_runs.report import gallery
from gcore_runs.report.page import render_report

REWARDS = """
def red(images, prompts, rows):
    return images[..., 0].mean((1, 2)) / 255


def less_red(images, prompts, rows):
    return -red(images, prompts, rows)


def dark(images, prompts, rows):
    return -images.mean((1, 2, 3)) / 255
"""


@pytest.fixture(scope="module")
def cli(diffusion_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(diffusion_server, tmp_path_factory.mktemp("screens"))


@pytest.fixture(scope="module")
def own_args(cli: Cli) -> list[str]:
    """Two steps on a pipeline of random weights, each with an evaluation of two prompts."""
    flow_pipeline(cli.cwd)
    (cli.cwd / "rewards.py").write_text(REWARDS)
    write_rows(cli.cwd / "train.jsonl", ({"prompt": f"a {i}"} for i in range(8)))
    write_rows(cli.cwd / "val.jsonl", [{"prompt": "one"}, {"prompt": "</option><script>"}])
    return [
        *(
            "train",
            "--threads",
            "1",
            "--device",
            "cpu",
            "--model",
            "flow",
            "--data.train-files",
            "train.jsonl",
        ),
        *(
            "--data.val-files",
            "val.jsonl",
            "--reward.kind",
            "rewards.py:red",
            "--reward.held-out",
            "rewards.py:dark",
        ),
        *("--data.train-batch-size", "4", "--rollout.n", "2", "--rollout.num-inference-steps", "2"),
        *(
            "--rollout.eval-n",
            "3",
            "--trainer.total-training-steps",
            "2",
            "--trainer.test-freq",
            "1",
        ),
    ]


@pytest.fixture(scope="module")
def run(cli: Cli, own_args: list[str]) -> Path:
    cli.ok(*own_args)
    return cli.cwd / "runs/default"


def test_tensorboard_has_the_images_of_each_evaluation(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0}).Reload()
    tags: Any = events.Tags()["images"]
    shown = [tag for tag in tags if not tag.startswith("samples/")]
    assert shown == ["images/grid", "images/prompt-000", "images/prompt-001"]
    found = events.Images("images/grid")
    assert [event.step for event in found] == [0, 1, 2]
    for event in found:
        with (
            Image.open(io.BytesIO(event.encoded_image_string)) as shown,
            Image.open(png(run, event.step)) as written,
        ):
            assert np.array_equal(np.asarray(shown), np.asarray(written))
    assert [event.step for event in events.Scalars("val/held_out/mean")] == [0, 1, 2]


def test_a_run_without_improvement_ends_early(cli: Cli, own_args: list[str]) -> None:
    """The reward that is not trained on only falls: the initial policy is exported, and screen and report say so."""
    args = [
        *option_set(own_args, "--trainer.total-training-steps", "50"),
        "--name",
        "early",
        "--actor.optim.lr",
        "1e-2",
    ]
    args = [
        *option_set(args, "--reward.held-out", "rewards.py:less_red"),
        "--trainer.tensorboard",
        "False",
    ]
    assert (
        "trainer.early_stopping_patience is 2; expected 0 with trainer.export 'last'"
        in cli.refused(*args, "--trainer.early-stopping-patience", "2")
    )
    args += ["--trainer.export", "best", "--trainer.early-stopping-patience"]
    out = cli.ok(*args, "2")
    folder = cli.cwd / "runs/early"
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "val/best" in row]
    assert [(row["step"], row["val/evaluations_since_best"]) for row in rows] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert {row["val/best"] for row in rows} == {rows[0]["val/held_out/mean"]}
    assert (
        "step 2: no improvement in 2 evaluations: the run ends early (trainer.early_stopping_patience)"
        in out
    )
    assert "exporting the policy of step 0, the best on held-out prompts" in out
    assert Checkpointer(folder / "checkpoints").steps() == [2]
    page = " ".join((folder / "report.html").read_text().split())
    assert "Ended early, after 2 of 50 steps" in page
    assert "the last 2 evaluations were no better than the best one" in page
    assert "complete: 2 of 50 steps are done; a higher trainer.early_stopping_patience" in cli.ok(
        *args, "2"
    )
    # As if the process had been killed while it exported.
    shutil.rmtree(folder / "export")
    out = cli.ok(*args, "2")
    assert "the run ended early, after step 2" in out
    assert (folder / "export/model_index.json").is_file()
    out = cli.ok(*args, "3")
    assert "resuming after step 2 of 50" in out
    assert "step 3: no improvement in 3 evaluations: the run ends early" in out


def png(run: Path, step: int) -> Path:
    return run / f"samples/step-{step:06}.png"


@pytest.mark.slow
def test_wandb_gets_metrics_and_images(cli: Cli, own_args: list[str], run: Path) -> None:
    """Without a network; a resumed run is the same one there, and its steps are those of metrics.jsonl."""
    pytest.importorskip("wandb")
    (cli.cwd / "wandb").mkdir()
    (cli.cwd / "wandb/settings").write_text("[default]\nmode = offline\n")
    args = [
        *own_args,
        "--name",
        "tracked",
        "--trainer.trackers",
        "wandb",
        "--trainer.tensorboard",
        "False",
    ]
    for total in ("1", "2"):
        finished = cli(*option_set(args, "--trainer.total-training-steps", total))
        assert finished.code == 0, finished
        assert re.fullmatch(r"(wandb: Loading settings from .*\n)?", finished.err)
    tracked_run = cli.cwd / "runs/tracked"
    files = sorted(tracked_run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    found = [record for file in files for record in records(file)]
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {(each.project, each.display_name) for each in runs} == {("gcore", "tracked")}
    assert len({each.run_id for each in runs}) == 1
    rewards = next(item for item in runs[0].config.update if item.key == "reward")
    assert json.loads(rewards.value_json)["kind"] == "rewards.py:red"
    logged = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    for name in ("critic/score/mean", "val/score/mean", "actor/pg_loss"):
        expected = [
            (row["step"], row[name])
            for row in read_rows(tracked_run / "metrics.jsonl")
            if name in row
        ]
        assert [(row["step"], row[name]) for row in logged if name in row] == expected
    check_samples_of_training(tracked_run, logged)
    pictures = [
        (row["step"], row["images/grid/path"]) for row in logged if "images/grid/path" in row
    ]
    assert [step for step, _ in pictures] == [0, 1, 2]
    for step, path in pictures:
        (file,) = tracked_run.glob(f"wandb/offline-run-*/files/{path}")
        with Image.open(file) as shown, Image.open(png(tracked_run, step)) as written:
            assert np.array_equal(np.asarray(shown), np.asarray(written))


def check_samples_of_training(run: Path, logged: list[dict[str, Any]]) -> None:
    """Four images of each step, and the same table, and images, in the tracker."""
    rows = read_rows(run / "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 1, 1, 2, 2, 2, 2]
    for row in rows:
        with Image.open(io.BytesIO(base64.b64decode(row["image"]))) as shown:
            assert shown.format == "WEBP"
            assert 40 <= max(shown.size) <= 160
        assert (row["advantage"] is None) == row["is_filtered"]
        assert row["prompt"]
    assert [
        (row["step"], row["samples/nrows"], row["samples/ncols"])
        for row in logged
        if "samples/nrows" in row
    ] == [
        (1, 4, 7),
        (2, 4, 7),
    ]
    assert [row["step"] for row in logged if "samples/3/path" in row] == [1, 2]
    page = (run / "report.html").read_text()
    assert page.count(rows[0]["image"]) == 1


class Page(HTMLParser):
    """The gallery as a browser reads it: the prompts to pick, and of each prompt its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.options: list[str] = []
        self.galleries: list[list[tuple[str, bytes, list[str]]]] = []
        self._tags: list[str] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._tags.append(tag)
        if values.get("class") == "gallery":
            self.galleries.append([])
        elif tag == "option":
            self.options.append("")
        elif tag == "figcaption":
            self._caption = ""
        elif values.get("class", "").startswith("sheet"):
            content = values["style"].partition("base64,")[2].removesuffix(")")
            self.galleries[-1].append((self._caption, base64.b64decode(content), []))
        elif tag == "i" and values.get("role") == "img":
            self.galleries[-1][-1][2].append(f"{values['style'].partition(': ')[2]}:")

    def handle_data(self, data: str) -> None:
        tag = self._tags[-1] if self._tags else ""
        if tag == "option":
            self.options[-1] += data.strip()
        elif tag in ("figcaption", "small"):
            self._caption += data
        elif tag == "span" and self.galleries and self.galleries[-1]:
            self.galleries[-1][-1][2][-1] += f" {data.strip()}".rstrip()


def test_the_report_has_a_gallery_by_prompt_and_step(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.options == ["one", "</option><script>"]
    assert "</option><script>" not in text
    rows = {step: read_rows(run / f"samples/step-{step:06}/prompts.jsonl") for step in (0, 1, 2)}
    for place, figures in enumerate(page.galleries):
        assert [" ".join(caption.split())[:6] for caption, *_ in figures] == [
            "Before",
            "Step 1",
            "Step 2",
        ]
        for step, (caption, content, scores) in enumerate(figures):
            row = rows[step][place]
            assert f"reward {np.mean(row['scores']['reward']):.3g}" in caption
            assert content == (run / f"samples/step-{step:06}" / row["file"]).read_bytes()
            pairs = zip(
                row["scores"]["reward"], row["scores"]["reward not trained on"], strict=True
            )
            # Three images in one row.
            places = [f"{50 * i}% 0%" for i in range(3)]
            assert scores == [
                f"{at}: {own:.3g} {other:.3g}"
                for at, (own, other) in zip(places, pairs, strict=True)
            ]
            with Image.open(io.BytesIO(content)) as sheet:
                assert sheet.size == (row["width"], row["height"])


def noisy(num_prompts: int, per_prompt: int, side: int) -> ImageEvaluation:
    """Images whose WebP is as large as it gets."""
    images = np.random.default_rng(0).integers(
        0, 256, (num_prompts * per_prompt, side, side, 3), np.uint8
    )
    prompts = [f"prompt {i // per_prompt}" for i in range(len(images))]
    return ImageEvaluation(
        prompts=prompts, images=images, scores=np.zeros(len(images)), held_out=None
    )


def test_the_gallery_has_an_upper_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('command = "diffusion"\n')
    write_sheets(tmp_path / "samples/step-000000", noisy(2 * MAX_SHEETS, 1, 20), per_prompt=1)
    for step in range(1, 12):
        shutil.copytree(tmp_path / "samples/step-000000", tmp_path / f"samples/step-{step:06}")
    found = gallery.read_gallery(tmp_path / "samples", notes := [])
    assert found is not None
    assert len(found["prompts"]) == 32
    assert found["seen"] == "8 of 12 evaluations are shown; the others are in samples/."
    for _, sheets in found["prompts"]:
        assert [sheet["step"] for sheet in sheets] == [0, 2, 3, 5, 6, 8, 9, 11]
    assert notes == []
    monkeypatch.setattr(gallery, "MAX_BYTES", 100_000)
    text = render_report(tmp_path, KINDS).read_text()
    page = Page(text)
    assert sum(len(content) for figures in page.galleries for _, content, _ in figures) <= 100_000
    assert f"{len(page.galleries)} of 32 prompts are shown, 8 of 12 evaluations are shown" in text
    assert 1 < len(page.galleries) < 32
    (tmp_path / "samples/step-000011/002.webp").unlink()
    assert (
        "step-000011/prompts.jsonl could not be read" in render_report(tmp_path, KINDS).read_text()
    )


def test_trackers_get_few_and_not_too_large_images() -> None:
    images = draw_pictures(noisy(40, 2, 300), per_prompt=2)
    assert len(images) <= 1 + 8
    assert all(image.dtype == np.uint8 and image.size < 3_000_000 for image in images.values())
