"""The settings of verl 0.9.1's PPO trainer (`verl.trainer.main_ppo`), and of versions before it."""

from gcore_runs.migration.key import Key, lacks, nothing, to
from gcore_runs.migration.verl_unused_keys import UNUSED

VERSION = "0.9.1"

_DATA = "data"
_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_ALGORITHM = "algorithm"
_TRAINER = "trainer"

_ON_POLICY = "responses are sampled from the policy's whole distribution, whose log-probabilities the trainer computes"
_FILTERED = "longer prompts are always left out, counted and reported"
_PACKED = "rows are always packed without padding, and micro-batches filled by tokens"
_REPORTED = "samples are always in the run's folder and report"
_OFTEN = "the run's own frequency, which a resumed run may change"
_REF_SAME = "the reference model is computed as the actor, in no more memory"
_OPTIMIZER = "no further options of the optimizer"
_CRITIC_SAME = "the critic's updates are those of the actor"
_ASYNC_OWN = "with trainer.schedule async, new weights come in the middle of responses"
_DYNAMIC = "engines have devices of their own, or all of the ranks' by turns: rollout.colocated"
_PROFILER = "no profiler's settings: each run has a timeline and stage times"


def _section(prefix: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


def _overlong_buffer(prefix: str) -> dict[str, Key]:
    return _section(
        prefix,
        {
            "enable": to("algorithm.overlong.buffer_len", default=False),
            "len": to("algorithm.overlong.buffer_len", default=0),
            "penalty_factor": to("algorithm.overlong.penalty_factor", default=1.0),
            "log": nothing(_REPORTED),
        },
    )


MICRO_BATCH = to("actor.ppo_max_token_len", "max_token_len", "actor.micro_batch_size", "ppo_max_token_len")
"""Key of the size of a micro-batch."""

_USED: dict[str, Key] = {
    **_section(
        _DATA,
        {
            "train_files": to("data.train_files"),
            "val_files": to("data.val_files"),
            "prompt_key": to("data.prompt_key", default="prompt"),
            "image_key": to("data.image_key", default=""),
            "max_prompt_length": to("data.max_prompt_length", default=512),
            "max_response_length": to("data.max_response_length", default=512),
            "train_batch_size": to("data.train_batch_size", default=1024),
            "seed": to("data.shuffle_seed", "seed"),
            "reward_fn_key": lacks("the column of a reward's data_source has this name", "data_source"),
            "shuffle": lacks("prompts are always shuffled", True),
            "truncation": lacks(f"prompts are not cut off: {_FILTERED}", "error"),
            "train_max_samples": lacks("all rows are used", -1),
            "val_max_samples": lacks("all held-out rows are used", -1),
            "trust_remote_code": lacks("code of a model's folder is not run", False),
            "apply_chat_template_kwargs": to("data.chat_template_kwargs", default={}),
            "apply_chat_template_kwargs.*": to("data.chat_template_kwargs"),
            "mm_processor_kwargs": lacks("the processor of images has the model's settings", {}),
            "mm_processor_kwargs.*": lacks("the processor of images has the model's settings"),
            **dict.fromkeys(
                ("sampler.class_path", "sampler.class_name", "datagen.path", "datagen.name"),
                lacks("no curriculum: rows are shuffled, and data.weights mixes files"),
            ),
            "custom_cls.path": lacks("no data set class of your own"),
            "custom_cls.name": lacks("no data set class of your own"),
            "tokenizer": lacks("the tokenizer is the model folder's"),
            "video_key": lacks("no videos in prompts", "videos"),
            "audio_key": lacks("no sound in prompts", "audios"),
            "tool_config_path": lacks("tools come from an environment, rollout.multi_turn.environment"),
            "function_tool_path": lacks("tools come from an environment, rollout.multi_turn.environment"),
            "filter_overlong_prompts": nothing(_FILTERED),
            "filter_overlong_prompts_workers": nothing(_FILTERED),
            "gen_batch_size": nothing("a wave of sampling has as many prompts as are missing"),
            "val_batch_size": nothing("held-out prompts are sampled together, as the engine has capacity"),
            "dataloader_num_workers": nothing("rows are read in the controllers; see data.num_workers"),
        },
    ),
    **_section(
        _MODEL,
        {
            "path": to("model"),
            "enable_gradient_checkpointing": to(
                "actor.enable_gradient_checkpointing", "enable_gradient_checkpointing", default=True
            ),
            "enable_activation_offload": to("actor.activation_offload", default=False),
            "lora_rank": to("actor.lora_rank", default=0),
            "lora_alpha": to("actor.lora_alpha", default=16),
            "target_modules": to("actor.target_modules", default="all-linear"),
            "lora.rank": to("actor.lora_rank", default=0),
            "lora.alpha": to("actor.lora_alpha", default=32),
            "exclude_modules": lacks("name the layers with adapters in actor.target_modules"),
            "lora_adapter_path": to("actor.lora_adapter_path"),
            "trust_remote_code": lacks("code of a model's folder is not run", False),
            "external_lib": lacks("no module is imported for a model"),
            "override_config": lacks("the model folder's config.json is taken as it is", {}),
            "override_config.*": lacks("the model folder's config.json is taken as it is"),
            "custom_chat_template": lacks("the chat template is the tokenizer's"),
            "hf_config_path": lacks("the config is the model folder's"),
            "tokenizer_path": lacks("the tokenizer is the model folder's"),
            "mtp.enable": lacks("no multi-token prediction", False),
            "mtp.*": nothing("no multi-token prediction"),
            "use_remove_padding": nothing(_PACKED),
            "use_liger": nothing("the loss's kernels are gcore's own"),
            "use_fused_kernels": nothing("the loss's kernels are gcore's own"),
        },
    ),
    **_section(
        _ACTOR,
        {
            "strategy": to("trainer.backend", default="fsdp"),
            "ppo_mini_batch_size": to("actor.ppo_mini_batch_size", default=256),
            "ppo_micro_batch_size": MICRO_BATCH,
            "ppo_micro_batch_size_per_gpu": MICRO_BATCH,
            "ppo_max_token_len_per_gpu": to(*MICRO_BATCH.ours, default=16_384),
            "use_dynamic_bsz": to(*MICRO_BATCH.ours, default=False),
            "ppo_epochs": to("actor.ppo_epochs", default=1),
            "clip_ratio": to("actor.loss.clip_ratio_low", "actor.loss.clip_ratio", default=0.2),
            "clip_ratio_low": to("actor.loss.clip_ratio_low", default=0.2),
            "clip_ratio_high": to("actor.loss.clip_ratio_high", default=0.2),
            "clip_ratio_c": to("actor.loss.clip_ratio_c", default=3.0),
            "tau_pos": to("actor.loss.tau_pos", default=1.0),
            "tau_neg": to("actor.loss.tau_neg", default=1.05),
            "policy_loss.loss_mode": to("actor.loss.loss_mode", default="vanilla"),
            "loss_agg_mode": to("actor.loss.loss_agg_mode", default="token-mean"),
            "loss_scale_factor": to("actor.loss.max_response_length"),
            "entropy_coeff": to("actor.loss.entropy_coeff", default=0.0),
            "use_kl_loss": to("actor.loss.kl_loss_coef", "loss.beta", "kl_loss_coef", default=False),
            "kl_loss_coef": to("actor.loss.kl_loss_coef", "kl_loss_coef", default=0.001),
            "kl_loss_type": to("actor.loss.kl_loss_type", default="low_var_kl"),
            "grad_clip": to("actor.optim.grad_clip", "optim.grad_clip"),
            **dict.fromkeys(
                ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"),
                to(
                    "trainer.parallel.context_parallel_size",
                    "trainer.parallel.ulysses_sequence_parallel_size",
                    default=1,
                ),
            ),
            **dict.fromkeys(
                ("router_replay.mode", "megatron.router_replay.mode", "veomni.router_replay.mode"),
                to("actor.router_replay", default="disabled"),
            ),
            "tis_imp_ratio_cap": to("algorithm.rollout_correction.rollout_is_threshold", default=-1),
            "use_rollout_log_probs": to("algorithm.old_log_probs", default=False),
            "policy_loss.tau_pos": to("actor.loss.tau_pos"),
            "policy_loss.tau_neg": to("actor.loss.tau_neg"),
            "optim.lr": to("actor.optim.lr", "optim.lr", default=1e-6),
            "optim.eps": to("actor.optim.eps", default=1e-8),
            "optim.weight_decay": to("actor.optim.weight_decay", "optim.weight_decay", default=0.01),
            "optim.betas": to("actor.optim.betas", "optim.betas", default=[0.9, 0.999]),
            "optim.clip_grad": to("actor.optim.grad_clip", "optim.grad_clip", default=1.0),
            "optim.lr_warmup_steps": to("actor.optim.lr_warmup_steps", "optim.lr_warmup_steps", default=-1),
            "optim.lr_warmup_steps_ratio": to("actor.optim.lr_warmup_steps", default=0.0),
            "optim.lr_scheduler_type": to("actor.optim.lr_scheduler_type", default="constant"),
            "optim.warmup_style": to("actor.optim.lr_scheduler_type"),
            "optim.lr_decay_style": to("actor.optim.lr_scheduler_type"),
            "optim.min_lr_ratio": to("actor.optim.min_lr_ratio", default=0.0),
            "optim.min_lr": to("actor.optim.min_lr_ratio", default=0.0),
            "optim.optimizer": to("actor.optim.name", "optim.name", default="AdamW"),
            "optim.total_training_steps": nothing("the run's own length"),
            "optim.num_cycles": lacks("half a cosine", 0.5),
            "optim.override_optimizer_config": lacks(_OPTIMIZER, {}),
            "optim.override_optimizer_config.*": lacks(_OPTIMIZER),
            "fsdp_config.param_offload": to("actor.offload", default=False),
            "fsdp_config.optimizer_offload": to("actor.offload", default=False),
            "fsdp_config.fsdp_size": to("trainer.parallel.fsdp_size", default=-1),
            "fsdp_config.dtype": to("dtype", "actor.dtype", default="bfloat16"),
            "fsdp_config.model_dtype": nothing("in bfloat16, updates are made to float32 copies of the weights"),
            "megatron.tensor_model_parallel_size": to("trainer.parallel.tensor_model_parallel_size", default=1),
            "megatron.pipeline_model_parallel_size": to("trainer.parallel.pipeline_model_parallel_size", default=1),
            "megatron.virtual_pipeline_model_parallel_size": to(
                "trainer.parallel.virtual_pipeline_model_parallel_size"
            ),
            "megatron.context_parallel_size": to("trainer.parallel.context_parallel_size", default=1),
            "megatron.expert_model_parallel_size": to("trainer.parallel.expert_model_parallel_size", default=1),
            "megatron.sequence_parallel": to("trainer.parallel.sequence_parallel", default=True),
            "megatron.expert_tensor_parallel_size": lacks("experts are whole on their ranks", 1),
            "megatron.param_offload": lacks("no offload with Megatron; see rollout.colocated", False),
            "megatron.optimizer_offload": lacks("no offload with Megatron; see rollout.colocated", False),
            "megatron.override_transformer_config.recompute_granularity": to("trainer.megatron.recompute_granularity"),
            "shuffle": lacks("samples of a step keep their order over its updates", False),
            "freeze_vision_tower": lacks("all parameters are trained, or adapters", False),
            "qat.enable": lacks("no training for quantization", False),
            "profiler.*": nothing(_PROFILER),
            "checkpoint.*": nothing("checkpoints hold models, optimizer and every controller's state"),
        },
    ),
    **_section(
        _ROLLOUT,
        {
            "name": to("rollout.engine", default="vllm"),
            "n": to("rollout.n", "n", default=1),
            "temperature": to("rollout.temperature", default=1.0),
            "gpu_memory_utilization": to("rollout.gpu_memory_utilization", default=0.5),
            "tensor_model_parallel_size": to("rollout.tensor_parallel_size", default=2),
            "expert_parallel_size": to("rollout.engine_options", default=1),
            "max_num_batched_tokens": to("rollout.max_num_batched_tokens", default=8192),
            "max_num_seqs": to("rollout.max_num_seqs", default=256),
            "top_p": lacks(_ON_POLICY, 1),
            "top_k": lacks(_ON_POLICY, -1, 0),
            "do_sample": lacks("responses are sampled", True),
            "ignore_eos": lacks("a response ends at its end token", False),
            "pipeline_model_parallel_size": lacks("an engine is split by tensor parallelism", 1),
            "standalone_gpu_memory_utilization": lacks("rollout.gpu_memory_utilization is that of every engine"),
            "quantization": to("rollout.engine_options"),
            "enable_rollout_routing_replay": lacks("routing of the engine is not replayed; R2 is", False),
            "val_kwargs.n": to("rollout.val_kwargs.n", default=1),
            "val_kwargs.temperature": to("rollout.val_kwargs.temperature", default=0),
            "val_kwargs.do_sample": to("rollout.val_kwargs.n", default=False),
            "val_kwargs.top_p": to("rollout.val_kwargs.top_p", default=1.0),
            "val_kwargs.top_k": to("rollout.val_kwargs.top_k", default=-1),
            "multi_turn.enable": lacks("several turns are of an environment: rollout.multi_turn.environment", False),
            "multi_turn.*": nothing("several turns are of an environment: rollout.multi_turn.environment"),
            "over_sample_rate": lacks("see rollout.partial_rollout, which finishes the others later", 0),
            "engine_kwargs.vllm": to("rollout.engine_options", default={}),
            "engine_kwargs.vllm.*": to("rollout.engine_options"),
            "engine_kwargs.*": lacks("options of an engine that is not converted: rollout.engine_options", {}),
            "disaggregation.enabled": lacks("an engine prefills and decodes", False),
            "agent.default_agent_loop": lacks("several turns are of an environment", "single_turn_agent"),
            "agent.agent_loop_config_path": lacks("several turns are of an environment"),
            "mtp": lacks("no multi-token prediction", {}),
            "mtp.enable": lacks("no multi-token prediction", False),
            "mtp.*": nothing("no multi-token prediction"),
            "free_cache_engine": nothing("the engine sleeps where it shares a device: rollout.colocated"),
            "calculate_log_probs": nothing("every token has its log-prob and weight version"),
            "profiler.*": nothing(_PROFILER),
            "prompt_length": nothing("data.max_prompt_length is the only one"),
            "response_length": nothing("data.max_response_length is the only one"),
            "seed": nothing("each response has a seed of its own, of the run's"),
        },
    ),
    **_section(
        _REF,
        {
            "log_prob_micro_batch_size_per_gpu": nothing(_REF_SAME),
            "profiler.*": nothing(_PROFILER),
        },
    ),
    **_section(
        _ALGORITHM,
        {
            "adv_estimator": to("algorithm.adv_estimator", default="gae"),
            "norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std_in_grpo", default=True),
            "gamma": to("algorithm.gamma", default=1.0),
            "lam": to("algorithm.lam", default=1.0),
            "use_kl_in_reward": to("algorithm.kl_ctrl.kl_coef", "actor.loss.kl_loss_coef", "loss.beta", default=False),
            "kl_penalty": to("algorithm.kl_ctrl.kl_penalty", default="kl"),
            "kl_ctrl.kl_coef": to("algorithm.kl_ctrl.kl_coef", default=0.001),
            "kl_ctrl.type": to("algorithm.kl_ctrl.type", default="fixed"),
            "kl_ctrl.horizon": to("algorithm.kl_ctrl.horizon", default=10_000),
            "kl_ctrl.target_kl": to("algorithm.kl_ctrl.target_kl", default=0.1),
            "filter_groups.enable": to("algorithm.filter_groups", "filter_groups", default=False),
            "filter_groups.max_num_gen_batches": to("algorithm.max_num_gen_batches", default=0),
            "filter_groups.metric": lacks(
                "groups are compared by their scores", "reward", "score", "seq_reward", "seq_final_reward"
            ),
            "rollout_correction.rollout_is": to("algorithm.rollout_correction.rollout_is"),
            "rollout_correction.rollout_is_threshold": to(
                "algorithm.rollout_correction.rollout_is_threshold",
                "algorithm.rollout_correction.rollout_is_threshold_lower",
                default=2.0,
            ),
            "rollout_correction.rollout_rs": to("algorithm.rollout_correction.rollout_rs"),
            "rollout_correction.rollout_rs_threshold": to(
                "algorithm.rollout_correction.rollout_rs_threshold",
                "algorithm.rollout_correction.rollout_rs_threshold_lower",
            ),
            "rollout_correction.rollout_is_batch_normalize": to(
                "algorithm.rollout_correction.rollout_is_batch_normalize", default=False
            ),
            "rollout_correction.rollout_token_veto_threshold": to(
                "algorithm.rollout_correction.rollout_token_veto_threshold"
            ),
            "gdpo_reward_keys": lacks("scores are added before they are normalized"),
            "rollout_correction.bypass_mode": to("algorithm.old_log_probs", default=False),
            "rollout_correction.loss_type": lacks("the policy loss is actor.loss.loss_mode", "ppo_clip"),
            "use_pf_ppo": lacks("no PF-PPO", False),
            "pf_ppo.*": nothing("no PF-PPO"),
        },
    ),
    **_section(
        "critic",
        {
            "model.path": to("critic.model"),
            "optim.lr": to("critic.optim.lr", default=1e-5),
            "optim.weight_decay": to("critic.optim.weight_decay", default=0.01),
            "optim.betas": to("critic.optim.betas", default=[0.9, 0.999]),
            "optim.eps": to("critic.optim.eps", default=1e-8),
            "optim.clip_grad": to("critic.optim.grad_clip", default=1.0),
            "grad_clip": to("critic.optim.grad_clip"),
            "optim.lr_warmup_steps": to("critic.optim.lr_warmup_steps", default=-1),
            "optim.lr_warmup_steps_ratio": to("critic.optim.lr_warmup_steps", default=0.0),
            "optim.lr_scheduler_type": to("critic.optim.lr_scheduler_type", default="constant"),
            "optim.warmup_style": to("critic.optim.lr_scheduler_type"),
            "optim.lr_decay_style": to("critic.optim.lr_scheduler_type"),
            "optim.min_lr_ratio": to("critic.optim.min_lr_ratio", default=0.0),
            "optim.min_lr": to("critic.optim.min_lr_ratio", default=0.0),
            "optim.optimizer": to("critic.optim.name", default="AdamW"),
            "optim.total_training_steps": nothing("the run's own length"),
            "optim.num_cycles": lacks("half a cosine", 0.5),
            "optim.override_optimizer_config": lacks(_OPTIMIZER, {}),
            "optim.override_optimizer_config.*": lacks(_OPTIMIZER),
            "ppo_epochs": lacks(_CRITIC_SAME, 1),
            "ppo_mini_batch_size": lacks(_CRITIC_SAME, 256),
            "shuffle": lacks("samples of a step keep their order over its updates", False),
            "loss_scale_factor": lacks("the divisor is data.max_response_length"),
            "cliprange_value": to("critic.cliprange_value", default=0.5),
            "loss_agg_mode": to("critic.loss_agg_mode", default="token-mean"),
        },
    ),
    "custom_reward_function.path": to("reward", "reward.kind", "data.train_files"),
    "custom_reward_function.name": to("reward", default="compute_score"),
    "custom_reward_function.reward_kwargs.*": to("reward_kwargs"),
    "reward_model.enable": to("reward_model.kind", "reward.kind", default=False),
    "reward_model.model.path": to("reward_model.path", "reward.path"),
    "reward_model.reward_manager": lacks("a reward scores one response", "naive", "dapo"),
    **_overlong_buffer("reward_model.overlong_buffer"),
    **_overlong_buffer("reward_model.reward_kwargs.overlong_buffer_cfg"),
    **dict.fromkeys(
        ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"),
        lacks("overlong responses are measured by data.max_response_length"),
    ),
    "reward.custom_reward_function.path": to("reward"),
    "reward.custom_reward_function.name": to("reward", default="compute_score"),
    "reward.custom_reward_function.reward_kwargs.*": to("reward_kwargs"),
    "reward.reward_model.enable": to("reward_model.kind", default=False),
    "reward.reward_model.model_path": to("reward_model.path"),
    "reward.reward_manager.name": lacks("a reward scores one response", "naive", "dapo", "custom_reward_manager"),
    "reward.reward_manager.source": lacks("a reward scores one response", "register"),
    **_overlong_buffer("reward.reward_kwargs.overlong_buffer_cfg"),
    "reward.sandbox_fusion.url": lacks("code runs in a sandbox of its own: reward code"),
    "sandbox_fusion.url": lacks("code runs in a sandbox of its own: reward code"),
    "distillation.enabled": to("distillation.teachers", default=False),
    "distillation.teacher_key": to("distillation.source_key", default="data_source"),
    "distillation.teacher_models.teacher_model.model_path": to("distillation.teachers"),
    "distillation.teacher_models.teacher_model.key": to("distillation.sources"),
    "distillation.distillation_loss.distillation_loss_coef": to("distillation.coef", default=1.0),
    "distillation.distillation_loss.use_task_rewards": to("algorithm.adv_estimator", default=True),
    "distillation.distillation_loss.loss_mode": to("distillation.teachers", default="k3"),
    **_section(
        _TRAINER,
        {
            "nnodes": to("trainer.num_processes", "devices", default=1),
            "n_gpus_per_node": to("trainer.num_processes", "devices", default=8),
            "total_epochs": to("trainer.total_epochs", "trainer.total_training_steps", "steps", default=30),
            "total_training_steps": to("trainer.total_training_steps", "steps"),
            "experiment_name": to("name", default="gsm8k"),
            "project_name": to("trainer.project_name", default="verl_examples"),
            "logger": to("trainer.trackers", default=["console", "wandb"]),
            "save_freq": to("trainer.save_freq", default=-1),
            "test_freq": to("trainer.test_freq", default=-1),
            "resume_mode": to("resume", default="auto"),
            "critic_warmup": to("critic.warmup_steps", default=0),
            "max_actor_ckpt_to_keep": to("trainer.max_ckpt_to_keep"),
            "device": to("device"),
            "v1.trainer_mode": to("trainer.schedule", default="sync"),
            "v1.sampler.max_off_policy_threshold": to("rollout.max_staleness", default=8),
            "resume_from_path": lacks("a run is resumed in its own folder"),
            "val_only": lacks("see gcore-llm eval", False),
            "rollout_data_dir": nothing(_REPORTED),
            "validation_data_dir": nothing(_REPORTED),
            "log_val_generations": nothing(_REPORTED),
            "default_local_dir": nothing("a run's folder is RUNS_DIR/NAME"),
            "default_hdfs_dir": nothing("a run's folder is RUNS_DIR/NAME"),
            "max_critic_ckpt_to_keep": nothing("a checkpoint holds all models"),
            "val_before_train": nothing("the first and last step always evaluate"),
            "balance_batch": nothing("samples are always dealt by work"),
            "esi_redundant_time": nothing("SIGTERM ends a run after a checkpoint"),
        },
    ),
    **_section(
        "async_training",
        {
            "staleness_threshold": to("rollout.max_staleness", "trainer.schedule", default=0.1),
            "trigger_parameter_sync_step": to("data.train_batch_size", default=4),
            "require_batches": to("data.train_batch_size", default=1),
            "compute_prox_log_prob": to("algorithm.old_log_probs", default=False),
            "use_rollout_log_probs": to("algorithm.old_log_probs", default=True),
            "partial_rollout": lacks(_ASYNC_OWN, True),
            "use_dynamic_resource_scheduling": lacks(_DYNAMIC, False),
            **dict.fromkeys(
                (
                    "dynamic_schedule_policy",
                    "dynamic_schedule_deactivate_ratio",
                    "dynamic_schedule_enable_rebalance",
                ),
                nothing("of use_dynamic_resource_scheduling"),
            ),
            "concurrent_samples_per_replica": nothing("an engine has as many responses as rollout.max_num_seqs"),
            "use_trainer_do_validate": nothing("the run's engines answer held-out prompts"),
            "checkpoint_engine.*": nothing("weights go to engines in parts of a bounded size"),
        },
    ),
    **_section(
        "rollout",
        {
            "nnodes": to("rollout.num_processes", "controllers", default=1),
            "n_gpus_per_node": to("rollout.num_processes", default=8),
            "total_rollout_steps": to("trainer.total_training_steps", default=100),
            "total_epochs": to("trainer.total_epochs"),
            "test_freq": to("trainer.test_freq"),
            "n": nothing("actor_rollout_ref.rollout.n is what counts"),
        },
    ),
    "actor_rollout_ref.checkpoint_engine.*": nothing("weights go to engines in parts of a bounded size"),
    "global_profiler.*": nothing(_PROFILER),
    "transfer_queue.*": nothing("samples go from controllers to ranks directly"),
    "ray_kwargs.*": nothing("the cluster's settings are in ray"),
    "hydra.*": nothing("no Hydra"),
    "model_engine": to("trainer.backend", default="dp"),
}
VERL: dict[str, Key] = _USED | {name: key for name, key in UNUSED.items() if name not in _USED}
"""verl's names, and sections of names, with the settings here that follow from each."""
