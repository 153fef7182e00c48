"""The settings of gcore-llm's commands that follow from those of TRL's trainers."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_llm.config import TrainConfig
from gcore_llm.finetune.config import DPORunConfig, RewardModelRunConfig, SFTRunConfig
from gcore_llm.migration.conversion import (
    NEVER,
    WRITTEN,
    Conversion,
    as_list,
    convert_trackers,
    count_of,
    folder_name,
    number_of,
)
from gcore_llm.migration.hydra_files import SourceConfig
from gcore_runs import UserError
from gcore_runs.migration.keys import read_keys
from gcore_runs.settings.checks import convert_value, flatten

_CONFIGS = {
    "grpo": ("train", TrainConfig),
    "rloo": ("train", TrainConfig),
    "dpo": ("dpo", DPORunConfig),
    "sft": ("sft", SFTRunConfig),
    "reward": ("reward-model", RewardModelRunConfig),
}
_TRAINERS = {
    "grpo": "trl.GRPOTrainer",
    "rloo": "trl.RLOOTrainer",
    "dpo": "trl.DPOTrainer",
    "sft": "trl.SFTTrainer",
    "reward": "trl.RewardTrainer",
}
_AGGREGATIONS = {
    **dict.fromkeys(("dapo", "bnpo", "cispo"), "token-mean"),
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
}
_FINE_TUNING: Mapping[str, Any] = {"max_length": 1024}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "rloo": {"beta": 0.05, "num_generations": 2},
    "dpo": {**_FINE_TUNING, "beta": 0.1, "loss_type": ["sigmoid"]},
    "sft": {**_FINE_TUNING, "learning_rate": 2e-5, "loss_type": "nll"},
    "reward": {**_FINE_TUNING, "learning_rate": 1e-4},
}
"""Defaults of each trainer that are not those of the table of keys."""
_KEYS_OF_GRPO = """
    scale_rewards delta entropy_coef importance_sampling_level use_bias_correction_kl
    sapo_temperature_pos sapo_temperature_neg top_entropy_quantile max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_mode off_policy_mask_threshold
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    multi_objective_aggregation cast_lm_head_to_fp32 use_adaptive_entropy
"""
_KEYS_OF_METHOD: Mapping[str, Sequence[str]] = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": _KEYS_OF_GRPO.split(),
    "dpo": (
        "label_smoothing",
        "precompute_ref_log_probs",
        "f_divergence_type",
        "ld_alpha",
        "use_weighting",
    ),
    "sft": ("packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"),
    "reward": ("center_rewards_coefficient",),
}
"""Keys by which a trainer is recognised, the first one that has any."""
_SAMPLING_KEYS = (
    "num_generations",
    "max_completion_length",
    "reward_funcs",
    "use_vllm",
    "num_iterations",
    "epsilon",
)
"""Keys of both trainers that sample, GRPO and RLOO."""
_SMALLEST = 1e-9
"""A lower bound of ratios that none reaches."""


def convert_trl_config(source: SourceConfig, method: str) -> Conversion:
    """Return the conversion of a config of one of TRL's trainers; `UserError` if it is not clear of which."""
    # A mapping is the value of a key, not a section.
    values = dict(source.values)
    env = values.pop("env", None)
    if method == "auto":
        method = _recognise(values, source.origin)
    command, config_class = _CONFIGS[method]
    if "env" in source.values:
        values |= flatten({"env": env or {}})
    conversion = Conversion(
        library="TRL",
        command=command,
        config=config_class(),
        keys=read_keys("trl"),
        values=values,
        trainer=_TRAINERS[method],
        cautions=source.cautions,
        defaults=DEFAULTS[method],
    )
    run(conversion)
    if command == "train":
        updates = sampled_batches(conversion)
        rollout(conversion)
        policy_loss(conversion, method)
        reward(conversion)
    else:
        updates = 1
        rows(conversion, method)
    optimizer(conversion)
    frequencies(conversion, updates)
    return conversion


