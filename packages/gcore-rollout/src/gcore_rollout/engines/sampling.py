"""Drawing tokens so that a sample depends on its own seed and nothing else in the batch."""

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sample_seeds(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit seed per sample of a request, shape [n]."""
    base = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    return _splitmix64(_splitmix64(base + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def continued_seed(seed: int, index: int, prefix_length: int) -> int:
    """Return the seed, from 0 to 2**63 - 1, of a sample for engines whose generators start with every request.

    Args:
        seed: of the request.
        index: of the sample.
        prefix_length: tokens that the sample has already. Its seed depends on them, because with the first seed the
            next token would be drawn with the random numbers of the first one.
    """
    own = int(sample_seeds(seed, np.array([index]))[0])
    if prefix_length:
        own = int(sample_seeds(own, np.array([prefix_length]))[0])
    return own >> 1


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The uniform number in (0, 1) that each sample (its seed, shape [B]) uses at each position, shape [B]."""
    bits = _splitmix64(seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample_tokens(
    logits_BV: torch.Tensor, temperatures: NDArray[np.float32], u: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at ``u``.

    Args:
        logits_BV: raw logits.
        temperatures: shape [B]; rows with 0 take the arg max.
        u: shape [B], in (0, 1).

    Returns:
        tokens (int64, [B]) and their log-probabilities (float32, [B]) at the row's temperature (1 for greedy rows).
    """
    logits_BV = logits_BV.float()
    greedy = temperatures == 0
    if (temperatures != 1).any():
        divisors = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(logits_BV.device)
        logits_BV = logits_BV / divisors[:, None]
    log_probs_BV = torch.log_softmax(logits_BV, dim=-1)
    cdf_BV = log_probs_BV.double().exp_().cumsum(dim=-1)
    threshold_B1 = torch.from_numpy(u).to(cdf_BV.device)[:, None] * cdf_BV[:, -1:]
    # right=True lands on the first entry strictly above the threshold, so a token of probability 0 is never drawn.
    tokens_B1 = torch.searchsorted(cdf_BV, threshold_B1, right=True).clamp_(max=cdf_BV.shape[1] - 1)
    if greedy.any():
        rows_B1 = torch.from_numpy(greedy).to(tokens_B1.device)[:, None]
        tokens_B1 = torch.where(rows_B1, logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
    return tokens_B1[:, 0], log_probs_BV.gather(1, tokens_B1)[:, 0]
