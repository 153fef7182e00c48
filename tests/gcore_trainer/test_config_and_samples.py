"""Wrong input is refused at the door, by the name of the field."""

from typing import Any

import numpy as np
import pytest

from gcore_trainer import (
    BatchError,
    ConfigError,
    OptimizerConfig,
    PolicyLossConfig,
    Sample,
    TrainerError,
)

NAN, INF = float("nan"), float("inf")
OPTIMIZER: dict[str, list[Any]] = {
    "lr": [0.0, -1e-6, NAN, INF],
    "betas": [(0.9, 1.0), (-0.1, 0.9), (0.9, 0.99, 0.999), (NAN, 0.9)],
    "eps": [0.0, -1e-8, NAN, INF],
    "weight_decay": [-0.1, NAN, INF],
    "lr_warmup_steps": [-1],
    "grad_clip": [0.0, -1.0, NAN],
}
POLICY_LOSS: dict[str, list[Any]] = {
    "clip_ratio_low": [-0.1, 1.1, NAN],
    "clip_ratio_high": [-0.1, NAN],
    "clip_ratio_c": [1.0, 0.0, NAN],
    "loss_agg_mode": ["mean", ""],
    "kl_loss_coef": [-0.1, NAN, INF],
    "kl_loss_type": ["k4", "low_var_kl"],
    "entropy_coeff": [-0.1, NAN, INF],
    "max_response_length": [0],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in table.items() for value in values]


@pytest.mark.parametrize(("field", "value"), pairs(OPTIMIZER))
def test_an_optimizer_setting_out_of_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is "):
        OptimizerConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), pairs(POLICY_LOSS))
def test_a_loss_setting_out_of_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is "):
        PolicyLossConfig(**{field: value})


def test_config_errors_are_value_errors_of_this_package() -> None:
    assert issubclass(ConfigError, TrainerError)
    assert issubclass(ConfigError, ValueError)


def ids(*shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.zeros(shape, np.int64)


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize(
    "value", [ids(0), ids(2, 3), ids(3).astype(np.int32), ids(3).astype(np.float32)]
)
def test_token_ids_are_one_dimension_of_int64(field: str, value: Any) -> None:
    arrays: dict[str, Any] = {"prompt_ids": ids(2), "response_ids": ids(3), field: value}
    with pytest.raises(BatchError, match=f"^{field} has "):
        Sample(**arrays)


@pytest.mark.parametrize(
    "field", ["response_mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs"]
)
def test_per_token_arrays_are_as_long_as_the_response(field: str) -> None:
    arrays: dict[str, Any] = {
        field: np.ones(4, np.bool_ if field == "response_mask" else np.float32)
    }
    with pytest.raises(BatchError, match=rf"^{field} has shape \(4,\)"):
        Sample(prompt_ids=ids(2), response_ids=ids(3), **arrays)


@pytest.mark.parametrize(
    ("counts", "kept", "message"),
    [
        ([1, 0, 0], None, r"one of kept_counts and kept_ids is None"),
        ([1, 0], [0], r"kept_counts has shape \(2,\)"),
        ([2, 0, 1], [0, 3], r"kept_ids has 2 tokens; expected 3, the sum of kept_counts"),
        (
            [2, 0, 1],
            [0, 3, 4],
            r"kept_ids of token 2 lack response_ids\[2\] = 7; expected it among",
        ),
        # The token of another place does not count.
        ([1, 1, 0], [0, 0], r"kept_ids of token 1 lack response_ids\[1\] = 5"),
    ],
)
def test_tokens_that_were_kept_are_checked(
    counts: list[int], kept: list[int] | None, message: str
) -> None:
    response = np.array([0, 5, 7])
    arrays: dict[str, Any] = {"kept_counts": np.array(counts, np.int32)}
    if kept is not None:
        arrays["kept_ids"] = np.array(kept, np.int32)
    with pytest.raises(BatchError, match=f"^{message}"):
        Sample(prompt_ids=ids(2), response_ids=response, **arrays)
    counts_R = np.array([2, 0, 1], np.int32)
    sets = np.array([3, 0, 7], np.int32)
    Sample(prompt_ids=ids(2), response_ids=response, kept_counts=counts_R, kept_ids=sets)


def test_a_mask_is_of_booleans() -> None:
    mask: Any = np.array([1, 0, 1])
    with pytest.raises(BatchError, match=r"^response_mask has dtype int64"):
        Sample(prompt_ids=ids(2), response_ids=ids(3), response_mask=mask)


def test_response_tokens_that_count() -> None:
    assert Sample(prompt_ids=ids(2), response_ids=ids(3)).mask.sum() == 3
    masked = Sample(
        prompt_ids=ids(2), response_ids=ids(3), response_mask=np.array([True, False, True])
    )
    assert masked.mask.sum() == 2
