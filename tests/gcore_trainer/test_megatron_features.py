"""What a trainer of Megatron-Core uses on which device, and settings that are refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import CONFIGS, save_megatron_model
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
from gcore_trainer.megatron import features as megatron_features
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.megatron.cpu import megatron_runtime
from gcore_trainer.megatron.features import (
    data_parallel_options,
    dispatcher_options,
    fusion_options,
    recompute_options,
)
from gcore_trainer.megatron.hf_files import num_parameters
from gcore_trainer.megatron.model import transformer_config

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


@pytest.mark.parametrize(
    ("device", "num_ranks", "has_lora", "settings", "expected"),
    [
        ("cuda", 8, False, {}, (True, True)),
        ("cuda", 8, True, {}, (True, False)),
        ("cuda", 1, False, {}, (False, False)),
        ("cpu", 8, False, {}, (False, False)),
        ("cpu", 8, False, {"overlap_param_gather": True}, (True, True)),
        ("cpu", 8, False, {"overlap_grad_reduce": True}, (True, False)),
        ("cuda", 8, False, {"overlap_grad_reduce": False}, (False, False)),
        ("cuda", 8, False, {"overlap_param_gather": False}, (True, False)),
    ],
)
def test_replicas_communicate_during_the_passes_on_cuda(
    device: str,
    num_ranks: int,
    has_lora: bool,
    settings: dict[str, Any],
    expected: tuple[bool, bool],
) -> None:
    options = data_parallel_options(
        MegatronConfig(**settings), device_type=device, num_ranks=num_ranks, has_lora=has_lora
    )
    assert (options["overlap_grad_reduce"], options["overlap_param_gather"]) == expected


@pytest.mark.parametrize(
    ("is_installed", "device", "num_ranks", "dtype", "expected"),
    [
        (True, "cuda", 8, torch.bfloat16, "flex"),
        (False, "cuda", 8, torch.bfloat16, "alltoall"),
        (True, "cpu", 8, torch.bfloat16, "alltoall"),
        (True, "cuda", 8, torch.float32, "alltoall"),
        (True, "cuda", 1, torch.bfloat16, "alltoall"),
        (True, "cuda", 6, torch.bfloat16, "alltoall"),
    ],
)
def test_deepep_exchanges_tokens_where_it_can(
    is_installed: bool,
    device: str,
    num_ranks: int,
    dtype: torch.dtype,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron_features, "HAVE_DEEP_EP", is_installed)
    options = dispatcher_options(num_ranks, device_type=device, dtype=dtype)
    assert options == {"moe_token_dispatcher_type": expected}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("granularity", ["auto", "selective"])
def test_megatron_accepts_what_is_chosen_on_cuda(name: str, granularity: Any) -> None:
    config, size = MegatronConfig(recompute_granularity=granularity), partial(int, LARGE_MODEL)
    features = fusion_options(config, device_type="cuda", has_te=False)
    features |= dispatcher_options(2, device_type="cuda", dtype=torch.bfloat16)
    features |= recompute_options(config, device_type="cuda", num_parameters=size)
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    with megatron_runtime(torch.device("cuda")):
        made = transformer_config(
            Architecture(CONFIGS[name]), parallel, features, dtype=torch.bfloat16
        )
    assert features.items() <= vars(made).items()
    assert made.bf16
    assert made.bias_activation_fusion
    assert made.gradient_accumulation_fusion
    assert made.recompute_granularity == ("full" if granularity == "auto" else granularity)


def test_parameters_are_counted_by_the_headers_of_files(tmp_path: Path) -> None:
    path = save_megatron_model("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert num_parameters(path) == sum(p.numel() for p in model.parameters())


def test_ranks_of_tensor_parallelism_have_one_queue_on_cuda() -> None:
    divided = ParallelConfig(tensor_model_parallel_size=2)
    assert MegatronConfig.environment(divided, "cuda") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert (
        MegatronConfig.environment(divided, "cpu")
        == MegatronConfig.environment(ParallelConfig(), "cuda")
        == {}
    )


def test_refused_settings() -> None:
    with pytest.raises(
        ConfigError,
        match="overlap_param_gather is True; expected auto or false without overlap_grad_reduce",
    ):
        MegatronConfig(overlap_param_gather=True, overlap_grad_reduce=False).check()
    with pytest.raises(ConfigError, match="bucket_size is 0; expected 1 or more"):
        MegatronConfig(bucket_size=0)
    with pytest.raises(
        ConfigError, match="recompute_granularity is 'some'; expected one of auto, none, selective"
    ):
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
