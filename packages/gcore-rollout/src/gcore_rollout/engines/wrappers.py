"""Bases of engines that forward calls to another engine, in this process or elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, cast

from gcore_rollout.engines.protocol import Engine, EngineStats
from gcore_rollout.engines.types import RequestT, SampleT
from gcore_rollout.weight_sync.report import Digests, HeldWeights, check_weights, report_weights

if TYPE_CHECKING:
    import torch


class ForwardingEngine(ABC):
    """Forwards those calls of `Engine` that are only a name and arguments; the others are the subclass's."""

    @property
    def weight_version(self) -> int:
        return self.stats().weight_version

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call("abort", None if request_ids is None else tuple(request_ids))

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the other engine, and wait until it returns."""


class WrappedEngine(ForwardingEngine, Generic[RequestT, SampleT]):
    """Forwards all calls to an engine in this process; subclasses add something to some of them."""

    def __init__(self, engine: Engine[RequestT, SampleT]) -> None:
        self._engine = engine

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        async with aclosing(cast(AsyncGenerator[SampleT], self._engine.generate(requests))) as completions:
            async for completion in completions:
                yield completion

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        await self._engine.update_weights(weights, version=version)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        return await report_weights(self._engine, names)

    async def check_weights(self, digests: Digests) -> None:
        await check_weights(self._engine, digests)

    async def close(self) -> None:
        await self._engine.close()

    async def _call(self, method: str, *arguments: Any) -> None:
        await getattr(self._engine, method)(*arguments)
