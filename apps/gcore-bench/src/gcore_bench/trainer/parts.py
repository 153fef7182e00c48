"""The parts' work: a step, in the same way under every contender, and one measurement of gcore-trainer each.

Shapes: N tokens, D hidden size, V vocabulary.
"""

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_bench.harness.measure import measured
from gcore_bench.harness.models import make_model
from gcore_bench.harness.processes import Spec, joined_world
from gcore_bench.harness.report import Figures
from gcore_bench.trainer.contenders import (
    LOSS,
    OPTIMIZER,
    GcoreStep,
    LossStep,
    TrlStep,
    VerlStep,
    attend_under_masks,
)
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.workload import (
    LONG_VOCAB_SIZE,
    context_layouts,
    deals,
    long_workload,
    make_samples,
    memory_lengths,
    step_batches,
    step_workload,
    too_large_masks,
)
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_placement import Device, TransformerWorkload
from gcore_trainer import (
    PackedModel,
    ParallelConfig,
    PolicyObjective,
    Sample,
    SFTObjective,
    TorchParallel,
    TorchTrainer,
    token_scores,
)

TARGET = 0.45
"""Fraction of the peak that well-tuned trainers of dense models reach."""
_OFF_POLICY = 0.1
"""Standard deviation of noise on log-probabilities that imitates an older policy; some ratios are clipped."""
_LENGTH = 4096
_SEQUENCES = 4
_PASSES = 4
_SHAPE = TransformerWorkload(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=151_936,
)
"""The shape of Qwen2.5-0.5B."""
_WARMUP = [
    Sample(
        prompt_ids=np.array([1, 2]),
        response_ids=np.array([2, 1]),
        advantages=np.array([a, a], np.float32),
        old_log_probs=np.full(2, -9.0, np.float32),
    )
    for a in (1.0, -1.0)
]
"""Enough to trigger the imports of a first step and to allocate moments, and so small that it frees no large blocks."""


def run(spec: Spec) -> dict[str, Figures]:
    """Return the figures of a part by row."""
    folder, options = Path(spec.folder), TrainerOptions(**spec.options)
    match spec.part:
        case "setup":
            return _set_up(folder, options)
        case "step":
            batches = step_batches(options, make_samples(options), spec.contender)
            peer = {"trl": TrlStep, "verl": VerlStep}.get(spec.contender)
            return _measured(spec, peer(folder) if peer else GcoreStep(folder, spec.contender), batches)
        case "balance":
            batches = deals(options, make_samples(options))[spec.contender].batches[spec.rank]
            # Parameters are sharded, so that ranks wait for each other in every pass.
            with joined_world(spec):
                parallel = TorchParallel.join(ParallelConfig())
                return _measured(spec, GcoreStep(folder, "gcore-shared", parallel=parallel), batches)
        case "log-probs":
            return {f"{size:,} {spec.contender}": _figures(spec, size) for size in spec.options["vocab_sizes"]}
        case "context":
            with joined_world(spec):
                return _long_steps(spec)
        case "memory":
            return _shared_steps(spec, options)
        case _:
            return _utilisation(spec)


def _set_up(folder: Path, options: TrainerOptions) -> dict[str, Figures]:
    """Write ``model``, ``long-model``, ``tokenizer`` and ``samples``, which contenders share."""
    make_model(folder / "model", step_workload(options), max_length=options.max_tokens, seed=options.seed)
    longest = max(*options.lengths, *map(max, memory_lengths(options).values())) + options.max_prompt_length
    make_model(folder / "long-model", long_workload(options), max_length=longest, seed=options.seed)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    samples = make_samples(options)
    (log_probs,) = PackedModel.from_pretrained(folder / "model").log_probs([samples])
    rng = np.random.default_rng(options.seed)
    noisy = [(lp + rng.normal(0.0, _OFF_POLICY, lp.shape)).astype(np.float32) for lp in log_probs]
    samples = [replace(s, old_log_probs=lp) for s, lp in zip(samples, noisy, strict=True)]
    (folder / "samples").write_bytes(pickle.dumps(samples))
    return {}


def _measured(spec: Spec, stepper: GcoreStep | LossStep, batches: list[list[int]]) -> dict[str, Figures]:
    """Return seconds and memory of a step, and its result; of one rank among several its own."""
    samples: list[Sample] = pickle.loads((Path(spec.folder) / "samples").read_bytes())
    stepper.step(_WARMUP, [[0, 1]])
    results: list[Figures] = []
    times = measured(lambda: results.append(stepper.step(samples, batches)), times=spec.options["steps"])
    return {spec.contender: times | results[0]}


