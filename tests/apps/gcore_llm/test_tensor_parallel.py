"""`gcore-llm train` with engines over several devices."""

import os
import random
import signal
import time

import pytest
from command_line import Cli, assert_same_metrics, option_set, read_rows, step_rows
from process_tree import descendants, left_after

from gcore_llm.config import RolloutConfig, TrainConfig, TrainerConfig
from gcore_llm.reward_config import JudgeConfig, RewardModelConfig
from gcore_runs import UserError

VLLM = ["--rollout.engine", "vllm"]
RANK = "VLLM::Worker_TP"


@pytest.mark.slow
def test_engines_of_two_devices_on_a_cluster(cli: Cli, own_args: list[str]) -> None:
    """Two engines of two devices and two training ranks: the metrics of one process, though a rank of vLLM's is killed.

    The training ranks take turns with the engines on their devices.
    """
    # Slowly: rounding differs with who computed what, and a policy that is nearly certain makes much of it.
    args = [*option_set(own_args, "--actor.optim.lr", "1e-4"), *VLLM, "--trainer.save-freq", "1"]
    alone = cli(*args, "--name", "alone")
    assert alone.code == 0, alone
    sizes = ["--controllers", "2", "--rollout.num-processes", "2", "--trainer.num-processes", "2"]
    options = ["--runtime", "ray", *sizes, "--rollout.tensor-parallel-size", "2", "--rollout.colocated", "true"]
    command = cli.start(*args, *options, "--name", "split")
    run = cli.cwd / "runs/split"
    while not command.has_ended() and not (run / "metrics.jsonl").exists():
        time.sleep(0.02)
    ranks = descendants(command.pid, RANK)
    assert len(ranks) == 4
    os.kill(random.Random(0).choice(ranks), signal.SIGKILL)
    finished = command.wait()
    assert finished.code == 0, finished
    assert "a rank of the engine died" in finished.out + (run / "logs/main.log").read_text()
    assert_same_metrics(run, cli.cwd / "runs/alone")
    assert len(step_rows(run)) >= 2
    places = {name for row in read_rows(run / "spans.jsonl") for name in row["devices"]}
    assert places == {"device 0", "device 1"}, "two devices of an engine are one row, that of the ranks there, too"
    assert not left_after(ranks, 10.0)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.tensor_parallel_size is 2; expected 1 with rollout\.engine 'hf'"):
        RolloutConfig(tensor_parallel_size=2)
    with pytest.raises(UserError, match=r"rollout\.tensor_parallel_size is 0; expected"):
        RolloutConfig(engine="vllm", tensor_parallel_size=0)
    with pytest.raises(UserError, match=r"rollout\.enable_expert_parallel is true; expected None with"):
        RolloutConfig(enable_expert_parallel=True)
    judge = RewardModelConfig(kind="judge", path="judge", judge=JudgeConfig(engine="vllm", num_processes=1))
    rollout = RolloutConfig(engine="vllm", num_processes=1, tensor_parallel_size=2)
    expected = r"reward_model\.judge\.tensor_parallel_size is 1; expected 2, as of rollout, with runtime 'ray'"
    with pytest.raises(UserError, match=expected):
        TrainConfig(model="policy", device="cpu", runtime="ray", rollout=rollout, reward_model=judge)


def test_reserved_devices() -> None:
    """Ranks are on the devices of engines, each of which has two."""
    rollout = RolloutConfig(engine="vllm", num_processes=2, tensor_parallel_size=2, colocated=True)
    config = TrainConfig(
        model="policy", device="cpu", runtime="ray", rollout=rollout, trainer=TrainerConfig(num_processes=5)
    )
    assert config.sizes.num_own_ranks == 1
    assert config.sizes.num_reserved == config.controllers + 2 * 2 + 1
