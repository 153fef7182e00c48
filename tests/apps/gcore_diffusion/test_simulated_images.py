"""`gcore-diffusion simulate train`: the records of a run, in simulated time."""

from pathlib import Path

import pytest
from command_line import Cli, Server, step_rows


@pytest.fixture
def cli(diffusion_server: Server, tmp_path: Path) -> Cli:
    return Cli(diffusion_server, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--recipe", "embedded_nft"],
        ["--sim.reward.latency-s", "3"],
        ["--rollout.dtype", "bfloat16"],
    ],
)
def test_a_run_in_simulated_time(cli: Cli, options: list[str]) -> None:
    args = [
        "simulate",
        "train",
        "--controllers",
        "2",
        "--sim.devices",
        "16",
        "--sim.engine.base-s",
        "1",
    ]
    out = cli.ok(
        *args, "--sim.engine.per-sample-s", "0", "--trainer.total-training-steps", "2", *options
    )
    assert "simulated: 16 devices" in out
    for row in step_rows(cli.cwd / "runs/default"):
        # An image has ten steps; the 16 replicas make the 256 of a wave at once.
        assert row["timing_s/gen"] == pytest.approx(10 * row["sampling/waves"])
        assert row["perf/generated/gen"] == row["perf/num_images"] >= 256
        assert row["timing_s/train"] > 0
        if "--sim.reward.latency-s" in options:
            assert row["timing_s/reward"] > 1
    assert (cli.cwd / "runs/default/report.html").is_file()
    assert not (cli.cwd / "runs/default/export").exists()


def test_what_is_simulated_has_a_name(cli: Cli) -> None:
    assert "the first argument of simulate is '--sim.devices'; expected train" in cli.refused(
        "simulate", "--sim.devices", "16"
    )
    assert "unknown option --sim.devices" in cli.refused("train", "--sim.devices", "16")
