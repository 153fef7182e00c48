"""Parts 2 to 5: packed passes, training steps, the head, and log-probabilities. Shapes as in gcore_trainer."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from acceptance.machine import matmul_flops_per_s, peak_flops_per_s
from acceptance.models import (
    Groups,
    compute_dtype,
    equal_groups,
    load_packed,
    load_trainer,
    lognormal_groups,
    model_shape,
    predicted_bytes,
    vocab_size,
)
from acceptance.trial import Trial
from gcore_placement import micro_batches
from gcore_trainer import Sample, token_scores

_AIMS = {"0.5B": 33.0, "1.5B": 42.0, "3B": 47.0}
"""Percent of the peak."""
_USABLE = 0.92
"""Share of a device's memory that is planned with, as in gcore-placement."""
_SHARES = (0.0, 0.25, 0.5, 0.75)
_NUM_SHAPES = 20
_MAX_TOKENS = 16_384
"""Tokens of a micro-batch."""
_FORWARD = 1 / 3
"""Share of the forward pass in the FLOPs of a forward and a backward pass."""


def new_shapes(trial: Trial) -> None:
    """Compare the first and the second pass over each of 20 micro-batches that no pass has seen."""
    packed = load_packed(trial, "0.5B", gradient_checkpointing=True)
    largest = equal_groups(trial, num=1)

    def step(samples: list[Sample]) -> None:
        packed.score(samples).log_probs.sum().backward()

    # The allocator gets its memory, and kernels are loaded.
    for _ in range(2):
        step(largest.samples(trial, seed=0)[0])
    rng = np.random.default_rng(1)
    ratios: list[float] = []
    firsts: list[float] = []
    for number in range(_NUM_SHAPES):
        prompt = int(rng.integers(2, largest.prompts[0]))
        lengths = rng.integers(2, max(largest.responses[0]), len(largest.responses[0]))
        [samples] = Groups(prompts=[prompt], responses=[lengths.tolist()]).samples(
            trial, seed=number
        )
        first = trial.measure_seconds(partial(step, samples))
        second = trial.measure_seconds(partial(step, samples))
        ratios.append(first / second)
        firsts.append(first)
    trial.figure("first pass over second, median", float(np.median(ratios)), at_most=1.15)
    trial.figure("first pass over second, largest", max(ratios))
    trial.figure("first pass, mean", 1000 * float(np.mean(firsts)), "ms")


def utilisation(trial: Trial) -> None:
    """Measure training steps of three sizes on equal and on lognormal groups of 8 responses."""
    peak = peak_flops_per_s(trial)
    trial.note(
        "Model FLOPs of a step are 6 for each token and weight of a matrix product, the head included, and 12 x layers "
        "x query width for each pair of a query and a key that it attends to; a group's prompt counts once, and what "
        "is recomputed does not. The step is `TorchTrainer.train_step`, the update included."
    )
    # Small models are all alike.
    sizes = list(_AIMS)[:1] if trial.is_small else list(_AIMS)
    for size in sizes:
        for kind in ("equal", "lognormal"):
            with trial.attempt(f"{size}, {kind}"):
                _step(trial, size, kind, peak=peak, aim=_AIMS[size])
            _free(trial)


