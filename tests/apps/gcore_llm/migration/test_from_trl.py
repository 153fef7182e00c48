"""Configs of TRL's trainers, converted: batches of completions, meanings and defaults, and a verdict on every key."""

import json
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, metrics_of, write_rows

from gcore_llm.migration.trl import DEFAULTS
from gcore_runs import UserError
from gcore_runs.migration.keys import read_keys

from .conversions import HERE, from_trl, missing, settings, train_config, verdicts

CONFIG = str(HERE / "grpo.yaml")
CLASSES = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "dpo": "DPOConfig",
    "sft": "SFTConfig",
    "reward": "RewardConfig",
}


def test_a_config_of_their_examples() -> None:
    conversion = from_trl("auto", config=CONFIG)
    found = settings(conversion)
    expected = {
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "reward": "rewards.py:trl_length",
        "name": "nemo_gym",
        "runs_dir": "outputs",
        # 256 passes of a completion are 16 prompts of 16 completions, and one update.
        "data.train_batch_size": 16,
        "actor.ppo_mini_batch_size": 0,
        "rollout.n": 16,
        "data.max_response_length": 10_000,
        "actor.optim.lr": 1e-5,
        "actor.optim.lr_warmup_steps": 3,
        "actor.optim.lr_scheduler_type": "linear",
        "actor.loss.loss_agg_mode": "token-mean",
        "actor.loss.clip_ratio_high": 0.2,
        "trainer.total_training_steps": 1000,
        "rollout.top_p": 0.999,
        "algorithm.filter_groups": False,
    }
    assert {name: found[name] for name in expected} == expected
    assert not missing(conversion)
    assert set(conversion.values) <= verdicts(conversion).keys()


