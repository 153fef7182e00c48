"""The models that contenders train, made once from gcore-llm's parts and kept."""

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gcore_bench.grpo.settings import load_train_prompts, train_config
from gcore_bench.grpo.workload import Workload
from gcore_llm.config import WarmupConfig
from gcore_llm.finetune.warmup import warm_up
from gcore_llm.sampling.rewards import make_runner, reward_function
from gcore_llm.tiny_model import make_tiny_model
from gcore_runs import build_tokenizer
from gcore_runs.display import Display
from gcore_runs.run_folder import RunFolder, write_atomically
from gcore_runs.settings.parsing import resolve

MEAN_LENGTH = 50
"""Mean length of the long-tailed model's answers without a limit."""
_NUM_JUDGED = 256


def make_model(workload: Workload, folder: Path, *, threads: int) -> None:
    """Make the model that the workload trains."""
    torch.set_num_threads(threads)
    folder.parent.mkdir(parents=True, exist_ok=True)
    make = {"warmed_up": _make_warmed_up, "long_tailed": _make_long_tailed}[workload.model]
    make(workload, folder, threads)


def _make_warmed_up(workload: Workload, folder: Path, threads: int) -> None:
    """Fine-tune gcore-llm's tiny model until about four of ten sampled sums are correct."""
    warmup = WarmupConfig(max_steps=400, target_accuracy=0.4, test_freq=10)
    config = replace(resolve(train_config(workload, threads=threads)), warmup=warmup)
    run = RunFolder(folder.with_name(f"{folder.name}-run"))
    initial = run.path / "initial-model"
    make_tiny_model(initial, seed=config.seed)
    tokenizer = build_tokenizer(initial)
    prompts = load_train_prompts(config, tokenizer)
    judged = replace(prompts, val=prompts.train[:_NUM_JUDGED])
    with Display() as display:
        reward = make_runner(reward_function(config), config)
        asyncio.run(warm_up(config, run, initial, judged, tokenizer, reward, display))
    run.model.rename(folder)
    shutil.rmtree(run.path)


def _make_long_tailed(workload: Workload, folder: Path, _threads: int) -> None:
    """Make gcore-llm's tiny model, untrained, end after every token with the same probability.

    Channel 0 of the embedding, which is tied to the head, is a constant: for any text it dominates that channel of the
    last hidden state, so that a token's value in it acts as a bias of its logit. The end of the sequence has the bias
    that makes its probability 1 / MEAN_LENGTH; tokens that are not printable characters are excluded.
    """

    def write(partial: Path) -> None:
        make_tiny_model(partial, seed=train_config(workload).seed)
        tokenizer = build_tokenizer(partial)
        model: Any = AutoModelForCausalLM.from_pretrained(partial)
        special = {tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}
        printable = [i for i in range(len(tokenizer)) if i not in special]
        with torch.no_grad():
            channel_V = model.get_input_embeddings().weight[:, 0]
            channel_V.fill_(-1.0)
            channel_V[printable] = 1.0
            hidden_PC = model.model(torch.tensor(printable)[:, None]).last_hidden_state[:, 0]
            odds = len(printable) / (MEAN_LENGTH - 1)
            channel_V[tokenizer.eos_token_id] = 1.0 + math.log(odds) / hidden_PC[:, 0].mean()
        model.save_pretrained(partial)

    write_atomically(folder, write)
