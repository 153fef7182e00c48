"""The learning rate of every step, against transformers' schedules."""

from typing import Any

import pytest
import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from gcore_trainer import ConfigError, OptimizerConfig
from gcore_trainer.trainer import learning_rate

WARMUP, TOTAL = 5, 40


def rates_of_transformers(schedule: Any, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = schedule(optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL, **options)
    rates: list[float] = []
    for _ in range(TOTAL + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("kind", "ratio", "schedule", "options"),
    [
        ("linear", 0.0, get_linear_schedule_with_warmup, {}),
        ("cosine", 0.0, get_cosine_schedule_with_warmup, {}),
        ("cosine", 0.1, get_cosine_with_min_lr_schedule_with_warmup, {"min_lr_rate": 0.1}),
    ],
)
def test_decay_is_that_of_transformers(
    kind: Any, ratio: float, schedule: Any, options: dict[str, float]
) -> None:
    config = OptimizerConfig(
        lr=0.3,
        lr_warmup_steps=WARMUP,
        lr_scheduler_type=kind,
        total_training_steps=TOTAL,
        min_lr_ratio=ratio,
    )
    expected = rates_of_transformers(schedule, **options)
    rates = [learning_rate(config, step) for step in range(TOTAL + 1)]
    assert rates[WARMUP:] == pytest.approx(expected[WARMUP:], abs=1e-12)
    # The first update already moves: transformers' first rate is 0.
    assert rates[:WARMUP] == pytest.approx(expected[1 : WARMUP + 1], abs=1e-12)
    assert learning_rate(config, 10 * TOTAL) == pytest.approx(0.3 * ratio)


def test_a_constant_rate_needs_no_end() -> None:
    config = OptimizerConfig(lr=0.3, lr_warmup_steps=2)
    assert [learning_rate(config, step) for step in (0, 1, 2, 1000)] == [0.15, 0.3, 0.3, 0.3]


def test_an_end_before_the_warm_up_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^total_training_steps is 5; expected more than lr_warmup_steps=5, or 0"
    ):
        OptimizerConfig(lr_warmup_steps=5, lr_scheduler_type="linear", total_training_steps=5)
