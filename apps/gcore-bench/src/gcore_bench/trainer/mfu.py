"""The part mfu: model FLOPs utilisation of a packed bfloat16 step of a Qwen2 of 0.5 billion parameters on a GPU."""

import dataclasses
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from gcore_bench.harness.child import Spec
from gcore_bench.harness.measure import measured
from gcore_bench.harness.rounds import Figures
from gcore_bench.trainer.updates import LOSS, OPTIMIZER
from gcore_placement import TransformerWorkload
from gcore_trainer import PackedModel, PolicyObjective, Sample, TorchTrainer
from gcore_trainer.torch.packed_model import ATTENTION_NAME, register

TARGET = 0.45
"""Fraction of the peak that well-tuned trainers of dense models reach."""
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12}
"""Dense bfloat16, from NVIDIA's data sheets (SXM)."""
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


def run(spec: Spec) -> dict[str, Figures]:
    """Return seconds of a step, and the model's FLOPs a second over the device's peak.

    Raises:
        ValueError: the peak of the device is not known.
    """
    name = torch.cuda.get_device_name()
    peak_flops = next((flops for known, flops in _PEAK_FLOPS.items() if known in name), None)
    if peak_flops is None:
        raise ValueError(f"the device is {name}; expected one of {', '.join(_PEAK_FLOPS)}, whose peaks are known")
    register()
    shape = dataclasses.asdict(_SHAPE)
    shape.pop("head_dim")
    config = Qwen2Config(**shape, max_position_embeddings=_LENGTH, tie_word_embeddings=True)
    torch.manual_seed(spec.options["seed"])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    packed = PackedModel(model.to("cuda"), compute_dtype=torch.bfloat16, gradient_checkpointing=False)
    trainer = TorchTrainer(packed, optimizer=OPTIMIZER, objective=PolicyObjective(LOSS))
    batches = _batches(spec.options["seed"])
    trainer.train_step(batches)
    times = measured(lambda: trainer.train_step(batches), times=spec.options["steps"], device="cuda")
    flops = float(_SHAPE.flops(np.full(_PASSES * _SEQUENCES, _LENGTH)).sum())
    return {spec.contender: times.figures() | {"mfu": flops / times.wall_s / peak_flops, "target": TARGET}}


def _batches(seed: int) -> list[list[Sample]]:
    rng = np.random.default_rng(seed)
    response_length = _LENGTH - 512

    def sample() -> Sample:
        return Sample(
            prompt_ids=rng.integers(0, _SHAPE.vocab_size, 512),
            response_ids=rng.integers(0, _SHAPE.vocab_size, response_length),
            advantages=np.full(response_length, rng.normal(), np.float32),
        )

    return [[sample() for _ in range(_SEQUENCES)] for _ in range(_PASSES)]
