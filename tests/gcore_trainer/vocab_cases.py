"""What the ranks do in `test_token_scores.py`: score with a part of the vocabulary each."""

import torch
from rank import Rank

from gcore_trainer import token_scores
from gcore_trainer.packing.head import KeptTokens, VocabShard


def score_part_of_vocabulary(
    rank: Rank,
    hidden: torch.Tensor,
    parts: list[torch.Tensor],
    targets: torch.Tensor,
    vocab_size: int,
    temperature: float,
    softcap: float | None,
    kept: KeptTokens | None,
) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies, and the gradients of the hidden states and this rank's rows."""
    weight = parts[rank.number].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    vocab = VocabShard(
        group=rank.groups[len(parts)], start=rank.number * parts[0].shape[0], vocab_size=vocab_size
    )
    scores = token_scores(
        hidden,
        weight,
        targets,
        temperature=temperature,
        softcap=softcap,
        entropy_grad=True,
        vocab=vocab,
        kept=kept,
        max_logits=70,
    )
    n = targets.shape[0]
    weights = torch.arange(1, n + 1, dtype=hidden.dtype) / n
    loss = (weights * scores.log_probs).sum() + (weights.flip(0) * scores.entropies).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, [hidden, weight])
    return scores.log_probs.detach(), scores.entropies.detach(), grad_hidden, grad_weight
