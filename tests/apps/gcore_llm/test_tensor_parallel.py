"""Settings of engines over several devices; runs with them are in `test_cluster_failures`."""

import pytest

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.sections import JudgeConfig, RewardModelConfig, TrainerConfig
from gcore_runs import UserError


def test_what_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"rollout\.tensor_parallel_size is 2; expected 1 with rollout\.engine 'hf'"
    ):
        RolloutConfig(tensor_parallel_size=2)
    with pytest.raises(UserError, match=r"rollout\.tensor_parallel_size is 0; expected"):
        RolloutConfig(engine="vllm", tensor_parallel_size=0)
    with pytest.raises(
        UserError, match=r"rollout\.engine_options has 'enable_expert_parallel'; expected some of"
    ):
        RolloutConfig(engine_options={"enable_expert_parallel": True})
    judge = RewardModelConfig(
        kind="judge", path="judge", judge=JudgeConfig(engine="vllm", num_processes=1)
    )
    rollout = RolloutConfig(engine="vllm", num_processes=1, tensor_parallel_size=2)
    expected = r"reward_model\.judge\.tensor_parallel_size is 1; expected 2, as of rollout, with runtime 'ray'"
    with pytest.raises(UserError, match=expected):
        TrainConfig(
            model="policy", device="cpu", runtime="ray", rollout=rollout, reward_model=judge
        )


def test_reserved_devices() -> None:
    """Ranks are on the devices of engines, each of which has two."""
    rollout = RolloutConfig(engine="vllm", num_processes=2, tensor_parallel_size=2, colocated=True)
    config = TrainConfig(
        model="policy",
        device="cpu",
        runtime="ray",
        rollout=rollout,
        trainer=TrainerConfig(num_processes=5),
    )
    assert config.sizes.num_own_ranks == 1
    assert config.sizes.num_reserved == config.controllers + 2 * 2 + 1
