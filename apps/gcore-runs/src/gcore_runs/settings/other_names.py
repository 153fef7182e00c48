"""Hints for unknown settings: the name here of another library's setting, or the nearest name."""

import difflib
from collections.abc import Callable, Collection

_STEPS = ("trainer.total_training_steps", "steps")
_WARMUP = ("actor.optim.lr_warmup_steps", "optim.lr_warmup_steps")
_KL = ("actor.loss.kl_loss_coef", "loss.beta", "kl_loss_coef")
_RESPONSE = ("data.max_response_length", "max_response_length", "data.max_length")
_REWARD = ("reward", "reward.kind", "data.train_files")
_MICRO_BATCH = ("actor.ppo_max_token_len", "max_token_len", "actor.micro_batch_size", "ppo_max_token_len")
_MICRO_BATCH_SIZES = (
    *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"),
    *("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu", "gradient_accumulation_steps"),
)

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # verl
    "model.path": ("model",),
    "reward_model.model.path": ("reward_model.path", "reward.path"),
    "reward_model.enable": ("reward_model.kind", "reward.kind"),
    "actor.strategy": ("trainer.backend",),
    "use_kl_loss": _KL,
    "use_kl_in_reward": ("algorithm.kl_ctrl.kl_coef", *_KL),
    "filter_groups.enable": ("algorithm.filter_groups", "filter_groups"),
    "data.seed": ("data.shuffle_seed", "seed"),
    "resume_mode": ("resume",),
    # TRL and transformers
    "model_name_or_path": ("model",),
    "beta": ("loss.beta", "actor.loss.kl_loss_coef", "actor.dpo.beta", "kl_loss_coef"),
    "num_generations": ("rollout.n", "n"),
    "max_grad_norm": ("actor.optim.grad_clip", "optim.grad_clip"),
    "warmup_steps": _WARMUP,
    "warmup_ratio": ("optim.lr_warmup_steps_ratio", *_WARMUP),
    "max_steps": _STEPS,
    "num_iterations": ("actor.ppo_epochs", "actor.num_updates"),
    "epsilon_high": ("actor.loss.clip_ratio_high", "actor.loss.clip_ratio"),
    "scale_rewards": ("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by"),
    "mask_truncated_completions": ("algorithm.overlong.filter",),
    "bf16": ("dtype", "actor.dtype"),
    "gradient_checkpointing": ("actor.enable_gradient_checkpointing", "enable_gradient_checkpointing"),
    "lora_r": ("actor.lora_rank",),
    "lora_target_modules": ("actor.target_modules",),
    "save_steps": ("trainer.save_freq",),
    "eval_steps": ("trainer.test_freq",),
    "report_to": ("trainer.trackers",),
    "trainer.logger": ("trainer.trackers",),
    "wandb_project": ("trainer.project_name",),
    # several names for one setting
    **dict.fromkeys(("clip_ratio", "epsilon"), ("actor.loss.clip_ratio_low", "actor.loss.clip_ratio")),
    **dict.fromkeys(("rollout.name", "use_vllm"), ("rollout.engine",)),
    **dict.fromkeys(_MICRO_BATCH_SIZES, _MICRO_BATCH),
    **dict.fromkeys(("custom_reward_function.path", "reward_function", "reward_funcs"), _REWARD),
    **dict.fromkeys(("experiment_name", "run_name"), ("name",)),
    **dict.fromkeys(("default_local_dir", "output_dir"), ("runs_dir",)),
    **dict.fromkeys(("n_gpus_per_node", "nnodes"), ("trainer.num_processes", "devices")),
    **dict.fromkeys(("max_actor_ckpt_to_keep", "save_total_limit"), ("trainer.max_ckpt_to_keep",)),
    **dict.fromkeys(("per_device_train_batch_size", "batch_size"), ("data.train_batch_size", "train_batch_size")),
    **dict.fromkeys(("learning_rate", "lr"), ("actor.optim.lr", "optim.lr")),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), ("actor.optim.betas", "optim.betas")),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_tokens"), _RESPONSE),
    **dict.fromkeys(("max_seq_length", "max_length"), ("data.max_length", *_RESPONSE[:2])),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "epochs"), ("trainer.total_epochs", *_STEPS)),
    **dict.fromkeys(("dataset_name", "dataset"), ("data.train_files",)),
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), ("rollout.gpu_memory_utilization",)),
}
"""Settings here by the end of another library's name; a command's own is the first that it has."""

_NONE = "there is no such setting: "
_ALWAYS_ON_POLICY = (
    f"{_NONE}responses are sampled from the policy's whole distribution, whose log-probabilities the trainer computes"
)
_ALWAYS_FILTERED = f"{_NONE}longer prompts are always left out, counted and reported"

NOT_HERE: dict[str, str] = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), _ALWAYS_ON_POLICY),
    **dict.fromkeys(("filter_overlong_prompts", "truncation"), _ALWAYS_FILTERED),
    "rollout.tensor_model_parallel_size": f"{_NONE}each engine is on one device",
    "logging_steps": f"{_NONE}every step is written to metrics.jsonl",
}
"""Advice for another library's setting that has no counterpart here, by the end of its name."""


def hint(name: str, known: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """Say what to write instead of an unknown dotted name, where ``known`` are all settings, spelled in some way."""
    # A section of verl that gcore does not have.
    name = name.removeprefix("actor_rollout_ref.")
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    found: list[str] = [name] if name in known else []
    for end in ends:
        if not found:
            found = [ours for ours in OTHER_NAMES.get(end, ()) if ours in known][:1]
        if not found and end in NOT_HERE:
            return _with_relatives(NOT_HERE[end], parts, known, spelled)
    last, by_last = parts[-1], {n.rpartition(".")[2]: n for n in known}
    found = (
        found
        or difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        or [n for n in known if n.rpartition(".")[2] == last][:3]
        or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        or [by_last[near] for near in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)]
    )
    named = " or ".join(map(spelled, found))
    return f"did you mean {named}?" if named else _with_relatives("", parts, known, spelled)


def _with_relatives(said: str, parts: list[str], known: Collection[str], spelled: Callable[[str], str]) -> str:
    """Return ``said`` with the settings of the section that the name is in."""
    for depth in range(len(parts) - 1, -1, -1):
        section = "".join(f"{part}." for part in parts[:depth])
        relatives = sorted(n for n in known if n.startswith(section))
        if relatives:
            splits = [n.removeprefix(section).partition(".") for n in relatives]
            names = dict.fromkeys(spelled(section + own) + (".*" if inner else "") for own, _, inner in splits)
            return f"{said}{'; ' if said else ''}known here: {', '.join(names)}"
    return said or "no setting has a similar name"
