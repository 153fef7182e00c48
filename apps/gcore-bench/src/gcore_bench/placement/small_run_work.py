"""The work of a process of a small run: a training step, generation, or a whole run of `gcore-llm train`."""

import asyncio
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gcore_bench.harness.processes import (
    Spec,
    joined_world,
    measure_work,
    settle,
    status_bytes,
    train_here,
)
from gcore_bench.placement.small_runs import SmallRun
from gcore_bench.rollout import collect
from gcore_bench.trainer import LOSS, OPTIMIZER
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_placement import balance, micro_batches
from gcore_rollout import HFEngine, Request, SamplingParams
from gcore_rollout.engines.hf.decoding import ATTENTION_NAME
from gcore_runs import write_jsonl
from gcore_trainer import (
    PackedModel,
    ParallelConfig,
    PolicyObjective,
    Sample,
    TorchParallel,
    TorchTrainer,
)
from gcore_trainer.torch import packed_model as packed_attention

_OPTIONS = """
--recipe=own_data --device=cpu --runs-dir=FOLDER/runs --model=FOLDER/step-model --reward=FOLDER/reward.py:score
--data.train-files=FOLDER/prompts.jsonl --data.val-size=0 --data.train-batch-size={prompts}
--data.max-prompt-length={prompt_length} --data.max-response-length={response_length}
--rollout.n={n} --rollout.max-num-seqs={run.max_num_seqs} --algorithm.filter-groups=False
--actor.optim.lr={optim.lr} --actor.optim.grad-clip={optim.grad_clip} --actor.ppo-max-token-len={run.max_tokens}
--trainer.total-training-steps={steps} --trainer.save-freq={steps} --trainer.tensorboard=False
"""
_REWARD = "def score(prompt, completion, row):\n    return float(len(completion) % 3)\n"


def run(spec: Spec) -> dict[str, float]:
    """Measure the seconds of the run, and the peak bytes of a training process."""
    run, times = spec.options
    torch.manual_seed(0)
    if run.stage == "generation":
        figures = {"step_s": measure_generation(run, times)}
    elif run.stage == "step":
        figures = {"step_s": measure_whole_step(run, spec.folder, times)}
    elif spec.world_size == 1:
        figures = measure_training(run, 0, times, None)
    else:
        with joined_world(spec):
            figures = measure_training(run, spec.rank, times, TorchParallel.join(ParallelConfig()))
    return figures


def measure_training(
    run: SmallRun, rank: int, times: int, parallel: TorchParallel | None
) -> dict[str, float]:
    """Measure training steps, and the peak memory of this process."""
    batches = _make_batches(run, rank)
    # A step of a tiny model first: buffers of the libraries are not counted.
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
    sample = _make_sample(np.ones(2, np.int64), 2, 64, np.random.default_rng(0))
    tiny = _make_trainer({**run.config, **sizes}, run, parallel)
    tiny.train_step([[sample]])
    del tiny
    settle()
    before_bytes = status_bytes("VmRSS")
    trainer = _make_trainer(run.config, run, parallel)
    settle()
    trainer_bytes = status_bytes("VmRSS") - before_bytes
    figures = measure_work(lambda: trainer.train_step(batches), times=times)
    return {"step_s": figures["step_s"], "process_bytes": trainer_bytes + figures["peak_bytes"]}


def _make_trainer(
    config: Mapping[str, Any], run: SmallRun, parallel: TorchParallel | None
) -> TorchTrainer:
    packed_attention.register()
    model = _make_model(config, packed_attention.ATTENTION_NAME)
    packed = PackedModel(model, gradient_checkpointing=run.gradient_checkpointing)
    return TorchTrainer(
        packed, optimizer=OPTIMIZER, objective=PolicyObjective(LOSS), parallel=parallel
    )


def _make_model(config: Mapping[str, Any], attention: str) -> Any:
    sizes = dict(config)
    model_config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    return AutoModelForCausalLM.from_config(model_config, attn_implementation=attention)


def _make_batches(run: SmallRun, rank: int) -> list[list[Sample]]:
    """Return this rank's micro-batches of whole groups, of even cost, as `gcore-llm train` makes them."""
    rng = np.random.default_rng(0)
    vocab_size = run.config["vocab_size"]
    prompts = [rng.integers(2, vocab_size, length) for length in run.prompts]
    groups: list[list[Sample]] = []
    tokens: list[int] = []
    for prompt, lengths in zip(prompts, run.responses, strict=True):
        groups.append([_make_sample(prompt, length, vocab_size, rng) for length in lengths])
        tokens.append(len(prompt) + sum(lengths))
    costs = run.job.policy.workload.group_flops(np.array(run.prompts), np.array(run.responses))
    parts = micro_batches(
        tokens,
        max_tokens=run.max_tokens,
        costs=costs,
        num_multiple=run.ranks,
    )
    of_ranks = balance([costs[part].sum() for part in parts], run.ranks, equal_count=True)
    batches: list[list[Sample]] = []
    for part in of_ranks[rank]:
        batch = chain.from_iterable(groups[group] for group in parts[part])
        batches.append(list(batch))
    return batches


def _make_sample(prompt_ids: Any, length: int, vocab_size: int, rng: np.random.Generator) -> Sample:
    return Sample(
        prompt_ids=prompt_ids,
        response_ids=rng.integers(2, vocab_size, length),
        advantages=rng.normal(size=length).astype(np.float32),
        old_log_probs=np.full(length, -np.log(vocab_size), np.float32),
    )


def measure_generation(run: SmallRun, times: int) -> float:
    """Return the median seconds in which the engine generates all responses."""
    model = _make_model(run.config, ATTENTION_NAME)
    engine = HFEngine(model, eos_token_ids=[], max_num_seqs=run.max_num_seqs)
    rng = np.random.default_rng(0)
    requests: list[Request] = []
    for number, responses in enumerate(run.responses):
        prompt = rng.integers(2, run.config["vocab_size"], run.prompts[number])
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=responses[0]),
            n=len(responses),
            seed=number,
        )
        requests.append(request)
    with asyncio.Runner() as runner:
        figures = measure_work(lambda: runner.run(collect(engine, requests)), times=times)
        runner.run(engine.close())
    return figures["step_s"]


def measure_whole_step(run: SmallRun, folder: Path, times: int) -> float:
    """Return the median seconds of a step of `gcore-llm train`, without the first, which touches new memory."""
    model = folder / "step-model"
    _make_model(run.config, "sdpa").save_pretrained(model)
    # One character is one token.
    tiny_tokenizer().save_pretrained(model)
    rng = np.random.default_rng(0)
    rows: list[dict[str, str]] = []
    for size in np.tile(run.prompts, times + 1):
        letters = rng.choice(list("abcdefgh"), size)
        rows.append({"prompt": "".join(letters)})
    write_jsonl(folder / "prompts.jsonl", rows)
    (folder / "reward.py").write_text(_REWARD)
    options = _OPTIONS.format(
        prompts=len(run.prompts),
        prompt_length=max(run.prompts),
        response_length=run.responses[0][0],
        n=len(run.responses[0]),
        run=run,
        optim=OPTIMIZER,
        steps=times + 1,
    )
    options = [option.replace("FOLDER", str(folder)) for option in options.split()]
    return median(row["timing_s/step"] for row in train_here(options)[1:])
