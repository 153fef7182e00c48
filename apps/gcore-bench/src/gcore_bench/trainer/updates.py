"""Loss, optimizer and result of a step: the same for every contender."""

from dataclasses import dataclass

import torch

from gcore_trainer import OptimizerConfig, PolicyLossConfig

OPTIMIZER = OptimizerConfig(lr=1e-9, grad_clip=1.0)
"""The rate is so low that the weights stay the same, and every step computes the same loss."""
LOSS = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, by which contenders are compared."""

    loss: float
    grad_norm: float
    computed_tokens: float
    """Tokens that passed through the model's layers, padding included."""


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that `TorchTrainer` would make."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clip the gradient, step and zero it; return its norm before clipping."""
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
    optimizer.step()
    # gcore keeps gradients allocated, too: they are in the memory before every contender's step, and in no peak.
    optimizer.zero_grad(set_to_none=False)
    return grad_norm.item()
