"""The settings of `gcore-llm train` that follow from those of verl's PPO trainer."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcore_llm.config import TrainConfig
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
from gcore_llm.migration.verl_algorithm import (
    ACTOR,
    ASYNC,
    BYPASSES,
    algorithm,
    options,
    policy_loss,
)
from gcore_rollout import engine_kind
from gcore_runs.migration.keys import Key, find_key, read_keys
from gcore_runs.settings.checks import convert_value, flatten

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

_OVERLONG_BUFFERS = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
_SYNC_STEPS = f"{ASYNC}.trigger_parameter_sync_step"
_FETCHED = f"{ASYNC}.require_batches"
_FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
_TEACHERS = "distillation.teacher_models"
_BUILT_IN_SCORERS = "verl's scorers by data_source; give --reward NAME, or a file that imports default_compute_score"


def convert_verl_config(source: SourceConfig) -> Conversion:
    """Return the conversion of a config of verl's PPO trainer."""
    values = flatten(source.values)
    is_fully_async = "fully_async" in source.trainer or any(
        name.startswith(f"{ASYNC}.") for name in values
    )
    conversion = Conversion(
        library="verl",
        command="train",
        config=TrainConfig(),
        keys={**read_keys("verl"), **_teacher_keys(values)},
        values=values,
        trainer=source.trainer or (_FULLY_ASYNC if is_fully_async else "verl.trainer.main_ppo"),
        defaults={BYPASSES[0]: True} if is_fully_async else {},
        cautions=source.cautions,
        explicit=source.explicit,
    )
    data(conversion)
    updates = batches(conversion)
    model(conversion)
    layout(conversion)
    rollout(conversion)
    algorithm(conversion)
    policy_loss(conversion)
    optimizer(conversion, f"{ACTOR}.optim", "actor.optim", updates)
    critic(conversion, updates)
    reward(conversion)
    distillation(conversion)
    options(conversion)
    run(conversion)
    return conversion


def _teacher_keys(values: Iterable[str]) -> dict[str, Key]:
    """Return the keys of teachers by the names that the config gives them: they are those of verl's only teacher."""
    keys: dict[str, Key] = {}
    for name in values:
        if name.startswith(f"{_TEACHERS}."):
            _, _, option = name.removeprefix(f"{_TEACHERS}.").partition(".")
            key = find_key(read_keys("verl"), f"{_TEACHERS}.teacher_model.{option}")
            if key is not None:
                keys[name] = key
    return keys


def _is_fully_async(c: Conversion) -> bool:
    """Return whether the config is of verl's fully asynchronous trainer."""
    return "fully_async" in c.trainer


def data(c: Conversion) -> None:
    """Convert the data's settings."""
    for side in ("train", "val"):
        name = f"data.{side}_files"
        files = as_list(c.get(name) or [])
        if files:
            c.put(name, [_expand_home(file) for file in files], name)
    c.copy(
        "data.prompt_key",
        "data.max_prompt_length",
        "data.max_response_length",
        "data.train_batch_size",
        "data.seed",
    )
    c.copy_section("data.apply_chat_template_kwargs", "data.chat_template_kwargs")
    if "data.image_key" in c.explicit:
        c.copy("data.image_key")
    else:
        c.notes["data.image_key"] = "verl's default; set data.image_key where prompts have images"


