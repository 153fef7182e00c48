"""One batch of made-up responses, and its advantages, loss and gradient as a run of gcore computes them.

Shapes: B responses, R padded response tokens, N response tokens end to end without padding.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_controller import run_inline
from gcore_llm.config import TrainConfig
from gcore_llm.learning.preparation import prepare
from gcore_rollout import Completion, Group
from gcore_trainer import (
    BatchTotals,
    KLController,
    OverlongConfig,
    PolicyObjective,
    Sample,
    TokenScores,
)

NUM_PROMPTS = 4
_MOST_RESPONSES = 8
_MOST_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """Advantages, loss and gradient of the batch."""

    advantages: NDArray[np.float64]
    """[N]"""
    loss: float
    gradient: NDArray[np.float64]
    """[N], of the loss to the policy's log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class FixedBatch:
    """Responses of different lengths with scores, and log-probabilities of engine, old policy, policy and reference."""

    n: int
    """Responses to each of the prompts."""
    lengths: list[int]
    scores: NDArray[np.float64]
    """[B]"""
    greedy_scores: NDArray[np.float64]
    """[NUM_PROMPTS]"""
    rollout: NDArray[np.float32]
    """[N], as the other arrays."""
    old: NDArray[np.float32]
    current: NDArray[np.float32]
    reference: NDArray[np.float32]
    values: NDArray[np.float32]
    entropies: NDArray[np.float32]
    parts: Mapping[str, NDArray[np.float64]]
    """[B] of each part of the reward that the estimator reads."""

    @classmethod
    def of(cls, config: TrainConfig, *, seed: int) -> "FixedBatch":
        """Draw a batch with as many responses to a prompt as a run has, but at most eight."""
        rng = np.random.default_rng(seed)
        n = min(config.rollout.n, _MOST_RESPONSES)
        longest = min(config.data.max_response_length, _MOST_TOKENS)
        lengths: list[int] = rng.integers(1, longest + 1, NUM_PROMPTS * n).tolist()

        def near(array: NDArray[np.floating], scale: float) -> NDArray[np.float32]:
            return (array + rng.normal(0.0, scale, array.size)).astype(np.float32)

        old = -np.abs(rng.normal(1.0, 1.0, sum(lengths))).astype(np.float32)
        rollout = old if config.algorithm.old_log_probs == "rollout" else near(old, 0.05)
        return cls(
            n=n,
            lengths=lengths,
            scores=rng.normal(size=len(lengths)).round(1),
            greedy_scores=rng.normal(size=NUM_PROMPTS).round(1),
            rollout=rollout,
            old=old,
            current=near(old, 0.2),
            reference=near(old, 0.3),
            values=rng.normal(size=old.size).astype(np.float32),
            entropies=np.abs(rng.normal(size=old.size)).astype(np.float32),
            parts={name: rng.normal(size=len(lengths)) for name in part_weights(config)},
        )

    @cached_property
    def ends(self) -> list[int]:
        """Ends of all responses but the last, in arrays [N]."""
        return np.cumsum(self.lengths)[:-1].tolist()

    def pad(self, array: NDArray[Any], width: int = 0) -> torch.Tensor:
        """[B, R] in float64 of an array [N], with zeros after it; ``width`` is at least R."""
        rows = np.split(np.asarray(array, np.float64), self.ends)
        longest = max(width, *self.lengths)
        return torch.from_numpy(np.stack([np.pad(row, (0, longest - row.size)) for row in rows]))

    def flat(self, padded: torch.Tensor) -> NDArray[np.float64]:
        """[N] of an array [B, R]."""
        rows = padded.detach().double().numpy()
        return np.concatenate(
            [row[:length] for row, length in zip(rows, self.lengths, strict=True)]
        )

    @cached_property
    def mask(self) -> torch.Tensor:
        """[B, R], 1 where there is a token."""
        return self.pad(np.ones(sum(self.lengths)))


def part_weights(config: TrainConfig) -> Mapping[str, float]:
    """Return the weights of the parts of the reward that the estimator reads, by name."""
    return config.algorithm.advantage_options.get("gdpo_rewards", {})


def computed_here(config: TrainConfig, batch: FixedBatch) -> BatchResult:
    """Return what a run with these settings makes of the batch; the overlong penalty is left out of the scores."""
    algorithm = replace(config.algorithm, overlong=OverlongConfig())
    samples = asyncio.run(run_inline(_prepare_samples(algorithm, batch), roles=None))[0]
    longest = config.actor.loss.max_response_length or config.data.max_response_length
    settings = replace(config.actor.loss, max_response_length=longest)
    objective = PolicyObjective(settings, algorithm.loss_options(settings.loss_mode))
    log_probs = torch.from_numpy(batch.current).double().requires_grad_()
    scores = TokenScores(log_probs=log_probs, entropies=torch.from_numpy(batch.entropies).double())
    loss, _ = objective.partial_loss(
        scores, samples, BatchTotals.of([sample.mask for sample in samples])
    )
    loss.backward()
    assert log_probs.grad is not None
    advantages = [np.asarray(sample.advantages, np.float64) for sample in samples]
    return BatchResult(
        advantages=np.concatenate(advantages), loss=loss.item(), gradient=log_probs.grad.numpy()
    )


def _prepare_samples(algorithm: Any, batch: FixedBatch) -> Any:
    """Return a program of one controller that returns the batch's samples with their advantages."""
    arrays = {
        "old_log_probs": batch.old,
        "rollout_log_probs": batch.rollout,
        "ref_log_probs": batch.reference,
        "values": batch.values,
    }
    rows: dict[str, Any] = {name: np.split(array, batch.ends) for name, array in arrays.items()}
    groups: list[Group] = []
    samples: list[list[Sample]] = []
    for prompt, greedy_score in enumerate(batch.greedy_scores):
        prompt_ids = np.array([prompt])
        responses: list[Completion] = []
        prompt_samples: list[Sample] = []
        for index in range(prompt * batch.n, (prompt + 1) * batch.n):
            fields = {name: parts[index] for name, parts in rows.items()}
            length = batch.lengths[index]
            sample = Sample(prompt_ids=prompt_ids, response_ids=np.arange(length), **fields)
            prompt_samples.append(sample)
            response = Completion(
                request_id="",
                index=0,
                finish_reason="stop",
                token_ids=sample.response_ids,
                log_probs=fields["rollout_log_probs"],
                weight_versions=np.zeros(length, np.int32),
                score=float(batch.scores[index]),
                parts={name: float(values[index]) for name, values in batch.parts.items()},
            )
            responses.append(response)
        group = Group(
            prompt_index=prompt,
            prompt_ids=prompt_ids,
            responses=responses,
            greedy_score=float(greedy_score),
        )
        groups.append(group)
        samples.append(prompt_samples)

    async def program(context: Any) -> list[Sample]:
        kl = KLController(algorithm.kl_ctrl)
        await prepare(
            groups,
            samples,
            algorithm,
            kl=kl,
            baselines={},
            max_response_length=_MOST_TOKENS,
            group=context.group,
        )
        return list(chain.from_iterable(samples))

    return program
