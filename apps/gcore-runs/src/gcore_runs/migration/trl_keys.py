"""The settings of TRL 1.16.0's GRPO, RLOO, DPO, SFT and reward trainers, and of `trl METHOD --config`."""

from collections.abc import Mapping
from typing import Any

from gcore_runs.migration.key import Key, lacks, nothing, to

VERSION = "1.16.0"

_ON_POLICY = "responses are sampled from the policy's whole distribution, whose log-probabilities the trainer computes"
_EVERY_STEP = "every step is written to metrics.jsonl"
_HUB = "nothing is sent to the Hub; the run's folder has export/"
_STEPS = ("trainer.total_training_steps", "steps")
_BATCH = to("data.train_batch_size", "train_batch_size", default=8)
MASKED = "here on the answer alone: of messages the last answer, of prompts with completions the completion"
"""Tokens that supervised training learns."""
_OPTIM = "AdamW, with options of its own"
_SAVING = "checkpoints hold everything, and the last ones are kept"
_LOADER = "rows are read in the controllers"
_DDP = "ranks are sharded by FSDP2 or Megatron-Core; see trainer.parallel"
_GPUS = "the placement follows from the numbers of processes"

TRL: dict[str, Key] = {
    # The model, its adapters and the data, of the command line of TRL.
    "model_name_or_path": to("model"),
    "model_revision": to("model", default="main"),
    "dtype": to("dtype", "actor.dtype", default="float32"),
    "bf16": to("dtype", "actor.dtype"),
    "fp16": lacks("float32 or bfloat16", False),
    "trust_remote_code": lacks("code of a model's folder is not run", False),
    "model_init_kwargs": lacks("the model folder's config.json is taken as it is", {}),
    "attn_implementation": nothing("attention on packed rows, of gcore's own choice"),
    "use_peft": to("actor.lora_rank", "lora_rank", default=False),
    "lora_r": to("actor.lora_rank", "lora_rank", default=16),
    "lora_alpha": to("actor.lora_alpha", "lora_alpha", default=32),
    "lora_target_modules": to("actor.target_modules", "target_modules"),
    "lora_dropout": lacks("adapters have no dropout", 0.0),
    "lora_task_type": nothing("adapters are of a causal LM"),
    "use_rslora": to("actor.use_rslora", "use_rslora", default=False),
    "use_dora": lacks("LoRA alone", False),
    "load_in_4bit": lacks("frozen weights are not quantized", False),
    "load_in_8bit": lacks("frozen weights are not quantized", False),
    "dataset_name": to("data.train_files"),
    "datasets": to("data.train_files"),
    "dataset_train_split": to("data.train_files", default="train"),
    "dataset_test_split": to("data.val_files", default="test"),
    "dataset_config": to("data.train_files"),
    "dataset_streaming": nothing(_LOADER),
    "reward_funcs": to("reward", "reward.kind", "data.train_files"),
    "reward_model_name_or_path": to("reward_model.path"),
    "reward_weights": to("reward"),
    "num_processes": to("trainer.num_processes", default=1),
    # Batches and updates.
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": to(*_BATCH.ours, "actor.ppo_mini_batch_size", default=1),
    "steps_per_generation": to("data.train_batch_size", "actor.ppo_mini_batch_size"),
    "generation_batch_size": to("data.train_batch_size"),
    "num_generations": to("rollout.n", "n", default=8),
    "num_iterations": to("actor.ppo_epochs", "actor.num_updates", default=1),
    "num_train_epochs": to("trainer.total_epochs", *_STEPS, default=3.0),
    "max_steps": to(*_STEPS, default=-1),
    "max_prompt_length": to("data.max_prompt_length"),
    "max_completion_length": to("data.max_response_length", "max_response_length", "data.max_length", default=512),
    "max_length": to("data.max_length", "data.max_response_length", "max_response_length", default=1024),
    "shuffle_dataset": nothing("rows are always shuffled"),
    "seed": to("seed", default=42),
    "data_seed": to("data.shuffle_seed"),
    # The optimizer.
    "learning_rate": to("actor.optim.lr", "optim.lr", default=1e-6),
    "lr_scheduler_type": to("actor.optim.lr_scheduler_type", "optim.lr_scheduler_type", default="linear"),
    "lr_scheduler_kwargs": to("actor.optim.min_lr_ratio", "optim.min_lr_ratio"),
    "warmup_steps": to("actor.optim.lr_warmup_steps", "optim.lr_warmup_steps", default=0),
    "warmup_ratio": to("optim.lr_warmup_steps_ratio", "actor.optim.lr_warmup_steps"),
    "weight_decay": to("actor.optim.weight_decay", "optim.weight_decay", default=0.0),
    "adam_beta1": to("actor.optim.betas", "optim.betas", default=0.9),
    "adam_beta2": to("actor.optim.betas", "optim.betas", default=0.999),
    "adam_epsilon": lacks("1e-8, as in AdamW's paper", 1e-8),
    "max_grad_norm": to("actor.optim.grad_clip", "optim.grad_clip", default=1.0),
    "optim": to("actor.optim.name", "optim.name", default="adamw_torch_fused"),
    "optim_args": lacks(_OPTIM),
    "neftune_noise_alpha": lacks("no noise on embeddings"),
    "label_smoothing_factor": lacks("no smoothing of labels", 0.0),
    # The policy's loss.
    "beta": to("loss.beta", "actor.loss.kl_loss_coef", "actor.dpo.beta", "kl_loss_coef", default=0.0),
    "epsilon": to("actor.loss.clip_ratio_low", "actor.loss.clip_ratio", default=0.2),
    "epsilon_high": to("actor.loss.clip_ratio_high", "actor.loss.clip_ratio"),
    "delta": to("actor.loss.clip_ratio_c"),
    "loss_type": to("actor.loss.loss_agg_mode", "actor.loss.loss_mode", "loss.loss_type", default="dapo"),
    "importance_sampling_level": to("actor.loss.loss_mode", default="token"),
    "sapo_temperature_pos": to("actor.loss.tau_pos", default=1.0),
    "sapo_temperature_neg": to("actor.loss.tau_neg", default=1.05),
    "entropy_coef": to("actor.loss.entropy_coeff", default=0.0),
    "scale_rewards": to("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by", default="group"),
    "mask_truncated_completions": to("algorithm.overlong.filter", default=False),
    "use_bias_correction_kl": lacks("the KL in the loss is not weighed by the ratio", False),
    "multi_objective_aggregation": lacks("scores are added, then normalized", "sum_then_normalize"),
    "top_entropy_quantile": lacks("all tokens that count are trained on", 1.0),
    "use_adaptive_entropy": lacks("the entropy bonus has a fixed weight", False),
    "off_policy_mask_threshold": lacks("see algorithm.rollout_correction.rollout_rs"),
    "sync_ref_model": lacks("the reference is the initial policy", False),
    "router_aux_loss_coef": lacks("no loss that balances experts", 0.0),
    "normalize_advantages": lacks("rloo's advantages are not normalized over the batch", False),
    "reward_clip_range": lacks("scores are not clipped"),
    "disable_dropout": nothing("models are trained without dropout"),
    "cast_lm_head_to_fp32": nothing("log-probs are computed in float32"),
    # Generation.
    "temperature": to("rollout.temperature", default=1.0),
    "top_p": lacks(_ON_POLICY, 1.0),
    "top_k": lacks(_ON_POLICY, 0, -1),
    "min_p": lacks(_ON_POLICY, 0.0),
    "repetition_penalty": lacks(_ON_POLICY, 1.0),
    "generation_kwargs": lacks(_ON_POLICY, {}),
    "chat_template_kwargs": to("data.chat_template_kwargs"),
    "max_tool_calling_iterations": lacks("several turns are of an environment: rollout.multi_turn.environment"),
    "use_vllm": to("rollout.engine", default=False),
    "vllm_mode": to("rollout.colocated", default="colocate"),
    "vllm_gpu_memory_utilization": to("rollout.gpu_memory_utilization", default=0.3),
    "vllm_tensor_parallel_size": to("rollout.tensor_parallel_size", default=1),
    "vllm_enable_sleep_mode": nothing("the engine sleeps where it shares a device: rollout.colocated"),
    "vllm_importance_sampling_correction": to("algorithm.rollout_correction.rollout_is", default=True),
    "vllm_importance_sampling_mode": to(
        "algorithm.rollout_correction.rollout_is",
        "algorithm.rollout_correction.rollout_is_threshold_lower",
        default="sequence_mask",
    ),
    "vllm_importance_sampling_clip_max": to("algorithm.rollout_correction.rollout_is_threshold", default=3.0),
    "vllm_importance_sampling_clip_min": to("algorithm.rollout_correction.rollout_is_threshold_lower"),
    "vllm_importance_sampling_cap": to("algorithm.rollout_correction.rollout_is_threshold"),
    "vllm_structured_outputs_regex": lacks(_ON_POLICY),
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        nothing("a run starts its engines: rollout.num_processes; servers are at rollout.urls"),
    ),
    **dict.fromkeys(("vllm_max_model_length", "vllm_model_impl"), nothing("the engine's own default is used")),
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
        nothing("hf always batches continuously"),
    ),
    **dict.fromkeys(
        ("cache_implementation", "ds3_gather_for_generation", "num_generations_eval", "pad_to_multiple_of"),
        nothing("engines have all weights, and no padding"),
    ),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), nothing("the reference is the initial policy")),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        nothing("the entropy bonus has a fixed weight"),
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), nothing("there is no VESPO")
    ),
    # DPO, SFT and reward models.
    "label_smoothing": to("loss.label_smoothing", default=0.0),
    "center_rewards_coefficient": to("loss.center_rewards_coefficient"),
    "loss_weights": lacks("one loss"),
    "ld_alpha": lacks("no weighting by length"),
    "f_divergence_type": lacks("the reverse KL", "reverse_kl"),
    "use_weighting": lacks("pairs have equal weights", False),
    "completion_only_loss": lacks(MASKED, True),
    "assistant_only_loss": lacks(MASKED),
    "packing": lacks(
        "a batch counts rows, and in TRL packs of max_length tokens: raise data.train_batch_size by the rows of a pack",
        False,
    ),
    "truncation_mode": nothing("longer rows are left out, counted and reported"),
    "chat_template_path": lacks("the chat template is the tokenizer's"),
    "eos_token": lacks("the end token is the tokenizer's", "<EOS_TOKEN>"),
    "pad_token": nothing("rows have no padding"),
    "dataset_text_field": lacks("text is in the column text", "text"),
    "dataset_kwargs": lacks("no arguments of a data set", {}),
    **dict.fromkeys(
        ("packing_strategy", "padding_free", "eval_packing"),
        nothing("rows are always packed without padding, and do not see each other"),
    ),
    **dict.fromkeys(("dataset_num_proc", "f_alpha_divergence_coef", "discopop_tau"), nothing("of an option not here")),
    **dict.fromkeys(
        ("precompute_ref_log_probs", "precompute_ref_batch_size"), nothing("the reference is computed in each step")
    ),
    # The run.
    "output_dir": to("name", "runs_dir"),
    "run_name": to("name"),
    "report_to": to("trainer.trackers", default="none"),
    "project": to("trainer.project_name", default="huggingface"),
    "save_steps": to("trainer.save_freq", default=500),
    "save_total_limit": to("trainer.max_ckpt_to_keep"),
    "save_strategy": to("trainer.save_freq", default="steps"),
    "eval_steps": to("trainer.test_freq"),
    "eval_strategy": to("trainer.test_freq", default="no"),
    "use_cpu": to("device", default=False),
    "gradient_checkpointing": to("actor.enable_gradient_checkpointing", "enable_gradient_checkpointing", default=True),
    "activation_offloading": to("actor.activation_offload", default=False),
    "resume_from_checkpoint": to("resume"),
    "load_best_model_at_end": to("trainer.export", default=False),
    "torch_compile": to("actor.compile", default=False),
    "deepspeed": lacks(_DDP, ""),
    "fsdp": nothing(_DDP),
    "fsdp_config": nothing(_DDP),
    "parallelism_config": lacks("see trainer.parallel.context_parallel_size"),
    **dict.fromkeys(
        (
            *("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "log_level"),
            *("log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal", "disable_tqdm"),
            *("log_level_replica", "log_on_each_node", "include_num_input_tokens_seen", "log_completions_hub_repo"),
        ),
        nothing(_EVERY_STEP),
    ),
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
            *("hub_revision", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        ),
        nothing(_HUB),
    ),
    **dict.fromkeys(
        (
            *(
                "per_device_eval_batch_size",
                "eval_delay",
                "prediction_loss_only",
                "eval_on_start",
                "batch_eval_metrics",
            ),
            *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
            *(
                "bf16_full_eval",
                "fp16_full_eval",
                "metric_for_best_model",
                "greater_is_better",
                "do_eval",
                "do_predict",
            ),
        ),
        nothing("held-out prompts are sampled together, with the run's own settings"),
    ),
    **dict.fromkeys(
        (
            *("save_only_model", "save_on_each_node", "enable_jit_checkpoint", "ignore_data_skip", "do_train"),
            "restore_callback_states_from_checkpoint",
        ),
        nothing(_SAVING),
    ),
    **dict.fromkeys(
        (
            *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "remove_unused_columns"),
            *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order", "label_names"),
            *("dataloader_multiprocessing_context", "train_sampling_strategy", "length_column_name"),
        ),
        nothing(_LOADER),
    ),
    **dict.fromkeys(
        (
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
            *("ddp_backend", "ddp_timeout", "accelerator_config", "local_rank", "average_tokens_across_devices"),
        ),
        nothing(_DDP),
    ),
    **dict.fromkeys(
        (
            *("full_determinism", "tf32", "gradient_checkpointing_kwargs", "torch_compile_backend", "debug"),
            *("torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache", "torch_empty_cache_steps"),
            *("auto_find_batch_size", "skip_memory_metrics", "optim_target_modules"),
        ),
        nothing("an option of transformers' own computation"),
    ),
    "env.*": nothing("variables of the command's own environment"),
}
"""TRL's names with the settings here that follow from each."""

