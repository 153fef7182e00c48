"""Layers that are computed again, and activations in host memory: less memory, the same gradients to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_oracles import Group, gradients, make_samples

from gcore_trainer import PackedModel
from gcore_trainer.torch import activations

SAMPLES = make_samples([Group(12, [20, 1, 9, 33]), Group(25, [7, 7])], seed=0)


def saved_bytes(packed: PackedModel) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters apart, each memory once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        packed.score(SAMPLES)
    return sum(storage.nbytes() for storage in storages.values())


def trained(path: Path, **options: Any) -> tuple[PackedModel, dict[str, torch.Tensor]]:
    packed = PackedModel.from_pretrained(path, **options)
    if options.get("activation_offload"):
        # Those of a tiny model are small.
        del packed.root.forward
        activations.offload_activations(packed.root, smallest_bytes=0)
    packed.score(SAMPLES).log_probs.mean().backward()
    return packed, gradients(packed.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed_layers", [0.0, 0.5, 1.0])
def test_gradients_are_the_same(
    qwen2: Path, dtype: torch.dtype, checkpointed_layers: float
) -> None:
    _, expected = trained(qwen2, compute_dtype=dtype)
    for activation_offload in (False, True):
        options: dict[str, Any] = {
            "gradient_checkpointing": True,
            "checkpointed_layers": checkpointed_layers,
        }
        _, found = trained(
            qwen2, compute_dtype=dtype, activation_offload=activation_offload, **options
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_memory_falls_with_the_share_of_layers(qwen2: Path) -> None:
    kept = [
        saved_bytes(
            PackedModel.from_pretrained(
                qwen2, gradient_checkpointing=True, checkpointed_layers=share
            )
        )
        for share in (0.0, 0.5, 1.0)
    ]
    assert kept[2] < 0.7 * kept[1] < 0.5 * kept[0]


def test_parameters_and_small_activations_stay() -> None:
    module = torch.nn.Linear(8, 8)
    activations.offload_activations(module, smallest_bytes=1024)
    large, small = (module(torch.ones(n, 8, requires_grad=True)) for n in (64, 2))
    assert large.grad_fn is not None
    assert small.grad_fn is not None
    host = large.grad_fn._raw_saved_mat1.data
    assert isinstance(host, tuple)
    assert host[1].shape == (64, 8)
    assert isinstance(small.grad_fn._raw_saved_mat1.data, torch.Tensor)
    assert (
        large.grad_fn._raw_saved_mat2.data.untyped_storage().data_ptr() == module.weight.data_ptr()
    )


def test_only_large_models_on_cuda_checkpoint_of_themselves() -> None:
    with FakeTensorMode():
        for size, device, expected in (
            (40_000, "cuda", True),
            (20_000, "cuda", False),
            (40_000, "cpu", False),
        ):
            model = torch.nn.Linear(size, size, device=device)
            own = torch.device(device)
            assert activations.is_checkpointed("auto", model, own) is expected
            assert activations.is_checkpointed(not expected, model, own) is not expected
