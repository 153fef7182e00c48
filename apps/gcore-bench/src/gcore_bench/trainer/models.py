"""Random models, and how their steps are optimised: the same for every contender."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from gcore_placement import TransformerWorkload
from gcore_trainer import OptimizerConfig, PolicyLossConfig

OPTIMIZER = OptimizerConfig(lr=1e-9, grad_clip=1.0)
"""So low a rate that the weights stay what they are, and every step computes the same loss."""
LOSS = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")


def make_model(folder: Path, shape: TransformerWorkload, *, max_length: int, seed: int) -> None:
    """Write a Qwen2 of this shape, whose next-token distributions are neither flat nor certain."""
    sizes = dataclasses.asdict(shape)
    del sizes["head_dim"]
    config = Qwen2Config(
        **sizes,
        max_position_embeddings=max_length,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """As `TorchTrainer` makes it."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clip, step, and forget the gradient; its norm before clipping."""
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
    optimizer.step()
    # Kept, as gcore keeps them: no contender's peak then holds gradients, everyone's base does.
    optimizer.zero_grad(set_to_none=False)
    return grad_norm.item()
