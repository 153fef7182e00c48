"""Whole passes of packed models on CUDA, by fake tensors: kernels, types and arguments are checked as there."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from gcore_trainer import PackedModel, Sample, compile_layers
from gcore_trainer.packing.accumulating_linear import accumulate_gradients
from gcore_trainer.packing.row import describe_mask
from gcore_trainer.torch import activations
from gcore_trainer.torch.packed_model import ATTENTION_NAME, register

ADDMM = torch.addmm
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


class Operations(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def describe_real_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Describe a mask as training does; it has no values, and a fake tensor has no subclasses."""
    with unset_fake_temporarily():
        return describe_mask(*args, **(kwargs | {"device": "cpu"}))


def group(prompt_length: int, *lengths: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 128, prompt_length)
    return [
        Sample(prompt_ids=prompt, response_ids=rng.integers(0, 128, length)) for length in lengths
    ]


def fake_model(config: type[PreTrainedConfig], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model on CUDA without values, for a `FakeTensorMode` that allows inputs with values."""
    register()
    windows: dict[str, Any] = {"sliding_window": 100} if config is Gemma3TextConfig else {}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config(**SIZES, **windows), dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    # It compares values, of which fake tensors have none.
    monkeypatch.setattr(PackedModel, "_probe", lambda *_: None)
    monkeypatch.setitem(
        vars(AttentionMaskInterface)["_global_mapping"], ATTENTION_NAME, describe_real_mask
    )
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                fake = torch.empty(own.shape, dtype=own.dtype, device="cuda")
                module._parameters[name] = torch.nn.Parameter(fake)
        for name, own in module._buffers.items():
            module._buffers[name] = (
                None if own is None else torch.empty(own.shape, dtype=own.dtype, device="cuda")
            )
    return model


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True, "activation_offload": True}], ids=str
)
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, Gemma3TextConfig])
def test_a_pass_is_flash_attention_and_waits_for_nothing(
    config: type[PreTrainedConfig],
    options: dict[str, Any],
    share_prefix: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The widest of these tiny activations are large enough.
    offload = partial(activations.offload_activations, smallest_bytes=1 << 16)
    monkeypatch.setattr(activations, "offload_activations", offload)
    monkeypatch.setattr(activations, "_address", lambda tensor: tensor.untyped_storage()._cdata)
    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = PackedModel(fake_model(config, monkeypatch), share_prefix=share_prefix, **options)
        with Operations() as operations:
            scores = packed.score([*group(300, 700, 20), *group(40, 130, 5)])
        assert scores.log_probs.device.type == "cuda"
        assert scores.log_probs.dtype == scores.entropies.dtype == torch.float32
        assert list(scores.log_probs.shape) == [855]
    assert {"_local_scalar_dense", "nonzero"}.isdisjoint(operations.names)
    assert not any("scaled_dot_product" in name for name in operations.names)
    assert ("empty_like" in operations.names) == ("activation_offload" in options), (
        "pinned memory of the host"
    )
    calls = operations.names.count("_flash_attention_forward")
    assert calls == 2, "one of each layer"


def add_product(
    total: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """Do what `torch.addmm` does on CUDA alone; kernels there take this type of a sum."""
    with FakeTensorMode():
        total_, a_, b_ = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (total, a, b))
        ADDMM(total_, a_, b_, out_dtype=out_dtype, out=total_)
    out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))


@pytest.mark.parametrize("has_bias", [False, True])
def test_matrix_products_add_gradients_up(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two passes, one of them checkpointed; tests/gpu has the kernels."""
    monkeypatch.setattr(torch, "addmm", add_product)
    layer = torch.nn.Linear(8, 4, bias=has_bias, dtype=torch.bfloat16)
    layer.forward = accumulate_gradients(layer)
    wanted = [torch.ones(p.shape) for p in layer.parameters()]
    for parameter, total in zip(layer.parameters(), wanted, strict=True):
        parameter.grad_dtype = torch.float32
        parameter.grad = total.clone()
    for length, is_checkpointed in ((5, False), (3, True)):
        x = torch.linspace(-1, 2, length * 8).bfloat16().view(1, length, 8).requires_grad_()
        grad = torch.linspace(3, -1, length * 4).bfloat16().view(1, length, 4)
        out = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
        out.backward(grad)
        torch.testing.assert_close(x.grad, grad @ layer.weight)
        wanted[0] += grad[0].float().T @ x[0].float()
        if has_bias:
            wanted[1] += grad[0].float().sum(0)
    for parameter, total in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_layers_without_a_float32_sum_are_torchs(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(8, 4, dtype=dtype)
    other = copy.deepcopy(layer)
    layer.forward = accumulate_gradients(layer)
    x = torch.linspace(-1, 1, 40).to(dtype).view(5, 8)
    for own in (layer, other):
        for _ in range(2):
            own(x.requires_grad_()).square().sum().backward()
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


# Dynamo looks at the gradient of every tensor, also of those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("config", "options", "with_gradient"),
    [
        (Qwen2Config, {}, True),
        (Qwen3Config, {"gradient_checkpointing": True}, True),
        (Gemma3TextConfig, {}, False),
        (Gemma3TextConfig, {"gradient_checkpointing": True}, True),
    ],
)
def test_compiled_layers_are_the_same_graphs_for_all_rows(
    config: type[PreTrainedConfig],
    options: dict[str, Any],
    with_gradient: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No more is traced than on a CPU, whose results `test_compiled.py` compares."""
    torch.compiler.reset()
    counters.clear()
    stats = counters["stats"]
    # A backward pass on CUDA cannot be traced without one.
    backend = "eager" if with_gradient else "aot_eager"
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(with_gradient):
        packed = PackedModel(fake_model(config, monkeypatch), **options)
        compile_layers(packed, backend=backend)
        first = packed.score([*group(300, 700, 20), *group(40, 130, 5)])
        num_graphs = stats["unique_graphs"]
        assert 0 < num_graphs <= 8
        for row in ([*group(17, 5)], [*group(90, 3, 400, 8)]):
            scores = packed.score(row)
            assert scores.log_probs.device.type == "cuda"
            assert scores.log_probs.requires_grad == first.log_probs.requires_grad == with_gradient
        assert stats["unique_graphs"] == num_graphs
    torch.compiler.reset()
