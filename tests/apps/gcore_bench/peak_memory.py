"""Prints, as JSON lines, the peak bytes of steps of `gcore_trainer` on the CPU, each in a fork of this process.

Run it with MALLOC_MMAP_THRESHOLD_ set: then what is freed goes back to the system, and the peak is that of the tensors.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
)


def main() -> None:
    """Measure the cases on the command line, a JSON list of [config, max tokens, recompute, prompts, responses]."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases: list[list[Any]] = json.loads(sys.argv[1])
        # Code and buffers of the libraries are touched before the first fork: they belong to no tensor.
        config, max_tokens, _, prompts, responses = cases[0]
        small = {**config, "num_hidden_layers": 1}
        # With recomputation, whose modules are imported when it is used.
        train(Path(folder) / "warm", small, max_tokens, True, prompts[:1], responses[:1])
        for number, case in enumerate(cases):
            if os.fork() == 0:
                print(json.dumps(measure(Path(folder) / str(number), *case)), flush=True)
                os._exit(0)
            _, status = os.wait()
            assert status == 0


def measure(folder: Path, *case: Any) -> float:
    """Peak bytes of a step, over what there was before the model."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(folder, *case)
    return resident_bytes("VmHWM") - before


def train(
    folder: Path,
    config: dict[str, Any],
    max_tokens: int,
    recompute: bool,
    prompts: list[int],
    responses: list[list[int]],
) -> None:
    """A step of a new model over these lengths, groups whole, in as few micro-batches as they fill."""
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(folder)
    trainer = TorchTrainer(
        PackedModel.from_pretrained(folder, gradient_checkpointing=recompute),
        optimizer=OptimizerConfig(lr=1e-9),
        objective=PolicyObjective(PolicyLossConfig()),
    )
    rng = np.random.default_rng(0)
    batches: list[list[Sample]] = [[]]
    filled = 0
    for prompt, group in zip(prompts, responses, strict=True):
        if batches[-1] and filled + prompt + sum(group) > max_tokens:
            batches.append([])
            filled = 0
        filled += prompt + sum(group)
        prompt_ids = rng.integers(1, config["vocab_size"], prompt)
        for length in group:
            sample = Sample(
                prompt_ids=prompt_ids,
                response_ids=rng.integers(1, config["vocab_size"], length),
                advantages=rng.normal(size=length).astype(np.float32),
                old_log_probs=np.full(length, -9.0, np.float32),
            )
            batches[-1].append(sample)
    trainer.train_step(batches)


def resident_bytes(field: str) -> int:
    """A size of this process, by its name in /proc/self/status."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
