"""The head of a language model: log-probabilities and entropies of tokens, from hidden states.

Logits are made a bounded number at a time. Shapes: N response tokens, D hidden size, V vocabulary (of this rank, where
it is divided), C tokens of a chunk.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_trainer.objectives.objective import TokenScores, on_device

CPU_LOGITS = 1 << 24
"""Most logits of a chunk on a CPU: 64 MB in float32."""
CUDA_LOGITS = 1 << 28
"""Most logits of a chunk on a GPU: 1 GiB in float32."""
_ROW_MULTIPLE = 128
"""Rows of a large chunk are a multiple of this, as the tiles of a matrix product are."""
_PADDING = -1e30
"""Logit of a token that is left out, or that pads the vocabulary: exp() of it is 0, and 0 times it is 0, which 0 times
-inf is not."""
KeptTokens = tuple[NDArray[np.int32], NDArray[np.int32]]
"""[N] number of tokens among which each target was drawn (0: all), and [K] these tokens; see `Sample.kept_counts`."""


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
    kept: KeptTokens | None = None,
    max_logits: int | None = None,
) -> TokenScores:
    """Score the targets under softmax(cap(logit_scale * (hidden @ weight^T + bias)) / temperature).

    Where a target was drawn from some tokens only, ``kept``, the softmax is over these. That costs one more pass that
    writes the logits of such targets.

    Logits are made a chunk of tokens at a time and made again in the backward pass, so that none outlive their chunk:
    memory is that of the head's gradient in float32, and of at most 2 copies of a chunk's logits in float32 (3 with a
    soft cap and ``entropy_grad``) and one in the type of ``hidden_ND``.

    Each chunk of the backward pass reads and writes the whole gradient of the head, 8 V D bytes, for 2 C V D operations
    of the same product: C has to be well above 1,000 for a GPU of 200 operations a byte. `chunk_rows` therefore allows
    1 GiB of logits there (1,664 rows at a vocabulary of 152k), which makes the peak 2 to 3 GiB. This is constant
    because it does not depend on what else holds memory, and asking the device for its free memory in every call would
    make the order of sums, and so the result, depend on it.

    In half precision on a GPU, products give their float32 sums, so that logits are never rounded; on a CPU they are
    rounded to the type of ``hidden_ND`` once. Everything after the product is in float32 at least.

    Args:
        hidden_ND: the same on all ranks of ``vocab.group``. Products are computed in its type.
        weight_VD: this rank's rows, in the type of ``hidden_ND`` or a wider one. Its gradient is summed in float32, and
            rounded only if ``weight_VD`` (its ``grad_dtype``) is narrower.
        targets_N: int64 tokens of the whole vocabulary.
        softcap: cap(x) is softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2); None: x.
        entropy_grad: make the entropies differentiable too.
        vocab: what part of the vocabulary this rank has; None: all of it.
        kept: tokens of the whole vocabulary; those that this head does not have count for nothing. None: all.
        max_logits: most logits of a chunk; None: as `chunk_rows` says for the device.
    """
    num_tokens = targets_N.shape[0]
    vocab_size = weight_VD.shape[0]
    if max_logits is None:
        chunk = chunk_rows(num_tokens, vocab_size, hidden_ND.device.type)
    else:
        chunk = max(1, max_logits // vocab_size)
    head = Head(
        temperature=temperature,
        scale=logit_scale,
        softcap=softcap,
        vocab=vocab,
        kept=kept,
        chunk=chunk,
    )
    log_probs_N, entropies_N = _TokenScores.apply(
        hidden_ND, weight_VD, bias_V, targets_N, head, entropy_grad
    )
    if not entropy_grad:
        entropies_N = entropies_N.detach()
    return TokenScores(log_probs=log_probs_N, entropies=entropies_N)


def chunk_rows(num_tokens: int, vocab_size: int, device_type: str) -> int:
    """Return the tokens of a chunk: as few chunks as the device's budget of logits allows, of about equal size."""
    max_logits = CPU_LOGITS if device_type == "cpu" else CUDA_LOGITS
    max_rows = max_logits // vocab_size
    if max_rows <= _ROW_MULTIPLE:
        return max(1, max_rows)
    num_tokens = max(1, num_tokens)
    num_chunks = -(-num_tokens // (max_rows - max_rows % _ROW_MULTIPLE))
    rows = -(-num_tokens // num_chunks)
    return -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class Head:
    """The operations that give the logits of this rank's part of the vocabulary, a chunk of tokens at a time."""

    temperature: float
    scale: float
    softcap: float | None
    vocab: VocabShard | None
    chunk: int
    kept: KeptTokens | None = None

    def logits(
        self,
        hidden_ND: torch.Tensor,
        rows: slice,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute tempered logits [C, V] of some rows; a very low one for tokens left out and padding."""
        logits_CV = _wide_product(hidden_ND[rows], weight_VD.T)
        if bias_V is not None:
            logits_CV += bias_V
        if self.softcap is None:
            if self.scale != self.temperature:
                logits_CV *= self.scale / self.temperature
        else:
            logits_CV.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        if self.vocab is not None:
            logits_CV[:, max(0, self.vocab.vocab_size - self.vocab.start) :] = _PADDING
        if self.kept is not None:
            self._leave_out(logits_CV, rows, *self.kept)
        return logits_CV

    def _leave_out(
        self,
        logits_CV: torch.Tensor,
        rows: slice,
        counts_N: NDArray[np.int32],
        ids_K: NDArray[np.int32],
    ) -> None:
        """Lower the logits of tokens that some rows were not drawn from, in place."""
        counts_C = counts_N[rows]
        begin = counts_N[: rows.start].sum()
        column_K = ids_K[begin : begin + counts_C.sum()]
        if self.vocab is not None:
            column_K = column_K - self.vocab.start
        row_K = np.repeat(np.arange(counts_C.size), counts_C)
        is_here_K = (column_K >= 0) & (column_K < logits_CV.shape[1])
        place_2K = on_device(np.stack([row_K, column_K])[:, is_here_K], logits_CV.device)
        kept_K = logits_CV[tuple(place_2K)]
        cut = on_device(np.flatnonzero(counts_C), logits_CV.device)
        logits_CV.index_fill_(0, cut, _PADDING)
        logits_CV[tuple(place_2K)] = kept_K

    def slope(self, logits_CV: torch.Tensor) -> torch.Tensor | None:
        """Return d logits / d product, but for its constant scale / temperature; None: 1; 0 for padding."""
        if self.softcap is None:
            return None
        capped_CV = (logits_CV * (self.temperature / self.softcap)).clamp_(min=-1)
        return capped_CV.square_().neg_().add_(1)

    def places(
        self, targets_C: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return whether each target is in this rank's part, [C] (None: all are), and a column of it, [C, 1]."""
        if self.vocab is None:
            return None, targets_C[:, None]
        column_C = targets_C - self.vocab.start
        return (column_C >= 0) & (column_C < num_rows), column_C.clamp(0, num_rows - 1)[:, None]

    def scores(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor, has_bias: bool
    ) -> tuple[torch.Tensor, ...]:
        """Compute log-probs, entropies and log-sum-exp of a chunk, [C] each; may overwrite the logits."""
        is_here_C, place_C1 = self.places(targets_C, logits_CV.shape[1])
        target_C = logits_CV.gather(1, place_C1)[:, 0]
        kernels = self._kernels(logits_CV, has_bias)
        if kernels is None:
            peak_C, sum_C, dot_C = moments_(logits_CV, has_bias=has_bias)
        else:
            peak_C, sum_C, dot_C = kernels.moments(logits_CV)
        if self.vocab is not None and is_here_C is not None:
            local_peak_C = peak_C
            peak_C = peak_C.clone()
            dist.all_reduce(peak_C, op=dist.ReduceOp.MAX, group=self.vocab.group)
            shift_C = local_peak_C - peak_C
            share_C = shift_C.exp()
            dot_C = (dot_C + sum_C * shift_C) * share_C
            sums = torch.stack([sum_C * share_C, dot_C, torch.where(is_here_C, target_C, 0.0)])
            dist.all_reduce(sums, group=self.vocab.group)
            sum_C, dot_C, target_C = sums
        log_sum_C = sum_C.log()
        return target_C - peak_C - log_sum_C, log_sum_C - dot_C / sum_C, peak_C + log_sum_C

    def _kernels(self, logits_CV: torch.Tensor, has_bias: bool) -> Any:
        """Return the module of kernels; None where they do not compute what this head needs."""
        if (
            has_bias
            or self.softcap is not None
            or not _has_kernels(logits_CV.device, logits_CV.dtype)
        ):
            return None
        from gcore_trainer.packing import logit_kernels

        return logit_kernels

    def gradient(
        self,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        log_sums_C: torch.Tensor,
        grad_log_probs_C: torch.Tensor,
        entropies_C: torch.Tensor | None,
        grad_entropies_C: torch.Tensor,
        has_bias: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Compute the gradient [C, V] of the product from the scores' gradients; may overwrite the logits.

        Args:
            entropies_C: None where entropies have no gradient.
            dtype: that the caller rounds the gradient to, as kernels do right away.
        """
        factor = self.scale / self.temperature
        is_here_C, place_C1 = self.places(targets_C, logits_CV.shape[1])
        kernels = self._kernels(logits_CV, has_bias)
        if kernels is not None:
            column_C = place_C1[:, 0]
            if is_here_C is not None:
                column_C = torch.where(is_here_C, column_C, -1)
            pull_C = grad_log_probs_C * -factor
            entropy_pull_C = None if entropies_C is None else grad_entropies_C * -factor
            return kernels.gradient(
                logits_CV, column_C, log_sums_C, pull_C, entropies_C, entropy_pull_C, dtype
            )
        grad_C1 = grad_log_probs_C[:, None] * -factor
        slope_CV = self.slope(logits_CV)
        log_probs_CV = logits_CV.sub_(log_sums_C[:, None])
        ones_C1 = (
            torch.ones_like(grad_C1) if is_here_C is None else is_here_C[:, None].to(grad_C1.dtype)
        )
        if entropies_C is None:
            # p - onehot first: with p near 1 the difference would be lost in a product that was rounded before.
            grad_CV = log_probs_CV.exp_().scatter_add_(1, place_C1, -ones_C1).mul_(grad_C1)
        else:
            probs_CV = log_probs_CV.exp()
            pull_CV = _finite_(log_probs_CV, has_bias).add_(entropies_C[:, None]).mul_(probs_CV)
            grad_CV = pull_CV.mul_(grad_entropies_C[:, None] * -factor)
            grad_CV.addcmul_(probs_CV.scatter_add_(1, place_C1, -ones_C1), grad_C1)
        return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)

    def gradients(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        log_sums_N: torch.Tensor,
        grad_log_probs_N: torch.Tensor,
        entropies_N: torch.Tensor | None,
        grad_entropies_N: torch.Tensor,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute the gradients of hidden states, weight and bias, the last two summed in float32 at least."""
        grad_hidden_ND = torch.empty_like(hidden_ND)
        narrow_VD = weight_VD.to(hidden_ND.dtype)
        grad_weight_VD: torch.Tensor | None = None
        grad_bias_V: torch.Tensor | None = None
        if needs_weight:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype))
        if bias_V is not None and needs_bias:
            grad_bias_V = torch.zeros_like(bias_V, dtype=_wide(bias_V.dtype))
        for begin in range(0, targets_N.shape[0], self.chunk):
            rows = slice(begin, begin + self.chunk)
            grad_CV = self.gradient(
                self.logits(hidden_ND, rows, narrow_VD, bias_V),
                targets_N[rows],
                log_sums_N[rows],
                grad_log_probs_N[rows],
                None if entropies_N is None else entropies_N[rows],
                grad_entropies_N[rows],
                bias_V is not None,
                hidden_ND.dtype,
            )
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            narrow_CV = grad_CV.to(hidden_ND.dtype)
            torch.mm(narrow_CV, narrow_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, narrow_CV.T, hidden_ND[rows])
        return grad_hidden_ND, grad_weight_VD, grad_bias_V


class _TokenScores(torch.autograd.Function):
    """d log p(t) / d logit = onehot(t) - p;  d entropy / d logit = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: Head,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts: list[tuple[torch.Tensor, ...]] = []
        narrow_VD = weight_VD.to(hidden_ND.dtype)
        for begin in range(0, max(1, targets_N.shape[0]), head.chunk):
            rows = slice(begin, begin + head.chunk)
            # Logits that have no name here are gone before those of the next chunk are made.
            parts.append(
                head.scores(
                    head.logits(hidden_ND, rows, narrow_VD, bias_V),
                    targets_N[rows],
                    bias_V is not None,
                )
            )
        log_probs_N, entropies_N, log_sums_N = (
            torch.cat(part) for part in zip(*parts, strict=True)
        )
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropies_N, log_sums_N)
        ctx.settings = head, entropy_grad
        return log_probs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs_N, grad_entropies_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, entropies_N, log_sums_N = ctx.saved_tensors
        head, entropy_grad = ctx.settings
        grad_hidden_ND, grad_weight_VD, grad_bias_V = head.gradients(
            hidden_ND,
            weight_VD,
            bias_V,
            targets_N,
            log_sums_N,
            grad_log_probs_N,
            entropies_N if entropy_grad else None,
            grad_entropies_N,
            *ctx.needs_input_grad[1:3],
        )
        if head.vocab is not None:
            dist.all_reduce(grad_hidden_ND, group=head.vocab.group)
        # Autograd rounds the sums to the type in which the parameters want their gradients.
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None


def moments_(
    logits_CV: torch.Tensor, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute peak, sum and dot product of the logits as `logit_kernels.moments` does; overwrites the logits."""
    peak_C = logits_CV.amax(-1)
    below_CV = logits_CV.sub_(peak_C[:, None])
    exp_CV = below_CV.exp()
    sum_C = exp_CV.sum(-1)
    return peak_C, sum_C, exp_CV.mul_(_finite_(below_CV, has_bias)).sum(-1)


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype != torch.float32 or find_spec("triton") is None:
        return False
    from gcore_trainer.packing.logit_kernels import compile_on

    return compile_on(device)


def _wide_product(a_CD: torch.Tensor, b_DV: torch.Tensor) -> torch.Tensor:
    """Return a @ b in float32 at least, without rounding in between if the device supports that."""
    wide = _wide(a_CD.dtype)
    if a_CD.device.type == "cuda" and wide != a_CD.dtype:
        return torch.mm(a_CD, b_DV, out_dtype=wide)
    return (a_CD @ b_DV).to(wide)


def _add_product(sum_VD: torch.Tensor, a_VC: torch.Tensor, b_CD: torch.Tensor) -> None:
    """Add a @ b to a sum in place; a sum wider than the factors is added to by the product itself on a GPU."""
    if sum_VD.dtype == b_CD.dtype:
        sum_VD.addmm_(a_VC, b_CD)
    elif sum_VD.device.type == "cuda":
        torch.addmm(sum_VD, a_VC, b_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += a_VC @ b_CD


def _finite_(x: torch.Tensor, may_be_infinite: bool) -> torch.Tensor:
    """Raise -inf, which a bias may have, to a finite number in place: 0 times -inf is not 0."""
    return x.clamp_(min=_PADDING) if may_be_infinite else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
