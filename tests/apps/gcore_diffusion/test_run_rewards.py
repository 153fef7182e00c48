"""Rewards of a run: weighted sums with their metrics and report, their models on Ray, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli, Server, read_rows, step_rows, write_rows
from tiny_pipelines import flow_pipeline
from tiny_vision_model import save_vision_model

from gcore_diffusion.backend import check_rewards
from gcore_diffusion.cli import parse_train
from gcore_diffusion.config import DiffusionConfig
from gcore_rollout import RewardConfigError
from gcore_runs import UserError
from gcore_runs.settings.sections import RayConfig

REWARD = """
from gcore_rollout import RewardConfigError


def red(images, prompts, rows):
    scores = images[..., 0].mean((1, 2)) / 255
    return scores, {"bright": images.mean((1, 2, 3))}


def green(images, prompts, rows):
    return images[..., 1].mean((1, 2)) / 255


def even(latents, prompts, rows):
    assert latents.dtype == "float32" and latents.shape[1:] == (3, 8, 8), latents.shape
    return -latents.std((1, 2, 3))


class Picky:
    def check_prompts(self, prompts, rows):
        if any(prompt.startswith("c") for prompt in prompts):
            raise RewardConfigError(f"{len(prompts)} prompts and {len(rows)} rows have a c; expected none")

    def __call__(self, images, prompts, rows):
        return [0.0] * len(images)


