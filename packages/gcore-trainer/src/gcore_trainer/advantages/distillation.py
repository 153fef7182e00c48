"""On-policy distillation: the reverse KL divergence to a teacher at the policy's own samples, as advantages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import AllGather, statistics
from gcore_trainer.errors import BatchError
from gcore_trainer.sample import Sample, require_finite


def distillation_advantages(
    log_probs: NDArray[np.floating],
    teacher_log_probs: NDArray[np.floating],
    mask: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the advantages of one response's tokens [R], 0 outside the mask: A_t = log q(y_t) - log p(y_t).

    p is the policy that drew y_t, q the teacher, both given the prompt and the tokens before. The policy gradient with
    these advantages, E_p[A_t grad log p(y_t)], is that of -KL(p || q) over the next token, at the states that the
    policy visits, because E_p[grad log p] is 0. How a token changes later states is left out, as in GKD (arXiv
    2306.13649, section 3.1, on-policy with the reverse KL) and in K. Lu, "On-Policy Distillation" (Thinking Machines
    Lab, 2025), where the discount is 0; MiniLLM (arXiv 2306.08543, eq. 2) sums over later tokens, too.

    Args:
        log_probs: [R] of the policy that wrote it, before its update.
        teacher_log_probs: [R] of the same tokens under the teacher. A weighted mean of several teachers' gives the
            gradient of the same mean of the divergences to them.

    Raises:
        BatchError: a log-probability of a token in the mask is not finite.
    """
    require_finite("log_probs", log_probs, mask)
    require_finite("teacher_log_probs", teacher_log_probs, mask)
    advantages = np.zeros(mask.shape, np.float64)
    advantages[mask] = teacher_log_probs[mask].astype(np.float64) - log_probs[mask]
    return advantages


async def add_distillation(
    samples: Sequence[Sequence[Sample]],
    teacher_log_probs: Sequence[Sequence[NDArray[np.floating] | None]],
    all_gather: AllGather,
    *,
    coef: float = 1.0,
) -> dict[str, float]:
    """Add ``coef`` times `distillation_advantages` to the advantages of the samples of each group of this process.

    Args:
        samples: with advantages, and with log-probs under the policy before its update.
        teacher_log_probs: [R] of each sample; None: it has no teacher, and keeps its advantages.

    Returns:
        metrics of the whole batch: ``critic/advantages`` as they are now; ``distillation/reverse_kl``,
        the mean of log p - log q, nats a token; and ``distillation/taught``, the share of samples with a teacher.

    Raises:
        BatchError: a sample has no advantages or log-probs, or a number that counts is not finite.
    """
    kl_sum = 0.0
    num_tokens = 0
    num_taught = 0
    everyone: list[Sample] = []
    for group_samples, group_log_probs in zip(samples, teacher_log_probs, strict=True):
        everyone.extend(group_samples)
        for sample, teacher in zip(group_samples, group_log_probs, strict=True):
            log_probs = sample.policy_log_probs
            if sample.advantages is None or log_probs is None:
                raise BatchError(
                    "advantages or log-probs is None; expected arrays for every sample of distillation"
                )
            if teacher is not None:
                further = distillation_advantages(log_probs, teacher, sample.mask)
                sample.advantages = (sample.advantages + coef * further).astype(np.float32)
                kl_sum -= float(further.sum())
                num_tokens += int(sample.mask.sum())
                num_taught += 1
    parts = await all_gather((kl_sum, num_tokens, num_taught, len(everyone)))
    kl, tokens, taught, total = (sum(column) for column in zip(*parts, strict=True))
    metrics = {
        "distillation/reverse_kl": kl / max(tokens, 1),
        "distillation/taught": taught / max(total, 1),
    }
    counted = [s.advantages[s.mask] for s in everyone if s.advantages is not None]
    return metrics | await statistics("critic/advantages", counted, all_gather)
