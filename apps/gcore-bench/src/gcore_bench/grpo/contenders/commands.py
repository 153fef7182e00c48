"""gcore on Ray and verl: systems of several processes, run by their own commands; figures are from their metrics."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_bench.grpo.measure import Step
from gcore_bench.grpo.setup import load_train_prompts, train_config
from gcore_bench.grpo.workload import PROMPT_LENGTH, Task
from gcore_bench.harness.processes import Program
from gcore_runs import build_tokenizer, read_jsonl, to_toml

_NUM_CONTROLLERS = 2
_KV_CACHE_BYTES = 256 << 20
"""Enough for the responses of a step in verl; all of it is touched at the start and counts as memory."""


def gcore_program(task: Task, *, folder: Path) -> Program:
    """Return the command `gcore-llm train` on Ray; its settings and its run are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(
        train_config(task),
        runtime="ray",
        controllers=_NUM_CONTROLLERS,
        model=str(task.model.resolve()),
        name="run",
        runs_dir=str(folder.resolve()),
    )
    settings, run = folder / "settings.toml", folder / config.name
    settings.write_text(to_toml(config))
    shutil.rmtree(run, ignore_errors=True)
    main = "from gcore_llm.cli import main; main()"
    # Responses are scored while others of the step are being generated.
    stages: dict[str, Any] = {"gen": ("gen",), "also": ("reward", "sync"), "train": ("train",)}
    return Program(
        command=[sys.executable, "-c", main, "train", "--config", str(settings.resolve())],
        environment={"OMP_NUM_THREADS": str(task.threads)},
        folder=folder,
        read=lambda: _figures(task, run / "metrics.jsonl", **stages),
    )


