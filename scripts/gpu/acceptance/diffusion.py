"""Part 12: three steps of `gcore-diffusion train` on the embedded model."""

import json

from acceptance.trial import Trial
from gcore_diffusion import DiffusionConfig, train
from gcore_diffusion.cli import parse_train_args
from gcore_runs import convert_settings

_NUM_STEPS = 3
_SHOWN = {
    "timing_s/gen": ("generation", "s"),
    "timing_s/train": ("training", "s"),
    "timing_s/step": ("step", "s"),
    "critic/score/mean": ("score, mean", ""),
}


def three_steps(trial: Trial) -> None:
    """Train for three steps, and report the last one's times."""
    folder = trial.work / "diffusion"
    folder.mkdir()
    steps = str(_NUM_STEPS)
    arguments = [
        "--name",
        "acceptance",
        "--runs-dir",
        str(folder / "runs"),
        "--device",
        trial.device,
    ]
    arguments += [
        "--demo.cache-dir",
        str(folder / "cache"),
        "--demo.num-steps",
        "2" if trial.is_small else "20",
        "--trainer.tensorboard",
        "False",
    ]
    arguments += [
        "--trainer.total-training-steps",
        steps,
        "--rollout.n",
        "4",
        "--data.train-batch-size",
        "4",
    ]
    parsed = parse_train_args(arguments)
    train(convert_settings(parsed, DiffusionConfig), demo=parsed.demo)
    metrics = (folder / "runs" / "acceptance" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, metrics) if "timing_s/gen" in row]
    trial.count("steps", len(rows), at_least=_NUM_STEPS)
    for key, (name, unit) in _SHOWN.items():
        if key in rows[-1]:
            trial.figure(f"step {len(rows)}: {name}", rows[-1][key], unit)
