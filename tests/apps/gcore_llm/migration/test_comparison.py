"""What `gcore-llm compare-with` computes: the same batch by gcore and by the installed libraries."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from command_line import Cli

from gcore_llm.config import TrainConfig
from gcore_llm.migration.comparison import computed_by_trl, computed_by_verl, differences
from gcore_llm.migration.fixed_batch import FixedBatch, computed_here
from gcore_runs import UserError
from gcore_trainer import RolloutCorrectionConfig

from .conversions import N8, from_trl, from_verl, train_config

ACTOR, ROLLOUT, CORRECTION = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "algorithm.rollout_correction",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def own_process() -> Iterator[None]:
    """What the import of verl does to the environment and the log is undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        patch.setattr(logging.root, "handlers", logging.root.handlers[:])
        patch.setattr(logging.root, "level", logging.root.level)
        yield


VERL = {
    "defaults": (),
    "grpo": (
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.entropy_coeff=0.01",
    ),
    "grpo without deviation": (
        *("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"),
        *(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.kl_loss_type=kl"),
    ),
    "rloo, gspo": (
        *(
            "algorithm.adv_estimator=rloo",
            f"{ACTOR}.policy_loss.loss_mode=gspo",
            f"{ACTOR}.clip_ratio_low=0.01",
        ),
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ),
    "remax, cispo": ("algorithm.adv_estimator=remax", f"{ACTOR}.policy_loss.loss_mode=cispo"),
    "baseline, sapo": (
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        f"{ACTOR}.policy_loss.loss_mode=sapo",
        f"{ACTOR}.tau_neg=1.5",
    ),
    "kl_cov": (
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.policy_loss.loss_mode=kl_cov",
        f"{ACTOR}.policy_loss.kl_cov_ratio=0.2",
    ),
    "KL in the reward": (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=True",
    ),
    "corrected": (
        *("algorithm.adv_estimator=grpo", f"{CORRECTION}.rollout_is=token"),
        *(f"{CORRECTION}.rollout_is_threshold=1.05", f"{CORRECTION}.rollout_rs=token_k2"),
        f"{CORRECTION}.rollout_rs_threshold=0.004",
    ),
}


@pytest.mark.parametrize("name", VERL)
def test_converted_settings_mean_what_they_mean_in_verl(name: str) -> None:
    config = train_config(from_verl(N8, *VERL[name]))
    batch = FixedBatch.of(config, seed=0)
    ours, theirs = computed_here(config, batch), computed_by_verl(config, batch)
    for quantity, *_, gap in differences(ours, theirs):
        assert gap < 1e-5, quantity
    # A setting that verl is not asked for shows.
    other = replace(
        config,
        actor=replace(
            config.actor, loss=replace(config.actor.loss, loss_agg_mode="seq-mean-token-sum")
        ),
    )
    assert differences(computed_here(other, batch), theirs)[1][3] > 1e-3 or name == "baseline, sapo"


TRL = {
    "defaults": (),
    "grpo": ("loss_type=grpo", "beta=0.04", "epsilon_high=0.28"),
    "dr_grpo": ("loss_type=dr_grpo", "scale_rewards=none", "delta=2.0"),
    "gspo": (
        "loss_type=grpo",
        "importance_sampling_level=sequence",
        "epsilon=0.01",
        "epsilon_high=0.02",
    ),
    "cispo": ("loss_type=cispo", "epsilon_high=1.2", "entropy_coef=0.01"),
    "sapo": ("loss_type=sapo",),
}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_a_bound_below_one_of_cispo_differs() -> None:
    """TRL bounds the weight itself, which settings here cannot say below 1."""
    conversion = from_trl("grpo", "loss_type=cispo", "epsilon_high=0.5")
    config = train_config(conversion)
    batch = FixedBatch.of(config, seed=0)
    here, there = computed_here(config, batch), computed_by_trl(config, batch, conversion.values)
    assert differences(here, there)[2][3] > 0.1


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
@pytest.mark.parametrize("name", TRL)
def test_converted_settings_mean_what_they_mean_in_trl(name: str) -> None:
    config = train_config(from_trl("grpo", *TRL[name]))
    batch = FixedBatch.of(config, seed=0)
    for quantity, *_, gap in differences(
        computed_here(config, batch), computed_by_trl(config, batch)
    ):
        # TRL adds 1e-4 to the deviation of a group, where gcore and verl add 1e-6.
        assert gap < (1e-5 if name == "dr_grpo" else 1e-3), quantity


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adv_estimator": "maxrl"}, "'maxrl'; expected an estimator that verl has, too"),
        (
            {
                "old_log_probs": "trainer",
                "rollout_correction": RolloutCorrectionConfig(
                    rollout_rs="seq_mean_tv", rollout_rs_threshold=0.1
                ),
            },
            "rollout_rs is 'seq_mean_tv'; expected a divergence that verl has, too",
        ),
    ],
)
def test_what_verl_does_not_have(settings: dict[str, Any], message: str) -> None:
    config = replace(TrainConfig(), algorithm=replace(TrainConfig().algorithm, **settings))
    with pytest.raises(UserError, match=message):
        computed_by_verl(config, FixedBatch.of(config, seed=0))


def test_the_command(cli: Cli) -> None:
    cli.ok(
        "from-verl",
        "a.b=c",
        N8,
        *VERL["grpo"],
        "trainer.total_training_steps=3",
        "--out",
        "run.toml",
    )
    out = cli.ok("compare-with", "verl", "run.toml")
    assert out.count("equal") == 3
    assert "differs" not in out
    # The library's own config shows what a conversion leaves out, and is computed with its own values.
    words = " ".join([N8, *VERL["grpo"], f"{ROLLOUT}.do_sample=False", "a.b=1"])
    (cli.cwd / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {words}\n")
    out = cli.ok("compare-with", "verl", "run.sh")
    assert out.count("equal") == 3
    assert f"{ROLLOUT}.do_sample" in out
    assert "unknown" in out
    assert "library is 'slime'; expected 'verl' or 'trl'" in cli.refused(
        "compare-with", "slime", "run.toml"
    )
