"""Where Transformer Engine's layers are used; a trainer with a stand-in for them is one with Megatron-Core's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_oracles import (
    EP,
    GROUPS,
    GROUPS_OF_STATE,
    OPTIMIZER,
    PP,
    SP,
    TP,
    assembled,
    data_parallel_size,
    largest_difference,
    save_megatron_model,
    uneven,
)
from rank_pool import RankServer
from trainer_oracles import make_samples

from gcore_trainer import (
    ConfigError,
    MegatronConfig,
    MegatronTrainer,
    OptimizerConfig,
    ParallelConfig,
    SFTObjective,
)
from gcore_trainer.megatron.features import uses_transformer_engine

# With a smaller eps, an entry whose gradient is no more than rounding error moves by whole steps of the rate.
OPTIONS: dict[str, Any] = {"optimizer": replace(OPTIMIZER, eps=1e-5), "objective": SFTObjective()}


@pytest.mark.parametrize(
    ("name", "size", "layout", "settings"),
    [
        ("qwen2", 1, {}, {}),
        ("qwen3", 2, {TP: 2, SP: True}, {}),
        pytest.param("qwen3_moe", 2, {EP: 2}, {"grouped_gemm": True}, marks=pytest.mark.slow),
        pytest.param(
            "qwen2", 4, {TP: 4}, {"recompute_granularity": "full"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_tied",
            4,
            {TP: 2, PP: 2},
            {"recompute_granularity": "selective"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            2,
            {},
            {"overlap_grad_reduce": True, "overlap_param_gather": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_trainer_with_a_stand_in_is_one_without(
    rank_server: RankServer,
    tmp_path: Path,
    name: str,
    size: int,
    layout: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Log-probs, two steps, exported weights and states, whose tensors have the same names."""
    path, ranks = save_megatron_model(name, tmp_path), rank_server.shared(size)
    steps = [
        uneven(make_samples(GROUPS, seed=i), data_parallel_size(size, layout), seed=i)
        for i in range(2)
    ]
    options = OPTIONS | {"megatron": MegatronConfig(**settings)}
    (expected, expected_state), (found, state) = (
        (results[0], assembled(box for *_, boxes in results for box in boxes))
        for results in (
            ranks.run(
                "megatron_scores_and_trains", str(path), layout, options | own, steps, size=size
            )
            for own in ({}, {"stand_in": True})
        )
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert largest_difference(found[2], expected[2]) < 1e-5
    for group in GROUPS_OF_STATE:
        assert largest_difference(state[group], expected_state[group]) < 1e-5, group


@pytest.mark.parametrize(
    ("setting", "device", "is_installed", "has_lora", "expected"),
    [
        ("auto", "cuda", True, False, True),
        ("auto", "cuda", False, False, False),
        ("auto", "cuda", True, True, False),
        ("auto", "cpu", True, False, False),
        (True, "cuda", True, False, True),
        (False, "cuda", True, False, False),
        (False, "cpu", False, True, False),
        (True, "cpu", True, False, "auto or false on cpu: it needs CUDA"),
        (True, "cuda", True, True, "auto or false with lora: adapters are of other layers"),
    ],
)
def test_it_is_used_on_cuda_where_it_is_installed(
    setting: Any, device: str, is_installed: bool, has_lora: bool, expected: bool | str
) -> None:
    config = MegatronConfig(transformer_engine=setting)
    options: dict[str, Any] = {
        "device_type": device,
        "is_installed": is_installed,
        "has_lora": has_lora,
    }
    if isinstance(expected, bool):
        assert uses_transformer_engine(config, **options) == expected
        return
    with pytest.raises(ConfigError) as error:
        uses_transformer_engine(config, **options)
    assert str(error.value) == f"transformer_engine is True; expected {expected}"


def test_without_it_a_trainer_that_is_to_use_it_is_refused_before_anything_is_read() -> None:
    options: dict[str, Any] = {
        "parallel": ParallelConfig(),
        "optimizer": OptimizerConfig(),
        "objective": SFTObjective(),
        "device": torch.device("cuda"),
    }
    with pytest.raises(
        ConfigError,
        match=r"transformer_engine is True; .* pip install 'transformer-engine\[pytorch\]'",
    ):
        MegatronTrainer("no folder", **options, megatron=MegatronConfig(transformer_engine=True))
