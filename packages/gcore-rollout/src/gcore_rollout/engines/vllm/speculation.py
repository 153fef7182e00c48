"""Speculative decoding in vLLM: what of it keeps the distribution sampled from, and its repair on CPU."""

from collections.abc import Mapping
from typing import Any

import torch


def check_speculation(config: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: a setting with which samples are not drawn from the policy.
    """
    method = config.get("rejection_sample_method", "standard")
    if method == "synthetic":
        raise ValueError(
            f"speculative_config has rejection_sample_method {method!r}: 'standard' or 'block' is needed, "
            "for samples are to be those of the policy"
        )


def repair_rejection_sampler() -> None:
    """Replace a function of vLLM 0.32 that is wrong on CPU; nothing of what runs without speculation calls it.

    Its kernel for CPU writes each token's temperature to a copy, so that logits are divided by memory that nobody has
    written: all samples and log-probs of a step in which anyone samples above temperature 0 would be wrong.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat what belongs to each of B samples for each of its tokens, shape [num_tokens].

    Args:
        x: shape [B].
        cu_num_tokens: tokens of the samples so far, summed up, shape [B].
        replace_from: a value of ``x`` that becomes ``replace_to``.
    """
    counts_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced_B = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced_B.repeat_interleave(counts_B, output_size=num_tokens)
