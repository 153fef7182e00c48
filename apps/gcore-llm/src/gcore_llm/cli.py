"""The `gcore-llm` command, and the recipes that it starts from."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tyro

from gcore_llm.config import RolloutConfig, TrainArgs, TrainConfig
from gcore_llm.finetune.command import run_fine_tuning
from gcore_llm.recipes.large import LARGE
from gcore_llm.report import KINDS
from gcore_llm.sections import (
    ActorConfig,
    ActorOptimConfig,
    DataConfig,
    TaskConfig,
    TrainerConfig,
    WarmupConfig,
)
from gcore_runs import (
    Amount,
    Checked,
    Command,
    Count,
    NonNegative,
    RunArgs,
    convert_settings,
    extend_recipes,
    parse,
    parse_arguments,
    run_command,
    run_training,
)

_AGENT = "--rollout.agent.run"
_USAGE = """usage: gcore-llm COMMAND [options]

LLM RLHF from one command.

commands:
  train               train by reinforcement; with no options, a tiny model on a reasoning task in minutes
  sft                 fine-tune on given answers
  reward-model        train a reward model on pairs of answers
  dpo                 train on pairs of answers, without sampling
  sample RUN PROMPT   complete a prompt with a run's latest policy
  eval MODEL_OR_RUN   score a model, or a run's policy, on sets of prompts
  report RUN          write the run's report.html again
  trace RUN           write the run's timeline for ui.perfetto.dev
  logs RUN            print what the run's processes logged, by time
  doctor              check this machine, or the nodes of a Ray cluster, before a run
  simulate            predict the time of a step of train, on up to 100,000 modelled devices
  from-verl CONFIG    write settings of train for a config or launch script of verl
  from-trl CONFIG     write settings for a config of TRL
  compare-with verl|trl SETTINGS  compute advantages, loss and gradient of one batch here and there

gcore-llm COMMAND --help documents every option.
"""


def embedded() -> TrainConfig:
    """Minutes on two cores, no GPU, no network: a tiny model learns to work out one-digit sums."""
    return TrainConfig(
        task=TaskConfig(
            name="chain_sum",
            params={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        ),
        answer_after="=",
        # Products of this size gain nothing from a second thread, and one gives the same numbers on every machine.
        threads=1,
        data=DataConfig(train_batch_size=32, max_prompt_length=16, max_response_length=32),
        rollout=RolloutConfig(n=8, max_num_seqs=512),
        # A rate that falls to 0 gets as far, greedily, in 130 steps as a constant one in 300, whose end is noisy.
        actor=ActorConfig(
            optim=ActorOptimConfig(lr=2e-4, lr_scheduler_type="linear"), ppo_max_token_len=16_384
        ),
        trainer=TrainerConfig(total_training_steps=130),
    )


def agent() -> TrainConfig:
    """The same model uses a tool: set rollout.agent.run. An agent's own work is most of a step, so steps are few."""
    config = embedded()
    return replace(
        config,
        task=replace(config.task, num_train=2_000, num_val=64),
        # The answer is all of the last turn.
        answer_after="",
        data=replace(config.data, train_batch_size=16, max_response_length=128),
        # Twelve updates a step: samples take long, and updates do not.
        actor=replace(config.actor, ppo_mini_batch_size=4, ppo_epochs=3),
        trainer=replace(config.trainer, total_training_steps=24),
    )


def own_data() -> TrainConfig:
    """Your model, your prompts, your reward: set model, data.train_files and reward."""
    return TrainConfig()


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "embedded": embedded,
    "agent": agent,
    "own_data": own_data,
    **LARGE,
}
"""Recipes of `gcore-llm train`: functions that return settings to start from."""


@dataclass(frozen=True, kw_only=True)
class SampleArgs(RunArgs, Checked):
    """Complete a prompt with a run's latest policy."""

    prompt: tyro.conf.Positional[str]
    """The prompt; a chat template is applied as in training."""
    images: tuple[str, ...] = ()
    """Image files for the places of images in the prompt, <image> each, for a run with data.image_key."""
    n: Count = 1
    """How many completions."""
    temperature: Amount = 0.0
    """0: greedy."""
    max_tokens: NonNegative = 0
    """Longest completion; 0: the run's data.max_response_length."""
    seed: NonNegative = 0
    """Seed of the samples."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; see `run_command`."""
    run_command(
        "gcore-llm",
        _COMMANDS,
        argv,
        usage=_USAGE,
        settings=_settings,
        kinds=lambda: KINDS,
        not_resumed=("simulate", "from-verl", "from-trl", "compare-with"),
    )


