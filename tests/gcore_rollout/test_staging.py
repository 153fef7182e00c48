"""Weights that are copied from a device to the host by way of two buckets; the CPU stands in for the device."""

import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch

from gcore_rollout.engines import host_weights
from gcore_rollout.engines.host_weights import HostBlock
from gcore_rollout.weight_sync import staging
from gcore_rollout.weight_sync.staging import stage, stage_each


@pytest.fixture(autouse=True)
def new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_blocks", [HostBlock(0), HostBlock(0)])


def test_the_next_bucket_is_copied_while_one_is_read() -> None:
    """Two blocks of memory for all buckets, of which each is valid until the next one is requested."""
    produced: list[int] = []

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(7):
            produced.append(number)
            weight = torch.nn.Parameter(torch.full((3, 5), float(number)))
            yield {f"w{number}": weight.t(), f"b{number}": torch.full((3,), number).bfloat16()}

    addresses: set[int] = set()
    for number, bucket in enumerate(stage(buckets(), device_type="cpu")):
        assert len(produced) == min(number + 2, 7), "one more than is read"
        assert list(bucket) == [f"w{number}", f"b{number}"]
        weight, bias = bucket.values()
        assert torch.equal(weight, torch.full((5, 3), float(number)))
        assert not weight.requires_grad
        assert torch.equal(bias, torch.full((3,), number).bfloat16())
        addresses.add(weight.untyped_storage().data_ptr())
    assert len(addresses) == 2


def test_tensors_that_are_elsewhere_pass_in_their_order() -> None:
    """On the way to the host, what other ranks send is between the tensors of this one."""
    names = ["a", "meta", "b", "c", "d", "meta 2"]
    requested: list[str] = []

    def weights() -> Iterator[dict[str, torch.Tensor]]:
        for name in names:
            requested.append(name)
            device = "meta" if name.startswith("meta") else "cpu"
            yield {name: torch.ones(2, device=device)}

    found = [name for bucket in stage(weights(), device_type="cpu") for name in bucket]
    assert found == names
    requested.clear()
    for number, bucket in enumerate(stage(weights()), start=1):
        assert len(requested) == number, "nothing is read ahead where nothing is copied"
        assert list(bucket) == names[number - 1 : number]


def test_a_bucket_is_let_go_before_the_next_one_is_made() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(4):
            assert not any(tensor() is not None for tensor in alive)
            tensor = torch.full((5,), float(number))
            alive.append(weakref.ref(tensor))
            yield {"w": tensor}
            del tensor

    def add_up(bucket: Mapping[str, torch.Tensor]) -> float:
        return float(bucket["w"].sum())

    sums = list(map(add_up, stage(buckets())))
    assert sums == [0, 5, 10, 15]
    tensor = torch.ones(3)
    assert dict(stage_each([("w", tensor)]))["w"] is tensor


class Refusal:
    """Stands in for `torch.cuda.cudart()` where no memory can be locked."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert address
        assert size_bytes == 4096
        return 2 + flags


def test_copies_go_through_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "_cudart", Refusal)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with pytest.warns(RuntimeWarning, match="cannot pin host memory .*: error 2.*ulimit -l"):
        block = HostBlock(4096, is_pinned=True)
    [copy] = block.split([torch.empty(1024)])
    assert torch.equal(copy.copy_(torch.arange(1024.0)), torch.arange(1024.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_buckets_of_a_gpu_are_pinned() -> None:
    weights = {f"w{i}": torch.randn(1000, 1000 + i, device="cuda") for i in range(9)}
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in stage_each(weights.items()):
        assert tensor.is_pinned()
        copies[name] = tensor.clone()
    assert list(copies) == list(weights)
    assert all(torch.equal(copies[name], tensor.cpu()) for name, tensor in weights.items())
