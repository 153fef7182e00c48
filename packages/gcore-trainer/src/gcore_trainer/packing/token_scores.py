"""Log-probabilities and entropies of tokens from hidden states, with logits of a bounded number of tokens in memory.

Shapes: N tokens, D hidden size, V vocabulary (of this rank, where it is divided), C tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

MAX_LOGITS = 1 << 24
"""Most logits of a chunk: 64 MB in float32."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Scores of N response tokens in the samples' order. All shape [N], in float32 at least."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    """Entropy of the distribution that each token was drawn from, in nats."""


ScoresT = TypeVar("ScoresT", TokenScores, torch.Tensor)
"""The scores that a model gives: those of a policy, or a critic's values [N]."""


def named_scores(scores: TokenScores | torch.Tensor) -> torch.Tensor:
    """Return the main scores [N] of a model: a policy's log-probabilities, or a critic's values."""
    return scores.log_probs if isinstance(scores, TokenScores) else scores


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The part of the vocabulary whose rows of the head this rank of a tensor-parallel group holds."""

    group: dist.ProcessGroup
    start: int
    """First token of the part."""
    vocab_size: int
    """Size of the whole vocabulary; rows from here on are padding."""


def token_scores(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy_grad: bool = False,
    vocab: VocabShard | None = None,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """Score the targets under softmax(cap(logit_scale * (hidden @ weight^T + bias)) / temperature).

    Logits are made a chunk of tokens at a time and made again in the backward pass, so that none outlive their chunk:
    memory is that of ``max_logits`` of them, and of the head's gradient.

    Args:
        hidden_ND: [N, D], the same on all ranks of ``vocab.group``.
        weight_VD: [V, D], this rank's rows.
        targets_N: [N] int64 tokens of the whole vocabulary.
        bias_V: [V].
        temperature: divides the logits.
        logit_scale: multiplies the logits before anything else.
        softcap: cap(x) is softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2); None: x.
        entropy_grad: make the entropies differentiable too.
        vocab: what part of the vocabulary this rank has; None: all of it.
        max_logits: most logits at once.
    """
    log_probs_N, entropies_N = _TokenScores.apply(
        hidden_ND,
        weight_VD,
        bias_V,
        targets_N,
        _Head(temperature=temperature, scale=logit_scale, softcap=softcap),
        entropy_grad,
        vocab,
        max_logits,
    )
    return TokenScores(log_probs=log_probs_N, entropies=entropies_N if entropy_grad else entropies_N.detach())


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The operations after the head's matrix product."""

    temperature: float
    scale: float
    softcap: float | None

    def changed(self, logits_CV: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = (logits_CV / self.softcap).tanh() * self.softcap
        return logits_CV if self.temperature == 1.0 else logits_CV / self.temperature

    def slope(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of changed logits with respect to the original ones; 0 where padding is -inf."""
        if self.softcap is None:
            return self.scale / self.temperature
        capped_CV = logits_CV * (self.temperature / self.softcap)
        return (1 - capped_CV.clamp(min=-1).square()) * (self.scale / self.temperature)


class _TokenScores(torch.autograd.Function):
    """d log p(t) / d logit = onehot(t) - p;  d entropy / d logit = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: _Head,
        entropy_grad: bool,
        vocab: VocabShard | None,
        max_logits: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _Logits(weight_VD, bias_V, targets_N, head, vocab)
        chunk = max(1, max_logits // weight_VD.shape[0])
        parts = [logits.scores(hidden_ND, begin, chunk) for begin in range(0, max(1, targets_N.shape[0]), chunk)]
        log_probs_N, entropies_N, log_sums_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropies_N, log_sums_N)
        ctx.settings = head, entropy_grad, vocab, chunk
        return log_probs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs_N, grad_entropies_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, entropies_N, log_sums_N = ctx.saved_tensors
        head, entropy_grad, vocab, chunk = ctx.settings
        logits = _Logits(weight_VD, bias_V, targets_N, head, vocab)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Sums over many chunks: not in half precision. With adapters the head is frozen.
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype)) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=_wide(bias_V.dtype)) if needs_bias else None
        for begin in range(0, targets_N.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits_CV = logits.of(hidden_ND, rows)
            log_probs_CV = logits_CV - log_sums_N[rows, None]
            grad_CV = -log_probs_CV.exp() * grad_log_probs_N[rows, None]
            if entropy_grad:
                finite_CV = log_probs_CV.clamp(min=torch.finfo(log_probs_CV.dtype).min)
                pull_CV = finite_CV + entropies_N[rows, None]
                grad_CV -= log_probs_CV.exp() * pull_CV * grad_entropies_N[rows, None]
            is_here, place = logits.places(rows)
            grad_CV[is_here, place[is_here]] += grad_log_probs_N[rows][is_here]
            grad_CV *= head.slope(logits_CV)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            narrow_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[rows] = narrow_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += narrow_CV.T @ hidden_ND[rows]
        if vocab is not None:
            dist.all_reduce(grad_hidden_ND, group=vocab.group)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None, None, None


class _Logits:
    """Tempered logits of this rank's part of the vocabulary, a chunk at a time."""

    def __init__(
        self,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: _Head,
        vocab: VocabShard | None,
    ) -> None:
        self._weight_VD = weight_VD
        self._bias_V = bias_V
        self._targets_N = targets_N
        self._head = head
        self._vocab = vocab

    def of(self, hidden_ND: torch.Tensor, rows: slice) -> torch.Tensor:
        """Compute the logits [C, V]; -inf for padding of the vocabulary."""
        logits_CV = hidden_ND[rows] @ self._weight_VD.T
        logits_CV = logits_CV.to(_wide(logits_CV.dtype))
        if self._bias_V is not None:
            logits_CV = logits_CV + self._bias_V
        logits_CV = self._head.changed(logits_CV)
        if self._vocab is not None:
            logits_CV[:, max(0, self._vocab.vocab_size - self._vocab.start) :] = -torch.inf
        return logits_CV

    def places(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the chunk's targets in this rank's part: whether each is there, [C], and its column."""
        column = self._targets_N[rows] - (self._vocab.start if self._vocab else 0)
        return (column >= 0) & (column < self._weight_VD.shape[0]), column

    def scores(self, hidden_ND: torch.Tensor, begin: int, chunk: int) -> tuple[torch.Tensor, ...]:
        """Compute log-probs, entropies and log-sum-exp of a chunk, [C] each."""
        rows = slice(begin, begin + chunk)
        logits_CV = self.of(hidden_ND, rows)
        peak_C = self._reduced(logits_CV.amax(-1), dist.ReduceOp.MAX)
        exp_CV = (logits_CV - peak_C[:, None]).exp_()
        is_here, place = self.places(rows)
        target_C = torch.zeros_like(peak_C)
        target_C[is_here] = logits_CV[is_here, place[is_here]]
        # 0 times -inf is not 0.
        dot_C = (exp_CV * logits_CV.clamp_(min=torch.finfo(logits_CV.dtype).min)).sum(-1)
        sums_3C = self._reduced(torch.stack([exp_CV.sum(-1), dot_C, target_C]), dist.ReduceOp.SUM)
        log_sum_C = peak_C + sums_3C[0].log()
        return sums_3C[2] - log_sum_C, log_sum_C - sums_3C[1] / sums_3C[0], log_sum_C

    def _reduced(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self._vocab is not None:
            dist.all_reduce(values, op=op, group=self._vocab.group)
        return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