def _recognise(values: Mapping[str, Any], origin: str) -> str:
    """Return the trainer that a config is for, by keys that others have not, or else by the names of file and run."""
    samples = not values.keys().isdisjoint(_SAMPLING_KEYS)
    candidates = ("rloo", "grpo") if samples else tuple(_KEYS_OF_METHOD)
    for method in candidates:
        if not values.keys().isdisjoint(_KEYS_OF_METHOD[method]):
            return method
    if not samples:
        raise UserError(
            "method is 'auto' and no key of the config says which; expected --method grpo, rloo, dpo, sft or reward"
        )
    if "loss_type" in values:
        # Of the two, RLOO has none.
        return "grpo"
    names = f"{origin} {values.get('output_dir')} {values.get('run_name')}".lower()
    matches = [method for method in candidates if method in names]
    if len(matches) != 1:
        raise UserError(
            "method is 'auto' and the keys of the config are those of GRPO and of RLOO; expected --method grpo or rloo"
        )
    return matches[0]


def run(c: Conversion) -> None:
    """Convert the model, the data, the run's name and where it computes."""
    c.copy(
        "model_name_or_path",
        "seed",
        "data_seed",
        "num_processes",
        "gradient_checkpointing",
        "chat_template_kwargs",
    )
    if c.has("dataset_name") or c.has("datasets"):
        data(c)
    if c.get("load_best_model_at_end") and "trainer.export" in c.known:
        c.put("trainer.export", "best", "load_best_model_at_end")
    revision = c.get("model_revision")
    if c.has("model_name_or_path") and revision != "main":
        c.put(
            "model",
            f"{c.get('model_name_or_path')}@{revision}",
            "model_name_or_path",
            "model_revision",
        )
    if c.has("output_dir"):
        folder = Path(str(c.get("output_dir")))
        c.put("name", folder_name(folder.name), "output_dir")
        if folder.parent != Path():
            c.put("runs_dir", str(folder.parent), "output_dir")
    if c.has("run_name"):
        c.put("name", folder_name(c.get("run_name")), "run_name")
    convert_trackers(c, "report_to", "project", ("none", "tensorboard"))
    c.notes["report_to"] = WRITTEN
    c.notes["project"] = "of the trackers that report_to names"
    if c.get("use_cpu"):
        c.put("device", "cpu", "use_cpu")
    if c.get("bf16") is False and not c.get("fp16"):
        c.put("dtype", "float32", "bf16")
    elif c.get("bf16") or c.get("dtype") == "bfloat16":
        c.put("dtype", "bfloat16", "bf16" if c.get("bf16") else "dtype")
    if c.get("use_peft"):
        adapters(c)
    if c.command == "train":
        c.copy("activation_offloading", "torch_compile")


def data(c: Conversion) -> None:
    """Convert the data set: a file, a folder, or a name on the Hub with a configuration and a split."""
    if c.has("datasets"):
        c.put("data.train_files", [_source(dataset) for dataset in c.get("datasets")], "datasets")
        return
    name = str(c.get("dataset_name"))
    if Path(name).suffix or Path(name).exists():
        c.put("data.train_files", [name], "dataset_name")
        return
    address = f"hf://{name}"
    if c.has("dataset_config"):
        address += f"/{c.get('dataset_config')}"
    files = [f"{address}:{c.get('dataset_train_split')}"]
    c.put("data.train_files", files, "dataset_name", "dataset_config", "dataset_train_split")
    if c.get("eval_strategy") != "no":
        c.put(
            "data.val_files",
            [f"{address}:{c.get('dataset_test_split')}"],
            "dataset_test_split",
            "eval_strategy",
        )


def _source(dataset: Mapping[str, Any]) -> str:
    """Return the source that one entry of a mixture of TRL names."""
    if dataset.get("data_files"):
        return str(dataset["data_files"])
    address = f"hf://{dataset.get('path')}"
    if dataset.get("name"):
        address += f"/{dataset['name']}"
    return f"{address}:{dataset.get('split') or 'train'}"


def adapters(c: Conversion) -> None:
    """Convert the adapters."""
    c.copy("lora_r", "lora_alpha", "use_rslora")
    for setting in ("actor.lora_rank", "lora_rank"):
        if setting in c.settings:
            c.sources[setting] = ("lora_r", "use_peft")
    targets = "lora_target_modules"
    if c.has(targets):
        c.put(c.known_settings(targets)[0], as_list(c.get(targets)), targets)
    if "lora_dropout" not in c.values:
        c.missing["lora_dropout"] = "0.05 in TRL; adapters have no dropout here"


