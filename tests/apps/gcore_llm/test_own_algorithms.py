"""Advantage estimators and policy losses of a user's own file, chosen on the command line."""

from pathlib import Path

import pytest
from command_line import Cli, step_rows

ADVANTAGE = '''
from gcore_trainer import advantage_estimator, gae_advantages, grpo_advantages


def reinforce(group):
    """REINFORCE without a baseline."""
    return group.at_every_token(group.scores)


@advantage_estimator(min_group_size=2)
def mine(group):
    return group.at_every_token(grpo_advantages(group.scores))


@advantage_estimator(needs_critic=True, reads_token_rewards=True, whiten=True)
def actor_critic(group, *, lam=1.0):
    rows = zip(group.rewards, group.values, group.masks)
    advantages, returns = zip(*(gae_advantages(r, v, m, gamma=1.0, lam=lam) for r, v, m in rows))
    return advantages, returns


def wrong(group):
    return group.scores
'''
LOSS = '''
import torch

from gcore_trainer import policy_loss_function


@policy_loss_function(has_dual_clip=True)
def ppo(tokens, config):
    """PPO's clip with the dual clip, written out."""
    ratio, advantages = tokens.ratio, tokens.advantages
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    bound = -advantages * (config.clip_ratio_c or torch.inf)
    is_bound = (advantages < 0) & (loss > bound)
    metrics = {"actor/pg_clipfrac": clipped > unclipped, "actor/pg_clipfrac_lower": is_bound}
    return torch.where(is_bound, bound, loss), metrics


def reinforce(tokens, config):
    return -tokens.advantages * tokens.log_probs


def wrong(tokens, config):
    return tokens.log_probs.sum()
'''


@pytest.fixture(autouse=True)
def own_files(cli: Cli) -> Path:
    (cli.cwd / "advantage.py").write_text(ADVANTAGE)
    (cli.cwd / "loss.py").write_text(LOSS)
    (cli.cwd / "broken.py").write_text("import nowhere_to_be_found\n")
    return cli.cwd


def timeless(folder: Path) -> list[dict[str, float]]:
    """The metrics of all steps that do not depend on the machine."""
    kinds = ("actor/", "critic/", "training/", "response_length/")
    return [{k: v for k, v in row.items() if k.startswith(kinds)} for row in step_rows(folder)]


def test_an_estimator_without_a_baseline(cli: Cli, own_args: list[str]) -> None:
    """Advantages are the scores themselves; a plain function needs no group and no critic."""
    cli.ok(
        *own_args,
        "--algorithm.adv-estimator",
        "advantage.py:reinforce",
        "--algorithm.filter-groups",
        "False",
    )
    for row in timeless(cli.cwd / "runs/default"):
        assert row["critic/advantages/max"] == pytest.approx(row["critic/score/max"])
        assert row["critic/advantages/min"] == pytest.approx(row["critic/score/min"])
        assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("own", "built_in"),
    [
        (["--algorithm.adv-estimator", "advantage.py:mine"], ["--algorithm.adv-estimator", "grpo"]),
        (["--actor.loss.loss-mode", "loss.py:ppo"], ["--actor.loss.loss-mode", "vanilla"]),
        pytest.param(
            [
                *("--algorithm.adv-estimator", "advantage.py:actor_critic"),
                *("--algorithm.options.lam", "0.9"),
            ],
            ["--algorithm.adv-estimator", "gae", "--algorithm.options.lam", "0.9"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--actor.loss.loss-mode", "loss.py:ppo", "--actor.loss.clip-ratio-c", "3"],
            ["--actor.loss.clip-ratio-c", "3"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["advantage", "loss", "critic", "dual clip"],
)
def test_equal_formulas_give_equal_runs(
    cli: Cli, own_args: list[str], own: list[str], built_in: list[str]
) -> None:
    epochs = ["--actor.ppo-epochs", "2"]
    cli.ok(*own_args, *epochs, *own, "--name", "own")
    cli.ok(*own_args, *epochs, *built_in, "--name", "built-in")
    assert timeless(cli.cwd / "runs/own") == timeless(cli.cwd / "runs/built-in")


def test_a_loss_of_one_line_on_several_controllers(cli: Cli, own_args: list[str]) -> None:
    cli.ok(*own_args, "--actor.loss.loss-mode", "loss.py:reinforce", "--controllers", "2")
    for row in timeless(cli.cwd / "runs/default"):
        assert row["actor/grad_norm"] > 0
        assert row["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--algorithm.adv-estimator", "ppo"],
            "algorithm.adv_estimator is 'ppo'; expected one of distillation, dr_grpo, flash_reinforce, gae, gdpo, "
            "gigpo, grpo, grpo_passk, grpo_process, maxrl, opo, optimal_token_baseline, rae, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, remax",
        ),
        (
            ["--algorithm.adv-estimator", "none.py:f"],
            "algorithm.adv_estimator is 'none.py:f'; expected a file that",
        ),
        (
            ["--algorithm.adv-estimator", "advantage.py:f"],
            "expected one of actor_critic, advantage_estimator, ",
        ),
        (
            ["--algorithm.adv-estimator", "broken.py:f"],
            "does not import (ModuleNotFoundError: No module named",
        ),
        (
            ["--algorithm.adv-estimator", "advantage.py:mine", "--rollout.n", "1"],
            "rollout.n is 1; expected at least 2",
        ),
        (
            [
                "--algorithm.adv-estimator",
                "advantage.py:mine",
                "--algorithm.kl-ctrl.kl-coef",
                "0.1",
            ],
            "it is read with algorithm.adv_estimator gae, reinforce_plus_plus",
        ),
        (["--algorithm.adv-estimator", "advantage.py:wrong"], "advantages has shapes [(), (), "),
        (
            ["--actor.loss.loss-mode", "ppo"],
            "loss_mode is 'ppo'; expected one of cispo, clip_cov, dppo_kl, dppo_tv, dro, geo_mean, gpg, gspo, kl_cov, ",
        ),
        (["--actor.loss.loss-mode", "none.py:f"], "loss_mode is 'none.py:f'; expected a file that"),
        (
            ["--actor.loss.loss-mode", "loss.py:f"],
            "expected one of policy_loss_function, ppo, ",
        ),
        (
            ["--actor.loss.loss-mode", "loss.py:reinforce", "--actor.loss.clip-ratio-c", "3"],
            "actor.loss.clip_ratio_c is 3.0; expected None with actor.loss.loss_mode 'loss.py:reinforce'",
        ),
        (
            ["--actor.loss.loss-mode", "loss.py:wrong"],
            "the policy loss has shape (); expected that of its tokens",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_one_line(
    cli: Cli, own_args: list[str], options: list[str], message: str
) -> None:
    assert message in cli.refused(*own_args, *options)
