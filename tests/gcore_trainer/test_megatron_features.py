"""What a trainer of Megatron-Core uses on which device, and settings that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import save_megatron_model
from transformers import AutoModelForCausalLM

from gcore_trainer import (
    LARGE_MODEL,
    ConfigError,
    LoRAConfig,
    MegatronConfig,
    MegatronTrainer,
    OptimizerConfig,
    ParallelConfig,
    SFTObjective,
)
from gcore_trainer.megatron.features import recompute_options
from gcore_trainer.megatron.hf_files import num_parameters

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("granularity", "device", "size", "expected"),
    [
        ("auto", "cuda", LARGE_MODEL, FULL),
        ("auto", "cuda", LARGE_MODEL - 1, {}),
        ("auto", "cpu", LARGE_MODEL, {}),
        ("none", "cuda", LARGE_MODEL, {}),
        ("full", "cpu", 1, FULL),
    ],
)
def test_large_models_compute_layers_again_on_cuda(
    granularity: str, device: str, size: int, expected: dict[str, object]
) -> None:
    config = MegatronConfig(recompute_granularity=granularity)  # pyright: ignore[reportArgumentType]
    assert recompute_options(config, device_type=device, num_parameters=lambda: size) == expected


def test_parameters_are_counted_by_the_headers_of_files(tmp_path: Path) -> None:
    path = save_megatron_model("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert num_parameters(path) == sum(p.numel() for p in model.parameters())


def test_ranks_of_tensor_parallelism_have_one_queue_on_cuda() -> None:
    divided = ParallelConfig(tensor_model_parallel_size=2)
    assert MegatronConfig.environment(divided, "cuda") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert MegatronConfig.environment(divided, "cpu") == MegatronConfig.environment(ParallelConfig(), "cuda") == {}


def test_refused_settings() -> None:
    with pytest.raises(ConfigError, match="overlap_param_gather is True; expected false without overlap_grad_reduce"):
        MegatronConfig(overlap_param_gather=True).check()
    with pytest.raises(ConfigError, match="bucket_size is 0; expected 1 or more"):
        MegatronConfig(bucket_size=0)
    with pytest.raises(ConfigError, match="recompute_granularity is 'some'; expected one of auto, none, selective"):
        MegatronConfig(recompute_granularity="some")  # pyright: ignore[reportArgumentType]


def test_adapters_are_not_gathered_late() -> None:
    late = MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True)
    options: dict[str, Any] = {
        "parallel": ParallelConfig(),
        "optimizer": OptimizerConfig(),
        "objective": SFTObjective(),
    }
    with pytest.raises(ConfigError, match="overlap_param_gather is True with lora; expected false"):
        MegatronTrainer("model", **options, megatron=late, lora=LoRAConfig())