def sampled_batches(c: Conversion) -> int:
    """Convert batches of completions to batches of prompts; return the updates of a step."""
    device = "per_device_train_batch_size"
    steps = "gradient_accumulation_steps"
    per_pass = int(number_of(c, device) * number_of(c, "num_processes"))
    per_update = per_pass * count_of(c, steps)
    factors = [device, "num_processes", steps]
    per_wave = per_update
    if c.has("generation_batch_size"):
        factors = ["generation_batch_size"]
        per_wave = count_of(c, "generation_batch_size")
    elif c.has("steps_per_generation"):
        factors = [device, "num_processes", "steps_per_generation"]
        per_wave = per_pass * count_of(c, "steps_per_generation")
    group = count_of(c, "num_generations")
    if per_wave % group:
        raise UserError(
            f"num_generations is {group}; expected a divisor of the {per_wave} completions of {' x '.join(factors)}; "
            "num_processes=N gives the processes of accelerate"
        )
    prompts = per_wave // group
    c.put("data.train_batch_size", prompts, *factors, "num_generations")
    # Fewer completions than a group are an update of part of it, which are not made here.
    mini = max(1, round(per_update / group))
    if mini >= prompts:
        mini = 0
    c.put("actor.ppo_mini_batch_size", mini, device, "num_processes", steps)
    if per_update % group:
        c.missing[steps] = (
            f"an update of {per_update} completions; here an update has whole groups of {group}"
        )
    c.copy("num_generations", "num_iterations", "max_prompt_length", "max_completion_length")
    longest = c.settings.get("data.max_prompt_length", TrainConfig().data.max_prompt_length)
    tokens = longest + c.settings["data.max_response_length"]
    c.put(
        "actor.ppo_max_token_len",
        max(tokens * count_of(c, device), tokens),
        device,
        "max_completion_length",
    )
    c.put("data.apply_chat_template", "never", "dataset_name")
    updates = math.ceil(per_wave / per_update) * count_of(c, "num_iterations")
    if number_of(c, "max_steps") > 0:
        c.put(
            "trainer.total_training_steps",
            math.ceil(number_of(c, "max_steps") / updates),
            "max_steps",
        )
        if updates > 1:
            c.notes["max_steps"] = f"TRL counts updates, of which a step here has {updates}"
        c.notes["num_train_epochs"] = "max_steps is set"
    else:
        c.copy("num_train_epochs")
    return updates


def rows(c: Conversion, method: str) -> None:
    """Convert batches and losses of the trainers that do not sample."""
    names = ("per_device_train_batch_size", "num_processes", "gradient_accumulation_steps")
    c.put("data.train_batch_size", math.prod(count_of(c, name) for name in names), *names)
    c.copy("max_length")
    longest = number_of(c, "max_length")
    if method != "sft":
        longest *= 2
    c.put("max_token_len", int(longest * max(1, number_of(c, names[0]))), names[0], "max_length")
    if number_of(c, "max_steps") > 0:
        c.copy("max_steps")
        c.notes["num_train_epochs"] = "max_steps is set"
    else:
        c.copy("num_train_epochs")
    if method == "dpo":
        c.copy("beta", "label_smoothing")
        losses = list(as_list(c.get("loss_type")))
        if len(losses) == 1 and losses[0] in ("sigmoid", "ipo", "hinge"):
            c.put("loss.loss_type", losses[0], "loss_type")
        else:
            c.missing["loss_type"] = (
                "there are sigmoid, ipo and hinge, one of them; sigmoid is written"
            )
    if method == "reward" and c.has("center_rewards_coefficient"):
        c.copy("center_rewards_coefficient")
    if method == "sft":
        tokens = (
            "of all the assistant's answers"
            if c.get("assistant_only_loss")
            else "of the whole conversation"
        )
        masked = c.keys["assistant_only_loss"].why
        c.missing["assistant_only_loss"] = (
            f"with a column messages TRL trains on the tokens {tokens}; {masked}"
        )
    if method == "sft" and c.get("loss_type") != "nll":
        c.missing["loss_type"] = "the negative log-likelihood"