def verl_program(task: Task, *, python: Path, folder: Path) -> Program:
    """Return the command of verl's main program on a CPU; the files that it reads are written to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, metrics = folder / "prompts.parquet", folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    overrides = _overrides(task, prompts, num_prompts=_write_prompts(task, prompts))
    stages: dict[str, Any] = {"gen": ("gen", "update_weights"), "train": ("old_log_prob", "update_actor")}
    return Program(
        command=[
            *(str(python), "-W", "ignore", "-m", "verl.trainer.main_ppo"),
            *(f"{name}={_hydra(value)}" for name, value in overrides.items()),
        ],
        environment={
            "OMP_NUM_THREADS": str(task.threads),
            "VERL_PLATFORM": "cpu",
            # Its FSDP engine is registered for CUDA and Ascend, and runs on a CPU unchanged.
            "VERL_ENGINE_DEVICE": "cuda",
            "VERL_FILE_LOGGER_PATH": str(metrics.resolve()),
            "VERL_LOGGING_LEVEL": "WARN",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        },
        folder=folder,
        read=lambda: _figures(task, metrics, **stages),
    )


def _figures(
    task: Task, metrics: Path, *, gen: Sequence[str], train: Sequence[str], also: Sequence[str] = ()
) -> list[Step]:
    """Return the figures of each step from the seconds of a system's stages; those of ``also`` may be missing in gen.

    Its generation includes rewards.
    """
    # verl writes the metrics of a step into one entry; evaluations of gcore have rows of their own.
    rows: list[dict[str, float]] = [row.get("data", row) for row in read_jsonl(metrics)]
    return [
        {
            "wall_s": row["timing_s/step"],
            "cpu_s": None,
            "gen_s": sum(row[f"timing_s/{s}"] for s in gen) + sum(row.get(f"timing_s/{s}", 0.0) for s in also),
            "train_s": sum(row[f"timing_s/{s}"] for s in train),
            "reward_s": 0.0,
            "score": row["critic/score/mean"],
            "num_samples": task.workload.samples_per_step,
            "mean_length": row["response_length/mean"],
            "max_length": int(row["response_length/max"]),
            "lengths": (),
        }
        for row in rows
        if "timing_s/step" in row
    ]


def _write_prompts(task: Task, path: Path) -> int:
    """Write the prompts of all contenders in verl's format; return their number."""
    from datasets import Dataset, disable_progress_bars

    config = train_config(task)
    prompts = load_train_prompts(config, build_tokenizer(task.model)).train
    rows: list[dict[str, Any]] = [
        {
            "data_source": "gcore-bench",
            "prompt": [{"role": "user", "content": prompt.text}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(prompt.row["entry"])},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    disable_progress_bars()
    Dataset.from_list(rows).to_parquet(path)
    return len(rows)


def _overrides(task: Task, prompts: Path, *, num_prompts: int) -> dict[str, object]:
    """Return verl's settings where they differ from its defaults: those of `train_config`, and those for a CPU."""
    workload, config = task.workload, train_config(task)
    optim, loss = config.actor.optim, config.actor.loss
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    micro_batch_size = workload.samples_per_step // workload.trl_micro_batches
    same: dict[str, object] = {
        "data.train_files": prompts.resolve(),
        "data.val_files": prompts.resolve(),
        "data.train_batch_size": workload.train_batch_size,
        "data.max_prompt_length": PROMPT_LENGTH,
        "data.max_response_length": workload.max_response_length,
        "data.seed": task.seed,
        "actor_rollout_ref.model.path": task.model.resolve(),
        # verl renders every prompt; this gives the text as it is.
        "actor_rollout_ref.model.custom_chat_template": "{{ messages[0].content }}",
        # This module is in scripts/verl-cpu.
        "reward.custom_reward_function.path": "pkg://gcore_bench_reward",
        "+reward.custom_reward_function.reward_kwargs.reward": workload.reward,
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": config.algorithm.norm_adv_by_std_in_grpo,
        f"{rollout}.n": workload.n,
        f"{rollout}.temperature": config.rollout.temperature,
        f"{rollout}.seed": task.seed,
        f"{rollout}.max_num_seqs": workload.samples_per_step,
        f"{actor}.optim.lr": optim.lr,
        f"{actor}.optim.betas": list(optim.betas),
        f"{actor}.optim.weight_decay": optim.weight_decay,
        f"{actor}.optim.clip_grad": optim.grad_clip,
        f"{actor}.optim.lr_scheduler_type": optim.lr_scheduler_type,
        f"{actor}.ppo_mini_batch_size": workload.train_batch_size,
        f"{actor}.ppo_epochs": config.actor.ppo_epochs,
        f"{actor}.clip_ratio_low": loss.clip_ratio_low,
        f"{actor}.clip_ratio_high": loss.clip_ratio_high,
        f"{actor}.loss_agg_mode": loss.loss_agg_mode,
        f"{actor}.entropy_coeff": loss.entropy_coeff,
        # The ratio's denominator is the engine's log-probs, which spares verl a forward pass.
        "algorithm.rollout_correction.bypass_mode": True,
        "trainer.total_training_steps": task.steps,
        "trainer.total_epochs": -(-task.steps * workload.train_batch_size // num_prompts) + 1,
    }
    on_a_cpu: dict[str, object] = {
        "trainer.device": "cpu",
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_micro_batch_size_per_gpu": micro_batch_size,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.dtype": "float32",
        # Without this it computes in bfloat16.
        f"++{actor}.fsdp_config.mixed_precision": {f"{kind}_dtype": "fp32" for kind in ("param", "reduce", "buffer")},
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.dtype": "float32",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.free_cache_engine": False,
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.load_format": "auto",
        f"{rollout}.max_model_len": PROMPT_LENGTH + workload.max_response_length,
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": _KV_CACHE_BYTES,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro_batch_size,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        # The default of both is eight.
        f"{rollout}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 1,
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.num_gpus": 1,
        # Ray's count alone: verl's workers reserve this many.
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 1 << 30,
        "trainer.logger": ["file"],
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
    }
    return same | on_a_cpu


def _hydra(value: object) -> str:
    """Format a value in the grammar of Hydra's command line."""
    match value:
        case list():
            return f"[{','.join(map(_hydra, value))}]"
        case dict():
            return "{" + ",".join(f"{name}:{_hydra(entry)}" for name, entry in value.items()) + "}"
        case str() | Path():
            return f"'{value}'"
        case _:
            return str(value)
