"""verl's settings that nothing here follows from: those that do not change training, and rare options that gcore lacks.

A key that is in neither table is unknown, and a conversion asks the user to check it.
"""

from typing import Any

from gcore_runs.migration.key import Key, lacks, nothing

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"


def _without_meaning(prefix: str, why: str, *names: str) -> dict[str, Key]:
    return {f"{prefix}.{name}": nothing(why) for name in names}


def _lacking(prefix: str, why: str, off: dict[str, Any]) -> dict[str, Key]:
    """Return keys of features that gcore lacks, by their values when they are off."""
    return {f"{prefix}.{name}": lacks(why, value) for name, value in off.items()}


def _optimizer(prefix: str) -> dict[str, Key]:
    return {
        **_without_meaning(
            prefix,
            "of an optimizer or a schedule that optim.name and lr_scheduler_type do not choose",
            *("lr_wsd_decay_steps", "lr_wsd_decay_style", "use_checkpoint_opt_param_scheduler", "optimizer_impl"),
            *("use_layer_wise_distributed_optimizer", "muon_coefficient_type", "muon_extra_scale_factor"),
            *("muon_fp32_matmul_prec", "muon_match_adamw_update_rms", "muon_momentum", "muon_nesterov"),
            *("muon_num_ns_steps", "muon_scalar_optimizer", "muon_scale_mode", "muon_split_qkv", "muon_tp_mode"),
        ),
        **_lacking(
            prefix,
            "the schedule ends with the run, and starts at 0",
            {
                "lr_decay_steps": None,
                "lr_decay_ratio": 1.0,
                "lr_warmup_init": 0.0,
                "lr_start": 0.0,
                "lr_min": 0.0,
                "min_lr_factor": 0.0,
                "decay_type": "linear",
                "zero_indexed_step": True,
            },
        ),
        **_lacking(
            prefix,
            "AdamW with its states and gradients in float32",
            {
                "name": "AdamW",
                "exp_avg_dtype": "fp32",
                "exp_avg_sq_dtype": "fp32",
                "main_grads_dtype": "fp32",
                "use_precision_aware_optimizer": False,
                "weight_decay_incr_style": "constant",
            },
        ),
        **_without_meaning(
            f"{prefix}.override_optimizer_config",
            "where the optimizer is computed does not change its numbers",
            *("optimizer_cpu_offload", "optimizer_offload_fraction", "offload_fraction"),
            "overlap_cpu_optimizer_d2h_h2d",
        ),
    }


