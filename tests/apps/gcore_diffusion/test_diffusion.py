"""`gcore-diffusion`: the embedded model in short, a user's own pipeline, every algorithm, resumption, wrong input."""

import json
import os
import re
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli, Server, option_set, read_rows, step_rows, write_rows
from PIL import Image
from process_tree import descendants
from safetensors.torch import load_file, save_file
from tiny_pipelines import ddim_pipeline, flow_pipeline
from tiny_vision_model import save_vision_model

from gcore_diffusion.backend import starting_messages
from gcore_diffusion.cli import parse_train
from gcore_diffusion.config import RECIPES, DiffusionConfig, DiffusionDataConfig
from gcore_diffusion.demo.digits import COLOURS, PROMPTS, load
from gcore_diffusion.demo.rewards import DemoJudgeReward, DigitReward
from gcore_diffusion.recipes.published import PUBLISHED
from gcore_diffusion.sampling.grids import grid
from gcore_diffusion.sampling.image_sampling import ImageEvaluation
from gcore_diffusion.sampling.prompts import ImagePrompt, ImagePromptSets, load_prompts
from gcore_rollout import RewardConfigError
from gcore_runs.run_folder import RunFolder
from gcore_runs.settings.parsing import merge, to_toml
from gcore_runs.settings.resources import resolve

REWARD = """
import numpy as np
import torch


def red(images, prompts, rows):
    assert images.dtype == np.uint8 and len(images) == len(prompts) == len(rows)
    means = images.astype(float).mean((1, 2)) / 255
    return means[:, 0] - means[:, 1]


def few(images, prompts, rows):
    return [0.0]


def nothing(images, prompts, rows):
    return [float("nan")] * len(images)


def opposite(images, prompts, rows):
    return -red(images, prompts, rows)


def extra(images, prompts, rows):
    scores = torch.tensor(red(images, prompts, rows), requires_grad=True) * 1e35
    return scores.bfloat16(), {"brightness": images.mean((1, 2, 3)), "verdict": ["good"] * len(images)}


def rounded(images, prompts, rows):
    return 0.5 + 1e-9 * red(images, prompts, rows)


def flat(latents, prompts):
    return 0 * latents.flatten(1).mean(1) + 0.5


def differentiable(latents, prompts):
    return torch.tanh(latents[:, 0].flatten(1).mean(1) - latents[:, 1].flatten(1).mean(1))
"""


@pytest.fixture
def cli(diffusion_server: Server, tmp_path: Path) -> Cli:
    return Cli(diffusion_server, tmp_path)