_FINE_TUNING: Mapping[str, Any] = {"max_length": 1024}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "rloo": {"beta": 0.05, "num_generations": 2},
    "dpo": {**_FINE_TUNING, "beta": 0.1, "loss_type": ["sigmoid"]},
    "sft": {**_FINE_TUNING, "learning_rate": 2e-5, "loss_type": "nll"},
    "reward": {**_FINE_TUNING, "learning_rate": 1e-4},
}
"""Defaults of each trainer that are not those of ``TRL``."""

MARKS: Mapping[str, tuple[str, ...]] = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": (
        *("scale_rewards", "delta", "entropy_coef", "importance_sampling_level", "use_bias_correction_kl"),
        *("sapo_temperature_pos", "sapo_temperature_neg", "top_entropy_quantile", "max_tool_calling_iterations"),
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "off_policy_mask_threshold"),
        *("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        *("multi_objective_aggregation", "cast_lm_head_to_fp32", "use_adaptive_entropy"),
    ),
    "dpo": ("label_smoothing", "precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "use_weighting"),
    "sft": ("packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"),
    "reward": ("center_rewards_coefficient",),
}
"""Keys by which a trainer is recognised, the first one that has any."""

SAMPLING_MARKS = ("num_generations", "max_completion_length", "reward_funcs", "use_vllm", "num_iterations", "epsilon")
"""Keys of both trainers that sample, GRPO and RLOO."""
