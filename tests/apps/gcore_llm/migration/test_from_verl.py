"""Configs and launch scripts of verl, converted: units, meanings and defaults, and a verdict on every key."""

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, metrics_of, write_rows

from gcore_llm.config import TrainConfig
from gcore_llm.migration.inputs import read_config
from gcore_runs.migration.keys import find_key, read_keys

from .conversions import HERE, N8, from_verl, missing, settings, verdicts

SCRIPT = str(HERE / "grpo_gsm8k.sh")
ACTOR, ROLLOUT, CORRECTION = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "algorithm.rollout_correction",
)


def verl_yaml(engine: str = "") -> str:
    """The file of all of verl's defaults that is part of its installed package."""
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / f"trainer/config/_generated_ppo_{engine}trainer.yaml")


def test_a_script_of_their_examples() -> None:
    conversion = from_verl("trainer.total_training_steps=105", config=SCRIPT)
    found = settings(conversion)
    assert found["data.train_files"] == [str(Path.home() / "data/gsm8k/train.parquet")]
    expected = {
        "model": "Qwen/Qwen2.5-3B-Instruct",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 1024,
        "data.prompt_key": "messages",
        "actor.ppo_mini_batch_size": 256,
        "actor.ppo_max_token_len": 40 * 1536,
        "actor.optim.lr": 3e-6,
        "actor.optim.weight_decay": 0.01,
        "actor.loss.kl_loss_coef": 0.001,
        "actor.loss.kl_loss_type": "k3",
        "actor.loss.clip_ratio_high": 0.2,
        "actor.loss.clip_ratio_c": 3.0,
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups": False,
        "algorithm.old_log_probs": "trainer",
        "rollout.engine": "vllm",
        "rollout.n": 5,
        "rollout.tensor_parallel_size": 2,
        "rollout.num_processes": 4,
        "rollout.engine_options": {"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 8192},
        "runtime": "ray",
        "trainer.num_processes": 8,
        "trainer.save_freq": 20,
        "trainer.total_training_steps": 105,
    }
    assert {name: found[name] for name in expected} == expected
    assert missing(conversion) == {
        "data.shuffle",
        f"{ROLLOUT}.engine_kwargs.sglang.attention_backend",
        "custom_reward_function.path",
    }
    lines = verdicts(conversion)
    assert set(conversion.values) <= lines.keys()
    assert lines[f"{ACTOR}.optim.weight_decay"].value == "(not set)"


def test_toml_is_what_a_run_takes() -> None:
    conversion = from_verl("trainer.total_training_steps=105", config=SCRIPT)
    text = conversion.toml("grpo_gsm8k.sh")
    values = tomllib.loads(text)
    assert values["actor"]["loss"]["kl_loss_type"] == "k3"
    assert "# missing here: data.shuffle = False: prompts are always shuffled" in text
    assert "weight_decay = 0.01  # actor_rollout_ref.actor.optim.weight_decay (default)" in text


@pytest.mark.parametrize("engine", ["", "megatron_", "torchtitan_", "veomni_"])
def test_every_key_of_the_installed_version_has_a_verdict(engine: str) -> None:
    conversion = from_verl(N8, config=verl_yaml(engine))
    conversion.result()
    lines = verdicts(conversion)
    assert set(conversion.values) <= lines.keys()
    assert len(lines) > 500
    assert all(line.text for line in lines.values())
    assert not missing(conversion, "unknown")
    # Of the defaults, only what a run has to be given is missing.
    allowed = {"custom_reward_function.path", f"{ACTOR}.strategy"}
    assert missing(conversion) <= allowed
    unknown = [
        name
        for name in conversion.values
        if find_key(read_keys("verl"), name) is None and "_target_" not in name
    ]
    assert unknown == []


def test_defaults_are_those_of_the_installed_version() -> None:
    theirs = from_verl(N8, config=verl_yaml()).values
    checked = 0
    for name, key in read_keys("verl").items():
        # An image column that no row has would be refused here.
        if not (key.ours and theirs.get(name) is not None) or name == "data.image_key":
            continue
        value = theirs[name]
        if name in (f"{ROLLOUT}.n", f"{ROLLOUT}.name") or name.endswith(
            ("_files", ".path", ".grad_clip", ".device")
        ):
            continue
        assert key.default == value, name
        checked += 1
    assert checked > 60


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "groups that get too old are waited for": (
        (
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
            "trainer.v1.sampler.max_off_policy_threshold=3",
        ),
        {
            "trainer.schedule": "async",
            "rollout.partial_rollout": "wait",
            "rollout.max_staleness": 3,
        },
    ),
    "groups that get too old are dropped": (
        ("trainer.v1.trainer_mode=separate_async",),
        {"trainer.schedule": "async", "rollout.partial_rollout": True},
    ),
    # Sizes: prompts, samples and tokens.
    "micro-batches by samples": (
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            "data.max_prompt_length=100",
            "data.max_response_length=200",
        ),
        {"actor.ppo_max_token_len": 1200},
    ),
    "micro-batches of all GPUs": (
        (f"{ACTOR}.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=8"),
        {"actor.ppo_max_token_len": 8 * 1024},
    ),
    "micro-batches by tokens, of a sequence's ranks": (
        (
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
        ),
        {
            "actor.ppo_max_token_len": 16_384,
            "trainer.parallel.context_parallel_size": 2,
            "trainer.parallel.ulysses_sequence_parallel_size": 2,
        },
    ),
    "warm-up in steps of four updates": (
        (
            "data.train_batch_size=256",
            f"{ACTOR}.ppo_mini_batch_size=64",
            f"{ACTOR}.optim.lr_warmup_steps=10",
        ),
        {"actor.optim.lr_warmup_steps": 40},
    ),
    "warm-up as a share": (
        (
            *(
                "data.train_batch_size=256",
                f"{ACTOR}.ppo_mini_batch_size=128",
                "trainer.total_training_steps=200",
            ),
            *(
                f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
                f"{ACTOR}.optim.lr_scheduler_type=cosine",
            ),
        ),
        {"actor.optim.lr_warmup_steps": 40, "actor.optim.lr_scheduler_type": "cosine"},
    ),
    "least rate of Megatron": (
        (
            "model_engine=megatron",
            f"{ACTOR}.optim.lr=1e-5",
            f"{ACTOR}.optim.min_lr=1e-6",
            f"{ACTOR}.optim.lr_decay_style=linear",
        ),
        {"actor.optim.min_lr_ratio": pytest.approx(0.1), "actor.optim.lr_scheduler_type": "linear"},
    ),
    "layout of Megatron": (
        (
            *(
                "model_engine=megatron",
                "trainer.nnodes=2",
                f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            ),
            *(
                f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
                f"{ROLLOUT}.tensor_model_parallel_size=4",
            ),
        ),
        {
            "trainer.backend": "megatron",
            "trainer.num_processes": 16,
            "trainer.parallel.tensor_model_parallel_size": 4,
            "trainer.parallel.pipeline_model_parallel_size": 2,
            "trainer.parallel.sequence_parallel": True,
            "rollout.num_processes": 4,
            "controllers": 2,
        },
    ),
    # The loss.
    "unused clip ratio": (
        (f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.28"),
        {"actor.loss.clip_ratio_low": 0.2, "actor.loss.clip_ratio_high": 0.28},
    ),
    "GSPO": (
        (
            f"{ACTOR}.policy_loss.loss_mode=gspo",
            f"{ACTOR}.clip_ratio_low=3e-4",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        ),
        {
            "actor.loss.loss_mode": "gspo",
            "actor.loss.clip_ratio_low": 3e-4,
            "actor.loss.loss_agg_mode": "seq-mean-token-mean",
        },
    ),
    "CISPO without a lower bound": (
        (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10"),
        {"actor.loss.loss_mode": "cispo", "actor.loss.clip_ratio_low": 1.0},
    ),
    "GMPO aggregates by sequence": (
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "algorithm.adv_estimator=opo"),
        {
            "actor.loss.loss_mode": "geo_mean",
            "actor.loss.loss_agg_mode": "seq-mean-token-mean",
            "algorithm.adv_estimator": "opo",
        },
    ),
    "DPPO": (
        (f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio_c=5"),
        {"actor.loss.loss_mode": "dppo_tv", "actor.loss.clip_ratio_c": 5.0},
    ),
    "SAPO aggregates by sequence": (
        (f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.2"),
        {
            "actor.loss.loss_agg_mode": "seq-mean-token-mean",
            "algorithm.options": {"tau_neg": 1.2},
        },
    ),
    "SAPO in the section of the loss": (
        (f"{ACTOR}.policy_loss.loss_mode=sapo", f"+{ACTOR}.policy_loss.tau_neg=1.2"),
        {"algorithm.options": {"tau_neg": 1.2}},
    ),
    "Clip-Cov": (
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=0.5"),
        {"actor.loss.loss_mode": "clip_cov", "algorithm.options": {"clip_cov_lb": 0.5}},
    ),
    "KL-Cov": (
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.ppo_kl_coef=1.0"),
        {"actor.loss.loss_mode": "kl_cov", "algorithm.options": {"ppo_kl_coef": 1.0}},
    ),
    "DRO": (
        (f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.3"),
        {"actor.loss.loss_mode": "dro", "algorithm.options": {"dro_beta": 0.3}},
    ),
    "GDPO": (
        (
            "algorithm.adv_estimator=gdpo",
            "+algorithm.gdpo_reward_keys=[right,short]",
            "+algorithm.gdpo_reward_weights=[1.0,0.5]",
        ),
        {
            "algorithm.adv_estimator": "gdpo",
            "algorithm.options": {"gdpo_rewards": {"right": 1.0, "short": 0.5}},
        },
    ),
    "GAE": (
        ("algorithm.adv_estimator=gae", "algorithm.lam=0.95", f"{ACTOR}.tau_neg=1.2"),
        {"algorithm.adv_estimator": "gae", "algorithm.options": {"lam": 0.95}},
    ),
    "routes replayed in Megatron": (
        ("model_engine=megatron", f"{ACTOR}.megatron.router_replay.mode=R2"),
        {"actor.router_replay": "R2"},
    ),
    "routes of the engine replayed": (
        (f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"),
        {"actor.router_replay": "R3"},
    ),
    "ranks of a sequence in the section of FSDP": (
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",),
        {"trainer.parallel.ulysses_sequence_parallel_size": 2},
    ),
    "Dr. GRPO": (
        (
            *(
                f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
                "algorithm.norm_adv_by_std_in_grpo=False",
            ),
            "algorithm.adv_estimator=grpo",
        ),
        {
            "actor.loss.loss_agg_mode": "seq-mean-token-sum-norm",
            "algorithm.options": {"norm_adv_by_std_in_grpo": False},
        },
    ),
    "unbiased KL in the loss": (
        (
            f"{ACTOR}.use_kl_loss=True",
            f"{ACTOR}.kl_loss_coef=0.01",
            f"{ACTOR}.kl_loss_type=low_var_kl+",
        ),
        {"actor.loss.kl_loss_coef": 0.01, "actor.loss.kl_loss_type": "k3+"},
    ),
    "no KL in the loss": ((f"{ACTOR}.kl_loss_coef=0.01",), {"actor.loss.kl_loss_coef": 0.0}),
    "KL in the reward": (
        (
            *("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl"),
            *("algorithm.kl_ctrl.kl_coef=0.02", "algorithm.kl_ctrl.type=adaptive"),
        ),
        {
            "algorithm.kl_ctrl.kl_coef": 0.02,
            "algorithm.kl_ctrl.kl_penalty": "k3",
            "algorithm.kl_ctrl.type": "adaptive",
        },
    ),
    "entropy": ((f"{ACTOR}.entropy_coeff=0.001",), {"actor.loss.entropy_coeff": 0.001}),
    "old name of a bound": ((f"{ACTOR}.grad_clip=0.5",), {"actor.optim.grad_clip": 0.5}),
    "a critic": (
        ("critic.optim.lr=2e-5", "critic.model.path=/models/critic", "trainer.critic_warmup=3"),
        {"critic.optim.lr": 2e-5, "critic.model": "/models/critic", "critic.warmup_steps": 3},
    ),
    # The batch.
    "dynamic sampling": (
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"),
        {"algorithm.filter_groups": True, "algorithm.max_num_gen_batches": 10},
    ),
    "dynamic sampling without a bound": (
        ("algorithm.filter_groups.enable=True",),
        {"algorithm.max_num_gen_batches": 1_000_000},
    ),
    "overlong responses": (
        (
            *(
                "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
                "reward.reward_manager.name=dapo",
            ),
            *(
                "+reward.reward_kwargs.overlong_buffer_cfg.len=128",
                "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            ),
        ),
        {"algorithm.overlong.buffer_len": 128, "algorithm.overlong.penalty_factor": 0.5},
    ),
    "overlong responses in the older section": (
        (
            *(
                "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
                "reward_model.reward_manager=dapo",
            ),
            *(
                "+reward_model.reward_kwargs.overlong_buffer_cfg.len=64",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            ),
        ),
        {"algorithm.overlong.buffer_len": 64, "algorithm.overlong.penalty_factor": 0.5},
    ),
    "truncated importance sampling under its older name": (
        (f"+{ACTOR}.tis_imp_ratio_cap=3.0",),
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 3.0,
        },
    ),
    "truncated importance sampling": (
        (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=3.0"),
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 3.0,
        },
    ),
    "IcePop": (
        (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='0.5_2.0'"),
        {
            "algorithm.rollout_correction.rollout_is_threshold": 2.0,
            "algorithm.rollout_correction.rollout_is_threshold_lower": 0.5,
        },
    ),
    "ratios to the engine under another name": (
        (f"{ACTOR}.use_rollout_log_probs=True",),
        {"algorithm.old_log_probs": "rollout"},
    ),
    "ratios to the engine": (
        (f"{CORRECTION}.bypass_mode=True",),
        {"algorithm.old_log_probs": "rollout"},
    ),
    # The rest.
    "a reward": (
        ("custom_reward_function.path=r.py", "custom_reward_function.name=score"),
        {"reward": "r.py:score"},
    ),
    "a reward in the later section": (
        ("reward.custom_reward_function.path=r.py",),
        {"reward": "r.py:compute_score"},
    ),
    "a reward model": (
        ("reward_model.enable=True", "reward_model.model.path=/models/rm"),
        {"reward_model.kind": "classifier", "reward_model.path": "/models/rm"},
    ),
    "adapters": (
        (
            "actor_rollout_ref.model.lora_rank=32",
            "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
        ),
        {
            "actor.lora_rank": 32,
            "actor.lora_alpha": 16,
            "actor.target_modules": ["q_proj", "v_proj"],
        },
    ),
    "top-p and top-k": (
        (f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=50"),
        {"rollout.top_p": 0.9, "rollout.top_k": 50},
    ),
    "held-out responses": (
        (
            *(f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.n=16"),
            *(f"{ROLLOUT}.val_kwargs.temperature=0.6", f"{ROLLOUT}.val_kwargs.top_p=0.9"),
            f"{ROLLOUT}.val_kwargs.top_k=20",
        ),
        {
            "rollout.val_kwargs.n": 16,
            "rollout.val_kwargs.temperature": 0.6,
            "rollout.val_kwargs.top_p": 0.9,
            "rollout.val_kwargs.top_k": 20,
        },
    ),
    "variables of the chat template": (
        ("+data.apply_chat_template_kwargs.enable_thinking=False",),
        {"data.chat_template_kwargs": {"enable_thinking": False}},
    ),
    "arguments of a reward": (
        (
            *("custom_reward_function.path=r.py", "custom_reward_function.name=score"),
            "+custom_reward_function.reward_kwargs.threshold=2",
        ),
        {"reward": "r.py:score", "reward_kwargs": {"threshold": 2}},
    ),
    "a critic's schedule": (
        (
            *(
                "data.train_batch_size=256",
                f"{ACTOR}.ppo_mini_batch_size=64",
                "critic.optim.lr_warmup_steps=10",
            ),
            "critic.optim.lr_scheduler_type=cosine",
        ),
        {"critic.optim.lr_warmup_steps": 40, "critic.optim.lr_scheduler_type": "cosine"},
    ),
    "several teachers": (
        (
            *(
                "distillation.enabled=True",
                "algorithm.adv_estimator=grpo",
                "distillation.teacher_key=kind",
            ),
            *(
                "+distillation.teacher_models.a.model_path=/models/a",
                "+distillation.teacher_models.a.key=gsm8k",
            ),
            *(
                "+distillation.teacher_models.b.model_path=/models/b",
                "+distillation.teacher_models.b.key=geo3k",
            ),
        ),
        {
            "distillation.teachers": ["/models/a", "/models/b"],
            "distillation.sources": ["gsm8k", "geo3k"],
            "distillation.source_key": "kind",
        },
    ),
    "a teacher": (
        (
            *(
                "distillation.enabled=True",
                "distillation.teacher_models.teacher_model.model_path=/models/teacher",
            ),
            *(
                "distillation.distillation_loss.use_task_rewards=False",
                "algorithm.adv_estimator=grpo",
            ),
        ),
        {"distillation.teachers": ["/models/teacher"], "algorithm.adv_estimator": "distillation"},
    ),
    "offload": ((f"{ACTOR}.fsdp_config.optimizer_offload=True",), {"actor.offload": "optimizer"}),
    "offload with Megatron": (
        ("model_engine=megatron", f"{ACTOR}.megatron.optimizer_offload=True"),
        {"actor.offload": "optimizer"},
    ),
    "one GPU": (
        ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1"),
        {"trainer.num_processes": 1, "rollout.tensor_parallel_size": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_units_and_meanings(name: str) -> None:
    overrides, expected = CASES[name]
    found = settings(from_verl(N8, *overrides))
    assert {setting: found.get(setting) for setting in expected} == expected


def test_keys_need_not_be_text(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("actor_rollout_ref: {model: {override_config: {id2label: {0: bad}}}}")
    converted = from_verl(N8, config=str(config))
    assert "actor_rollout_ref.model.override_config.id2label.0" in verdicts(converted)


def test_a_number_may_be_written_as_text() -> None:
    texts = (f"{ROLLOUT}.max_num_batched_tokens='4096'", f"{ROLLOUT}.gpu_memory_utilization='0.6'")
    options = settings(from_verl(N8, *texts))["rollout.engine_options"]
    assert options == {"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 4096}


MISSING = {
    f"{ROLLOUT}.name": "sglang",
    f"{ACTOR}.loss_agg_mode": "token-sum",
    f"{ACTOR}.policy_loss.loss_mode": "bypass_mode",
    f"{ACTOR}.entropy_coeff": "-0.1",
    f"{ACTOR}.quux": None,
    "algorithm.adv_estimator": "optimal_token_baseline",
    f"{ROLLOUT}.multi_turn.enable": "True",
    "trainer.device": "npu",
    f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff": "0.01",
    f"{ACTOR}.megatron.override_transformer_config.fp8": "hybrid",
    f"{ACTOR}.optim.override_optimizer_config.fp8_recipe": "blockwise",
    f"{ROLLOUT}.engine_kwargs.vllm.seed": "7",
    "data.sampler.class_name": "CurriculumSampler",
    "actor_rollout_ref.model.override_config.attention_dropout": "0.1",
    "reward.reward_kwargs.max_resp_len": "100",
    "critic.ppo_epochs": "2",
}
UNKNOWN = {
    "quux.frob": "1",
    f"{ACTOR}.policy_loss.new_option": "3",
    f"{ACTOR}.optim.new_option": "3",
    f"{ROLLOUT}.val_kwargs.new_option": "3",
    "data.new_option": "3",
    "algorithm.filter_groups.new_option": "3",
    "trainer.new_option": "3",
}


def test_arguments_of_vllm() -> None:
    options = (
        "engine_kwargs.vllm.kv_cache_dtype=fp8",
        "quantization=fp8",
        "expert_parallel_size=2",
    )
    correction = "algorithm.rollout_correction.rollout_is=token"
    conversion = from_verl(N8, correction, *(f"{ROLLOUT}.{option}" for option in options))
    expected = {
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 8192,
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
    }
    assert conversion.settings["rollout.engine_options"] == expected
    converted = conversion.result()
    assert isinstance(converted, TrainConfig)
    assert converted.rollout.engine_options == expected


@pytest.mark.parametrize("name", [name for name, value in MISSING.items() if value])
def test_what_is_missing_is_named(name: str) -> None:
    conversion = from_verl(N8, f"{name}={MISSING[name]}")
    conversion.result()
    assert name in missing(conversion)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_key_that_is_not_known_is_to_be_checked(name: str) -> None:
    conversion = from_verl(N8, f"+{name}={UNKNOWN[name]}")
    assert name in missing(conversion, "unknown")
    assert (
        f"# unknown here: {name} = {UNKNOWN[name]}: no key of verl that is known here"
        in conversion.toml("x")
    )


def test_the_same_option_in_two_sections_has_one_verdict() -> None:
    """Two teachers' options are those of verl's only one."""
    other = "distillation.teacher_models.a.inference.max_model_len"
    assert (
        verdicts(from_verl(N8, f"+{other}=7", "+distillation.teacher_models.a.quux=7"))[
            other
        ].verdict
        == "no meaning"
    )


def test_a_value_of_several_lines_stays_a_comment() -> None:
    conversion = from_verl(N8, 'quux="a\\nmodel = 3"')
    assert tomllib.loads(conversion.toml("x")).get("model") is None
    assert "quux" in missing(conversion, "unknown")


def test_a_setting_that_the_command_refuses() -> None:
    with pytest.raises(
        Exception, match=r"converted from verl: rollout\.n is 1; expected at least 2 for algorithm"
    ):
        from_verl("algorithm.adv_estimator=grpo").result()


FULLY_ASYNC = """
train_prompt_mini_bsz=32
python3 -m verl.experimental.fully_async_policy.fully_async_main \\
    --config-name=fully_async_ppo_trainer \\
    data.train_files=train.parquet data.train_batch_size=0 data.gen_batch_size=1 \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.hybrid_engine=False algorithm.adv_estimator=grpo \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    trainer.nnodes=2 trainer.n_gpus_per_node=4 rollout.nnodes=3 rollout.n_gpus_per_node=8 \\
    rollout.total_rollout_steps=$(((512*100))) rollout.total_epochs=10 rollout.test_freq=10 \\
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \\
    async_training.require_batches=4 async_training.partial_rollout=True async_training.new_option=3 \\
    async_training.use_rollout_log_probs=True
"""


def test_the_fully_asynchronous_trainer(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(FULLY_ASYNC)
    conversion = from_verl(config=str(tmp_path / "run.sh"))
    expected = {
        "trainer.schedule": "async",
        "rollout.max_staleness": 1,
        "data.train_batch_size": 4 * 4 * 32,
        "actor.ppo_mini_batch_size": 32,
        "actor.optim.lr_warmup_steps": 10 * 4,
        "algorithm.old_log_probs": "rollout",
        "trainer.total_training_steps": 100,
        "trainer.test_freq": 10,
        "trainer.num_processes": 8,
        "rollout.num_processes": 12,
        "controllers": 3,
        "runtime": "ray",
    }
    found = settings(conversion)
    assert {name: found.get(name) for name in expected} == expected
    assert "rollout.colocated" not in found
    assert missing(conversion, "unknown") == {"async_training.new_option"}
    assert missing(conversion) == {"custom_reward_function.path"}
    assert (
        "# Converted as verl.experimental.fully_async_policy.fully_async_main."
        in conversion.toml("run.sh")
    )


ASYNC_CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "defaults": (
        ("async_training.require_batches=1",),
        {
            "data.train_batch_size": 4 * 256,
            "trainer.schedule": "async",
            "algorithm.old_log_probs": "rollout",
        },
    ),
    "steps ahead": (("async_training.staleness_threshold=2.5",), {"rollout.max_staleness": 3}),
    "by the weights of the step": (
        ("async_training.staleness_threshold=0", "async_training.partial_rollout=False"),
        {"trainer.schedule": "sync"},
    ),
    "log-probs of the trainer": (
        ("async_training.compute_prox_log_prob=True",),
        {"algorithm.old_log_probs": "trainer"},
    ),
    "log-probs of the trainer, by the later name": (
        ("async_training.require_batches=1", f"{CORRECTION}.bypass_mode=False"),
        {"algorithm.old_log_probs": "trainer"},
    ),
    "no evaluations": (
        ("async_training.require_batches=1", "rollout.test_freq=-1"),
        {"trainer.test_freq": 1_000_000},
    ),
}


@pytest.mark.parametrize("name", ASYNC_CASES)
def test_settings_of_the_fully_asynchronous_trainer(name: str) -> None:
    overrides, expected = ASYNC_CASES[name]
    conversion = from_verl(N8, "algorithm.adv_estimator=grpo", *overrides)
    found = settings(conversion)
    assert {setting: found.get(setting) for setting in expected} == expected
    assert missing(conversion) <= {"custom_reward_function.path"}


def test_what_the_fully_asynchronous_trainer_has_alone() -> None:
    """Responses that are not continued by new weights; and every key of the installed version's file is known."""
    partial = "async_training.partial_rollout"
    assert partial in missing(from_verl(N8, "algorithm.adv_estimator=grpo", f"{partial}=False"))
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "experimental/fully_async_policy/config"
    for name in ("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"):
        given = from_verl(N8, config=str(folder / f"{name}.yaml")).values
        names = [own for own in given if own != "defaults" and not own.startswith("hydra.")]
        assert len(names) > 15
        assert [own for own in names if find_key(read_keys("verl"), own) is None] == []


DEVICES = """
DEVICE=${DEVICE:-$(python3 -c 'import no_such_accelerator' 2>/dev/null && echo npu || echo gpu)}
train_batch_size=1024
EXTRA=()
case "${DEVICE}" in
    gpu) ;;
    npu)
        train_batch_size=16
        EXTRA+=(trainer.device=npu)
        ;;
esac
if [ "$WITH_KL" = 1 ]; then EXTRA+=(actor_rollout_ref.actor.use_kl_loss=True); fi
if nvidia-smi | grep -q H100; then EXTRA+=(trainer.nnodes=2); fi
python3 -m recipe.dapo.main_dapo data.train_batch_size=$train_batch_size actor_rollout_ref.rollout.n=8 \\
    trainer.experiment_name=$NAME "${EXTRA[@]}" \\
"""


def test_a_script_s_branches_are_decided(tmp_path: Path) -> None:
    """The values are those of the default device; the TOML names the trainer and what is not certain."""
    (tmp_path / "run.sh").write_text(DEVICES)
    conversion = from_verl(config=str(tmp_path / "run.sh"))
    assert settings(conversion)["data.train_batch_size"] == 1024
    assert not conversion.values.keys() & {
        "trainer.device",
        "trainer.nnodes",
        f"{ACTOR}.use_kl_loss",
    }
    comments = [line for line in conversion.toml("run.sh").splitlines() if line.startswith("#")]
    for part in (
        "# Converted as recipe.dapo.main_dapo.",
        "# caution: the script does not set $NAME: replace it in the TOML, or give the key again",
        "# caution: the script does not set $WITH_KL: conditions take it as empty",
        "# caution: not decided, and taken as false: line 13: nvidia-smi | grep -q H100",
    ):
        assert part in comments


def test_a_command_of_a_branch_that_is_not_taken(tmp_path: Path) -> None:
    script = f'if [ "$1" = train ]; then python3 -m verl.trainer.main_ppo {N8}; else echo "run.sh train"; exit 1; fi'
    (tmp_path / "run.sh").write_text(script)
    given = read_config(str(tmp_path / "run.sh"), [])
    assert given.values["actor_rollout_ref"]["rollout"]["n"] == 8
    assert (
        "the trainer's command is in a branch that the script does not take with these values"
        in given.cautions
    )


@pytest.mark.parametrize("root", ["clone", "elsewhere"])
def test_config_files_that_a_script_names_are_read(tmp_path: Path, root: str) -> None:
    """Found below the folder that a script is started in, or below one of those that the script is in."""
    examples = tmp_path / "clone/examples/multi_turn"
    (examples / "config").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (examples / "config/base.yaml").write_text(
        "data: {train_batch_size: 64, max_prompt_length: 300}\n"
    )
    (examples / "config/games.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_megatron_trainer, base, _self_]\n"
        "data: {max_prompt_length: 400}\n"
        "actor_rollout_ref: {rollout: {n: 4, multi_turn: {enable: True}}}\n"
    )
    (examples / "run.sh").write_text(
        'CONFIG="$(pwd)/examples/multi_turn/config"\n'
        "python3 -m verl.trainer.main_ppo --config-path=$CONFIG --config-name games actor_rollout_ref.rollout.n=8\n"
    )
    given = read_config(str(examples / "run.sh"), ["data.seed=3"], str(tmp_path / root))
    assert given.cautions == []
    assert given.values == {
        "model_engine": "megatron",
        "data": {"train_batch_size": 64, "max_prompt_length": 400, "seed": 3},
        "actor_rollout_ref": {"rollout": {"n": 8, "multi_turn": {"enable": True}}},
    }
    assert "data.max_prompt_length" in given.explicit


def test_config_files_that_are_not_found(tmp_path: Path) -> None:
    words = ["main_ppo", "--config-path=config", "--config-name=games.yaml", N8]
    (caution,) = read_config("", words, str(tmp_path)).cautions
    assert caution == (
        "--config-name games.yaml is in no folder config: its settings are missing here; give --root FOLDER, where the "
        "script is started"
    )
    own = read_config(
        "", ["main_ppo", "--config-path=./config", "--config-name=ppo_megatron_trainer", N8]
    )
    assert own.values["model_engine"] == "megatron"
    assert own.cautions == []


def test_a_script_that_is_not_closed_is_one_line(cli: Cli) -> None:
    for name, text in {
        "quote": "main_ppo a='b\n",
        "end": "main_ppo a=b \\",
        "if": "if true; then main_ppo",
    }.items():
        (cli.cwd / f"{name}.sh").write_text(text)
    for name in ("quote", "if"):
        error = cli.refused("from-verl", f"{name}.sh")
        assert "expected a shell script whose quotes and brackets are closed" in error
    assert "converted as main_ppo" in cli.ok("from-verl", "end.sh", N8)


def test_references_in_yaml_follow_overrides(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "trainer: {project_name: a, experiment_name: '${trainer.project_name}-b', lost: '${no.such}'}\n"
    )
    given = read_config(str(file), ["trainer.project_name=c"])
    assert given.values["trainer"] == {
        "project_name": "c",
        "experiment_name": "c-b",
        "lost": "${no.such}",
    }
    assert given.explicit == {"trainer.project_name"}


def test_the_command(cli: Cli) -> None:
    out = cli.ok("from-verl", SCRIPT, "--out", "converted.toml", "trainer.total_epochs=2")
    for part in (
        "mapped (",
        "no meaning (",
        "missing (3)",
        "next: gcore-llm train --config converted.toml",
        "caution: ",
    ):
        assert part in out
    table = (cli.cwd / "converted.md").read_text()
    assert "| missing | `data.shuffle` | `False` | prompts are always shuffled |" in table
    assert "trainer.total_epochs" in table
    refused = {
        (
            "from-verl",
            SCRIPT,
            "--out",
            "converted.toml",
        ): "converted.toml is there already; expected another file, or --force",
        ("from-verl", "nowhere.yaml"): "CONFIG is nowhere.yaml: No such file or directory",
        ("from-verl", "converted.md"): "expected a file .yaml, .json or .sh",
        ("from-verl",): "CONFIG is missing; expected gcore-llm from-verl CONFIG",
    }
    for args, message in refused.items():
        assert message in cli.refused(*args)
    # The same command line as verl's.
    words = ("python3", "-m", "verl.trainer.main_ppo", N8, "trainer.total_training_steps=3")
    assert "next: gcore-llm train --config verl.toml" in cli.ok("from-verl", *words)


@pytest.mark.slow
def test_a_script_of_their_examples_runs(cli: Cli, chat: Path) -> None:
    """On a tiny model, rows of verl's form, and a reward function of verl's form."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"{i}+1="}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(40)
    ]
    write_rows(cli.cwd / "rows.jsonl", rows)
    (cli.cwd / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and extra_info['index'] + 1 == int(ground_truth)\n"
        "    share = sum(ord(c) % 2 == 0 for c in solution_str) / max(len(solution_str), 1)\n"
        "    return {'score': share, 'acc': float(solution_str == ground_truth)}\n"
    )
    tiny = [
        *(
            f"actor_rollout_ref.model.path={chat}",
            "data.train_files=rows.jsonl",
            "data.val_files=null",
        ),
        *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", "data.max_prompt_length=64"),
        *(
            "data.max_response_length=8",
            "trainer.n_gpus_per_node=1",
            f"{ROLLOUT}.name=hf",
            "trainer.logger=console",
        ),
        *(
            "custom_reward_function.path=score.py",
            "trainer.total_training_steps=2",
            "trainer.experiment_name=ported",
        ),
    ]
    cli.ok("from-verl", SCRIPT, *tiny, "--out", "run.toml")
    cli.ok("train", "--config", "run.toml", "--device", "cpu", "--threads", "1")
    (last,) = [row for row in metrics_of(cli.cwd / "runs/ported") if "critic/score/mean" in row][1:]
    assert {"reward/acc/mean", "actor/kl_loss"} <= last.keys()