picky = Picky()
"""


@pytest.fixture
def cli(diffusion_server: Server, tmp_path: Path) -> Cli:
    return Cli(diffusion_server, tmp_path)


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    """A job of two steps, without a reward."""
    flow_pipeline(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    write_rows(
        tmp_path / "train.jsonl", ({"prompt": f"{word} {i}"} for i in range(10) for word in "abc")
    )
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
        *("--data.train-batch-size", "2", "--rollout.n", "4", "--rollout.num-inference-steps", "4"),
        *(
            "--rollout.eval-n",
            "2",
            "--trainer.total-training-steps",
            "2",
            "--trainer.tensorboard",
            "False",
        ),
    ]


def test_a_weighted_sum(cli: Cli, args: list[str]) -> None:
    """Its terms are metrics, also of the sum that is not trained on, and charts of the report."""
    (cli.cwd / "rewards.toml").write_text(
        "[reward]\nkind = '0.5 * red + -0.25*jpeg_compressibility'\nheld_out = 'rewards.py:green + 2 * size'\n"
        "[reward.models.red]\nkind = 'rewards.py:red'\n[reward.models.size]\nkind = 'jpeg_incompressibility'\n"
    )
    out = cli.ok(*args, "--config", "rewards.toml")
    run = cli.cwd / "runs/default"
    for row in step_rows(run):
        terms = [row[f"reward/{name}/mean"] for name in ("red", "jpeg_compressibility")]
        assert row["critic/score/mean"] == pytest.approx(0.5 * terms[0] - 0.25 * terms[1])
        assert row["reward/red/std"] > 0
        assert row["reward/red/bright/mean"] > 1
    evaluated = [row for row in read_rows(run / "metrics.jsonl") if "val/score/mean" in row]
    for row in evaluated:
        terms = [row[f"val/reward/{name}/mean"] for name in ("red", "jpeg_compressibility")]
        assert row["val/score/mean"] == pytest.approx(0.5 * terms[0] - 0.25 * terms[1])
        terms = [row[f"val/held_out/{name}/mean"] for name in ("green", "size")]
        assert row["val/held_out/mean"] == pytest.approx(terms[0] + 2 * terms[1])
    assert f"held_out/green {evaluated[0]['val/held_out/green/mean']:.3g}" in out
    page = (run / "report.html").read_text()
    assert "Reward: red" in page
    assert "Reward: jpeg_compressibility" in page


@pytest.mark.slow
def test_a_judge_may_be_a_term(cli: Cli, args: list[str]) -> None:
    """Of the sum that is not trained on, too, with the same engine."""
    folder = save_vision_model(cli.cwd / "judge")
    cli.ok(
        *(*args, "--reward.kind", "2 * judge + rewards.py:red", "--reward.held-out", "judge"),
        *(
            "--reward.models.judge.path",
            folder,
            "--reward.judge.pattern",
            r"(\d)",
            "--reward.judge.n",
            "2",
        ),
        *("--reward.judge.max-response-length", "48", "--reward.judge.temperature", "1.0"),
    )
    for row in step_rows(cli.cwd / "runs/default"):
        terms = [row[f"reward/{name}/mean"] for name in ("judge", "red")]
        assert row["critic/score/mean"] == pytest.approx(2 * terms[0] + terms[1])
    first = next(
        row for row in read_rows(cli.cwd / "runs/default/metrics.jsonl") if "val/score/mean" in row
    )
    assert first["val/held_out/mean"] == pytest.approx(first["val/reward/judge/mean"])


MODEL = ["--model", "m", "--data.train-files", "f", "--reward.kind"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["a + a"], "reward.kind is 'a + a'; expected WEIGHT * NAME + WEIGHT * OTHER NAME"),
        (["0 * clip"], "reward.kind is '0 * clip'; expected a weight that is not 0"),
        (["clip", "--reward.models.a.b.path", "x"], "unknown field reward.models.a.b"),
        (["clip", "--reward.models.clip.pth", "x"], "unknown field reward.models.clip.pth"),
        (["clip", "--reward.models.clip", "x"], "reward.models.clip is 'x'; expected a table"),
        (["0.1 * digit + clip"], "expected a reward that is not the embedded model's with model"),
        (
            ["a + judge"],
            "reward.path is not set; expected a local folder of a vision-language model for judge",
        ),
        (
            ["a + b", "--algorithm.name", "reward_gradient", "--rollout.kernel", "ode"],
            "reward.kind is 'a + b'; expected one reward with algorithm.name 'reward_gradient'",
        ),
    ],
)
def test_sums_that_contradict_themselves(options: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_train([*MODEL, *options])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "rewards.py:red + http://x:9",
            "has 'http://x:9' in a sum; expected a name in reward.models, with this as",
        ),
        (
            "rewards.py:red + other.py:red",
            "reward.kind has the names red, red; expected names that differ",
        ),
        (
            "rewards.py:red + clip",
            "reward.models.clip.path is not set; expected a local folder of a CLIP model",
        ),
        ("rewards.py:red + pretty", "reward.kind is 'pretty'; expected jpeg_compressibility"),
        (
            "rewards.py:red + rewards.py:even",
            "reward.kind is a sum; expected rewards of images, not of latents, in it",
        ),
    ],
)
def test_sums_of_wrong_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    with pytest.raises((UserError, RewardConfigError)) as error:
        check_rewards(parse_train([*MODEL, kind]))
    assert said in str(error.value)


@pytest.mark.parametrize("held_out", ["", "rewards.py:red"])
def test_a_reward_of_latents_needs_no_image(cli: Cli, args: list[str], held_out: str) -> None:
    """Images of training are decoded only for a reward of images next to it; held-out ones are shown in any case."""
    folder = str(flow_pipeline(cli.cwd / "with-vae", with_vae=True))
    reward = ["--reward.kind", "rewards.py:even", "--reward.held-out", held_out]
    cli.ok(*args, "--model", folder, *reward, "--trainer.log-samples", "4")
    run = cli.cwd / "runs/default"
    for row in step_rows(run):
        assert row["critic/score/mean"] < 0
        assert row["actor/grad_norm"] > 0
    shown = read_rows(run / "samples.jsonl")
    assert len(shown) == 8
    for row in shown:
        assert ("image" in row) == bool(held_out)
    assert list((run / "samples").glob("*.png"))


def test_all_prompts_are_checked_at_the_start(cli: Cli, args: list[str]) -> None:
    refused = cli.refused(*args, "--reward.kind", "0.1 * rewards.py:red + rewards.py:picky")
    assert "30 prompts and 30 rows have a c; expected none" in refused
    assert not (cli.cwd / "runs/default").exists()


def test_an_option_is_over_a_table_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[reward.models.good]\nkind = 'clip'\npath = 'x'\n")
    config = parse_train(
        [*MODEL, "2 * good", "--config", str(tmp_path / "a.toml"), "--reward.models.good.path", "y"]
    )
    assert (config.reward.find_reward("good").kind, config.reward.find_reward("good").path) == (
        "clip",
        "y",
    )


@pytest.mark.parametrize(
    ("kind", "held_out", "gpus"),
    [
        ("jpeg_compressibility", "", 0.0),
        ("a.py:f", "http://x", 0.0),
        ("judge", "", 0.0),
        ("clip", "", 0.25),
        ("a.py:f + 0.1 * named", "", 0.25),
        ("a.py:f", "aesthetic", 0.25),
    ],
)
def test_models_that_reward_have_a_share_of_a_gpu(kind: str, held_out: str, gpus: float) -> None:
    """Each controller's, on Ray; a judge has engines of its own."""
    options = ["--reward.models.named.kind", "pick_score"] if "named" in kind else []
    config: DiffusionConfig = parse_train(
        [
            *MODEL,
            kind,
            *options,
            "--reward.held-out",
            held_out,
            "--reward.path",
            "x",
            "--device",
            "cuda",
        ]
    )
    config = replace(config, runtime="ray", ray=RayConfig(gpus_per_reward_model=0.25))
    assert config.gpus_per_controller == gpus
    assert replace(config, device="cpu").gpus_per_controller == 0.0
