"""A platform `cpu` for verl, which knows NVIDIA's, AMD's and Huawei's: what it asks of a device, and nothing more."""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(ModuleType):
    """In the place of ``torch.cuda``."""

    Stream = torch.cpu.Stream

    def __getattr__(self, name: str) -> Any:
        if name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
            return _nothing
        if name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            return _zero
        raise AttributeError(name)

    def is_available(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def current_stream(self, *_: Any) -> Any:
        return torch.cpu.current_stream()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 2**34, 2**34

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(name="CPU", total_memory=2**34)

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return 0, 0


def _nothing(*_: Any) -> None:
    pass


def _zero(*_: Any) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Tensors in main memory, gloo between processes, and Ray's GPUs in name only."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("torch_cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        del device_index
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        del msg
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl places its workers by GPUs: `ray.init(num_gpus=1)` says that there is one.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        # New weights then go to vLLM through shared memory.
        return False

    def cudart(self) -> None:
        return None


def _accept_gloo_named_twice() -> None:
    """verl asks for ``cpu:gloo,DEVICE:BACKEND``, which torch refuses where DEVICE is cpu."""
    initialise = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        initialise("gloo" if backend and "cpu:gloo" in backend else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


_accept_gloo_named_twice()
