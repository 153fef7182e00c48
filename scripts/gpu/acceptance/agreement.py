"""A trainer's weights in another process on its device, and log-probabilities of an engine with two kinds of heads."""

import asyncio
import copy
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from acceptance.layouts import FSDP2, dtypes, make_trainer, train_step
from acceptance.models import model_folder
from acceptance.ranks import run
from acceptance.rollout import generate_all, make_requests
from acceptance.trial import Trial
from gcore_rollout import HFEngine, SharedWeights
from gcore_rollout.engines.hf.decoding import load_model
from gcore_rollout.weight_sync.shared_weights import (
    OpenedWeights,
    SharedCudaWeights,
    SharedWeightsReader,
)
from gcore_trainer import PackedModel, Sample

_MOST_APART = 0.05
"""Nats between log-probabilities of the engine and the trainer in bfloat16, on average."""


def shared_memory(trial: Trial) -> None:
    """Read a trainer's weights in another of its ranks, out of shared memory of the host."""
    _share(trial, "shared memory", _share_in_memory)


def cuda_ipc(trial: Trial) -> None:
    """Read a trainer's weights in another of its ranks, out of the device's memory by CUDA IPC."""
    _share(trial, "CUDA IPC", _share_on_device)


def _share(trial: Trial, name: str, share: Any) -> None:
    _, (different, count, seconds) = run(trial, share, size=2)
    trial.count(f"{name}: tensors", count, at_least=1)
    trial.count(f"{name}: tensors that differ", different, at_most=0)
    trial.figure(f"{name}: handles and copy", 1000 * seconds, "ms", at_most=1000)


def _trained_weights(trial: Trial) -> dict[str, torch.Tensor]:
    trainer = make_trainer(trial, FSDP2, dtypes(trial)[-1])
    train_step(trial, trainer, 0)
    return dict(trainer.export_weights())


def _share_in_memory(trial: Trial) -> tuple[int, int, float]:
    weights = _trained_weights(trial)
    begin = time.perf_counter()
    shared = SharedWeights()
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        shared.write(weights.items())
        message = [(shared.path, shared.layout)]
    dist.broadcast_object_list(message, src=0)
    path, layout = message[0]
    views = SharedWeightsReader().read(os.open(path, os.O_RDONLY), layout)
    copies = {name: view.to(trial.device) for name, view in views}
    seconds = time.perf_counter() - begin
    dist.barrier()
    shared.close()
    return _num_different(weights, copies), len(copies), seconds


def _share_on_device(trial: Trial) -> tuple[int, int, float]:
    weights = _trained_weights(trial)
    trial.synchronize()
    begin = time.perf_counter()
    shared: SharedCudaWeights | None = None
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = SharedCudaWeights(weights.items())
        message = [shared.handles()]
    dist.broadcast_object_list(message, src=0)
    copies: dict[str, torch.Tensor] = weights
    if shared is None:
        opened = OpenedWeights(message[0])
        copies = {name: view.clone() for name, view in opened}
        opened.release()
    seconds = time.perf_counter() - begin
    dist.barrier()
    if shared is not None:
        shared.close()
    return _num_different(weights, copies), len(copies), seconds


def _num_different(weights: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> int:
    assert weights.keys() == copies.keys()
    return sum(not torch.equal(weights[name], copies[name]) for name in weights)


def engine_head(trial: Trial) -> None:
    """Compare an engine in bfloat16 with the trainer, with the model's head and with a float32 copy of it."""
    [differences] = run(trial, _head_differences, size=1)
    for name, (mean, largest) in differences.items():
        trial.count(f"engine's head in {name}: mean difference", mean, "nats", at_most=_MOST_APART)
        trial.figure(f"engine's head in {name}: largest difference", largest, "nats")


def _head_differences(trial: Trial) -> dict[str, tuple[float, float]]:
    folder = model_folder(trial, "0.5B")
    packed = PackedModel.from_pretrained(folder, device=trial.device, compute_dtype=torch.bfloat16)
    length = 16 if trial.is_small else 128
    requests = make_requests(trial, num_prompts=4, n=2, max_tokens=length)
    prompts = {request.request_id: np.array(request.prompt_token_ids) for request in requests}
    differences: dict[str, tuple[float, float]] = {}
    for name in ("bfloat16", "float32"):
        model, _ = load_model(folder, dtype=torch.bfloat16, max_model_len=None)
        model = model.to(trial.device)
        if name == "float32":
            model.lm_head = _float32_head(model.lm_head)
        engine = HFEngine(model, eos_token_ids=(), max_num_seqs=8)
        completions = asyncio.run(generate_all(engine, requests))
        asyncio.run(engine.close())
        samples = [
            Sample(prompt_ids=prompts[request_id], response_ids=completion.token_ids)
            for (request_id, _), completion in completions.items()
        ]
        [scores] = packed.log_probs([samples])
        sampled = np.concatenate([completion.log_probs for completion in completions.values()])
        apart = np.abs(sampled - np.concatenate(scores))
        differences[name] = float(apart.mean()), float(apart.max())
    return differences


def _float32_head(head: torch.nn.Linear) -> torch.nn.Linear:
    """Return a copy of a head that computes in float32."""
    head = copy.deepcopy(head).float()
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return head
