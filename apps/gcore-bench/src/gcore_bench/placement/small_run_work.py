"""The work of a process of a small run: a training step, generation, or a whole run of `gcore-llm train`."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gcore_bench.harness.measure import measured, settle, status_bytes
from gcore_bench.harness.processes import Spec, joined_world
from gcore_bench.placement.small_runs import SmallRun
from gcore_bench.trainer import LOSS, OPTIMIZER
from gcore_placement import balance, micro_batches
from gcore_rollout import HFEngine, Request, SamplingParams
from gcore_rollout.engines.hf.decoding import ATTENTION_NAME
from gcore_trainer import PackedModel, ParallelConfig, PolicyObjective, Sample, TorchParallel, TorchTrainer
from gcore_trainer.torch import packed_model as packed_attention


def run(spec: Spec) -> dict[str, dict[str, float]]:
    """Seconds of the run, and of a training process its peak bytes."""
    small, times = spec.options["run"], spec.options["steps"]
    torch.manual_seed(0)
    if small.kind == "generation":
        figures = {"step_s": _generation_s(small, times)}
    elif small.kind == "step":
        figures = {"step_s": _whole_step_s(small, Path(spec.folder), times)}
    else:
        with joined_world(spec) if spec.world_size > 1 else nullcontext():
            parallel = TorchParallel.join(ParallelConfig()) if spec.world_size > 1 else None
            figures = _train(small, spec.rank, times, parallel)
    return {spec.contender: figures}


def _train(run: SmallRun, rank: int, times: int, parallel: TorchParallel | None) -> dict[str, float]:
    batches = _batches(run, rank)
    # Buffers of the libraries are not counted as tensors.
    tiny = {**run.config, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    tiny |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
    sample = _sample(np.ones(2, np.int64), 2, 64, np.random.default_rng(0))
    _trainer(tiny, run, parallel).train_step([[sample]])
    settle()
    before_bytes = status_bytes("VmRSS")
    trainer = _trainer(run.config, run, parallel)
    settle()
    held_bytes = status_bytes("VmRSS") - before_bytes
    figures = measured(lambda: trainer.train_step(batches), times=times)
    return {"step_s": figures["step_s"], "process_bytes": held_bytes + figures["peak_bytes"]}


def _trainer(config: Mapping[str, Any], run: SmallRun, parallel: TorchParallel | None) -> TorchTrainer:
    packed_attention.register()
    return TorchTrainer(
        PackedModel(_model(config, packed_attention.ATTENTION_NAME), gradient_checkpointing=run.gradient_checkpointing),
        optimizer=OPTIMIZER,
        objective=PolicyObjective(LOSS),
        parallel=parallel,
    )


def _model(config: Mapping[str, Any], attention: str) -> Any:
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **sizes)
    return AutoModelForCausalLM.from_config(made, attn_implementation=attention)


def _batches(run: SmallRun, rank: int) -> list[list[Sample]]:
    """This rank's micro-batches of whole groups, of even cost, as `gcore-llm train` makes them."""
    rng = np.random.default_rng(0)
    vocab_size, workload = run.config["vocab_size"], run.job.policy.workload
    prompts = [rng.integers(2, vocab_size, length) for length in run.prompts]
    groups = [
        [_sample(prompt, length, vocab_size, rng) for length in lengths]
        for prompt, lengths in zip(prompts, run.responses, strict=True)
    ]
    costs = workload.group_flops(np.array(run.prompts), np.array(run.responses))
    tokens = [prompt + sum(lengths) for prompt, lengths in zip(run.prompts, run.responses, strict=True)]
    parts = micro_batches(tokens, max_tokens=run.max_tokens, costs=costs, num_multiple=run.ranks)
    owned = balance([costs[part].sum() for part in parts], run.ranks, equal_count=True)[rank]
    return [[sample for g in parts[k].tolist() for sample in groups[g]] for k in owned.tolist()]


def _sample(prompt_ids: Any, length: int, vocab_size: int, rng: np.random.Generator) -> Sample:
    return Sample(
        prompt_ids=prompt_ids,
        response_ids=rng.integers(2, vocab_size, length),
        advantages=rng.normal(size=length).astype(np.float32),
        old_log_probs=np.full(length, -np.log(vocab_size), np.float32),
    )


def _generation_s(run: SmallRun, times: int) -> float:
    model = _model(run.config, ATTENTION_NAME)
    engine = HFEngine(model, eos_token_ids=[], max_num_seqs=run.max_num_seqs)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(rng.integers(2, run.config["vocab_size"], length).tolist()),
            sampling=SamplingParams(max_tokens=responses[0]),
            n=len(responses),
            seed=number,
        )
        for number, (length, responses) in enumerate(zip(run.prompts, run.responses, strict=True))
    ]

    async def generate() -> None:
        async for _ in engine.generate(requests):
            pass

    with asyncio.Runner() as runner:
        seconds = measured(lambda: runner.run(generate()), times=times)["step_s"]
        runner.run(engine.close())
    return seconds


def _whole_step_s(run: SmallRun, folder: Path, times: int) -> float:
    """The median but for the first, which touches memory for the first time."""
    from gcore_llm import ActorConfig, AlgorithmConfig, DataConfig, RolloutConfig, TrainConfig, TrainerConfig, train
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_runs import read_jsonl, write_jsonl

    model, prompts, reward = folder / "step-model", folder / "prompts.jsonl", folder / "reward.py"
    _model(run.config, "sdpa").save_pretrained(model)
    # A character a token.
    tiny_tokenizer().save_pretrained(model)
    rng = np.random.default_rng(0)
    rows = [{"prompt": "".join(rng.choice(list("abcdefgh"), size))} for _ in range(times + 1) for size in run.prompts]
    write_jsonl(prompts, rows)
    reward.write_text("def score(prompt, completion, row):\n    return float(len(completion) % 3)\n")
    config = TrainConfig(
        runs_dir=str(folder / "runs"),
        model=str(model),
        reward=f"{reward}:score",
        threads=torch.get_num_threads(),
        device="cpu",
        data=DataConfig(
            train_files=(str(prompts),),
            val_size=0,
            train_batch_size=len(run.prompts),
            max_prompt_length=max(run.prompts),
            max_response_length=run.responses[0][0],
        ),
        rollout=RolloutConfig(n=len(run.responses[0]), max_num_seqs=run.max_num_seqs),
        algorithm=AlgorithmConfig(filter_groups=False),
        actor=ActorConfig(optim=OPTIMIZER, loss=LOSS, ppo_max_token_len=run.max_tokens),
        trainer=TrainerConfig(total_training_steps=times + 1, save_freq=times + 1, tensorboard=False),
    )
    metrics = read_jsonl(train(config).run / "metrics.jsonl")
    return median(row["timing_s/step"] for row in metrics if row["step"] > 1 and "timing_s/step" in row)
