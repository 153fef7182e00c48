"""The part log-probs: log-probabilities from hidden states, forward and backward, in chunks of logits and all at once.

Shapes: N tokens, D hidden size, V vocabulary.
"""

import torch

from gcore_bench.harness.measure import measured
from gcore_bench.harness.processes import Spec
from gcore_bench.harness.report import Figures
from gcore_trainer import token_scores


def run(spec: Spec) -> dict[str, Figures]:
    """Return a row for each vocabulary: seconds and memory of ``chunked`` or ``naive``, and the mean log-prob."""
    return {f"{size:,} {spec.contender}": _figures(spec, size) for size in spec.options["vocab_sizes"]}


def _figures(spec: Spec, vocab_size: int) -> Figures:
    options = spec.options
    device, hidden_size = options["device"], options["hidden_size"]
    work = {"chunked": _chunked, "naive": _naive}[spec.contender]
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
    # Threads start and kernels load at first use, which is not measured.
    work(hidden_ND, weight_VD, targets_N, rows=2)
    sums: list[float] = []
    times = measured(lambda: sums.append(work(hidden_ND, weight_VD, targets_N)), times=options["steps"], device=device)
    return times.figures() | {
        "log_probs": sums[0] / num_tokens,
        "logits_bytes": 4.0 * num_tokens * vocab_size,
        "tokens": float(num_tokens),
    }


def _chunked(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, rows: int | None = None
) -> float:
    total = token_scores(hidden_ND[:rows], weight_VD, targets_N[:rows]).log_probs.sum()
    total.backward()
    return total.item()


def _naive(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, rows: int | None = None) -> float:
    """The straightforward way: float32 logits of every token, their log-softmax, and one entry of each."""
    log_probs_NV = torch.log_softmax((hidden_ND[:rows] @ weight_VD.T).float(), -1)
    total = log_probs_NV.gather(-1, targets_N[:rows, None]).sum()
    del log_probs_NV
    total.backward()
    return total.item()
