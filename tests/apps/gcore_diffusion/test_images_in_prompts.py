"""Prompts with images: in data files, in runs, in checkpoints."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli, Server, step_rows, write_rows
from PIL import Image
from tiny_families import FAMILIES

from gcore_ckpt import Checkpointer
from gcore_diffusion.config import DiffusionDataConfig
from gcore_diffusion.sampling.image_sampling import ImageGroup
from gcore_diffusion.sampling.prompts import ImagePrompt, load_prompts
from gcore_runs import UserError

PAGE = Path(__file__).parents[3] / "docs/how-to/own-pipeline.md"


@pytest.fixture
def cli(diffusion_server: Server, tmp_path: Path) -> Cli:
    return Cli(diffusion_server, tmp_path)


def picture(path: Path, *, width: int = 64, grey: int = 128) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.new("L", (width, 64), grey).save(path)
    return path


def data_config(path: Path, rows: list[dict[str, Any]]) -> DiffusionDataConfig:
    write_rows(path / "rows.jsonl", rows)
    return DiffusionDataConfig(
        train_files=(str(path / "rows.jsonl"),), image_key="image", val_size=0
    )


def test_images_of_data_files(tmp_path: Path) -> None:
    """Paths are relative to the file, and absolute in the rows that rewards get."""
    paths = [picture(tmp_path / f"pictures/{i}.png", width=64 + 16 * i, grey=i) for i in range(2)]
    names = [str(path.relative_to(tmp_path)) for path in paths]
    rows = [
        {"prompt": "a", "image": names[1]},
        {"prompt": "b", "image": names},
        {"prompt": "c", "image": None},
    ]
    config = data_config(tmp_path, rows)
    one, two, none = load_prompts(config, size=(16, 16)).train
    assert (one.row["image"], two.row["image"], none.row["image"]) == (
        str(paths[1]),
        [str(p) for p in paths],
        None,
    )
    assert [image.shape for image in two.pixels()] == [(64, 64, 3), (64, 80, 3)]
    assert (one.pixels()[0] == 1).all()
    assert none.pixels() == ()
    with pytest.raises(
        UserError,
        match=r"rollout.size is \(0, 0\); expected a size, because images of prompts have",
    ):
        load_prompts(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gone.png", r"row 2: image is 'gone.png'; expected an existing file"),
        (7, r"row 2: image is 7; expected a path, or the bytes of an image file"),
        (
            "rows.jsonl",
            r"row 2: image is 'rows.jsonl': an image of \d+ bytes is no image file that Pillow reads",
        ),
        (
            ["a.png", "cut.png"],
            r"row 2: image is \['a.png', 'cut.png'\]: an image of \d+ bytes does not decode",
        ),
    ],
)
def test_bad_images_are_refused(value: object, message: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[: 64 * 64])
    config = data_config(
        tmp_path, [{"prompt": "a", "image": "a.png"}, {"prompt": "b", "image": value}]
    )
    with pytest.raises(UserError, match=message) as found:
        load_prompts(config, size=(16, 16))
    assert str(tmp_path / "rows.jsonl") in str(found.value)
    assert "\n" not in str(found.value)


def test_data_files_without_images(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no column 'image' \(data.image_key\); it has 'prompt'"
    ):
        load_prompts(data_config(tmp_path, [{"prompt": "a"}]))
    (tmp_path / "prompts.txt").write_text("a\n")
    config = DiffusionDataConfig(train_files=(str(tmp_path / "prompts.txt"),), image_key="image")
    with pytest.raises(
        UserError, match=r"expected \.jsonl, \.parquet, \.arrow or \.csv with data.image_key"
    ):
        load_prompts(config)


def test_a_checkpoint_keeps_images(tmp_path: Path) -> None:
    """Of a group that waits for its batch: files as paths, others as they are."""
    prompt = ImagePrompt(
        text="red 7", row={"image": b"\x00file"}, images=(Path("pictures/1.png"), b"\x00file")
    )
    group = ImageGroup(prompt_index=3, prompt=prompt, samples=[], scores=np.zeros(0), parts=[])
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"group": group.state()})
        checkpointer.wait()
        assert ImageGroup.from_state(checkpointer.load(step=1)["group"]).prompt == prompt


@pytest.mark.slow
def test_the_example_of_the_page(cli: Cli) -> None:
    """With a tiny FLUX.2 instead of a pipeline of the user, prompts with and without images, and smaller images."""
    section = PAGE.read_text().partition("## Images in prompts")[2].partition("\n## ")[0]
    [command] = re.findall(r"```bash\nuv run gcore-diffusion (.*?)\n```", section, flags=re.DOTALL)
    [code] = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    FAMILIES["FLUX.2 klein"].make(cli.cwd).save_pretrained(cli.cwd / "PIPELINE")
    (cli.cwd / "edits.py").write_text(code)
    for i in range(3):
        picture(cli.cwd / f"pictures/{i}.png", width=64 + 16 * i, grey=100 * i)
    images = [{"prompt": f"make {i} red", "image": f"pictures/{i}.png"} for i in range(3)]
    write_rows(cli.cwd / "edits.jsonl", images * 4)
    options = (
        *(
            "--threads",
            "1",
            "--device",
            "cpu",
            "--data.train-batch-size",
            "3",
            "--data.val-size",
            "1",
        ),
        *(
            "--rollout.n",
            "2",
            "--rollout.num-inference-steps",
            "3",
            "--rollout.guidance-scale",
            "2",
        ),
        *(
            "--rollout.max-sequence-length",
            "16",
            "--rollout.eval-n",
            "1",
            "--trainer.tensorboard",
            "False",
        ),
        *("--trainer.total-training-steps", "1"),
    )
    finished = cli(*command.replace("\\\n", "").replace("512 512", "16 16").split(), *options)
    assert (finished.code, finished.err) == (0, "")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["actor/grad_norm"] > 0
    assert row["training/rollout_ratio_dev"] < 1e-5
    # The reward saw the images' files: these have brightnesses far apart.
    assert row["critic/score/std"] > 0.1
    sample = ("sample", "runs/default", "make it red", "--n", "2")
    finished = cli(*sample, "--image", "pictures/0.png", "--out", "red.png")
    assert (finished.code, finished.err) == (0, "")
    assert cli(*sample, "--image", "pictures/2.png", "--out", "other.png").code == 0
    assert (cli.cwd / "red.png").read_bytes() != (cli.cwd / "other.png").read_bytes()
    assert "image is edits.py: an image of" in cli.refused(*sample, "--image", "edits.py")
