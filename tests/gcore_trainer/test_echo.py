"""ECHO: the cross-entropy of the environment's tokens next to the policy loss, against transformers in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_trees import load, path_to, session
from trainer_oracles import (
    Group,
    deviation,
    gradients,
    load_padded,
    make_samples,
    off_policy,
    packed_gradients,
    padded_loss,
)

from gcore_trainer import (
    BatchError,
    OptimizerConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
)

LOSS = PolicyLossConfig(loss_agg_mode="token-mean")
COEF = 0.3
NOTHING_MOVES = OptimizerConfig(lr=1e-30, grad_clip=float("inf"))


def cross_entropy(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """The mean of -log p of the environment's tokens, each on its path alone."""
    losses: list[torch.Tensor] = []
    environment: NDArray[np.bool_] | None = sample.environment_mask
    assert environment is not None
    for token in np.flatnonzero(environment):
        path, follows_prompt = path_to(sample, int(token))
        ids = sample.response_ids[path]
        if follows_prompt:
            ids = np.append(sample.prompt_ids, ids)
        logits = model(input_ids=torch.from_numpy(ids)[None, :-1]).logits[0, -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-1])))
    return torch.stack(losses).mean()


def test_it_is_added_to_the_policy_loss(qwen2: Path) -> None:
    """Of three responses one has no environment; the advantages of another are 0, and it is learned from still."""
    packed = load(qwen2)
    samples = off_policy(make_samples([Group(7, [20, 9]), Group(4, [13])], seed=0), packed, seed=1)
    samples = [replace(s, environment_mask=~s.mask) for s in samples]
    samples[0] = replace(samples[0], advantages=np.zeros_like(samples[0].advantages))
    samples[1] = replace(samples[1], environment_mask=None)
    assert all(s.environment_mask.any() for s in samples if s.environment_mask is not None)
    objective = PolicyObjective(LOSS, {"echo_coef": COEF})
    trainer = TorchTrainer(packed, optimizer=NOTHING_MOVES, objective=objective)
    metrics = trainer.train_step([samples[:1], samples[1:]])
    actual = gradients(packed.model)

    model = load_padded(qwen2, dtype=torch.float64)
    policy_loss = padded_loss(model, samples, LOSS)
    echo_loss = (cross_entropy(model, samples[0]) + cross_entropy(model, samples[2])) / 3
    (policy_loss + COEF * echo_loss).backward()
    assert metrics["actor/echo_loss"] == pytest.approx(echo_loss.item(), rel=1e-6)
    assert metrics["actor/pg_loss"] == pytest.approx(policy_loss.item(), rel=1e-6)
    assert deviation(actual, gradients(model)) < 1e-6
    # Without the option the same samples have the policy loss alone.
    _, plain = packed_gradients(packed, [samples], LOSS)
    padded_loss(model, samples, LOSS).backward()
    assert deviation(plain, gradients(model)) < 1e-6


def test_a_tree_of_turns_is_one_sequence(qwen2: Path) -> None:
    packed = load(qwen2)
    tree = session()
    tree = replace(
        tree,
        advantages=np.zeros_like(tree.advantages),
        environment_mask=np.isin(np.arange(30), [11, 12, 13, 23]),
    )
    _, actual = packed_gradients(packed, [[tree]], LOSS, echo_coef=COEF)
    model = load_padded(qwen2, dtype=torch.float64)
    (COEF * cross_entropy(model, tree)).backward()
    assert deviation(actual, gradients(model)) < 1e-6


def test_what_cannot_be_predicted_is_refused() -> None:
    tree = session()
    with pytest.raises(
        BatchError, match=r"forks\[2\] is \[22, -2\] and the mask of token 22 is True"
    ):
        replace(tree, environment_mask=~tree.mask)
