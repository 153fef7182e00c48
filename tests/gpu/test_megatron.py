"""Megatron-Core's step on each device: what is computed again, and when ranks communicate, changes no number."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_cases import ON_CUDA, MegatronStep, train_megatron

from gcore_trainer import MegatronConfig

PLAIN = MegatronConfig(
    recompute_granularity="none", overlap_grad_reduce=False, overlap_param_gather=False
)
SETTINGS = {
    "none": PLAIN,
    "selective": MegatronConfig(recompute_granularity="selective"),
    "full": MegatronConfig(recompute_granularity="full"),
    "small buckets": MegatronConfig(overlap_param_gather=True, bucket_size=10_000),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "num_ranks"),
    [
        ("cpu", 1),
        pytest.param("cuda", 1, marks=ON_CUDA),
        pytest.param(
            "cuda",
            2,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)
def test_settings_change_no_update(
    device: str, num_ranks: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    """In float32, where sums of other orders differ by rounding alone."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    rendezvous = f"file://{tmp_path}/rendezvous"
    ranks = [
        context.Process(
            target=train_megatron,
            args=(rank, num_ranks, device, rendezvous, folders["qwen3"], SETTINGS, other),
        )
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    other.close()
    steps: dict[str, MegatronStep] = own.recv()
    for process in ranks:
        process.join(60)
    metrics, weights = steps.pop("none")
    assert steps.keys() == SETTINGS.keys() - {"none"}
    for name, (own_metrics, own_weights) in steps.items():
        for row, own_row in zip(metrics, own_metrics, strict=True):
            assert own_row == pytest.approx(row, rel=1e-4, abs=1e-5), name
        for key, weight in weights.items():
            np.testing.assert_allclose(own_weights[key], weight, rtol=1e-4, atol=1e-5)