@pytest.fixture(scope="session")
def own_args(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job of two steps on the user's own pipeline, prompts and reward: a second or two."""
    folder = tmp_path_factory.mktemp("own-diffusion")
    flow_pipeline(folder)
    (folder / "rewards.py").write_text(REWARD)
    write_rows(
        folder / "train.jsonl",
        ({"prompt": f"{word} {i}", "i": i} for i in range(10) for word in "abc"),
    )
    return [
        *("train", "--threads", "1", "--device", "cpu", "--model", str(folder / "flow")),
        *(
            "--data.train-files",
            str(folder / "train.jsonl"),
            "--reward.kind",
            f"{folder / 'rewards.py'}:red",
        ),
        *("--data.train-batch-size", "8", "--rollout.n", "4", "--rollout.num-inference-steps", "4"),
        *(
            "--rollout.eval-n",
            "2",
            "--trainer.total-training-steps",
            "2",
            "--trainer.tensorboard",
            "False",
        ),
    ]


@pytest.fixture(scope="session")
def small_args(own_args: list[str]) -> list[str]:
    """The job with batches of half the size."""
    return option_set(own_args, "--data.train-batch-size", "4")


def reproducible(run: Path) -> list[dict[str, Any]]:
    clocks = ("timing_s/", "perf/throughput", "perf/resident_gb/", "ledger/", "placement/")
    return [
        {k: v for k, v in row.items() if not k.startswith(clocks)}
        for row in read_rows(run / "metrics.jsonl")
    ]


def assert_alike(run: Path, expected: Path, tolerance: float) -> None:
    rows, others = reproducible(run), reproducible(expected)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (
                row["step"],
                name,
            )


EMBEDDED = [
    *(
        "train",
        "--device",
        "cpu",
        "--demo.num-steps",
        "6",
        "--demo.batch-size",
        "16",
        "--data.train-batch-size",
        "2",
    ),
    *("--rollout.n", "4", "--rollout.num-inference-steps", "4", "--rollout.eval-n", "2"),
    *("--trainer.total-training-steps", "2", "--trainer.test-freq", "2"),
]


def test_embedded_run_folder(cli: Cli) -> None:
    """And the taught model is kept for the next run."""
    args = [*EMBEDDED, "--demo.cache-dir", str(cli.cwd / "cache")]
    out = cli.ok(*args)
    run = cli.cwd / "runs/default"
    for name in (
        "config.toml",
        "metrics.jsonl",
        "spans.jsonl",
        "report.html",
        "export/model_index.json",
    ):
        assert (run / name).is_file(), name
    assert RunFolder(run).load_config(DiffusionConfig) == resolve(parse_train(args[1:]))
    assert "held-out images: reward" in out
    assert "reward not trained on" in out
    with Image.open(run / "samples/step-000002.png") as picture:
        assert picture.size[0] > 100
    page = (run / "report.html").read_text()
    assert page.count('<img src="data:image/png;') == 2
    assert "Before training" in page
    for label in (
        "Held-out reward, trained on",
        "Held-out reward, not trained on",
        "Diversity within prompts",
    ):
        assert label in page
        assert label.lower().removeprefix("held-out ").split(",")[0] in out
    first = {row["step"]: row for row in read_rows(run / "metrics.jsonl") if "val/diversity" in row}
    assert set(first) == {0, 2}
    assert {"val/score/mean", "val/held_out/mean"} <= first[0].keys()
    (kept,) = (cli.cwd / "cache").iterdir()
    changed = kept.stat().st_mtime_ns
    cli.ok(*args, "--name", "again")
    assert kept.stat().st_mtime_ns == changed
    assert_alike(cli.cwd / "runs/again", run, 0.0)
    cli.ok("sample", run, "red 7", "--n", "3", "--out", "three.png")
    assert (cli.cwd / "three.png").is_file()
    assert cli.ok("report", run).strip().endswith("report.html")
    assert "held-out images" in cli.ok("logs", run, "--lines", "50")


ALGORITHMS: dict[str, list[str]] = {
    "flow_grpo": ["--actor.loss.kl-loss-coef", "0.1", "--actor.ema-decay", "0.9"],
    "flow_grpo_fast": [
        *("--rollout.window-size", "1", "--actor.loss.kl-loss-coef", "0.04"),
        *("--actor.loss.kl-loss-type", "flow_grpo", "--algorithm.old-log-probs", "trainer"),
        *("--actor.lora-rank", "2", "--rollout.colocated", "true"),
    ],
    "mix_grpo": [
        "--rollout.window-size",
        "1",
        "--rollout.window-steps",
        "1",
    ],
    "ddpo": [
        "--algorithm.name",
        "ddpo",
        "--rollout.kernel",
        "dance_sde",
        "--algorithm.timestep-fraction",
        "0.5",
    ],
    "grpo_guard": ["--algorithm.name", "grpo_guard", "--actor.lora-rank", "2"],
    "cps": ["--rollout.kernel", "cps", "--rollout.guidance-scale", "2.0"],
    "nft": ["--algorithm.name", "nft", "--rollout.kernel", "ode", "--actor.lora-rank", "2"],
    "dpo": ["--algorithm.name", "dpo", "--rollout.kernel", "ode"],
    "flow_dppo": ["--algorithm.name", "flow_dppo", "--algorithm.options.kl-mask-threshold", "1e-3"],
    "awm": [
        *("--algorithm.name", "awm", "--rollout.kernel", "ode", "--actor.lora-rank", "2"),
        *("--algorithm.options.ghuber-power", "0.25", "--algorithm.options.kl-loss-coef", "0.01"),
    ],
    "dgpo": [
        *("--algorithm.name", "dgpo", "--rollout.kernel", "ode"),
        *("--algorithm.options.min-level", "0.3", "--actor.num-updates", "1"),
    ],
    "crd": ["--algorithm.name", "crd", "--rollout.kernel", "ode", "--actor.lora-rank", "2"],
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs(cli: Cli, small_args: list[str], name: str) -> None:
    cli.ok(*small_args, *ALGORITHMS[name])
    run = cli.cwd / "runs/default"
    steps = step_rows(run)
    assert [row["step"] for row in steps] == [1, 2]
    has_adapters = "--actor.lora-rank" in ALGORITHMS[name]
    assert (run / "export/lora/pytorch_lora_weights.safetensors").is_file() == has_adapters
    for row in steps:
        assert row["actor/grad_norm"] > 0
        assert all(np.isfinite(value) for value in row.values())


def test_a_run_learns_from_the_export_of_another(
    cli: Cli, small_args: list[str], tmp_path: Path
) -> None:
    """By steps with noise and without, whole and by adapters; the reward is only measured."""
    cli.ok(*small_args, "--actor.optim.lr", "0.003", "--name", "teacher")
    teacher = str(cli.cwd / "runs/teacher/export")
    opd = ["--algorithm.name", "opd", "--algorithm.filter-groups", "False"]
    taught = [*opd, "--algorithm.options.teacher", teacher, "--actor.optim.lr", "0.003"]
    for name, options in {
        "noisy": ["--algorithm.timestep-fraction", "0.5"],
        "noiseless": ["--rollout.kernel", "ode", "--actor.lora-rank", "2"],
    }.items():
        cli.ok(*small_args, *taught, *options, "--name", name)
        first, second = step_rows(cli.cwd / "runs" / name)
        assert 0 < second["actor/distillation_loss"] < first["actor/distillation_loss"]
    refused = cli(*small_args, *opd)
    assert "algorithm.options.teacher is ''; expected the folder of a pipeline" in refused.err
    refused = cli(*small_args, *opd, "--algorithm.options.teacher", str(cli.cwd))
    assert f"{cli.cwd} has no model_index.json" in refused.err
    other = str(ddim_pipeline(tmp_path / "other"))
    refused = cli(*small_args, *opd, "--algorithm.options.teacher", other)
    assert "expected a pipeline with a SD3Transformer2DModel" in " ".join(refused.err.split())


def test_a_run_starts_from_the_adapters_of_another(cli: Cli, own_args: list[str]) -> None:
    """The engine's first images are those of the merged pipeline, and the reference is the policy at the start."""
    cli.ok(*own_args, "--actor.lora-rank", "2", "--actor.optim.lr", "0.005", "--name", "first")
    export = cli.cwd / "runs/first/export"
    options = ["--actor.num-updates", "1", "--actor.loss.kl-loss-coef", "0.1"]
    cli.ok(
        *own_args,
        *options,
        "--actor.lora-adapter-path",
        str(export / "lora"),
        "--name",
        "continued",
    )
    merged = list(own_args)
    merged[merged.index("--model") + 1] = str(export)
    cli.ok(*merged, *options, "--name", "merged")
    cli.ok(*own_args, *options, "--name", "base")
    [continued, expected, base] = [
        step_rows(cli.cwd / "runs" / name)[0] for name in ("continued", "merged", "base")
    ]
    assert continued["critic/score/mean"] == pytest.approx(expected["critic/score/mean"], abs=1e-3)
    assert abs(base["critic/score/mean"] - expected["critic/score/mean"]) > 1e-2
    assert continued["actor/kl_loss"] < 1e-6
    refused = cli(
        *own_args, "--actor.lora-adapter-path", str(export / "lora"), "--actor.lora-rank", "3"
    )
    assert refused.code == 2
    assert "actor.lora_rank is 3; expected 2, as the adapters in" in refused.err
    refused = cli(*own_args, "--actor.lora-adapter-path", str(export))
    assert "actor.lora_adapter_path is" in refused.err
    assert "expected adapters of diffusers" in refused.err


@pytest.mark.parametrize(
    ("trainers_type", "algorithm"),
    [
        ("bfloat16", "flow_grpo"),
        pytest.param("float32", "grpo_guard", marks=pytest.mark.slow),
    ],
)
def test_after_a_sampler_in_bfloat16_the_first_update_is_on_policy(
    cli: Cli, small_args: list[str], algorithm: str, trainers_type: str
) -> None:
    args = [
        *small_args,
        "--algorithm.name",
        algorithm,
        "--rollout.dtype",
        "bfloat16",
        "--actor.num-updates",
        "1",
    ]
    args += ["--actor.dtype", trainers_type]
    cli.ok(*args, "--name", "auto")
    cli.ok(*args, "--name", "rollout", "--algorithm.old-log-probs", "rollout")
    rows, others = (step_rows(cli.cwd / "runs" / name) for name in ("auto", "rollout"))
    for row, other in zip(rows, others, strict=True):
        assert row["actor/ratio_dev"] < 1e-7
        assert row["actor/pg_clipfrac"] == 0
        assert other["actor/ratio_dev"] > 1e-5
        assert row["training/rollout_ratio_dev"] > 1e-5
        assert other["training/rollout_ratio_dev"] == other["actor/ratio_dev"]
    if algorithm == "flow_grpo":
        # The weights of the first step are the same, and so is what sampler and trainer differ by.
        mismatches = [of_run[0]["training/rollout_ratio_dev"] for of_run in (rows, others)]
        assert mismatches[0] == pytest.approx(mismatches[1], rel=1e-3)


def test_the_trainer_repeats_negative_prompts_and_shared_noise(
    cli: Cli, small_args: list[str]
) -> None:
    args = [*small_args, "--rollout.guidance-scale", "2.5", "--rollout.negative-prompt", "blue 1"]
    cli.ok(
        *args,
        "--rollout.shared-noise",
        "True",
        "--actor.num-updates",
        "1",
        "--algorithm.old-log-probs",
        "trainer",
    )
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["actor/ratio_dev"] == 0
        assert row["training/rollout_ratio_dev"] < 1e-5
        assert row["actor/grad_norm"] > 0
    cli.ok("sample", "runs/default", "a 1", "--n", "2")
    assert "guidance_scale is 1.0; expected above 1 with a negative_prompt" in cli.refused(
        "sample", "runs/default", "a 1", "--guidance-scale", "1"
    )


def test_what_a_run_says_at_its_start(tmp_path: Path) -> None:
    """Prompts that are longer than their text encoder reads, and a safety checker, which is left out."""
    folder = flow_pipeline(tmp_path)
    index = folder / "model_index.json"
    components = json.loads(index.read_text())
    index.write_text(
        json.dumps(
            {**components, "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
        )
    )
    texts = ["red 7", "a very long one", "one that is very long", "red 7"]
    prompts = ImagePromptSets(
        train=[ImagePrompt(text=text, row={}) for text in texts],
        val=[ImagePrompt(text="a", row={})],
    )
    assert starting_messages(DiffusionConfig(), folder, prompts) == [
        "warning: the text encoders do not read the ends of 2 prompts: 'a very long one', 'one that is very long'",
        "the pipeline's safety checker is left out: it would make images black",
    ]


def test_gradient_of_a_reward_itself(cli: Cli, own_args: list[str], tmp_path: Path) -> None:
    """Images are scored by what is differentiated, latents, of a pipeline with a VAE too."""
    args = option_set(
        own_args,
        "--reward.kind",
        own_args[own_args.index("--reward.kind") + 1].replace(":red", ":differentiable"),
    )
    args = option_set(args, "--trainer.total-training-steps", "6")
    args = option_set(args, "--model", str(flow_pipeline(tmp_path, with_vae=True)))
    args = [*args, "--actor.num-updates", "1", "--actor.optim.lr", "3e-3"]
    cli.ok(*args, "--algorithm.name", "reward_gradient", "--rollout.kernel", "ode")
    run = cli.cwd / "runs/default"
    for row in step_rows(run):
        assert row["critic/score/mean"] == pytest.approx(row["actor/reward"], rel=1e-4)
    rows = [
        row["val/score/mean"] for row in read_rows(run / "metrics.jsonl") if "val/score/mean" in row
    ]
    assert rows[-1] > rows[0]


def test_ddim_pipelines_and_classes(cli: Cli, own_args: list[str], tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("zero\n1\n2\n3\n")
    args = option_set(own_args, "--model", str(ddim_pipeline(tmp_path)))
    args = option_set(args, "--data.train-files", str(tmp_path / "classes.txt"))
    cli.ok(
        *args,
        "--algorithm.name",
        "ddpo",
        "--rollout.kernel",
        "ddim",
        "--reward.held-out",
        "jpeg_incompressibility",
    )
    row = step_rows(cli.cwd / "runs/default")[-1]
    assert row["actor/ratio_dev"] < 1
    assert row["training/rollout_ratio_dev"] < 1e-3
    assert row["held_out/score/mean"] > 0


@pytest.mark.slow
def test_controllers_and_engines_elsewhere_make_the_same_images(
    cli: Cli, small_args: list[str]
) -> None:
    """To what sums round to in batches of other sizes; one engine of three is on a lent device, of the trainer."""
    cli.ok(*small_args, "--name", "one")
    cli.ok(*small_args, "--controllers", "4", "--name", "four")
    lent = ["--placement.lend-ranks", "true"]
    cli.ok(
        *small_args,
        "--controllers",
        "2",
        "--rollout.num-processes",
        "2",
        *lent,
        "--name",
        "processes",
    )
    for name in ("four", "processes"):
        assert_alike(cli.cwd / "runs" / name, cli.cwd / "runs/one", 2e-3)
    logs = cli.cwd / "runs/processes/logs"
    assert {path.stem for path in logs.iterdir()} == {"main", "engine-0", "engine-1", "lent-0"}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", ["0", "2"])
def test_ranks_in_local_processes_train_alike(
    cli: Cli, small_args: list[str], lora_rank: str
) -> None:
    """Two ranks have copies of the parameters, and then, continued, share them, also those of the reference."""
    args = [*small_args, "--actor.loss.kl-loss-coef", "0.1", "--algorithm.old-log-probs", "trainer"]
    args += ["--actor.lora-rank", lora_rank, "--trainer.test-freq", "1"]
    cli.ok(*args, "--name", "one")
    args = [*args, "--trainer.num-processes", "2", "--rollout.colocated", "true", "--name", "ranks"]
    cli.ok(*option_set(args, "--trainer.total-training-steps", "1"))
    cli.ok(*args, "--trainer.fsdp-size", "0")
    assert_alike(cli.cwd / "runs/ranks", cli.cwd / "runs/one", 2e-3)
    assert (cli.cwd / "runs/ranks/logs/trainer-1.log").is_file()


@pytest.mark.slow
def test_a_cluster_trains_alike_despite_kills(cli: Cli, own_args: list[str]) -> None:
    """Two controllers, engines and ranks are actors, the last two on the same devices; one of each is killed."""
    args = option_set(
        [*own_args, "--actor.loss.kl-loss-coef", "0.1"], "--trainer.total-training-steps", "6"
    )
    args = [
        *args,
        "--trainer.save-freq",
        "1",
        "--trainer.test-freq",
        "100",
        "--actor.optim.lr",
        "1e-4",
    ]
    # Adapters alone are sent: an engine that is replaced gets the frozen weights with them.
    args = [*args, "--actor.lora-rank", "2", "--algorithm.old-log-probs", "trainer"]
    cli.ok(*args, "--name", "one")
    options = [
        "--runtime",
        "ray",
        "--controllers",
        "2",
        "--trainer.num-processes",
        "2",
        "--rollout.colocated",
        "true",
    ]
    command = cli.start(*args, *options, "--ray.weight-sync", "delta")
    run = cli.cwd / "runs/default"
    for number, title in enumerate(
        ("ray::EngineActor", "ray::TrainingRank", "ray::ControllerActor"), start=1
    ):
        command.wait_for_steps(run, number)
        os.kill(descendants(command.pid, title)[0], signal.SIGKILL)
    finished = command.wait()
    assert finished.code == 0, finished
    assert finished.out.count("continuing after step") == 2
    rows, others = (
        [
            {
                k: v
                for k, v in row.items()
                if not k.startswith(("perf/generated", "controller/load"))
            }
            for row in reproducible(path)
        ]
        for path in (run, cli.cwd / "runs/one")
    )
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=2e-3, abs=2e-3)
    logs = {path.name for path in (run / "logs").iterdir()}
    assert {"controller-1.log", "engine-1.log", "trainer-1.log"} <= logs


@pytest.mark.slow
def test_a_cluster_tries_an_image_where_its_engines_are(cli: Cli, own_args: list[str]) -> None:
    """By turns with the training ranks; the command's own process makes no engine."""
    args = [*own_args, "--runtime", "ray", "--rollout.colocated", "true"]
    args += ["--rollout.kernel", "cps", "--rollout.window-size", "2"]
    err = cli.refused(*args, "--rollout.window-range", "1", "4")
    assert "rollout.window_range is (1, 4); expected steps with noise: step 3 of 4 has none" in err
    assert not (cli.cwd / "runs/default").exists()


@pytest.fixture(scope="session")
def judged(own_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The job with a vision-language model for a reward, which says little that is to the point."""
    folder = save_vision_model(tmp_path_factory.mktemp("judge") / "model")
    args = option_set(
        option_set(own_args, "--reward.kind", "judge"), "--trainer.total-training-steps", "5"
    )
    return [
        *(
            *args,
            "--reward.path",
            str(folder),
            "--reward.judge.pattern",
            r"(\d)",
            "--reward.judge.n",
            "2",
        ),
        *("--reward.judge.max-response-length", "48", "--reward.judge.temperature", "1.0"),
        *(
            "--reward.judge.max-num-seqs",
            "8",
            "--trainer.test-freq",
            "100",
            "--algorithm.filter-groups",
            "False",
        ),
    ]


@pytest.mark.slow
def test_engines_go_to_a_judge_that_is_busy(cli: Cli, judged: list[str]) -> None:
    cli.ok(*judged, "--name", "inline")
    ray = ["--runtime", "ray", "--rollout.num-processes", "2", "--placement.strategy", "dynamic"]
    # Each of three ranks is on the device of an engine, whatever its role.
    turns = ["--rollout.colocated", "true", "--trainer.num-processes", "3"]
    out = cli.ok(*judged, *ray, *turns, "--placement.horizon-steps", "1000")
    assert "1 engine moved from the policy to the judge: 1 generate and 2 judge now\n" in out
    rows = step_rows(cli.cwd / "runs/default")
    assert (rows[0]["placement/judges"], rows[-1]["placement/judges"]) == (1, 2)
    for row, other in zip(rows, step_rows(cli.cwd / "runs/inline"), strict=True):
        # A pixel that rounds otherwise in another batch may change what this judge says.
        assert row["critic/score/mean"] == pytest.approx(other["critic/score/mean"], abs=0.05)
        assert row["perf/generated/gen"] == row["perf/num_images"] == other["perf/num_images"]
    for row in read_rows(cli.cwd / "runs/default/spans.jsonl"):
        assert sorted(row["devices"]) == ["device 0", "device 1", "device 2"]
        assert all(
            {"train", "swap"} < {stage for stage, *_ in spans} for spans in row["devices"].values()
        )


def test_a_resumed_run_is_the_same_to_the_bit(cli: Cli, own_args: list[str]) -> None:
    four = option_set(own_args, "--trainer.total-training-steps", "4")
    cli.ok(*four, "--name", "whole")
    # The rate is to fall as in the whole run.
    cli.ok(*own_args, "--name", "parts")
    out = cli.ok(*four, "--name", "parts")
    assert "resuming after step 2 of 4" in out
    last, expected = (step_rows(cli.cwd / "runs" / name)[-1] for name in ("parts", "whole"))
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert last[name] == expected[name]
    exports = [
        cli.cwd / "runs" / name / "export/transformer/diffusion_pytorch_model.safetensors"
        for name in ("parts", "whole")
    ]
    assert exports[0].read_bytes() == exports[1].read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_exports_its_best_step(cli: Cli, own_args: list[str]) -> None:
    """Also where the trainer sleeps during evaluations, which takes turns with the engine."""
    (cli.cwd / "own.py").write_text("""
def middling(images, prompts, rows):
    means = images.astype(float).mean((1, 2)) / 255
    return [-abs((means[:, 0] - means[:, 1]).mean() - 0.41)] * len(images)
""")
    args = option_set(
        [*own_args, "--trainer.test-freq", "1"], "--trainer.total-training-steps", "6"
    )
    args += [
        "--trainer.export",
        "best",
        "--actor.optim.lr",
        "1e-2",
        "--reward.held-out",
        "own.py:middling",
    ]
    cli.ok(*args, "--name", "whole")
    command = cli.start(*args, "--rollout.colocated", "true", "--name", "parts")
    whole, parts = (cli.cwd / "runs" / name for name in ("whole", "parts"))
    command.wait_for_steps(parts, 4)
    command.send(signal.SIGINT)
    assert command.wait().code == 130
    best = json.loads((whole / "best/step.json").read_text())
    out = cli.ok(*args, "--rollout.colocated", "true", "--name", "parts")
    assert "resuming after step" in out
    assert f"exporting the policy of step {best['step']}, the best on held-out prompts" in " ".join(
        out.split()
    )
    scores = {
        row["step"]: row["val/held_out/mean"]
        for row in read_rows(whole / "metrics.jsonl")
        if "val/held_out/mean" in row
    }
    assert best["step"] == max(scores, key=lambda step: scores[step])
    assert 0 < best["step"] < 4
    weights = ["export/transformer/diffusion_pytorch_model.safetensors"] * 2
    assert (whole / weights[0]).read_bytes() == (parts / weights[1]).read_bytes()


BAD: dict[str, tuple[Callable[[str], list[str]], str]] = {
    "group of one": (lambda _: ["--rollout.n", "1"], "rollout.n is 1; expected at least 2"),
    "kernel without noise": (
        lambda _: ["--rollout.kernel", "ode"],
        "rollout.kernel is 'ode'; expected a kernel with noise",
    ),
    "kernel of another kind": (
        lambda _: ["--rollout.kernel", "ddim"],
        "kernel is DDIM; expected a flow kernel",
    ),
    "noise where none is": (
        lambda _: ["--algorithm.name", "nft"],
        "rollout.kernel is 'flow_sde'; expected 'ode' or 'ddim'",
    ),
    "one noise without more of it": (
        lambda _: [
            "--algorithm.name",
            "dpo",
            "--rollout.kernel",
            "ode",
            "--rollout.shared-noise",
            "True",
        ],
        "rollout.shared_noise is true; expected false with rollout.kernel 'ode'",
    ),
    "negative prompt without guidance": (
        lambda _: ["--rollout.negative-prompt", "blurry"],
        "rollout.guidance_scale is 1.0; expected above 1 with rollout.negative_prompt",
    ),
    "negative prompt without guidance of evaluations": (
        lambda _: [
            *("--rollout.negative-prompt", "blurry", "--rollout.guidance-scale", "2"),
            *("--rollout.eval-guidance-scale", "1"),
        ],
        "rollout.eval_guidance_scale is 1.0; expected 0, or above 1 with rollout.negative_prompt",
    ),
    "form of the KL": (
        lambda _: [
            *(
                "--rollout.kernel",
                "cps",
                "--actor.loss.kl-loss-type",
                "flow_grpo",
                "--actor.loss.kl-loss-coef",
                "1",
            ),
        ],
        "actor.loss.kl_loss_type is 'flow_grpo'; expected 'gaussian' with rollout.kernel 'cps'",
    ),
    "window": (
        lambda _: ["--rollout.window-size", "9"],
        "rollout.window_size is 9; expected at most",
    ),
    "a window over a step without noise": (
        lambda _: [
            "--rollout.kernel",
            "cps",
            "--rollout.window-size",
            "2",
            "--rollout.window-range",
            "1",
            "4",
        ],
        "rollout.window_range is (1, 4); expected steps with noise: step 3 of 4 has none with rollout.kernel 'cps'",
    ),
    "unknown reward": (
        lambda _: ["--reward.kind", "pretty"],
        "reward.kind is 'pretty'; expected jpeg_compressibility",
    ),
    "no such function": (lambda file: ["--reward.kind", f"{file}:blue"], "has no function 'blue'"),
    "too few scores": (
        lambda file: ["--reward.kind", f"{file}:few"],
        "returned 1 scores; expected one for each of 2 images",
    ),
    "no number": (lambda file: ["--reward.kind", f"{file}:nothing"], "returned nan for an image"),
    "size for a reward": (
        lambda _: ["--reward.held-out", "digit", "--rollout.size", "4", "4"],
        "rewards of digits score 8 x 8 pixels",
    ),
    "clip without weights": (
        lambda _: ["--reward.kind", "clip"],
        "reward.path is not set; expected a local folder of a CLIP model for clip",
    ),
    "judge without a model": (
        lambda _: ["--reward.kind", "judge"],
        "reward.path is not set; expected a local folder of a vision-language model",
    ),
    "a judge that sees nothing": (
        lambda file: [
            "--reward.kind",
            "judge",
            "--reward.path",
            str(Path(file).parent / "flow/transformer"),
        ],
        "flow/transformer has a config.json that does not load",
    ),
    "judges without devices": (
        lambda _: [
            *(
                "--runtime",
                "ray",
                "--rollout.num-processes",
                "2",
                "--reward.kind",
                "judge",
                "--reward.path",
                "x",
            ),
            *("--placement.strategy", "colocated", "--reward.judge.num-processes", "3"),
        ],
        "reward.judge.num_processes is 3; expected rollout.num_processes=2",
    ),
    "no role to share devices with": (
        lambda _: ["--placement.strategy", "dynamic"],
        "placement.strategy is 'dynamic'; expected 'split' with runtime 'inline'; others need runtime 'ray'",
    ),
    "model": (
        lambda _: ["--model", "nowhere"],
        "model is 'nowhere'; expected a folder of a diffusers pipeline",
    ),
    "ranks that do not divide": (
        lambda _: ["--trainer.fsdp-size", "3", "--trainer.num-processes", "2"],
        "trainer.fsdp_size is 3; expected auto, 0, or a divisor of trainer.num_processes=2",
    ),
    "ranks by another name": (
        lambda _: ["--trainer.n-gpus-per-node", "2"],
        "did you mean --trainer.num-processes?",
    ),
    "one side": (lambda _: ["--rollout.size", "8"], "rollout.size is ['8']; expected more values"),
    "guidance below none": (
        lambda _: ["--rollout.guidance-scale", "-1"],
        "rollout.guidance_scale is -1.0; expected a finite number, 0 or more",
    ),
    "size": (
        lambda _: ["--rollout.size", "7", "7"],
        "makes no image of a prompt alone with size (7, 7): ",
    ),
    "layers to adapt": (
        lambda _: ["--actor.lora-rank", "2", "--actor.target-modules", "zzz"],
        "zzz",
    ),
    "a server that does not answer": (
        lambda _: ["--reward.kind", "http://127.0.0.1:9"],
        "127.0.0.1:9",
    ),
    "a folder of prompts": (lambda _: ["--data.train-files", "."], "data file .: Is a directory"),
    "prompts of memory": (
        lambda _: ["--data.train-files", "/proc/self/mem"],
        "data file /proc/self/mem: ",
    ),
    "column": (
        lambda _: ["--data.prompt-key", "text"],
        "row 1 has no column 'text' (data.prompt_key); it has",
    ),
    "run folder": (lambda file: ["--runs-dir", file], "cannot be made: "),
    "gradient of a number": (
        lambda _: [
            "--algorithm.name",
            "reward_gradient",
            "--rollout.kernel",
            "ode",
            "--reward.kind",
            "jpeg_compressibility",
        ],
        "algorithm.name is 'reward_gradient'; expected a differentiable function",
    ),
}


@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm.name", "nft", "--rollout.kernel", "ode"],
        ["--algorithm.name", "dpo", "--rollout.kernel", "ode"],
        ["--algorithm.name", "ddpo", "--algorithm.norm-adv-by", "group"],
        ["--actor.loss.kl-loss-coef", "0.1"],
        ["--reward.kind", "flat", "--algorithm.name", "reward_gradient", "--rollout.kernel", "ode"],
    ],
    ids=["nft", "dpo", "ddpo", "kl", "reward_gradient"],
)
def test_a_reward_without_differences_never_ends_well(
    cli: Cli, own_args: list[str], options: list[str]
) -> None:
    file = own_args[own_args.index("--reward.kind") + 1].rpartition(":")[0]
    own = ["--reward.kind", f"{file}:rounded", "--algorithm.filter-groups", "False"]
    finished = cli(
        *own_args, *own, *(f"{file}:flat" if option == "flat" else option for option in options)
    )
    assert (finished.code, finished.err) == (3, "")
    assert "the run trained nothing: no step had anything to learn from" in " ".join(
        finished.out.split()
    )


def test_large_scores_and_numbers_that_come_with_them(cli: Cli, own_args: list[str]) -> None:
    file = own_args[own_args.index("--reward.kind") + 1].rpartition(":")[0]
    out = cli.ok(*own_args, "--reward.kind", f"{file}:extra")
    assert re.search(r"held-out images: reward -?[\d.]+e\+3\d", out)
    assert not re.search(r"\d{12}", out)
    page = (cli.cwd / "runs/default/report.html").read_text()
    assert "\N{MULTIPLICATION SIGN}10³" in page
    for row in step_rows(cli.cwd / "runs/default"):
        assert 0 < row["reward/brightness/mean"] < 255
        assert "reward/verdict/mean" not in row


def test_prompts_with_a_mark_and_other_line_ends(tmp_path: Path) -> None:
    """Only a newline ends a prompt, after a carriage return or not."""
    text, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes("\ufeffa cat\u2028and a dog\r\na\rbird\n\n".encode())
    rows.write_bytes(
        '\ufeff{"prompt": "a cat\u2028and a dog"}\r\n{"prompt": "a\\rbird"}\r\n'.encode()
    )
    for file in (text, rows):
        sets = load_prompts(DiffusionDataConfig(train_files=(str(file),), val_size=0))
        assert [prompt.text for prompt in sets.train] == ["a cat\u2028and a dog", "a\rbird"]


@pytest.mark.parametrize("filters", [True, False])
def test_a_reward_that_says_nothing(cli: Cli, own_args: list[str], filters: bool) -> None:
    (cli.cwd / "constant.py").write_text(
        "def half(images, prompts, rows):\n    return [0.5] * len(images)\n"
    )
    options = ["--reward.kind", "constant.py:half", "--algorithm.filter-groups", str(filters)]
    if filters:
        options += ["--algorithm.max-num-gen-batches", "1"]
    finished = cli(*own_args, *options, "--data.train-batch-size", "1")
    assert (finished.code, finished.err) == (3, "")
    expected = "no step had anything to learn from: every response scored 0.5"
    assert expected in " ".join(finished.out.split())
    assert "nan" not in finished.out
    assert expected in (cli.cwd / "runs/default/report.html").read_text()


def test_batches_of_any_size(cli: Cli, own_args: list[str]) -> None:
    """A batch is by the present weights, and the same for any number of controllers."""
    args = [*own_args, "--data.train-batch-size", "3", "--trainer.total-training-steps", "3"]
    cli.ok(*args, "--name", "one")
    cli.ok(*args, "--name", "four", "--controllers", "4")
    rows = [row for row in read_rows(cli.cwd / "runs/one/metrics.jsonl") if "sampling/waves" in row]
    assert [row["perf/num_images"] for row in rows] == [12, 12, 12]
    assert all((row["sampling/waves"], row["sampling/stale_groups"]) == (1, 0) for row in rows)
    assert all("critic/score/mean" in row for row in rows)
    for row, other in zip(
        reproducible(cli.cwd / "runs/four"), reproducible(cli.cwd / "runs/one"), strict=True
    ):
        for name in ("critic/score/mean", "sampling/epoch", "val/score/mean"):
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-4)


@pytest.mark.slow
def test_one_ctrl_c_ends_a_reward_that_blocks(cli: Cli, own_args: list[str]) -> None:
    """And one that leaves is named."""
    (cli.cwd / "odd.py").write_text("""
import sys
import time
from pathlib import Path


def blocking(images, prompts, rows):
    Path("blocked").touch()
    time.sleep(600)


def leaving(images, prompts, rows):
    sys.exit(3)
""")
    command = cli.start(*own_args, "--reward.kind", "odd.py:blocking")
    while not (cli.cwd / "blocked").exists():
        assert not command.has_ended(timeout_s=0.05), command.wait()
    command.send(signal.SIGINT)
    finished = command.wait()
    assert finished.code == 130
    assert "trying the pipeline and the reward" in finished.out
    message = cli.refused(*own_args, "--reward.kind", "odd.py:leaving")
    assert "reward 'leaving' on 2 images: tried to end the process: SystemExit: 3" in " ".join(
        message.split()
    )


def broken_index(model: Path) -> None:
    (model / "model_index.json").write_text("{")


def lost_tokenizer(model: Path) -> None:
    shutil.rmtree(next(model.glob("tokenizer*")))


def truncated(model: Path) -> None:
    weights = next(model.glob("transformer/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])


def lost_tensor(model: Path) -> None:
    weights = next(model.glob("transformer/*.safetensors"))
    tensors = load_file(weights)
    del tensors["norm_out.linear.weight"]
    save_file(tensors, weights, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (broken_index, "model/model_index.json is not JSON: "),
        (lost_tokenizer, "model folder model lacks the folder tokenizer"),
        (
            truncated,
            "model/transformer/diffusion_pytorch_model.safetensors is damaged, or was not copied to its end: ",
        ),
        (lost_tensor, "lack 1 of the model's tensors, such as norm_out.linear.weight"),
    ],
)
def test_damaged_pipeline(
    cli: Cli, own_args: list[str], damage: Callable[[Path], None], expected: str
) -> None:
    shutil.copytree(own_args[own_args.index("--model") + 1], cli.cwd / "model")
    damage(cli.cwd / "model")
    assert expected in cli.refused(*own_args, "--model", "model")


def test_wrong_arguments_of_sample_and_report(cli: Cli, own_args: list[str]) -> None:
    cli.ok(*own_args)
    for options, expected in (
        (["--n", "0"], "n is 0; expected 1 or more"),
        (["--n", "x"], "n is 'x'; expected a valid integer"),
        (["--guidance-scale", "nan"], "guidance_scale is nan; expected a finite number"),
        (["--seed", "-1"], "seed is -1; expected 0 or more"),
        (["--out", "x.quux"], "out is 'x.quux'; expected a file that ends in .png"),
        (
            ["--out", "nowhere/x.png"],
            "out is 'nowhere/x.png'; expected a file in an existing folder",
        ),
        (["--num-images", "4"], "unknown option --num-images; known here: "),
    ):
        assert expected in cli.refused("sample", "runs/default", "a", *options)
    assert "PROMPT is missing; expected gcore-diffusion sample RUN PROMPT" in cli.refused(
        "sample", "runs/default"
    )
    (cli.cwd / "runs/default/report.html").unlink()
    (cli.cwd / "runs/default/report.html").mkdir()
    assert "runs/default/report.html: Is a directory" in cli.refused("report", "runs/default")
    (cli.cwd / "runs/default/config.toml").write_text("[")
    assert "config.toml: not TOML" in cli.refused("sample", "runs/default", "a")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(cli: Cli, own_args: list[str], name: str) -> None:
    options, expected = BAD[name]
    file = own_args[own_args.index("--reward.kind") + 1].rpartition(":")[0]
    # An option that comes again is the last one's.
    assert expected in cli.refused(*own_args, *options(file))
    assert not (cli.cwd / "runs/default").exists()


@pytest.mark.parametrize("name", {**RECIPES, **PUBLISHED})
def test_recipes_are_what_a_file_can_hold(name: str, tmp_path: Path) -> None:
    config = {**RECIPES, **PUBLISHED}[name]()
    assert merge(DiffusionConfig(), tomllib.loads(to_toml(config)), source="test") == config


def coloured(grey: Any, colour: tuple[float, float, float]) -> Any:
    return (grey[..., None] * np.array(colour) * 255).round().astype(np.uint8)


@pytest.mark.slow
def test_digits_are_scored_by_two_rewards() -> None:
    """Each reads most digits that it was not trained on, in their colours alone, and no halves of two digits."""
    pixels, labels = load()
    for reward, half, score in ((DigitReward(), 1, 0.6), (DemoJudgeReward(), 0, 0.6)):
        grey, own = pixels[half::2], labels[half::2]
        rows: list[dict[str, Any]] = [{}] * len(grey)
        for colour, rgb in COLOURS.items():
            images = coloured(grey, rgb)
            assert reward(images, [f"{colour} {label}" for label in own], rows).mean() > score
            assert (
                reward(images, [f"{colour} {(label + 1) % 10}" for label in own], rows).mean()
                < 0.05
            )
        # As the policy drew blue digits for a reward of the digit alone.
        orange = coloured(grey, (1.0, 0.5, 0.1))
        assert reward(orange, [f"blue {label}" for label in own], rows).mean() < 0.05
        for prompt in ("7", "red", "green 7", "red 77"):
            with pytest.raises(RewardConfigError, match="names a colour and a digit"):
                reward(orange[:1], [prompt], [{}])
    sevens, zeros = (
        coloured(pixels[1::2][labels[1::2] == digit], COLOURS["red"]) for digit in (7, 0)
    )
    count = min(len(sevens), len(zeros))
    halves = np.concatenate([sevens[:count, :4], zeros[:count, 4:]], axis=1)
    assert DigitReward()(halves, ["red 7"] * count, [{}] * count).mean() < 0.2
    assert len(PROMPTS) == 30


def evaluation(pixels: float, scores: float, held_out: float | None) -> ImageEvaluation:
    """Eight images of two prompts, those of each alike but for one pixel value."""
    images = np.zeros((8, 2, 2, 3), np.uint8)
    images[::2] = round(255 * pixels)
    judged = None if held_out is None else np.full(8, held_out)
    return ImageEvaluation(
        prompts=["a"] * 4 + ["b"] * 4, images=images, scores=np.full(8, scores), held_out=judged
    )


def test_diversity_is_within_prompts() -> None:
    assert evaluation(0.4, 0.0, None).metrics()["val/diversity"] == pytest.approx(0.2)
    whole = evaluation(0.4, 0.0, None)
    whole.images[:4], whole.images[4:] = 0, 255
    assert whole.metrics()["val/diversity"] == 0.0


def test_doubts_of_a_reward_that_rises_alone() -> None:
    earlier: list[dict[str, float]] = [
        {"step": 0, **evaluation(0.4, 0.3, 0.5).metrics()},
        {"step": 10, **evaluation(0.4, 0.5, 0.6).metrics()},
    ]
    assert evaluation(0.4, 0.8, 0.7).doubts(earlier) is None
    assert evaluation(0.4, 0.4, 0.5).doubts(earlier) is None
    fell, alike = (
        evaluation(*values).doubts(earlier) for values in ((0.4, 0.8, 0.55), (0.2, 0.8, 0.7))
    )
    assert fell is not None
    assert (
        "rose from 0.5 at step 10 to 0.8, while the reward that is not trained on fell from 0.6 to 0.55;"
        in fell
    )
    assert alike is not None
    assert "the images of a prompt became alike: 50% of the initial diversity is left;" in alike


@pytest.mark.slow
def test_the_best_step_is_exported(cli: Cli, own_args: list[str]) -> None:
    """With a reward that is not trained on and only falls, that is the first; the screen and the report say so."""
    file = own_args[own_args.index("--reward.kind") + 1].rpartition(":")[0]
    args = option_set(
        [*own_args, "--reward.held-out", f"{file}:opposite"], "--trainer.total-training-steps", "6"
    )
    args += ["--actor.optim.lr", "3e-3", "--trainer.test-freq", "2"]
    initial = load_file(
        next(Path(args[args.index("--model") + 1]).glob("transformer/*.safetensors"))
    )
    for export in ("last", "best"):
        out = " ".join(cli.ok(*args, "--trainer.export", export, "--name", export).split())
        assert "while the reward that is not trained on fell from" in out
        assert ("exporting the policy of step 0, the best on held-out prompts" in out) == (
            export == "best"
        )
        report = (cli.cwd / f"runs/{export}/report.html").read_text()
        assert "while the reward that is not trained on fell" in report
        assert ("Before training, exported" in report) == (export == "best")
        last_step = 0 if export == "best" else 6
        assert f"after, step {last_step}" in out
        assert ("step 0, which is exported" in report) == (export == "best")
        assert ("step 0 → step 6" in report) == (export == "last")
        exported = load_file(
            next((cli.cwd / f"runs/{export}/export/transformer").glob("*.safetensors"))
        )
        is_initial = [torch.equal(exported[name], tensor) for name, tensor in initial.items()]
        assert all(is_initial) == (export == "best")


def test_grids_show_every_prompt_until_there_are_too_many() -> None:
    images = np.zeros((40 * 3, 8, 8, 3), np.uint8)
    prompts = [f"prompt {i // 3}" for i in range(120)]
    small, large = (
        grid(images[:12], prompts[:12], per_prompt=3),
        grid(images, prompts, per_prompt=3),
    )
    assert large.size[1] < 5 * small.size[1]
    wide = grid(np.zeros((2, 512, 256, 3), np.uint8), ["a", "a"], per_prompt=2)
    assert wide.size[1] < 200