@pytest.mark.slow
@pytest.mark.parametrize("method", CLASSES)
def test_defaults_are_those_of_the_installed_version_and_every_key_has_a_verdict(
    method: str,
) -> None:
    config: Any = getattr(import_module("trl"), CLASSES[method])
    theirs: dict[str, Any] = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    theirs |= {
        f.name: f.default_factory() for f in fields(config) if f.default_factory is not MISSING
    }
    for name, key in read_keys("trl").items():
        default = DEFAULTS[method].get(name, key.default)
        if key.ours and theirs.get(name) is not None:
            assert default == theirs[name], name
    conversion = from_trl(method, config="")
    conversion.values = {name: value for name, value in theirs.items() if value is not None}
    lines = verdicts(conversion)
    assert set(theirs) <= set(read_keys("trl")), "keys of the trainer that the table does not know"
    assert all(line.text for line in lines.values())
    lost = {name for name in missing(conversion) if name in theirs}
    assert lost <= {"beta", "assistant_only_loss"}


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    # 4 completions x 8 processes x 2 passes are 64 an update, and 8 prompts of 8.
    "batch": (
        "grpo",
        ("per_device_train_batch_size=4", "num_processes=8", "gradient_accumulation_steps=2"),
        {"data.train_batch_size": 8, "actor.ppo_mini_batch_size": 0, "trainer.num_processes": 8},
    ),
    # A wave is 256 completions, or 32 prompts, for four updates of 64, twice.
    "several updates of a wave": (
        "grpo",
        (
            *("per_device_train_batch_size=4", "num_processes=8", "gradient_accumulation_steps=2"),
            *(
                "steps_per_generation=8",
                "num_iterations=2",
                "max_steps=80",
                "save_steps=40",
                "warmup_steps=16",
            ),
        ),
        {
            "data.train_batch_size": 32,
            "actor.ppo_mini_batch_size": 8,
            "actor.ppo_epochs": 2,
            "trainer.total_training_steps": 10,
            "trainer.save_freq": 5,
            "actor.optim.lr_warmup_steps": 16,
        },
    ),
    "generation batch": (
        "grpo",
        ("generation_batch_size=128",),
        {"data.train_batch_size": 16, "actor.ppo_mini_batch_size": 1},
    ),
    "one bound": (
        "grpo",
        ("epsilon=0.1",),
        {"actor.loss.clip_ratio_low": 0.1, "actor.loss.clip_ratio_high": 0.1},
    ),
    "higher bound": (
        "grpo",
        ("epsilon_high=0.28",),
        {"actor.loss.clip_ratio_low": 0.2, "actor.loss.clip_ratio_high": 0.28},
    ),
    "dual clip": ("grpo", ("delta=4.0",), {"actor.loss.clip_ratio_c": 4.0}),
    "GRPO": ("grpo", ("loss_type=grpo",), {"actor.loss.loss_agg_mode": "seq-mean-token-mean"}),
    "Dr. GRPO": (
        "grpo",
        ("loss_type=dr_grpo", "scale_rewards=none"),
        {
            "actor.loss.loss_agg_mode": "seq-mean-token-sum-norm",
            "algorithm.options": {"norm_adv_by_std_in_grpo": False},
        },
    ),
    "GSPO": (
        "grpo",
        (
            "loss_type=grpo",
            "importance_sampling_level=sequence",
            "epsilon=3e-4",
            "epsilon_high=4e-4",
        ),
        {"actor.loss.loss_mode": "gspo", "actor.loss.clip_ratio_high": 4e-4},
    ),
    "CISPO": (
        "grpo",
        ("loss_type=cispo", "epsilon_high=5.0"),
        {
            "actor.loss.loss_mode": "cispo",
            "actor.loss.clip_ratio_low": 1.0,
            "actor.loss.clip_ratio_high": 4.0,
        },
    ),
    "SAPO": (
        "grpo",
        ("loss_type=sapo", "sapo_temperature_neg=1.4"),
        {
            "actor.loss.loss_mode": "sapo",
            "actor.loss.loss_agg_mode": "seq-mean-token-mean",
            "algorithm.options": {"tau_pos": 1.0, "tau_neg": 1.4},
        },
    ),
    "KL": (
        "grpo",
        ("beta=0.04", "use_bias_correction_kl=False"),
        {"actor.loss.kl_loss_coef": 0.04},
    ),
    "truncated": (
        "grpo",
        ("mask_truncated_completions=True",),
        {"algorithm.overlong.filter": True},
    ),
    "masked importance sampling": (
        "grpo",
        ("use_vllm=True",),
        {
            "rollout.engine": "vllm",
            "rollout.engine_options": {"gpu_memory_utilization": 0.3},
            "algorithm.old_log_probs": "trainer",
            "algorithm.rollout_correction.rollout_is": "sequence",
            "algorithm.rollout_correction.rollout_is_threshold": 3.0,
            "algorithm.rollout_correction.rollout_is_threshold_lower": 1e-9,
        },
    ),
    "truncated importance sampling": (
        "grpo",
        ("use_vllm=True", "vllm_importance_sampling_mode=token_truncate", "num_processes=8"),
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "rollout.num_processes": 8,
            "rollout.colocated": True,
            "runtime": "ray",
        },
    ),
    "rewards with weights": (
        "grpo",
        ("reward_funcs=[a.b.format,c.right]", "reward_weights=[0.5,1.0]"),
        {"reward": "0.5 * a/b.py:format + c.py:right"},
    ),
    "adapters": (
        "grpo",
        ("use_peft=True", "lora_target_modules=[q_proj]"),
        {"actor.lora_rank": 16, "actor.target_modules": ["q_proj"]},
    ),
    "data on the Hub": (
        "grpo",
        (
            "dataset_name=openai/gsm8k",
            "dataset_config=main",
            "model_name_or_path=a/b",
            "model_revision=v1",
        ),
        {"data.train_files": ["hf://openai/gsm8k/main:train"], "model": "a/b@v1"},
    ),
    "a mixture": (
        "sft",
        ("datasets=[{path: a/b, split: test}, {path: c/d, name: main}]",),
        {"data.train_files": ["hf://a/b:test", "hf://c/d/main:train"]},
    ),
    "the best policy": ("grpo", ("load_best_model_at_end=True",), {"trainer.export": "best"}),
    "adapters of DPO": ("dpo", ("use_peft=True", "lora_r=8"), {"lora_rank": 8, "lora_alpha": 32}),
    "RLOO": (
        "rloo",
        ("beta=0.0", "max_steps=10"),
        {
            "algorithm.adv_estimator": "rloo",
            "rollout.n": 2,
            "actor.loss.loss_agg_mode": "seq-mean-token-sum",
        },
    ),
    "DPO": (
        "dpo",
        ("beta=0.3", "loss_type=[ipo]", "gradient_accumulation_steps=4"),
        {
            "loss.beta": 0.3,
            "loss.loss_type": "ipo",
            "data.train_batch_size": 32,
            "data.max_length": 1024,
            "optim.lr": 1e-6,
            "optim.lr_scheduler_type": "linear",
            "trainer.total_epochs": 3.0,
        },
    ),
    "SFT": (
        "sft",
        ("warmup_ratio=0.1", "lr_scheduler_type=cosine", "num_processes=2"),
        {"optim.lr": 2e-5, "optim.lr_warmup_steps_ratio": 0.1, "data.train_batch_size": 16},
    ),
    "a reward model": (
        "reward",
        ("center_rewards_coefficient=0.01",),
        {"loss.center_rewards_coefficient": 0.01, "optim.lr": 1e-4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_units_and_meanings(name: str) -> None:
    method, overrides, expected = CASES[name]
    found = settings(from_trl(method, *overrides))
    assert {setting: found.get(setting) for setting in expected} == expected


LOST = {
    "min_p": ("grpo", "0.1"),
    "loss_type": ("grpo", "vespo"),
    "scale_rewards": ("grpo", "batch"),
    "use_bias_correction_kl": ("grpo", "True beta=0.1"),
    "sync_ref_model": ("grpo", "True"),
    "reward_funcs": ("grpo", "accuracy_reward"),
    "optim": ("grpo", "adafactor"),
    "beta": ("rloo", "0.1"),
    "assistant_only_loss": ("sft", "True"),
    "packing": ("sft", "True"),
    "epsilon": ("grpo", "0.2 loss_type=cispo"),
    "epsilon_high": ("grpo", "0.5 loss_type=cispo"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_missing_is_named(name: str) -> None:
    method, value = LOST[name]
    assert name in missing(from_trl(method, *f"{name}={value}".split()))


@pytest.mark.parametrize(
    ("given", "tokens"), [((), "whole conversation"), (("assistant_only_loss=True",), "answers")]
)
def test_the_tokens_that_supervised_training_learns_are_named(
    given: tuple[str, ...], tokens: str
) -> None:
    line = verdicts(from_trl("sft", "packing=False", *given))["assistant_only_loss"]
    assert line.verdict == "missing"
    assert tokens in line.text
    assert "packing" not in missing(from_trl("sft", "packing=False"))


def test_a_key_that_is_not_known_is_to_be_checked() -> None:
    assert "quux" in missing(from_trl("sft", "quux=1"), "unknown")


COMMON = "num_generations: 4\nreward_funcs: [a.b]\nper_device_train_batch_size: 4\n"


@pytest.mark.parametrize(
    ("name", "text", "method"),
    [
        ("rloo.yaml", COMMON, "rloo"),
        ("run.yaml", COMMON + "output_dir: out/rloo-qwen\n", "rloo"),
        ("run.yaml", COMMON + "normalize_advantages: true\n", "rloo"),
        ("grpo_config.yaml", COMMON, "grpo"),
        ("rloo.yaml", COMMON + "scale_rewards: group\n", "grpo"),
    ],
)
def test_grpo_and_rloo_are_distinguished(tmp_path: Path, name: str, text: str, method: str) -> None:
    (tmp_path / name).write_text(text)
    conversion = from_trl("auto", config=str(tmp_path / name))
    assert train_config(conversion).algorithm.adv_estimator == method
    assert f"# Converted as trl.{method.upper()}Trainer." in conversion.toml(name)


def test_a_config_of_either_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(COMMON)
    with pytest.raises(
        UserError, match=r"^method is 'auto' and the keys .* expected --method grpo or rloo$"
    ):
        from_trl("auto", config=str(tmp_path / "run.yaml"))


def test_batches_that_are_not_of_whole_groups() -> None:
    with pytest.raises(
        UserError, match=r"^num_generations is 7; expected a divisor of the 8 completions of "
    ):
        from_trl("grpo", "num_generations=7")


@pytest.mark.slow
def test_json_of_a_trainer_s_config(tmp_path: Path) -> None:
    trl: Any = import_module("trl")
    config = trl.DPOConfig(output_dir="out", beta=0.2, use_cpu=True, bf16=False)
    (tmp_path / "dpo.json").write_text(json.dumps(config.to_dict(), default=str))
    conversion = from_trl("auto", config=str(tmp_path / "dpo.json"))
    assert conversion.command == "dpo"
    assert settings(conversion)["loss.beta"] == 0.2
    assert missing(conversion) == set()


def test_the_command(cli: Cli) -> None:
    out = cli.ok("from-trl", CONFIG, "num_processes=2", "min_p=0.1")
    assert "next: gcore-llm train --config grpo.toml" in out
    assert "missing (1)" in out
    (cli.cwd / "sft.yaml").write_text("learning_rate: 1e-4\nmodel_name_or_path: x\n")
    error = cli.refused("from-trl", "sft.yaml")
    assert (
        "no key of the config says which; expected --method grpo, rloo, dpo, sft or reward" in error
    )
    assert "next: gcore-llm sft --config sft.toml" in cli.ok(
        "from-trl", "sft.yaml", "--method", "sft"
    )


@pytest.mark.slow
def test_a_config_of_their_examples_runs(cli: Cli, chat: Path) -> None:
    """On a tiny model, rows of TRL's conversational form, and a reward function of TRL's form."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)}
        for i in range(40)
    ]
    write_rows(cli.cwd / "rows.jsonl", rows)
    (cli.cwd / "rewards.py").write_text(
        "def trl_length(completions, prompts, answer, log_metric=None, **columns):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    assert all(int(p[0]['content'][:-3]) + 1 == int(a) for p, a in zip(prompts, answer))\n"
        "    log_metric('length', len(texts[0]))\n"
        "    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in texts]\n"
    )
    tiny = [
        *(
            f"model_name_or_path={chat}",
            "dataset_name=rows.jsonl",
            "num_generations=4",
            "max_prompt_length=64",
        ),
        *(
            "gradient_accumulation_steps=16",
            "max_completion_length=8",
            "use_cpu=True",
            "max_steps=2",
            "warmup_steps=1",
        ),
    ]
    cli.ok("from-trl", CONFIG, *tiny, "--out", "run.toml")
    cli.ok("train", "--config", "run.toml", "--threads", "1")
    (last,) = [
        row for row in metrics_of(cli.cwd / "outputs/nemo_gym") if "critic/score/mean" in row
    ][1:]
    assert "reward/length/mean" in last
