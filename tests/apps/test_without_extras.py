"""What the commands do by default needs no optional library: `pip install gcore-llm` or `gcore-diffusion` is enough."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXTRAS = (
    "datasets",
    "ray",
    "vllm",
    "megatron",
    "bitsandbytes",
    "sglang",
    "triton",
    "mlflow",
    "swanlab",
    "trackio",
    "wandb",
)
PROGRAM = f"""
import sys
from importlib import import_module

# An import of these fails, as where they are not installed.
sys.modules.update(dict.fromkeys({EXTRAS!r}))
import_module(f"{{sys.argv[1]}}.cli").main(sys.argv[2:])
"""
TRAIN = (
    "--trainer.total-training-steps",
    "1",
    "--trainer.tensorboard",
    "False",
    "--device",
    "cpu",
    "--threads",
    "1",
)
COMMANDS = {
    "gcore_llm": ("--warmup.max-steps", "2"),
    "gcore_diffusion": ("--demo.num-steps", "2", "--demo.cache-dir", "cache", "--rollout.n", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("app", COMMANDS)
def test_a_run_needs_no_extra(app: str, tmp_path: Path) -> None:
    arguments = ("train", "--name", "run", *TRAIN, "--data.train-batch-size", "2", *COMMANDS[app])
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, app, *arguments],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Code 3: no step had anything to learn from, which after 2 updates is likely.
    assert finished.returncode in (0, 3), finished.stdout + finished.stderr
    assert (tmp_path / "runs" / "run" / "export").is_dir()
