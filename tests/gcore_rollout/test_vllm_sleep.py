"""The sleep of vLLM as on a GPU: its own engine, executor, worker and backend, with an allocator for the host."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    TinyModel,
    collect,
    errors,
    make_engine,
    make_request,
    overlap_steps,
)

from gcore_rollout import RolloutError

pytestmark = [pytest.mark.slow, *VLLM_IMPORT_WARNINGS]

LOST = 7.0
"""What memory holds that was given back and taken again."""


@dataclass
class HostAllocator:
    """Stands for `CuMemAllocator`: allocations have tags, sleep by tag, and lose what is not backed up."""

    tensors: dict[str, list[torch.Tensor]]
    log: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.asleep: dict[str, list[torch.Tensor] | None] = {}

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for tag in self.tensors.keys() - self.asleep.keys():
            is_kept = tag in offload_tags
            self.log.append(f"{tag} {'kept' if is_kept else 'lost'}")
            self.asleep[tag] = [tensor.clone() for tensor in self.tensors[tag]] if is_kept else None
            for tensor in self.tensors[tag]:
                tensor.fill_(LOST)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in [tag for tag in self.asleep if tags is None or tag in tags]:
            self.log.append(f"{tag} back")
            kept = self.asleep.pop(tag) or []
            for tensor, before in zip(self.tensors[tag], kept, strict=False):
                tensor.copy_(before)

    def taken(self) -> set[str]:
        """Return what was logged since the last call."""
        log, self.log = self.log, []
        assert len(log) == len(set(log))
        return set(log)


@dataclass(frozen=True)
class Sleeper:
    """An engine that takes the path of a GPU, and what it should hold."""

    engine: Any
    allocator: HostAllocator
    model: TinyModel

    @property
    def sleeping_tags(self) -> set[str]:
        return self.engine._engine.engine_core.engine_core.model_executor.sleeping_tags

    @property
    def is_scheduling(self) -> bool:
        return not self.engine._engine.engine_core.engine_core.is_scheduler_paused()

    async def answers_like(self, model: Any) -> None:
        request = make_request("r", 300, n=2)
        assert max(errors(model, [request], await collect(self.engine, request))) < 1e-5


@pytest.fixture(params=["one by one", "overlapping"])
def sleeper(
    request: pytest.FixtureRequest, untied: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> Sleeper:
    """An engine whose steps overlap, as on a GPU by default, or do not."""
    if request.param == "overlapping":
        overlap_steps(monkeypatch)
    # The head is not tied, because on CPU a tied one has to be packed again, which the path of a GPU leaves out.
    engine: Any = make_engine("vllm", untied)
    from vllm import device_allocator
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    runner = engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    weights = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    allocator = HostAllocator({"weights": weights, "kv_cache": list(runner.kv_caches)})
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(CPUWorker, name, getattr(Worker, name))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    monkeypatch.setattr(engine, "_on_cpu", False)
    monkeypatch.setattr(engine, "_can_sleep", True)
    return Sleeper(engine, allocator, untied)


async def test_weights_that_are_replaced_in_sleep(sleeper: Sleeper) -> None:
    """Level 2; the weights wake, are overwritten, and only then are there keys and values."""
    engine, model, allocator = sleeper.engine, sleeper.model, sleeper.allocator
    await sleeper.answers_like(model.old)
    for version, new in ((1, model.new), (2, model.old)):
        await engine.sleep(keep_weights=False)
        assert allocator.taken() == {"weights lost", "kv_cache lost"}
        assert sleeper.sleeping_tags == {"weights", "kv_cache"}
        assert not sleeper.is_scheduling
        await engine.wake(cache=False)
        assert allocator.taken() == {"weights back"}
        assert sleeper.sleeping_tags == {"kv_cache"}
        assert all(bool((p == LOST).all()) for p in _parameters(engine)), "nothing came back"
        await engine.update_weights(new.state_dict().items(), version=version)
        assert not sleeper.is_scheduling, "keys and values are asleep"
        await engine.wake()
        assert allocator.taken() == {"kv_cache back"}
        assert not sleeper.sleeping_tags
        assert sleeper.is_scheduling
        # Buffers, such as the rotary embedding's, are of no update: vLLM keeps them in the host.
        await sleeper.answers_like(new)
    await engine.close()


async def test_weights_that_are_kept_in_sleep(sleeper: Sleeper) -> None:
    """Level 1, and half awake, and asleep again."""
    engine, model, allocator = sleeper.engine, sleeper.model, sleeper.allocator
    await sleeper.answers_like(model.old)
    kept = [p.clone() for p in _parameters(engine)]
    await engine.sleep()
    assert allocator.taken() == {"weights kept", "kv_cache lost"}
    await engine.wake()
    assert allocator.taken() == {"weights back", "kv_cache back"}
    await sleeper.answers_like(model.old)
    await engine.sleep()
    await engine.wake(cache=False)
    allocator.taken()
    await engine.sleep()
    assert allocator.taken() == {"weights kept"}, "keys and values slept all the time"
    assert sleeper.sleeping_tags == {"weights", "kv_cache"}
    await engine.wake(cache=False)
    assert sleeper.sleeping_tags == {"kv_cache"}
    await engine.wake(weights=False)
    assert sleeper.is_scheduling
    assert all(torch.equal(p, before) for p, before in zip(_parameters(engine), kept, strict=True))
    await sleeper.answers_like(model.old)
    await engine.close()


async def test_memory_that_cannot_sleep(tied: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = make_engine("vllm", tied)
    monkeypatch.setattr(engine, "_on_cpu", False)
    with pytest.raises(
        RolloutError,
        match=r"needs an engine made with from_pretrained\(..., enable_sleep_mode=True\)",
    ):
        await engine.sleep()
    monkeypatch.undo()
    request = make_request("r", 9)
    assert max(errors(tied.old, [request], await collect(engine, request))) < 1e-5
    await engine.close()


def _parameters(engine: Any) -> list[torch.Tensor]:
    (found,) = engine._engine.apply_model(_own_parameters)
    return found


def _own_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]
