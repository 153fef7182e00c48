"""Losses of pairs against TRL's `DPOTrainer` and `RewardTrainer`: their own methods, handed scores of our choosing."""

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from gcore_trainer import BatchError, ConfigError
from gcore_trainer.config import DPOLossType
from gcore_trainer.objectives.supervised import bradley_terry_loss, dpo_loss

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def trl() -> Iterator[Any]:
    """TRL without vLLM, which it would import (ten seconds) and warn about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False
        )
        yield SimpleNamespace(
            DPOTrainer=import_module("trl.trainer.dpo_trainer").DPOTrainer,
            RewardTrainer=import_module("trl.trainer.reward_trainer").RewardTrainer,
        )


def accelerator() -> Any:
    """One process: what is gathered is what was given."""
    return SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def stand_in(**fields: Any) -> Any:
    """What TRL's loss reads of its trainer."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator(),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **fields,
    )


def trl_dpo(
    trl: Any,
    log_probs: torch.Tensor,
    ref: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str,
    beta: float,
    label_smoothing: float,
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """`DPOTrainer`'s mean loss and metrics, of token log-probabilities [2P, L], chosen first, and sums [2P]."""
    trainer = stand_in(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
    )
    ref_chosen, ref_rejected = ref.chunk(2)
    # The first token of a sequence is predicted by nothing.
    completion = torch.nn.functional.pad(mask, (1, 0))
    outputs = SimpleNamespace(
        log_probs=log_probs * mask, entropy=mask * 0.0, mean_logits=mask * 0.0, is_top1=mask.bool()
    )
    inputs = {
        "input_ids": torch.ones_like(completion, dtype=torch.long),
        "attention_mask": torch.ones_like(completion, dtype=torch.long),
        "completion_mask": completion,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss, trainer._metrics["train"]


TRL_LOSS_TYPES: dict[tuple[DPOLossType, float], str] = {
    ("sigmoid", 0.0): "sigmoid",
    ("ipo", 0.0): "ipo",
    ("hinge", 0.0): "hinge",
    # With one pair there is nothing to sort, and TRL's AOT is what its sigmoid without label smoothing is not.
    ("sigmoid", 0.1): "aot",
}


@pytest.mark.parametrize("kind", TRL_LOSS_TYPES)
@given(seed=seeds, beta=st.sampled_from([0.05, 0.1, 0.5]))
def test_dpo(trl: Any, kind: tuple[DPOLossType, float], seed: int, beta: float) -> None:
    loss_type, label_smoothing = kind
    generator = torch.Generator().manual_seed(seed)
    pairs, length = (1 if label_smoothing else 4), 7
    mask = (torch.rand(2 * pairs, length, generator=generator) < 0.7).double()
    mask[:, 0] = 1.0
    ref_tokens = -torch.rand(2 * pairs, length, generator=generator, dtype=torch.float64) * 4
    noise = torch.randn(2 * pairs, length, generator=generator, dtype=torch.float64)
    tokens = (ref_tokens + noise * 2).requires_grad_()
    ref = (ref_tokens * mask).sum(1)
    expected, metrics = trl_dpo(
        trl,
        tokens,
        ref,
        mask,
        loss_type=TRL_LOSS_TYPES[kind],
        beta=beta,
        label_smoothing=label_smoothing,
    )
    (expected_gradient,) = torch.autograd.grad(expected, tokens)

    lengths = mask.sum(1) if loss_type == "ipo" else torch.ones(2 * pairs)
    policy_chosen, policy_rejected = ((tokens * mask).sum(1) / lengths).chunk(2)
    ref_chosen, ref_rejected = (ref / lengths).chunk(2)
    losses, chosen_rewards, rejected_rewards = dpo_loss(
        policy_chosen,
        policy_rejected,
        ref_chosen,
        ref_rejected,
        beta=beta,
        loss_type=loss_type,
        label_smoothing=label_smoothing,
    )
    assert losses.shape == (pairs,)
    (gradient,) = torch.autograd.grad(losses.mean(), tokens)
    torch.testing.assert_close(losses.mean(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    if loss_type != "ipo":  # TRL's rewards are of the sums there too
        assert chosen_rewards.mean().item() == pytest.approx(metrics["rewards/chosen"][0])
        assert rejected_rewards.mean().item() == pytest.approx(metrics["rewards/rejected"][0])
    assert not chosen_rewards.requires_grad


@given(seed=seeds, center=st.sampled_from([0.0, 0.01, 1.0]), has_margin=st.booleans())
def test_bradley_terry(trl: Any, seed: int, center: float, has_margin: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = (torch.randn(10, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    margin = torch.rand(5, generator=generator, dtype=torch.float64) if has_margin else None
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=center or None))
    inputs = {"attention_mask": torch.ones(10, 3)} | ({} if margin is None else {"margin": margin})
    expected = trl.RewardTrainer.compute_loss(
        trainer, lambda **_: SimpleNamespace(logits=rewards[:, None]), inputs
    )
    (expected_gradient,) = torch.autograd.grad(expected, rewards)
    chosen, rejected = rewards.chunk(2)
    loss = bradley_terry_loss(chosen, rejected, margin=margin, center_coefficient=center)
    assert loss.shape == (5,)
    (gradient,) = torch.autograd.grad(loss.mean(), rewards)
    torch.testing.assert_close(loss.mean(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


def test_a_policy_that_is_its_reference_has_no_opinion() -> None:
    x, y = torch.tensor([-3.0, -40.0]), torch.tensor([-5.0, -2.0])
    losses, chosen_rewards, _ = dpo_loss(x, y, x, y, beta=0.1)
    torch.testing.assert_close(losses, torch.full((2,), 2.0).log())
    torch.testing.assert_close(chosen_rewards, torch.zeros(2))


def test_far_apart_the_losses_stay_finite() -> None:
    far = torch.tensor([1e4, -1e4])
    zeros = torch.zeros(2)
    losses, _, _ = dpo_loss(far, -far, zeros, zeros, beta=0.1, label_smoothing=0.1)
    torch.testing.assert_close(losses, torch.tensor([200.0, 1800.0]))
    torch.testing.assert_close(bradley_terry_loss(far, -far), torch.tensor([0.0, 2e4]))


@pytest.mark.parametrize(
    ("loss_type", "label_smoothing"),
    [("sigmoid", 0.5), ("sigmoid", -0.1), ("ipo", 0.1), ("hinge", 0.1)],
)
def test_label_smoothing_out_of_bounds_is_refused(
    loss_type: DPOLossType, label_smoothing: float
) -> None:
    x = torch.zeros(2)
    with pytest.raises(
        ConfigError,
        match=rf"label_smoothing is {label_smoothing}; .* \(loss_type is '{loss_type}'\)",
    ):
        dpo_loss(x, x, x, x, beta=0.1, loss_type=loss_type, label_smoothing=label_smoothing)


def test_shapes_that_differ_are_refused() -> None:
    x = torch.zeros(2)
    with pytest.raises(
        BatchError, match=r"'ref_rejected': \(2, 1\)\}; expected equal shapes of one dimension"
    ):
        dpo_loss(x, x, x, x[:, None], beta=0.1)
    with pytest.raises(BatchError, match="'rejected': \\(2, 1\\)"):
        bradley_terry_loss(x, x[:, None])
    with pytest.raises(BatchError, match="'margin': \\(1,\\)"):
        bradley_terry_loss(x, x, margin=torch.zeros(1))
