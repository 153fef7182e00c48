"""Hints for unknown settings: the name here of another library's setting, or the nearest name."""

import difflib
from collections.abc import Callable, Collection

_SECTIONS = ("actor_rollout_ref.",)
"""Sections of verl that gcore does not have."""

_LR = ("actor.optim.lr", "optim.lr")
_BATCH = ("data.train_batch_size", "train_batch_size")
_MICRO_BATCH = ("actor.ppo_max_token_len", "max_token_len", "actor.micro_batch_size", "ppo_max_token_len")
_STEPS = ("trainer.total_training_steps", "steps")
_EPOCHS = ("trainer.total_epochs", *_STEPS)
_WARMUP = ("actor.optim.lr_warmup_steps", "optim.lr_warmup_steps")
_WARMUP_RATIO = ("optim.lr_warmup_steps_ratio", *_WARMUP)
_KL = ("actor.loss.kl_loss_coef", "loss.beta", "kl_loss_coef")
_KL_REWARD = ("algorithm.kl_ctrl.kl_coef", *_KL)
_CHECKPOINTING = ("actor.enable_gradient_checkpointing", "enable_gradient_checkpointing")
_GROUP = ("rollout.n", "n")
_RESPONSE = ("data.max_response_length", "max_response_length", "data.max_length")
_LENGTH = ("data.max_length", "data.max_response_length", "max_response_length")
_REWARD = ("reward", "reward.kind", "data.train_files")
_RANKS = ("trainer.num_processes", "devices")

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # verl
    "model.path": ("model",),
    "reward_model.model.path": ("reward_model.path", "reward.path"),
    "reward_model.enable": ("reward_model.kind", "reward.kind"),
    "rollout.name": ("rollout.engine",),
    "actor.strategy": ("trainer.backend",),
    "use_kl_loss": _KL,
    "use_kl_in_reward": _KL_REWARD,
    "clip_ratio": ("actor.loss.clip_ratio_low", "actor.loss.clip_ratio"),
    "filter_groups.enable": ("algorithm.filter_groups", "filter_groups"),
    "ppo_micro_batch_size": _MICRO_BATCH,
    "ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
    "ppo_max_token_len_per_gpu": _MICRO_BATCH,
    "log_prob_micro_batch_size_per_gpu": _MICRO_BATCH,
    "log_prob_max_token_len_per_gpu": _MICRO_BATCH,
    "custom_reward_function.path": _REWARD,
    "reward_function": _REWARD,
    "data.seed": ("data.shuffle_seed", "seed"),
    "experiment_name": ("name",),
    "project_name": ("name",),
    "default_local_dir": ("runs_dir",),
    "resume_mode": ("resume",),
    "n_gpus_per_node": _RANKS,
    "nnodes": _RANKS,
    "max_actor_ckpt_to_keep": ("trainer.max_ckpt_to_keep",),
    # TRL and transformers
    "num_generations": _GROUP,
    "beta": ("loss.beta", "actor.loss.kl_loss_coef", "actor.dpo.beta", "kl_loss_coef"),
    "per_device_train_batch_size": _BATCH,
    "batch_size": _BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "learning_rate": _LR,
    "lr": _LR,
    "adam_beta1": ("actor.optim.betas", "optim.betas"),
    "adam_beta2": ("actor.optim.betas", "optim.betas"),
    "max_grad_norm": ("actor.optim.grad_clip", "optim.grad_clip"),
    "warmup_steps": _WARMUP,
    "warmup_ratio": _WARMUP_RATIO,
    "max_completion_length": _RESPONSE,
    "max_new_tokens": _RESPONSE,
    "max_tokens": _RESPONSE,
    "max_seq_length": _LENGTH,
    "max_length": _LENGTH,
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "epochs": _EPOCHS,
    "max_steps": _STEPS,
    "output_dir": ("runs_dir",),
    "run_name": ("name",),
    "model_name_or_path": ("model",),
    "dataset_name": ("data.train_files",),
    "dataset": ("data.train_files",),
    "reward_funcs": _REWARD,
    "num_iterations": ("actor.ppo_epochs", "actor.num_updates"),
    "epsilon": ("actor.loss.clip_ratio_low", "actor.loss.clip_ratio"),
    "epsilon_high": ("actor.loss.clip_ratio_high", "actor.loss.clip_ratio"),
    "scale_rewards": ("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by"),
    "mask_truncated_completions": ("algorithm.overlong.filter",),
    "use_vllm": ("rollout.engine",),
    "bf16": ("dtype", "actor.dtype"),
    "gradient_checkpointing": _CHECKPOINTING,
    "lora_r": ("actor.lora_rank",),
    "lora_target_modules": ("actor.target_modules",),
    "save_steps": ("trainer.save_freq",),
    "eval_steps": ("trainer.test_freq",),
    "save_total_limit": ("trainer.max_ckpt_to_keep",),
    "report_to": ("trainer.tensorboard",),
}
"""Settings here by the end of another library's name; a command's own is the first that it has."""

_ALWAYS_ON_POLICY = (
    "there is no such setting: responses are sampled from the policy's whole distribution, whose log-probabilities the "
    "trainer computes"
)

NOT_HERE: dict[str, str] = {
    "top_p": _ALWAYS_ON_POLICY,
    "top_k": _ALWAYS_ON_POLICY,
    "min_p": _ALWAYS_ON_POLICY,
    "repetition_penalty": _ALWAYS_ON_POLICY,
    "filter_overlong_prompts": "there is no such setting: longer prompts are always left out, counted and reported",
    "truncation": "there is no such setting: longer prompts are always left out, counted and reported",
    "gpu_memory_utilization": "there is no such setting: an engine sizes its own cache",
    "rollout.tensor_model_parallel_size": "there is no such setting: each engine is on one device",
    "logging_steps": "there is no such setting: every step is written to metrics.jsonl",
}
"""Advice for another library's setting that has no counterpart here, by the end of its name."""


def hint(name: str, known: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """Say what to write instead of an unknown name.

    Args:
        name: as it was given, with underscores: ``actor_rollout_ref.rollout.n``.
        known: dotted names of all settings.
        spelled: how a setting is to be written.
    """
    for section in _SECTIONS:
        name = name.removeprefix(section)
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
    if found:
        return f"did you mean {' or '.join(spelled(n) for n in found)}?"
    return _with_relatives("", parts, known, spelled)


def _with_relatives(said: str, parts: list[str], known: Collection[str], spelled: Callable[[str], str]) -> str:
    """Return ``said`` with the settings of the section that the name is in."""
    for depth in range(len(parts) - 1, -1, -1):
        section = "".join(f"{part}." for part in parts[:depth])
        relatives = sorted(n for n in known if n.startswith(section))
        if relatives:
            names = dict.fromkeys(_spelled_relative(n, section, spelled) for n in relatives)
            return f"{said}{'; ' if said else ''}known here: {', '.join(names)}"
    return said or "no setting has a similar name"


def _spelled_relative(name: str, section: str, spelled: Callable[[str], str]) -> str:
    own, _, inner = name.removeprefix(section).partition(".")
    return spelled(section + own) + (".*" if inner else "")