_MULTI_TURN = "of multi_turn.enable"
_BACKENDS = {
    **_without_meaning(
        _ACTOR,
        "an option of verl's sharding",
        *("fsdp_config.forward_only", "fsdp_config.forward_prefetch", "fsdp_config.full_determinism"),
        *("fsdp_config.offload_policy", "fsdp_config.reshard_after_forward", "fsdp_config.seed"),
        *("fsdp_config.strategy", "fsdp_config.turbo_config.*", "fsdp_config.use_orig_params"),
        *("fsdp_config.use_no_sync_for_gradient_accumulation", "fsdp_config.use_torch_compile"),
        *("fsdp_config.wrap_policy.*", "fsdp_config.pad_to_length", "fsdp_config.pad_to_length_bucket"),
        *("fsdp_config.entropy_checkpointing", "fsdp_config.entropy_from_logits_chunk_size"),
        "fsdp_config.entropy_from_logits_with_chunking",
    ),
    **_lacking(_ACTOR, "no training for quantization", {"fsdp_config.qat.enable": False, "megatron.qat.enable": False}),
    **_without_meaning(_ACTOR, "of qat.enable", "qat.*", "fsdp_config.qat.*", "megatron.qat.*"),
    **_without_meaning(
        _ACTOR,
        "an option of verl's Megatron; see trainer.megatron",
        *("megatron.dist_checkpointing_path", "megatron.dist_checkpointing_prefix"),
        *("megatron.dist_ckpt_optim_fully_reshardable", "megatron.distrib_optim_fully_reshardable_mem_efficient"),
        *("megatron.dynamic_context_parallel", "megatron.entropy_from_logits_chunk_size"),
        *("megatron.entropy_from_logits_with_chunking", "megatron.forward_only", "megatron.grad_offload"),
        *("megatron.max_seqlen_per_dp_cp_rank", "megatron.pad_bshd_to_minibatch_max", "megatron.pad_to_length"),
        *("megatron.pad_to_length_bucket", "megatron.router_replay.*", "megatron.seed"),
        *("megatron.use_dist_checkpointing", "megatron.use_distributed_optimizer", "megatron.use_mbridge"),
        *("megatron.use_megatron_fsdp", "megatron.use_remove_padding", "megatron.vanilla_mbridge"),
    ),
    **_lacking(
        _ACTOR,
        "no further options of Megatron-Core; see trainer.megatron",
        {"megatron.dtype": "bfloat16", "megatron.override_ddp_config": {}, "megatron.override_mcore_model_config": {}},
    ),
    **_without_meaning(
        _TRANSFORMER,
        "a kernel, or where layers and their activations are",
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "apply_rope_fusion"),
        *("attention_backend", "bias_activation_fusion", "bias_dropout_fusion", "context_parallel_size"),
        *("deallocate_pipeline_outputs", "gradient_accumulation_fusion", "masked_softmax_fusion"),
        *("max_seqlen_per_dp_cp_rank", "moe_enable_deepep", "moe_grouped_gemm", "moe_permute_fusion"),
        *("moe_shared_expert_overlap", "moe_token_dispatcher_type", "num_layers_in_first_pipeline_stage"),
        *("num_layers_in_last_pipeline_stage", "persist_layer_norm", "pipeline_model_parallel_layout"),
        *("recompute_method", "recompute_modules", "recompute_num_layers", "sequence_parallel"),
        *("tensor_model_parallel_size", "use_distributed_optimizer", "use_flash_attn", "use_fused_rmsnorm"),
        "use_fused_swiglu",
    ),
    **_lacking(
        _TRANSFORMER,
        "no loss that balances experts, and their bias stays",
        {
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0,
            "dsa_indexer_loss_coeff": 0.0,
        },
    ),
    **_lacking(_TRANSFORMER, "no training in FP8", {"fp8": None, "fp8_recipe": None, "fp8_param": False}),
    **_lacking(_TRANSFORMER, "models are trained without dropout", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    **_lacking(_TRANSFORMER, "no multi-token prediction", {"mtp_num_layers": None, "mtp_loss_scaling_factor": None}),
    **_without_meaning(_ACTOR, "of a backend of verl's; see strategy", "torchtitan.*", "veomni.*"),
}
_OPTIONS = {
    **_without_meaning(
        "data",
        "how rows are read: they reach the reward as they are, and prompts go through the chat template",
        *("image_patch_size", "return_full_prompt", "return_multi_modal_inputs", "return_raw_chat"),
        *("return_raw_input_ids", "use_shm", "validation_shuffle"),
    ),
    **_without_meaning(
        _MODEL,
        "an option of verl's own kernels and loading",
        *("fused_kernel_options.*", "tiled_mlp.*", "use_shm"),
    ),
    **_without_meaning(
        _MODEL,
        "how adapters are computed or kept",
        *("lora.a2a_experimental", "lora.merge", "lora.fully_sharded_loras", "lora.dropout_position", "lora.dtype"),
        *("lora.freeze_language_model", "lora.freeze_vision_model", "lora.freeze_vision_projection"),
    ),
    **_lacking(
        _MODEL,
        "actor.target_modules is all-linear or names of the model's own layers, and adapters start at 0",
        {
            "lora.target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            "lora.lora_A_init_method": "xavier",
            "lora.lora_B_init_method": "zero",
        },
    ),
    **_lacking(
        _MODEL,
        "adapters have a rank, an alpha and target_modules",
        {"lora.adapter_path": None, "lora.dropout": 0.0, "lora.exclude_modules": [], "lora.type": "lora"},
    ),
    **_without_meaning(
        _ACTOR,
        "an option of verl's own computation",
        *("calculate_entropy", "data_loader_seed", "entropy_checkpointing", "entropy_from_logits_chunk_size"),
        *("entropy_from_logits_with_chunking", "pad_to_length", "rollout_n", "use_fused_kernels"),
        *("use_prefix_grouper", "use_remove_padding", "use_torch_compile"),
    ),
    **_lacking(_ACTOR, "no optimal token baseline", {"calculate_sum_pi_squared": False}),
    **_without_meaning(
        f"{_ACTOR}.policy_loss",
        "of policy losses that policy_loss.loss_mode does not choose",
        *("clip_cov_lb", "clip_cov_ratio", "clip_cov_ub", "dro_beta", "kl_cov_ratio", "ppo_kl_coef"),
    ),
    **_optimizer(f"{_ACTOR}.optim"),
    "actor_rollout_ref.hybrid_engine": nothing("the placement follows from the numbers of processes"),
    "actor_rollout_ref.nccl_timeout": nothing("process groups have their default time limits"),
    **_without_meaning(
        _ROLLOUT,
        "an option of the engine that does not change what it samples",
        *("cudagraph_capture_sizes", "data_parallel_size", "disable_log_stats", "disaggregation.*"),
        *("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "full_determinism", "layered_summon"),
        *("load_format", "max_model_len", "mode", "moe_load_balance_metrics_interval", "moe_tensor_parallel_size"),
        *("multi_stage_wake_up", "router_config_path", "scheduling_policy", "skip_tokenizer_init", "qat"),
        *("checkpoint_engine.*", "prometheus.*", "server.*", "trace.*", "qat.*", "sglang_rollout_mode"),
    ),
    **_without_meaning(
        _ROLLOUT,
        "log-probs are computed in the actor's micro-batches",
        *("log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
        "log_prob_use_dynamic_bsz",
    ),
    **_without_meaning(
        _ROLLOUT,
        "the placement follows from the numbers of processes",
        "nnodes",
        "n_gpus_per_node",
        "agent.num_workers",
    ),
    **_lacking(
        _ROLLOUT,
        "the engine's own default is used",
        {
            "dtype": "bfloat16",
            "limit_images": None,
            "logprobs_mode": "processed_logprobs",
            "quantization_config_file": None,
            "agent.custom_async_server.name": None,
            "agent.custom_async_server.path": None,
        },
    ),
    **_without_meaning(
        f"{_ROLLOUT}.multi_turn",
        _MULTI_TURN,
        *("format", "function_tool_path", "interaction_config_path", "max_assistant_turns", "max_parallel_calls"),
        *("max_tool_response_length", "max_user_turns", "num_repeat_rollouts", "tokenization_sanity_check_mode"),
        *("tool_config_path", "tool_response_truncate_side", "use_inference_chat_template"),
    ),
    **_without_meaning(
        _REF,
        "the reference model is computed as the actor, in no more memory",
        *("entropy_checkpointing", "entropy_from_logits_chunk_size", "entropy_from_logits_with_chunking"),
        *("fsdp_config.*", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz"),
        *("megatron.*", "optim.*", "pad_to_length", "rollout_n", "strategy", "torchtitan.*", "veomni.*"),
        *("ulysses_sequence_parallel_size", "use_torch_compile"),
    ),
    **_lacking(_REF, "the reference is the initial policy", {"model.path": None}),
    **_without_meaning(
        "critic",
        "the critic has the actor's layout and micro-batches",
        *("checkpoint.*", "data_loader_seed", "enable", "forward_max_token_len_per_gpu", "forward_micro_batch_size"),
        *("forward_micro_batch_size_per_gpu", "fsdp.*", "megatron.*", "model.enable_activation_offload"),
        *("model.enable_gradient_checkpointing", "model.fsdp_config.*", "model.fused_kernel_options.*"),
        *("model.tiled_mlp.*", "model.use_fused_kernels", "model.use_liger", "model.use_remove_padding"),
        *("model.use_shm", "nccl_timeout", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size"),
        *("ppo_micro_batch_size_per_gpu", "profiler.*", "rollout_n", "strategy", "torchtitan.*"),
        *("ulysses_sequence_parallel_size", "use_dynamic_bsz", "veomni.*", "model.tokenizer_path"),
        *("model.custom_chat_template", "model.mtp.*"),
    ),
    **_lacking("critic", "the critic is trained without adapters", {"model.lora.rank": 0, "model.lora_rank": 0}),
    **_without_meaning(
        "critic.model", "of adapters of the critic", "lora.*", "lora_alpha", "lora_adapter_path", "target_modules"
    ),
    **_lacking(
        "critic.model",
        "the critic's folder is taken as it is",
        {
            "exclude_modules": None,
            "external_lib": None,
            "hf_config_path": None,
            "override_config": {},
            "trust_remote_code": False,
        },
    ),
    **_optimizer("critic.optim"),
    "algorithm.filter_groups.max_inflight_gen_batches": nothing("waves follow each other"),
}
_REWARD = "a reward model is loaded by each controller, or is a judge with an engine"
_ASYNCHRONOUS = "batches are sampled ahead as trainer.schedule says, and rollout.max_staleness bounds their age"
_RUN = {
    **_without_meaning(
        "reward_model",
        _REWARD,
        *("enable_resource_pool", "micro_batch_size_per_gpu", "model.fsdp_config.*", "model.use_remove_padding"),
        *("n_gpus_per_node", "nnodes", "num_workers", "rollout.*", "use_reward_loop", "sandbox_fusion.*"),
        *("strategy", "use_dynamic_bsz", "model.input_tokenizer", "launch_reward_fn_async"),
    ),
    **_lacking(
        "reward_model",
        "a reward scores one response",
        {
            "reward_loop_class_name": None,
            "reward_loop_module_path": None,
            "reward_loop_source": None,
            "model.external_lib": None,
            "model.trust_remote_code": False,
        },
    ),
    **_without_meaning(
        "reward",
        _REWARD,
        *("num_workers", "reward_model.enable_resource_pool", "reward_model.n_gpus_per_node", "reward_model.nnodes"),
        *("reward_model.rollout.*", "reward_manager.module.name", "sandbox_fusion.*"),
    ),
    **_lacking("reward", "a reward scores one response", {"reward_manager.module.path": None}),
    **_without_meaning(
        "sandbox_fusion", "code runs in a sandbox of its own: reward code", "max_concurrent", "memory_limit_mb"
    ),
    **_lacking(
        "distillation.distillation_loss",
        "the divergence is the reverse KL at the policy's own tokens, as an advantage",
        {"log_prob_min_clamp": None, "loss_max_clamp": None, "topk": 32, "policy_loss_mode": "vanilla"},
    ),
    **_lacking(
        "distillation.distillation_loss",
        "the bounds are those of actor.loss",
        {"clip_ratio": 0.2, "clip_ratio_high": 0.2, "clip_ratio_low": 0.2},
    ),
    "distillation.distillation_loss.use_policy_gradient": nothing("always, as an advantage"),
    **_without_meaning(
        "distillation",
        "a teacher is computed as the reference model",
        *("n_gpus_per_node", "nnodes", "teacher_models.teacher_model.inference.*"),
        "teacher_models.teacher_model.num_replicas",
    ),
    **_without_meaning(
        "trainer",
        "the placement follows from the numbers of processes",
        *("ray_wait_register_center_timeout", "use_legacy_worker_impl", "use_v1", "del_local_ckpt_after_load"),
    ),
    **_lacking("trainer", "no callbacks of a checkpoint", {"checkpoint_callback_class": None}),
    **_without_meaning(
        "trainer.v1",
        _ASYNCHRONOUS,
        *("colocate_async.*", "separate_async.*", "sync", "sampler.max_off_policy_strategy"),
        *("sampler.sampler_kwargs", "sampler.sync_refill_failed_groups", "sampler.custom_sampler.name"),
    ),
    **_lacking("trainer.v1", "rows are shuffled", {"sampler.custom_sampler.path": None}),
    **_lacking(
        "skip",
        "every step samples",
        {"rollout.enable": False, "async_rollout.enable": False, "rollout_tq.enable": False},
    ),
    **_without_meaning("skip", "of skip.rollout.enable", "rollout.*", "async_rollout.*", "rollout_tq.*"),
}
UNUSED: dict[str, Key] = {**_OPTIONS, **_BACKENDS, **_RUN}
"""verl's names without a setting here, with the reason."""
