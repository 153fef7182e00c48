"""A physical limit: a step's matrix products alone, at their real shapes, on this machine and under its present load.

There are no attention, norms, sampling, optimizer or bookkeeping; no padding, and a group's prompt is computed once.
No program that multiplies the same weights with the same tokens in the same number of passes can be faster.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from gcore_bench.grpo.measure import Step, StepClock, step_figures
from gcore_bench.grpo.workload import PROMPT_LENGTH, Task


def run(task: Task) -> list[Step]:
    """Make the matrix products of steps whose responses have the task's lengths."""
    lengths, num_prompts = task.lengths, task.workload.train_batch_size
    layers, head = _random_weights(json.loads((task.model / "config.json").read_text()))
    figures: list[Step] = []
    clock = StepClock()
    for _ in range(task.steps):
        clock.lap()
        _generate(layers, head, lengths, num_prompts)
        gen_s, gen_cpu_s = clock.lap()
        _train(layers, head, lengths, num_prompts)
        train_s, train_cpu_s = clock.lap()
        seconds = {"wall_s": gen_s + train_s, "cpu_s": gen_cpu_s + train_cpu_s, "gen_s": gen_s, "train_s": train_s}
        figures.append(step_figures(lengths, **seconds))
    return figures


def _random_weights(config: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return every matrix of every layer, [out, in], and the head."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = [(width, width), (kv_width, width), (kv_width, width), (width, width)]
    shapes += [(inner, width), (inner, width), (width, inner)]
    layers = [torch.randn(shape) for _ in range(config["num_hidden_layers"]) for shape in shapes]
    return layers, torch.randn(config["vocab_size"], width)


@torch.inference_mode()
def _generate(layers: list[torch.Tensor], head: torch.Tensor, lengths: Sequence[int], num_prompts: int) -> None:
    """Compute prompts once, then one pass for every further token of the responses that have not ended."""
    passes = [(num_prompts * PROMPT_LENGTH, num_prompts)]
    passes += [(alive, alive) for t in range(1, max(lengths)) if (alive := sum(n > t for n in lengths))]
    for num_tokens, num_logits in passes:
        for weight in layers:
            linear(_inputs(num_tokens, weight.shape[1]), weight)
        linear(_inputs(num_logits, head.shape[1]), head)


@torch.inference_mode()
def _train(layers: list[torch.Tensor], head: torch.Tensor, lengths: Sequence[int], num_prompts: int) -> None:
    """Compute the forward product and both products of the backward pass."""
    num_inner = sum(n - 1 for n in lengths)
    passes = [(num_prompts * PROMPT_LENGTH + num_inner, w) for w in layers]
    passes.append((num_prompts + num_inner, head))
    for num_tokens, weight in passes:
        inputs, gradient = (_inputs(num_tokens, width) for width in reversed(weight.shape))
        linear(inputs, weight)
        torch.mm(gradient, weight)
        torch.mm(gradient.T, inputs)


@cache
def _inputs(num_tokens: int, width: int) -> torch.Tensor:
    return torch.randn(num_tokens, width)
