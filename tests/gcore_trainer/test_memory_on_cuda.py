"""Memory of a trainer on a GPU: what waits for the device, in which order, by fake tensors and stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gcore_trainer import OptimizerConfig
from gcore_trainer.torch.host_memory import Sleeper
from gcore_trainer.torch.optimizer import make_adamw


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the device's runtime, in order."""
    log: list[str] = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: log.append(f"synchronize {device}")
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty cache"))
    return log


# One parameter: fake tensors have no addresses, by which storages are told apart.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_memory_is_freed_once_all_of_it_is_copied(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resize = torch.UntypedStorage.resize_

    def noting_resize(storage: torch.UntypedStorage, size: int) -> Any:
        calls.append("free" if size == 0 else "allocate")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", noting_resize)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = torch.nn.Linear(4, 4, bias=False, device="cuda:0")
        sleeper = Sleeper(module)
        sleeper.sleep()
        assert calls == ["synchronize cuda:0", "free", "empty cache"]
        assert module.weight.untyped_storage().nbytes() == 0
        calls.clear()
        sleeper.wake()
        assert calls == ["allocate", "synchronize cuda:0"]
        assert module.weight.untyped_storage().nbytes() == 64


def test_gradients_have_arrived_before_the_host_updates(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = {
            "w": torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16, device="cuda:0"))
        }
        adamw: Any = make_adamw(parameters, OptimizerConfig(lr=1e-3), offload=True)
        calls.clear()
        for step in ("_update_masters", "_round"):
            monkeypatch.setattr(adamw, step, lambda *_, step=step: calls.append(step))
        adamw._step(1e-3)
    assert calls == ["synchronize cuda:0", "_update_masters", "_round"]