def _figures(spec: Spec, vocab_size: int) -> Figures:
    options = spec.options
    device, hidden_size = options["device"], options["hidden_size"]
    # Logits in float32 of so many tokens have the size that was asked for.
    num_tokens = max(2, int(options["logits_mb"] * 2**18) // vocab_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(options["seed"])

    def leaf(rows: int, scale: float) -> torch.Tensor:
        values = (torch.randn(rows, hidden_size, generator=generator) * scale).to(device, dtype).requires_grad_()
        values.grad = torch.zeros_like(values)
        return values

    hidden_ND, weight_VD = leaf(num_tokens, 1.0), leaf(vocab_size, hidden_size**-0.5)
    targets_N = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(device)
    sums: list[float] = []

    def work(rows: int | None = None) -> None:
        total = {"chunked": _chunked, "naive": _naive}[spec.contender](hidden_ND[:rows], weight_VD, targets_N[:rows])
        total.backward()
        sums.append(total.item())

    # Threads start and kernels load at first use, which is not measured.
    work(rows=2)
    times = measured(work, times=options["steps"], device=device)
    return times | {
        "log_probs": sums[-1] / num_tokens,
        "logits_bytes": 4.0 * num_tokens * vocab_size,
        "tokens": float(num_tokens),
    }


def _chunked(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return token_scores(hidden_ND, weight_VD, targets_N).log_probs.sum()


def _naive(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """The straightforward way: float32 logits of every token, their log-softmax, and one entry of each."""
    log_probs_NV = torch.log_softmax((hidden_ND @ weight_VD.T).float(), -1)
    return log_probs_NV.gather(-1, targets_N[:, None]).sum()


def _long_steps(spec: Spec) -> dict[str, Figures]:
    """Return a row for each length: seconds of a step, and the loss, which all layouts must agree on."""
    size, ulysses = context_layouts(spec.options["context_sizes"])[spec.contender]
    config = ParallelConfig(context_parallel_size=size, ulysses_sequence_parallel_size=ulysses)
    trainer = TorchTrainer(
        PackedModel.from_pretrained(Path(spec.folder) / "long-model"),
        optimizer=OPTIMIZER,
        objective=SFTObjective(),
        parallel=TorchParallel.join(config) if size > 1 else None,
    )
    losses: list[float] = []

    def step(batches: list[list[Sample]]) -> None:
        losses.append(trainer.train_step(batches)["sft/loss"])

    def sample(length: int) -> Sample:
        tokens = np.random.default_rng(spec.options["seed"]).integers(1, LONG_VOCAB_SIZE, length + 1)
        return Sample(prompt_ids=tokens[:16], response_ids=tokens[16:])

    rows: dict[str, Figures] = {}
    step([[sample(32)]])
    for length in spec.options["lengths"]:
        times = measured(partial(step, [[sample(length)]]), times=spec.options["steps"])
        rows[f"{length:,} {spec.contender}"] = times | {"loss": losses[-1], "tokens": float(length)}
    return rows


def _shared_steps(spec: Spec, options: TrainerOptions) -> dict[str, Figures]:
    """Return a row for each workload of eight responses to a prompt: memory and seconds of a step, and its loss."""
    left_out = too_large_masks(options) if spec.contender == "masks" else {}
    if spec.contender == "masks":
        attend_under_masks()
    trainer = TorchTrainer(
        PackedModel.from_pretrained(Path(spec.folder) / "long-model"), optimizer=OPTIMIZER, objective=SFTObjective()
    )
    losses: list[float] = []

    def step(lengths: list[int]) -> None:
        rng = np.random.default_rng(options.seed)
        prompt = rng.integers(1, LONG_VOCAB_SIZE, options.max_prompt_length)
        responses = [rng.integers(1, LONG_VOCAB_SIZE, length) for length in lengths]
        losses.append(trainer.train_step([[Sample(prompt_ids=prompt, response_ids=r) for r in responses]])["sft/loss"])

    step([32] * 8)
    rows: dict[str, Figures] = {}
    for name, lengths in memory_lengths(options).items():
        if name in left_out:
            continue
        times = measured(partial(step, lengths), times=options.steps)
        rows[f"{name} {spec.contender}"] = times | {"loss": losses[-1], "tokens": float(sum(lengths))}
    return rows


def _utilisation(spec: Spec) -> dict[str, Figures]:
    """Return seconds of a packed bfloat16 step of a Qwen2 on a GPU, and the model's FLOPs a second over the peak."""
    peak_flops = Device.matching(torch.cuda.get_device_name()).flops_per_s
    folder, seed = Path(spec.folder) / "mfu-model", spec.options["seed"]
    make_model(folder, _SHAPE, max_length=_LENGTH, seed=seed)
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "gradient_checkpointing": False}
    packed = PackedModel.from_pretrained(folder, device="cuda", **options)
    trainer = TorchTrainer(packed, optimizer=OPTIMIZER, objective=PolicyObjective(LOSS))
    rng = np.random.default_rng(seed)
    response_length = _LENGTH - 512

    def sample() -> Sample:
        return Sample(
            prompt_ids=rng.integers(0, _SHAPE.vocab_size, 512),
            response_ids=rng.integers(0, _SHAPE.vocab_size, response_length),
            advantages=np.full(response_length, rng.normal(), np.float32),
        )

    batches = [[sample() for _ in range(_SEQUENCES)] for _ in range(_PASSES)]
    trainer.train_step(batches)
    times = measured(lambda: trainer.train_step(batches), times=spec.options["steps"], device="cuda")
    flops = float(_SHAPE.flops(np.full(_PASSES * _SEQUENCES, _LENGTH)).sum())
    return {spec.contender: times | {"mfu": flops / times["step_s"] / peak_flops, "target": TARGET}}