def parse_train(args: Sequence[str]) -> TrainConfig:
    """Return the settings of a run from a recipe, a TOML file and the command line, each over the one before."""
    return convert_settings(parse_train_args(args), TrainConfig)


def parse_train_args(args: Sequence[str]) -> TrainArgs:
    """Return the same, and the options that are no settings of a run; see `parse`."""
    recipes = extend_recipes(RECIPES, TrainArgs)
    recipes["agent"] = _warm_up_agent
    has_agent = any(arg.startswith(_AGENT) for arg in args)
    return parse(
        args,
        prog="gcore-llm train",
        recipes=recipes,
        description="Train by GRPO with dynamic sampling.",
        embedded="agent" if has_agent else "embedded",
    )


def _warm_up_agent() -> TrainArgs:
    """Return the recipe `agent` with a warm-up that leaves something to learn, and has one check: agents are slow."""
    warmup = WarmupConfig(max_steps=100, batch_size=64, test_freq=100)
    return replace(convert_settings(agent(), TrainArgs), warmup=warmup)


def _settings() -> dict[str, type]:
    from gcore_llm.evaluation.args import EvalArgs
    from gcore_llm.finetune.config import DPORunConfig, RewardModelRunConfig, SFTRunConfig
    from gcore_llm.migration.command import FromTRLArgs, FromVerlArgs
    from gcore_llm.migration.comparison import CompareArgs
    from gcore_runs.simulation.config import SimulateConfig

    return {
        "train": TrainArgs,
        "sft": SFTRunConfig,
        "reward-model": RewardModelRunConfig,
        "dpo": DPORunConfig,
        "sample": SampleArgs,
        "eval": EvalArgs,
        "simulate": SimulateConfig,
        "from-verl": FromVerlArgs,
        "from-trl": FromTRLArgs,
        "compare-with": CompareArgs,
    }


def _train(args: Sequence[str]) -> None:
    parsed = parse_train_args(args)
    if parsed.dry_run:
        from gcore_llm.learning.dry_run import dry_run

        dry_run(parsed)
        return
    config = convert_settings(parsed, TrainConfig)
    # Before the libraries of training are imported, which takes seconds.
    config.check_inputs()
    from gcore_llm.training import train

    labels = {f"val/{way}/score/mean": way for way in ("greedy", "sampled")}
    run_training(
        config, partial(train, warmup=parsed.warmup), title="held-out score", labels=labels
    )


def _sample(args: Sequence[str]) -> None:
    parsed = parse_arguments(SampleArgs, args, prog="gcore-llm sample")
    from gcore_llm.training import sample_run

    for text in asyncio.run(sample_run(**vars(parsed))):
        print(text)


def _eval(args: Sequence[str]) -> None:
    from gcore_llm.evaluation.args import EvalArgs

    parsed = parse_arguments(EvalArgs, args, prog="gcore-llm eval")
    from gcore_llm.evaluation.command import run_eval

    run_eval(parsed)


def _simulate(args: Sequence[str]) -> None:
    from gcore_llm.simulate import run_simulate

    run_simulate(args, RECIPES)


def _from_verl(args: Sequence[str]) -> None:
    from gcore_llm.migration.command import from_verl

    from_verl(args)


def _compare_with(args: Sequence[str]) -> None:
    from gcore_llm.migration.comparison import compare_with

    compare_with(args, parse_train)


def _from_trl(args: Sequence[str]) -> None:
    from gcore_llm.migration.command import from_trl

    from_trl(args)


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "sft": partial(run_fine_tuning, "sft"),
    "reward-model": partial(run_fine_tuning, "reward-model"),
    "dpo": partial(run_fine_tuning, "dpo"),
    "sample": _sample,
    "eval": _eval,
    "simulate": _simulate,
    "from-verl": _from_verl,
    "from-trl": _from_trl,
    "compare-with": _compare_with,
}
