"""Tiny models, samples, and what they are compared with, for the tests of this folder."""

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from gcore_rollout.weight_sync.shared_weights import open_weights
from gcore_trainer import (
    MegatronConfig,
    OptimizerConfig,
    PackedModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
)

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: pytest -m gpu tests/gpu"
    ),
]
MegatronStep = tuple[list[dict[str, float]], dict[str, np.ndarray[Any, Any]]]
"""Metrics of two updates, and the weights after them."""
VOCAB_SIZE = 96
WINDOW = 8
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=64, tie_word_embeddings=False),
    "window": MistralConfig(**_SIZES, sliding_window=WINDOW),
    "sinks": GptOssConfig(
        **_SIZES, head_dim=32, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
}
"""All with grouped queries; gpt-oss has sinks, and windows in every other layer."""


def save_model(config: PreTrainedConfig, path: Path) -> Path:
    """Write a model whose next-token distributions are neither flat nor certain."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return path


def make_samples(lengths: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0) -> list[Sample]:
    """Return samples of groups, by the length of the prompt and of each response, with advantages."""
    rng, found = np.random.default_rng(seed), list[Sample]()
    for prompt_length, response_lengths in lengths:
        prompt = rng.integers(2, VOCAB_SIZE, prompt_length)
        for length in response_lengths:
            advantages = np.full(length, rng.normal(), np.float32)
            ids = rng.integers(2, VOCAB_SIZE, length)
            found.append(Sample(prompt_ids=prompt, response_ids=ids, advantages=advantages))
    return found


SAMPLES = make_samples([(30, (20, 5, 60)), (3, (1,)), (70, (12, 40))])


def load_packed(
    path: Path, device: str, dtype: torch.dtype = torch.float32, **options: Any
) -> PackedModel:
    """Load a model whose parameters, as those in training, are float32."""
    return PackedModel.from_pretrained(path, device=device, compute_dtype=dtype, **options)


def make_trainer(
    path: Path, device: str, dtype: torch.dtype = torch.float32, **options: Any
) -> TorchTrainer:
    """Load a model with an optimizer and the loss of GRPO."""
    packed = load_packed(path, device, dtype, **options)
    return TorchTrainer(
        packed, optimizer=OptimizerConfig(lr=1e-3), objective=PolicyObjective(PolicyLossConfig())
    )


def plain_log_probs(path: Path, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Compute log-probabilities [R] of each sample by transformers alone, in float32 on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    found: list[torch.Tensor] = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[
                0, sample.prompt_ids.size - 1 :
            ]
        found.append(logits.log_softmax(-1).gather(1, ids[sample.prompt_ids.size :, None])[:, 0])
    return found


def gradients(packed: PackedModel, samples: Sequence[Sample]) -> torch.Tensor:
    """Return all gradients of the sum of log-probabilities times advantages, end to end, in float64 on the CPU."""
    advantages = np.concatenate([s.advantages for s in samples if s.advantages is not None])
    log_probs = packed.score(list(samples)).log_probs
    (log_probs * torch.from_numpy(advantages).to(log_probs)).sum().backward()
    parameters = [p for p in packed.model.parameters() if p.grad is not None]
    return torch.cat([p.grad.double().cpu().ravel() for p in parameters if p.grad is not None])


def receive(connection: Connection) -> None:
    """Open the weights of another process, and send what they hold."""
    opened = open_weights(connection.recv_bytes())
    seen = {name: tensor.float().cpu().numpy() for name, tensor in opened}
    del opened
    torch.cuda.synchronize()
    connection.send(seen)


def train_megatron(
    rank: int,
    num_ranks: int,
    device: str,
    rendezvous: str,
    path: Path,
    settings: Mapping[str, MegatronConfig],
    connection: Connection,
) -> None:
    """Make two updates under each setting, on a rank of a process of its own; the first one sends the steps."""
    # An image may lack Megatron-Core.
    from gcore_trainer import MegatronTrainer

    torch.set_num_threads(1)
    backend = "gloo"
    place = torch.device(device)
    if device == "cuda":
        backend = "nccl"
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks)
    steps: dict[str, MegatronStep] = {}
    for name, config in settings.items():
        trainer = MegatronTrainer(
            path,
            parallel=ParallelConfig(),
            # With a smaller eps, an entry whose gradient is rounding error moves by whole steps of the rate.
            optimizer=OptimizerConfig(lr=1e-3, eps=1e-5),
            objective=PolicyObjective(PolicyLossConfig()),
            megatron=config,
            device=place,
        )
        replica = SAMPLES[trainer.data_parallel_rank :: trainer.data_parallel_size]
        metrics = [trainer.train_step([replica[:2], replica[2:]]) for _ in range(2)]
        weights = {key: weight.cpu().numpy() for key, weight in trainer.export_weights()}
        steps[name] = metrics, weights
    if rank == 0:
        connection.send(steps)
    dist.destroy_process_group()