def rollout(c: Conversion) -> None:
    """Convert generation."""
    world = count_of(c, "num_processes")
    c.copy("temperature", "top_p", "top_k")
    c.put("rollout.engine", "vllm" if c.get("use_vllm") else "hf", "use_vllm")
    c.put("algorithm.old_log_probs", "trainer", "vllm_importance_sampling_correction")
    if not c.get("use_vllm"):
        return
    c.copy("vllm_tensor_parallel_size")
    share = "vllm_gpu_memory_utilization"
    memory_share = convert_value(share, c.get(share), float)
    c.put("rollout.engine_options", {"gpu_memory_utilization": memory_share}, share)
    mode = c.get("vllm_mode")
    if mode == "server":
        c.notes["vllm_mode"] = "a run starts its engines; rollout.num_processes is how many"
    if world > 1:
        engines = max(1, world // count_of(c, "vllm_tensor_parallel_size"))
        c.put("runtime", "ray", "num_processes")
        c.put("rollout.num_processes", engines, "num_processes", "vllm_tensor_parallel_size")
        c.put("rollout.colocated", mode == "colocate", "vllm_mode")
    if not c.get("vllm_importance_sampling_correction"):
        return
    sampling = "vllm_importance_sampling"
    level, _, way = str(c.get(f"{sampling}_mode")).partition("_")
    c.put(
        "algorithm.rollout_correction.rollout_is",
        level,
        f"{sampling}_mode",
        f"{sampling}_correction",
    )
    c.copy(f"{sampling}_cap" if c.has(f"{sampling}_cap") else f"{sampling}_clip_max")
    lower = "algorithm.rollout_correction.rollout_is_threshold_lower"
    lowest = c.get(f"{sampling}_clip_min")
    if way == "mask":
        c.put(lower, lowest or _SMALLEST, f"{sampling}_clip_min", f"{sampling}_mode")
    elif lowest is not None:
        c.missing[f"{sampling}_clip_min"] = "weights are cut off at the upper bound alone"


def policy_loss(c: Conversion, method: str) -> None:
    """Convert advantages and the policy's loss."""
    c.put("algorithm.filter_groups", False, "num_generations")
    c.copy("mask_truncated_completions")
    low = number_of(c, "epsilon")
    high = c.get("epsilon_high")
    high_name = "epsilon_high"
    if high is None:
        high = low
        high_name = "epsilon"
    c.put("actor.loss.clip_ratio_low", low, "epsilon")
    c.put("actor.loss.clip_ratio_high", high, "epsilon_high", "epsilon")
    beta = number_of(c, "beta")
    if method == "rloo":
        c.put("algorithm.adv_estimator", "rloo", "num_generations")
        c.put("actor.loss.loss_agg_mode", "seq-mean-token-sum", "loss_type")
        if beta:
            c.missing["beta"] = (
                f"{beta:g}: RLOO's KL is in the reward, which is not with rloo; see actor.loss.kl_loss_coef"
            )
        if number_of(c, "num_iterations") > 1:
            c.missing["num_iterations"] = "RLOO's ratio is of whole responses; here it is of tokens"
        return
    scales = {"group": True, True: True, "none": False, False: False}
    is_normed = c.one_of("scale_rewards", scales, True, "by the group or not")
    options: dict[str, Any] = {}
    sources: list[str] = []
    if not is_normed:
        options["norm_adv_by_std_in_grpo"] = False
        sources.append("scale_rewards")
    loss = c.get("loss_type")
    has_own_ratio = loss in ("cispo", "sapo")
    c.put(
        "actor.loss.loss_agg_mode", c.one_of("loss_type", _AGGREGATIONS, "token-mean"), "loss_type"
    )
    if loss == "bnpo":
        c.notes["loss_type"] = "the mean over the tokens of an update, not of each device's pass"
    if has_own_ratio:
        c.put("actor.loss.loss_mode", loss, "loss_type")
    level = c.get("importance_sampling_level")
    if level == "sequence" and has_own_ratio:
        c.missing["importance_sampling_level"] = f"the ratio is of tokens in {loss}"
    elif level == "sequence":
        c.put("actor.loss.loss_mode", "gspo", "importance_sampling_level")
    elif level != "token":
        c.missing["importance_sampling_level"] = "token or sequence"
    if loss == "cispo":
        # TRL bounds the weight itself, and gcore its distance from 1.
        c.put("actor.loss.clip_ratio_low", 1.0, "loss_type")
        bound = low if high_name == "epsilon" else float(high)
        c.put("actor.loss.clip_ratio_high", max(0.0, bound - 1), "epsilon_high", "epsilon")
        if bound < 1:
            text = f"in TRL a weight is at most {bound:g}; here the bound is 1 or more, and 1 is written"
            c.missing[high_name] = text
    if loss == "sapo":
        for name in ("pos", "neg"):
            temperature = f"sapo_temperature_{name}"
            options[f"tau_{name}"] = number_of(c, temperature)
            sources.append(temperature)
    if options:
        c.put("algorithm.options", options, *sources)
    if c.has("delta") and not has_own_ratio and level == "token":
        c.copy("delta")
    c.put("actor.loss.kl_loss_coef", beta, "beta")
    c.copy("entropy_coef")
    if not beta:
        c.notes["use_bias_correction_kl"] = "of a KL in the loss, whose weight is 0"
    elif c.get("use_bias_correction_kl") is not False:
        c.missing["use_bias_correction_kl"] = (
            "on by default in TRL; the KL in the loss is not weighed by the ratio here"
        )


def reward(c: Conversion) -> None:
    """Convert reward functions, which TRL names by MODULE.function, and their weights."""
    functions = list(as_list(c.get("reward_funcs") or []))
    weights: list[Any] = list(c.get("reward_weights") or [1.0] * len(functions))
    terms: list[str] = []
    for function, weight in zip(functions, weights, strict=False):
        module, _, name = str(function).rpartition(".")
        if not module:
            c.missing["reward_funcs"] = (
                f"{name} is TRL's own: give a file with `from trl.rewards import {name}`"
            )
            continue
        term = f"{module.replace('.', '/')}.py:{name}"
        if weight != 1.0:
            term = f"{weight:g} * {term}"
        terms.append(term)
    if terms:
        sources = ["reward_funcs"]
        if c.has("reward_weights"):
            sources.append("reward_weights")
        c.put("reward", " + ".join(terms), *sources)
    if c.has("reward_model_name_or_path"):
        c.put("reward_model.kind", "classifier", "reward_model_name_or_path")
        c.copy("reward_model_name_or_path")
    if not (functions or c.has("reward_model_name_or_path")):
        c.missing["reward_funcs"] = "no reward in the config: give --reward FILE.py:FUNCTION"


def optimizer(c: Conversion) -> None:
    """Convert the optimizer, whose schedule counts updates in TRL and here."""
    section = "actor.optim" if c.command == "train" else "optim"
    c.copy("learning_rate", "weight_decay", "max_grad_norm", "optim", "lr_scheduler_type")
    c.put(
        f"{section}.betas", [c.get("adam_beta1"), c.get("adam_beta2")], "adam_beta1", "adam_beta2"
    )
    options: dict[str, Any] = dict(c.get("lr_scheduler_kwargs") or {})
    if "min_lr_rate" in options:
        c.put(f"{section}.min_lr_ratio", options["min_lr_rate"], "lr_scheduler_kwargs")
    elif options:
        c.missing["lr_scheduler_kwargs"] = "min_lr_rate alone"
    steps = number_of(c, "warmup_steps")
    name = "warmup_ratio" if c.get("warmup_ratio") else "warmup_steps"
    share = c.get("warmup_ratio") or 0.0
    if 0 < steps < 1:
        share = steps
    if share and f"{section}.lr_warmup_steps_ratio" in c.known:
        c.put(f"{section}.lr_warmup_steps_ratio", share, name)
    elif share and number_of(c, "max_steps") > 0:
        c.put(
            f"{section}.lr_warmup_steps",
            math.ceil(share * number_of(c, "max_steps")),
            name,
            "max_steps",
        )
    elif share:
        c.missing[name] = (
            "set actor.optim.lr_warmup_steps, in updates: the run's length follows from its data"
        )
    else:
        c.put(f"{section}.lr_warmup_steps", int(steps), "warmup_steps")


def frequencies(c: Conversion, updates: int) -> None:
    """Convert the steps between checkpoints and evaluations, which are updates in TRL."""
    if c.get("save_strategy") == "steps" and number_of(c, "save_steps") >= 1:
        c.put("trainer.save_freq", math.ceil(number_of(c, "save_steps") / updates), "save_steps")
    else:
        c.notes["save_strategy"] = "here every trainer.save_freq steps"
        c.notes["save_steps"] = "here every trainer.save_freq steps"
    c.copy("save_total_limit")
    if c.get("eval_strategy") == "steps":
        name = "eval_steps" if c.has("eval_steps") else "logging_steps"
        steps = c.get("eval_steps") or c.values.get("logging_steps") or 10
        c.put("trainer.test_freq", math.ceil(steps / updates), name, "eval_strategy")
    else:
        c.put("trainer.test_freq", NEVER, "eval_strategy")
        c.notes["eval_strategy"] = "the first and the last step evaluate"