def _step(trial: Trial, size: str, kind: str, *, peak: float, aim: float) -> None:
    num = 2 if trial.is_small else 8
    groups = equal_groups(trial, num=num) if kind == "equal" else lognormal_groups(trial, num=num)
    costs = groups.flops(model_shape(trial, size))
    max_tokens = max(_MAX_TOKENS // 16 if trial.is_small else _MAX_TOKENS, *groups.tokens)
    share = _checkpointed_share(trial, size, groups, max_tokens)
    samples = groups.samples(trial, seed=0)
    parts = micro_batches(groups.tokens, max_tokens=max_tokens, costs=costs)
    batches = [[sample for group in part.tolist() for sample in samples[group]] for part in parts]
    trainer = load_trainer(
        trial, size, gradient_checkpointing=share > 0, checkpointed_layers=share or 1.0
    )
    trainer.train_step(batches)
    with peak_memory(trial) as peaks:
        seconds = min(
            trial.measure_seconds(lambda: trainer.train_step(batches))
            for _ in range(1 if trial.is_small else 3)
        )
    name = f"{size}, {kind}"
    trial.figure(f"{name}: layers that are computed again", 100 * share, "%")
    trial.figure(
        f"{name}: model FLOPs of the peak", 100 * sum(costs) / seconds / peak, "%", at_least=aim
    )
    trial.figure(f"{name}: tokens", sum(groups.tokens) / seconds, "per second")
    predicted = _predicted(trial, size, groups, max_tokens, share)
    for measured in peaks:
        trial.figure(f"{name}: peak memory", measured / 1e9, "GB", at_most=predicted / 1e9)
        trial.figure(f"{name}: peak memory over the law's", measured / predicted)


def _checkpointed_share(trial: Trial, size: str, groups: Groups, max_tokens: int) -> float:
    """Return the share of the layers that are computed again: as few as fit, as in a run that leaves this to gcore."""
    if not trial.device.startswith("cuda"):
        return 1.0
    most = _USABLE * torch.cuda.mem_get_info()[1]
    return next((s for s in _SHARES if _predicted(trial, size, groups, max_tokens, s) <= most), 1.0)


def _predicted(trial: Trial, size: str, groups: Groups, max_tokens: int, share: float) -> float:
    return predicted_bytes(
        trial, size, groups, max_tokens=max_tokens, gradient_checkpointing=share > 0, share=share
    )


def head(trial: Trial) -> None:
    """Measure the head's forward and backward pass against three matrix products of its size."""
    num_tokens, hidden_size = (256, 64) if trial.is_small else (16_384, 1536)
    vocab, dtype = vocab_size(trial), compute_dtype(trial)

    def leaf(rows: int) -> torch.Tensor:
        values = torch.randn(rows, hidden_size, device=trial.device) * hidden_size**-0.5
        return values.to(dtype).requires_grad_()

    hidden_ND, weight_VD = leaf(num_tokens), leaf(vocab)
    targets_N = torch.randint(0, vocab, (num_tokens,), device=trial.device)

    def step() -> None:
        hidden_ND.grad = weight_VD.grad = None
        token_scores(hidden_ND, weight_VD, targets_N).log_probs.sum().backward()

    step()
    with peak_memory(trial) as peaks:
        seconds = min(trial.measure_seconds(step) for _ in range(3))
    limit = 3 * 2.0 * num_tokens * hidden_size * vocab / matmul_flops_per_s(trial)
    trial.figure("forward and backward pass", 1000 * seconds, "ms")
    trial.figure("three matrix products at the measured rate", 1000 * limit, "ms")
    trial.figure("passes over the products", seconds / limit)
    trial.figure("float32 logits, if all were kept", 4.0 * num_tokens * vocab / 1e9, "GB")
    for measured in peaks:
        trial.figure("peak memory, with the inputs", measured / 1e9, "GB")


def log_probs(trial: Trial) -> None:
    """Measure the pass for log-probabilities of 64k tokens in one micro-batch."""
    packed = load_packed(trial, "0.5B", gradient_checkpointing=False)
    groups = equal_groups(trial, num=1 if trial.is_small else 7, prompt=1024, response=1024)
    samples = [sample for group in groups.samples(trial, seed=0) for sample in group]
    packed.log_probs([samples])
    with peak_memory(trial) as peaks:
        seconds = min(trial.measure_seconds(lambda: packed.log_probs([samples])) for _ in range(3))
    flops = _FORWARD * sum(groups.flops(model_shape(trial, "0.5B")))
    trial.figure("tokens", sum(groups.tokens))
    trial.figure("seconds", seconds, "s")
    trial.figure("tokens a second", sum(groups.tokens) / seconds)
    trial.figure("model FLOPs of the peak", 100 * flops / seconds / peak_flops_per_s(trial), "%")
    for measured in peaks:
        trial.figure("peak memory", measured / 1e9, "GB")


@contextmanager
def peak_memory(trial: Trial) -> Generator[list[float]]:
    """Measure the peak of the device's allocated bytes in the block; the list stays empty on a CPU."""
    peaks: list[float] = []
    if trial.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    yield peaks
    if trial.device.startswith("cuda"):
        peaks.append(float(torch.cuda.max_memory_allocated()))


def _free(trial: Trial) -> None:
    gc.collect()
    if trial.device.startswith("cuda"):
        torch.cuda.empty_cache()