def batches(c: Conversion) -> int:
    """Convert the sizes of batches and micro-batches; return the updates of a step of the learning rate."""
    prompts = "data.train_batch_size"
    mini = f"{ACTOR}.ppo_mini_batch_size"
    epochs = f"{ACTOR}.ppo_epochs"
    c.copy(mini, epochs)
    longest = int(number_of(c, "data.max_prompt_length") + number_of(c, "data.max_response_length"))
    ranks = count_of(c, _ulysses(c))
    per_gpu = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    of_all_gpus = f"{ACTOR}.ppo_micro_batch_size"
    is_dynamic = f"{ACTOR}.use_dynamic_bsz"
    if c.get(is_dynamic) or not c.has(per_gpu, of_all_gpus):
        name = f"{ACTOR}.ppo_max_token_len_per_gpu"
        size = count_of(c, name) * ranks
    else:
        name = per_gpu
        gpus = 1
        if not c.has(per_gpu):
            name = of_all_gpus
            gpus = _world(c)
        size = max(1, count_of(c, name) // gpus) * longest
        c.notes[name] = f"as many tokens as its samples have at most, {longest} each"
    c.put("actor.ppo_max_token_len", max(size, longest), name, is_dynamic)
    if _is_fully_async(c):
        fetched = count_of(c, _FETCHED)
        size = count_of(c, _SYNC_STEPS) * fetched * count_of(c, mini)
        c.put(prompts, size, _SYNC_STEPS, _FETCHED, mini)
        c.notes[prompts] = f"0 in verl, which streams prompts; weights are new after {size}"
        return fetched * count_of(c, epochs)
    return math.ceil(number_of(c, prompts) / number_of(c, mini)) * count_of(c, epochs)


def model(c: Conversion) -> None:
    """Convert the model's settings."""
    path = f"{MODEL}.path"
    if c.has(path):
        c.put("model", _expand_home(c.get(path)), path)
    c.copy(
        f"{MODEL}.lora_adapter_path",
        f"{MODEL}.enable_gradient_checkpointing",
        f"{MODEL}.enable_activation_offload",
    )
    section = f"{MODEL}.lora." if c.get(f"{MODEL}.lora.rank") else f"{MODEL}.lora_"
    if c.get(f"{section}rank"):
        c.copy(f"{section}rank", f"{section}alpha")
        targets = f"{MODEL}.target_modules"
        c.put("actor.target_modules", as_list(c.get(targets)), targets)


def layout(c: Conversion) -> None:
    """Convert the training backend and its ranks."""
    if c.get("model_engine") == "megatron":
        c.put("trainer.backend", "megatron", "model_engine")
    else:
        c.copy(f"{ACTOR}.strategy")
    c.put("trainer.num_processes", _world(c), "trainer.nnodes", "trainer.n_gpus_per_node")
    if _world(c) > 1 or _is_fully_async(c):
        c.put("runtime", "ray", "trainer.nnodes", "trainer.n_gpus_per_node")
    if c.settings["trainer.backend"] == "megatron":
        for dimension in (
            "tensor_model",
            "pipeline_model",
            "virtual_pipeline_model",
            "context",
            "expert_model",
        ):
            c.copy(f"{ACTOR}.megatron.{dimension}_parallel_size")
        is_split = number_of(c, f"{ACTOR}.megatron.tensor_model_parallel_size") > 1
        parallel = f"{ACTOR}.megatron.sequence_parallel"
        c.put("trainer.parallel.sequence_parallel", bool(c.get(parallel)) and is_split, parallel)
        c.copy(f"{ACTOR}.megatron.override_transformer_config.recompute_granularity")
        of_optimizer = f"{ACTOR}.megatron.optimizer_offload"
        c.put("actor.offload", "optimizer" if c.get(of_optimizer) else "none", of_optimizer)
        return
    name = _ulysses(c)
    ranks = count_of(c, name)
    if ranks > 1:
        c.put("trainer.parallel.context_parallel_size", ranks, name)
        c.put("trainer.parallel.ulysses_sequence_parallel_size", ranks, name)
    fsdp_size = f"{ACTOR}.fsdp_config.fsdp_size"
    shards = count_of(c, fsdp_size)
    if not 0 < shards < _world(c):
        shards = 0
    c.put("trainer.parallel.fsdp_size", shards, fsdp_size)
    of_parameters = f"{ACTOR}.fsdp_config.param_offload"
    of_optimizer = f"{ACTOR}.fsdp_config.optimizer_offload"
    offload = "none"
    if c.get(of_parameters):
        offload = "all"
    elif c.get(of_optimizer):
        offload = "optimizer"
    c.put("actor.offload", offload, of_parameters, of_optimizer)
    dtype = f"{ACTOR}.fsdp_config.dtype"
    if c.get(dtype) not in ("bfloat16", "bf16"):
        c.copy(dtype)


def _ulysses(c: Conversion) -> str:
    """Return the key of the sequence's ranks that counts: verl takes the older one where it is above 1."""
    older = f"{ACTOR}.ulysses_sequence_parallel_size"
    return (
        older if number_of(c, older) > 1 else f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    )


def rollout(c: Conversion) -> None:
    """Convert the engine's settings."""
    engine = c.one_of(
        f"{ROLLOUT}.name", {"vllm": "vllm", "hf": "hf", "???": "vllm"}, "vllm", _ENGINES
    )
    c.put("rollout.engine", engine, f"{ROLLOUT}.name")
    c.copy(f"{ROLLOUT}.n", f"{ROLLOUT}.temperature", f"{ROLLOUT}.max_num_seqs")
    c.copy(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
    tensor_size = f"{ROLLOUT}.tensor_model_parallel_size"
    gpus_per_engine = count_of(c, tensor_size)
    if engine == "vllm":
        c.put("rollout.tensor_parallel_size", gpus_per_engine, tensor_size)
        _engine_options(c)
    else:
        gpus_per_engine = 1
    is_fully_async = _is_fully_async(c)
    if _world(c) > 1 or is_fully_async:
        section = "rollout" if is_fully_async else "trainer"
        nodes = f"{section}.nnodes"
        gpus = f"{section}.n_gpus_per_node"
        world = int(number_of(c, nodes) * number_of(c, gpus))
        engines = max(1, world // gpus_per_engine)
        c.put("rollout.num_processes", engines, nodes, gpus, tensor_size)
        c.put("controllers", min(engines, count_of(c, nodes)), nodes)
        if not is_fully_async and c.get("trainer.v1.trainer_mode") != "separate_async":
            c.put("rollout.colocated", True, "trainer.v1.trainer_mode")
    val = f"{ROLLOUT}.val_kwargs"
    if c.get(f"{val}.do_sample"):
        c.put("rollout.val_kwargs.n", c.get(f"{val}.n"), f"{val}.n", f"{val}.do_sample")
        c.copy(f"{val}.temperature", f"{val}.top_p", f"{val}.top_k")
    if is_fully_async:
        schedule_fully_async(c)
        return
    mode = "trainer.v1.trainer_mode"
    c.copy(mode)
    if c.settings["trainer.schedule"] == "async":
        sampler = "trainer.v1.sampler"
        c.copy(f"{sampler}.max_off_policy_threshold", f"{sampler}.max_off_policy_strategy")


def schedule_fully_async(c: Conversion) -> None:
    """Convert how far sampling is ahead of training in verl's fully asynchronous trainer."""
    share = f"{ASYNC}.staleness_threshold"
    staleness = number_of(c, share)
    if staleness > 0:
        c.put("trainer.schedule", "async", share)
        c.put("rollout.max_staleness", math.ceil(staleness), share)
        c.notes[share] = (
            "a share of the prompts between two updates of the engines in verl, and whole steps here"
        )
    else:
        c.put("trainer.schedule", "sync", share)
        c.notes[f"{ASYNC}.partial_rollout"] = "of a staleness_threshold above 0"


def _engine_options(c: Conversion) -> None:
    """Convert the arguments of vLLM."""
    experts = f"{ROLLOUT}.expert_parallel_size"
    quantization = f"{ROLLOUT}.quantization"
    batched = f"{ROLLOUT}.max_num_batched_tokens"
    tokens = convert_value(batched, c.get(batched), int | None)
    share = f"{ROLLOUT}.gpu_memory_utilization"
    options: dict[str, Any] = {"max_num_batched_tokens": tokens}
    options["gpu_memory_utilization"] = convert_value(share, c.get(share), float | None)
    sources = [share, batched]
    if number_of(c, experts) > 1:
        options["enable_expert_parallel"] = True
        sources.append(experts)
    if c.get(quantization) is not None:
        options["quantization"] = c.get(quantization)
        sources.append(quantization)
    for key, value in c.values.items():
        _, is_vllm, name = key.partition(f"{ROLLOUT}.engine_kwargs.vllm.")
        if not is_vllm or value is None:
            continue
        if name in engine_kind("vllm").reserved_options:
            c.missing[key] = "gcore gives this argument itself"
            continue
        options[name] = value
        sources.append(key)
    c.put("rollout.engine_options", options, *sources)


_ENGINES = "sglang needs rollout.engine_options.server_python, an environment of its own, and there are no others"


def optimizer(c: Conversion, theirs: str, ours: str, updates: int) -> None:
    """Convert an optimizer's settings; verl's schedule counts steps, gcore's the updates in them."""
    for name in ("lr", "weight_decay", "betas", "optimizer"):
        c.copy(f"{theirs}.{name}")
    clip = f"{theirs}.clip_grad"
    older = f"{theirs.removesuffix('.optim')}.grad_clip"
    if c.has(older) and not c.has(clip):
        clip = older
    c.copy(clip)
    if c.has(f"{theirs}.eps"):
        c.copy(f"{theirs}.eps")
    steps = f"{theirs}.lr_warmup_steps"
    share = f"{theirs}.lr_warmup_steps_ratio"
    total = c.get("trainer.total_training_steps")
    if number_of(c, steps) > 0:
        c.put(f"{ours}.lr_warmup_steps", count_of(c, steps) * updates, steps)
        c.notes[steps] = f"in updates, of which a step has {updates}"
    elif c.get(share) and total:
        c.put(
            f"{ours}.lr_warmup_steps",
            int(c.get(share) * total) * updates,
            share,
            "trainer.total_training_steps",
        )
    elif c.get(share):
        c.missing[share] = (
            f"set {ours}.lr_warmup_steps, in updates: the run's length follows from its data"
        )
    schedule = f"{theirs}.lr_scheduler_type"
    for name in (f"{theirs}.warmup_style", f"{theirs}.lr_decay_style"):
        if c.has(name):
            schedule = name
    c.copy(schedule)
    lowest = f"{theirs}.min_lr"
    if c.get(lowest):
        c.put(f"{ours}.min_lr_ratio", c.get(lowest) / c.get(f"{theirs}.lr"), lowest, f"{theirs}.lr")
    else:
        c.copy(f"{theirs}.min_lr_ratio")


def critic(c: Conversion, updates: int) -> None:
    """Convert the critic's settings, where there is one."""
    if c.settings["algorithm.adv_estimator"] != "gae":
        return
    optimizer(c, "critic.optim", "critic.optim", updates)
    for name in ("ppo_epochs", "ppo_mini_batch_size"):
        if c.get(f"critic.{name}") == c.get(f"{ACTOR}.{name}"):
            c.notes[f"critic.{name}"] = "as the actor's"
    c.copy("critic.cliprange_value", "critic.loss_agg_mode", "trainer.critic_warmup")
    if c.has("critic.model.path"):
        c.put("critic.model", _expand_home(c.get("critic.model.path")), "critic.model.path")


def reward(c: Conversion) -> None:
    """Convert the reward function, or the reward model."""
    for function in ("reward.custom_reward_function", "custom_reward_function"):
        path = f"{function}.path"
        name = f"{function}.name"
        if c.has(path):
            c.put("reward", f"{_expand_home(c.get(path))}:{c.get(name)}", path, name)
            c.copy_section(f"{function}.reward_kwargs", "reward_kwargs")
            break
    for enable, path in (
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
        ("reward_model.enable", "reward_model.model.path"),
    ):
        if c.get(enable) and c.has(path):
            c.put("reward_model.kind", "classifier", enable)
            c.copy(path)
    if not {"reward", "reward_model.kind"} & c.settings.keys():
        c.missing["custom_reward_function.path"] = _BUILT_IN_SCORERS
    for section in _OVERLONG_BUFFERS:
        if c.get(f"{section}.enable"):
            length = f"{section}.len"
            c.put("algorithm.overlong.buffer_len", c.get(length), length, f"{section}.enable")
            c.copy(f"{section}.penalty_factor")
        longest = section.replace("overlong_buffer_cfg", "max_resp_len")
        if longest in c.values and c.get(longest) == c.get("data.max_response_length"):
            c.notes[longest] = "data.max_response_length"


def distillation(c: Conversion) -> None:
    """Convert teachers, whose reverse KL is here an advantage, as k1 with a policy gradient is in verl."""
    paths = [
        name
        for name in c.values
        if name.startswith(f"{_TEACHERS}.") and name.endswith(".model_path")
    ]
    default = f"{_TEACHERS}.teacher_model.model_path"
    if len(paths) > 1 and default in paths:
        # Where there are several, verl leaves out the teacher of its defaults.
        paths.remove(default)
    paths = list(filter(c.has, paths))
    if not (c.get("distillation.enabled") and paths):
        return
    c.put(
        "distillation.teachers",
        [_expand_home(c.get(path)) for path in paths],
        *paths,
        "distillation.enabled",
    )
    if len(paths) > 1:
        sources = [path.removesuffix("model_path") + "key" for path in paths]
        c.put("distillation.sources", [str(c.get(source)) for source in sources], *sources)
        c.copy("distillation.teacher_key")
    loss = "distillation.distillation_loss"
    c.copy(f"{loss}.distillation_loss_coef")
    if not c.get(f"{loss}.use_task_rewards"):
        c.put("algorithm.adv_estimator", "distillation", f"{loss}.use_task_rewards")
        c.missing.pop("custom_reward_function.path", None)
    c.missing[f"{loss}.loss_mode"] = (
        "the loss is the reverse KL at the policy's own tokens, as an advantage"
    )


def run(c: Conversion) -> None:
    """Convert the run's name, length, checkpoints and evaluations."""
    c.put("name", folder_name(c.get("trainer.experiment_name")), "trainer.experiment_name")
    if "trainer.logger" in c.values:
        convert_trackers(
            c, "trainer.logger", "trainer.project_name", ("console", "tensorboard", "file")
        )
    c.notes["trainer.project_name"] = "of the trackers that trainer.logger names"
    c.notes.setdefault("trainer.logger", WRITTEN)
    steps = "trainer.total_training_steps"
    rollouts = "rollout.total_rollout_steps"
    if _is_fully_async(c):
        length = count_of(c, rollouts) // c.settings["data.train_batch_size"]
        c.put(steps, max(1, length), rollouts)
        c.notes["trainer.total_epochs"] = (
            f"{rollouts} is set; verl ends after so many epochs, if these are fewer steps"
        )
    elif c.has(steps):
        c.copy(steps)
        c.notes["trainer.total_epochs"] = "trainer.total_training_steps is set"
    else:
        c.copy("trainer.total_epochs")
    save = "trainer.save_freq"
    if number_of(c, save) > 0:
        c.copy(save)
    else:
        c.notes[save] = "never in verl; here as often as by default"
    test = "rollout.test_freq" if c.has("rollout.test_freq") else "trainer.test_freq"
    if number_of(c, test) > 0:
        c.copy(test)
    else:
        c.put("trainer.test_freq", NEVER, test)
        c.notes[test] = "never in verl; here at the first and the last step"
    c.copy("trainer.resume_mode", "trainer.max_actor_ckpt_to_keep")
    c.notes["trainer.device"] = "device auto finds it"
    if c.get("trainer.device") == "cpu":
        c.put("device", "cpu", "trainer.device")
    elif c.get("trainer.device") == "npu":
        c.missing["trainer.device"] = "NVIDIA GPUs and CPUs"


def _expand_home(path: object) -> str:
    if str(path).startswith("~"):
        return str(Path(str(path)).expanduser())
    return str(path)


def _world(c: Conversion) -> int:
    return int(number_of(c, "trainer.nnodes") * number_of(c, "trainer.n_gpus_per_node"))
